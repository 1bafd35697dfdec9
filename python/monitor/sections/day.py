"""All that a page is made from, and what several sections say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from headrace.config import Spec
from headrace.manifest import Manifest
from headrace.monitor import facts, lineage
from headrace.monitor.blocks import Cell, Text
from headrace.stages import STAGES


@dataclass(frozen=True)
class Day:
    """All that a page is made from."""

    spec: Spec
    ds: str
    #: The day's manifests by stage; any subset.
    manifests: Mapping[str, Manifest]
    #: What the generator knows of the day; empty for real data.
    truth: Mapping[str, Any] = field(default_factory=dict)
    #: All manifests of the pipeline, for lineage.
    runs: lineage.Runs = field(default_factory=dict)

    def facts(self, stage: str) -> Mapping[str, Any]:
        return self.manifests[stage].facts if stage in self.manifests else {}

    def rows(self, stage: str) -> Mapping[str, int]:
        return self.manifests[stage].rows if stage in self.manifests else {}

    def metric(self, stage: str, name: str) -> float | None:
        return facts.number(facts.mapping(self.facts(stage).get("metrics")).get(name))

    @property
    def ceiling(self) -> float | None:
        return facts.number(self.truth.get("auc_ceiling"))

    def planned(self, stage: str) -> bool:
        """Whether the pipeline has the stage."""
        return STAGES[stage].applies(self.spec)


def not_run(what: str, title: str = "") -> Text:
    """In the place of what a stage would tell."""
    return Text(f"Not run: {what}.", "dim", title, wide=not title)


def checks(value: Any) -> tuple[tuple[Cell | str, ...], ...]:
    """Rows of {"name", "value", "limit", "ok"}."""
    rows: list[tuple[Cell | str, ...]] = []
    for r in facts.records(value):
        ok = r.get("ok")
        state = Cell("ok", "good") if ok is True else Cell("failed", "bad") if ok is False else Cell("–", "dim")
        rows.append((str(r.get("name")), facts.show(r.get("value")), facts.show(r.get("limit")), state))
    return tuple(rows)
