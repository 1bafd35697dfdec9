"""The stage `compare_versions`: registered models over the same rows of a day."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from headrace.config import Spec
from headrace.errors import UserError
from headrace.gate.day_evaluation import evaluate_day, measured_part, rows_of_day, tables_of_day
from headrace.gate.figures import beside
from headrace.gate.models import JudgedModel, gate_or_default
from headrace.gate.predictions import check_columns
from headrace.manifest import Input, Manifest
from headrace.models.predictor import read_meta
from headrace.registry.versions import champion, numbered, registered_name
from headrace.stage import Context, Result, Stage


class CompareVersions(Stage):
    """Two versions of the registry, whichever days they were trained for, predict the rows of a day's split, each by
    its own saved workflow; metrics of both, and the difference with its paired interval. Nothing is trained.
    """

    name = "compare_versions"
    version = 1
    needs: tuple[str, ...] = ("ingest", "features", "train?", "baseline?", "second_stage?")

    def spec_part(self, spec: Spec) -> Mapping[str, Any]:
        """What is measured, of which rows."""
        return dict(measured_part(spec, gate_or_default(spec)))

    def inputs(self, ctx: Context) -> tuple[Input, ...]:
        """What the rows are made of, and the models. Raises UserError where one is not there."""
        return (*tables_of_day(ctx), *(model.input for model in _models(ctx).values()))

    def verify(self, ctx: Context, manifest: Manifest) -> str | None:
        """It leaves nothing but its manifest."""
        return None

    def run(self, ctx: Context) -> Result:
        """See the class. Raises UserError for what the spec, the data or a model lack."""
        models, began = _models(ctx), time.perf_counter()
        gone = [m for m in models.values() if m.input not in ctx.inputs]
        if gone:
            raise UserError(f"version {gone[0].version} is another model since the run began; run it again")
        folders = {asked: ctx.ws.locate(model.name) for asked, model in models.items()}
        with rows_of_day(ctx, self.name) as (spark, rows):
            for asked, folder in folders.items():
                try:
                    read_meta(folder)
                    check_columns(folder, rows.columns)
                except UserError as e:
                    raise UserError(f"{asked} cannot predict the rows of {ctx.ds}: {e}") from None
            found = evaluate_day(ctx, spark, rows, list(folders.values()), gate_or_default(ctx.spec))
        reference, *others = models
        told = [
            {
                "name": asked,
                "stage": gate_or_default(ctx.spec).stage,
                "class": read_meta(folders[asked])["kind"],
                "metrics": of["metrics"],
                "intervals": of["intervals"],
                "steps": None,
                "seconds": round(time.perf_counter() - began, 3),
                "peak_memory_mib": {"worker": found.peak_mib},
                "mib": round(of["bytes"] / 2**20, 3),
                "key": models[asked].key,
                "version": models[asked].version,
                "rows_per_second": of["rows_per_second"],
                "against": {},
            }
            for asked, of in zip(models, found.told, strict=True)
        ]
        confidence = gate_or_default(ctx.spec).bootstrap.confidence
        for i, _ in enumerate(others, 1):
            differences = beside(found.splits, found.results[i], found.results[0], confidence)["differences"]
            told[i]["against"] = {m: d for m, d in differences.items() if d is not None}
        return Result(
            rows={"rows": found.rows, "models": len(told)},
            facts={"reference": reference, "split": found.splits[0], "models": told},
            peak_memory_mib={"worker": found.peak_mib},
        )


def _models(ctx: Context) -> dict[str, JudgedModel]:
    """By what was asked for.

    Raises:
        UserError: one is not there.
    """
    assert ctx.spec.compare is not None
    name = registered_name(ctx.spec.pipeline, gate_or_default(ctx.spec).stage)
    found: dict[str, JudgedModel] = {}
    for asked in ctx.spec.compare.versions:
        version = champion(ctx.ws, name, asked[1:]) if asked[0] == "@" else numbered(ctx.ws, name, asked)
        if version is None:
            raise UserError(f"model '{name}' has no {'alias' if asked[0] == '@' else 'version'} {asked.lstrip('@')}")
        shown = f"version {version.version}" if asked[0] != "@" else f"{asked} (version {version.version})"
        found[shown] = JudgedModel(version.version, version.key, ctx.ws.name_of(version.source))
    return found
