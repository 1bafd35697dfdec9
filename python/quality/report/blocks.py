"""Blocks of a page (values for the template, no HTML but the plots') and the day that it is about.

The template shows a block by its `kind`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from markupsafe import Markup

from headrace.config import Spec
from headrace.config.stages import ORDER, STAGES
from headrace.errors import UserError
from headrace.quality.report import facts, lineage
from headrace.quality.report.lineage import Node
from headrace.stage import stage_order
from headrace.stage.manifest import Manifest

Tone = Literal["", "good", "bad", "dim"]


@dataclass(frozen=True)
class Cell:
    """One cell of a table. `bar`: a share of 1 that is drawn behind the text."""

    text: str
    tone: Tone = ""
    bar: float | None = None
    code: bool = False


@dataclass(frozen=True)
class ReportTable:
    """Rows under headings. Headings that start with `>` are of numbers, to the right."""

    kind: ClassVar = "table"
    headings: tuple[str, ...]
    rows: tuple[tuple[Cell | str, ...], ...]
    title: str = ""
    wide: bool = False

    @property
    def columns(self) -> list[tuple[str, bool]]:
        """(heading, to the right?)."""
        return [(h.removeprefix(">"), h.startswith(">")) for h in self.headings]


@dataclass(frozen=True)
class Plot:
    """An inline SVG."""

    kind: ClassVar = "plot"
    svg: Markup
    title: str
    note: str = ""
    wide: bool = False


@dataclass(frozen=True)
class Text:
    """A paragraph; `pre`: a preformatted one, folded away under its title."""

    kind: ClassVar = "text"
    text: str
    tone: Tone = ""
    title: str = ""
    pre: bool = False
    wide: bool = True


@dataclass(frozen=True)
class Tree:
    """A lineage tree."""

    kind: ClassVar = "tree"
    root: Node
    wide: bool = True


Block = ReportTable | Plot | Text | Tree


@dataclass(frozen=True)
class ReportSection:
    """A headed part of the page."""

    id: str
    title: str
    blocks: tuple[Block, ...]
    note: str = ""


@dataclass(frozen=True)
class Card:
    """A number at the top of the page. `meter`: a share of 1, drawn as a bar."""

    label: str
    value: str
    detail: str = ""
    tone: Tone = ""
    meter: float | None = None


@dataclass(frozen=True)
class Chip:
    """A stage and its state, in the header."""

    name: str
    state: Literal["done", "not run"]


@dataclass(frozen=True)
class Day:
    """Spec, manifests and truth of the day that a page is about."""

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
        """Return whether the pipeline has the stage."""
        return stage in self.spec.stages or (stage in STAGES and STAGES[stage].applies(self.spec))

    @property
    def order(self) -> list[str]:
        """Names of all stages before the report, those of other packages among them, in the order of the day.

        The classes of packages say where they come. Where some cannot be imported, packages' stages come last, as in a
        page about days that were made elsewhere.
        """
        try:
            order = [*stage_order(self.spec)]
        except UserError:
            order = [*ORDER, *self.spec.stages]
        return [name for name in order if name != ORDER[-1]]


def not_run(name: str, title: str = "") -> Text:
    """Return the text that stands for a stage that did not run."""
    return Text(f"Not run: {name}.", "dim", title, wide=not title)


def checks(value: Any) -> tuple[tuple[Cell | str, ...], ...]:
    """Return rows of {"name", "value", "limit", "ok"}."""
    rows: list[tuple[Cell | str, ...]] = []
    for r in facts.records(value):
        ok = r.get("ok")
        state = Cell("ok", "good") if ok is True else Cell("failed", "bad") if ok is False else Cell("–", "dim")
        rows.append((str(r.get("name")), facts.show(r.get("value")), facts.show(r.get("limit")), state))
    return tuple(rows)
