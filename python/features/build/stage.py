"""The stage `features`: the lake's events to the Parquet dataset of a day."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from headrace.config import Spec
from headrace.dataset.layout import LISTING
from headrace.features.build.plan import checked_workflow, other_inputs, pinned_table
from headrace.features.layout.files import engine_of
from headrace.features.table_ops.preparation import Preparation
from headrace.features.vocabulary.restoration import damage_of
from headrace.lake.delta.log import DeltaLog, damaged_file
from headrace.stage import Context, Result, Stage
from headrace.stage.manifest import Input, Manifest, Output
from headrace.storage import StoreAway, not_as_written

if TYPE_CHECKING:
    from headrace.features.build.run import CountStatistics


class BuildFeatures(Stage):
    """Fit the workflow on the training range, transform every split, write the dataset.

    Reads the events at the version that ingest's manifest names: days up to `ds` of a daily source, the newest snapshot
    up to `ds` of another. Writes the vocabulary table (one commit) and the dataset's folder (one rename).
    """

    name = "features"
    version = 2
    needs = ("ingest",)

    def __init__(
        self, count_statistics: CountStatistics | None = None, after: Callable[[str], None] = lambda step: None
    ) -> None:
        """Make the stage.

        Args:
            count_statistics: needed where the spec has the section `drift`.
            after: called when a step of the work has ended: rows, fit, write. The GPU-plan gate listens.
        """
        self._count_statistics, self._after = count_statistics, after

    def spec_part(self, spec: Spec) -> Mapping[str, Any]:
        """Return the section `features`, and what it needs of the table's declaration."""
        features = spec.features.model_dump(mode="json") | {"engine": engine_of(spec)}
        # Only keys that affect the counts: limits belong to the stage `drift`.
        counted = spec.drift and spec.drift.model_dump(include={"quantiles", "top_values"})
        return {
            "features": features,
            "columns": [c.model_dump() for c in spec.table.columns],
            "event_time": spec.table.event_time,
            "daily": spec.source.daily,
            **({"statistics": counted} if counted else {}),
            **_sources_part(spec),
        }

    def inputs(self, ctx: Context) -> tuple[Input, ...]:
        """Return the events at ingest's version, tables and sources that operators read, the dataset that is appended
        to.
        """
        events, base = pinned_table(ctx), None
        if ctx.spec.features.append is not None:
            from headrace.features.build.append import base_input

            base = base_input(ctx, self.spec_part(ctx.spec), self.version)
        return (
            Input(kind=events.kind, name=events.name, version=events.version),
            *other_inputs(ctx),
            *([base] if base is not None else ()),
        )

    def verify(self, ctx: Context, manifest: Manifest) -> str | None:
        """Check that the dataset's files, the vocabularies' and the day's statistics have the sizes that they had."""
        folder = ctx.ws.locate(manifest.output("dataset").name)
        try:
            listed = json.loads((folder / LISTING).read_text())
        except StoreAway:
            raise
        except (OSError, ValueError):
            return f"the dataset {folder} is gone or incomplete"
        if (fault := not_as_written({folder / file["name"]: file["size"] for file in listed})) is not None:
            return fault
        for output in manifest.outputs:
            if output.kind == "delta" and (fault := _why_damaged(DeltaLog(ctx.ws.locate(output.name)), output, ctx.ds)):
                return fault
        # The newest version: older ones lose their files to VACUUM, and each day's codes are in all later ones.
        table = ctx.ws.table(ctx.spec.pipeline, "vocabulary")
        damage = damage_of(table, None, manifest.facts.get("vocabulary_version"))
        return None if damage is None else damage.reason

    def run(self, ctx: Context) -> Result:
        """See the class. Raises UserError for what the spec or the data lack."""
        # Late: a day that is done is found out without Spark.
        from headrace.features.build.rows import day_rows
        from headrace.features.build.run import append_day, build, day_events
        from headrace.features.vocabulary.delta_table import retry_if_overtaken
        from headrace.lake.spark.session import session

        workflow = checked_workflow(ctx.spec)
        with (
            session(ctx.spec.spark, ctx.ws, f"features {ctx.spec.pipeline} {ctx.ds}") as spark,
            day_rows(ctx, day_events(ctx, workflow, spark), from_files=engine_of(ctx.spec) == "arrow") as rows,
        ):
            count = self._counting(ctx.spec)
            if ctx.spec.features.append is not None:
                return retry_if_overtaken(lambda: append_day(ctx, workflow, rows, spark, count, self.version))
            return retry_if_overtaken(lambda: build(ctx, workflow, rows, spark, count, self._after))

    def _counting(self, spec: Spec) -> CountStatistics:
        if spec.drift is None:
            return lambda *_: ()
        if self._count_statistics is None:
            raise RuntimeError(
                "the spec has a section `drift`: this stage needs headrace.quality.drift.count_day to count for it"
            )
        return self._count_statistics


def _why_damaged(log: DeltaLog, output: Output, ds: str) -> str | None:
    """Return why a table lacks what a run has written or read there; others may have removed the version's log."""
    if log.version is None:
        return f"the table {output.name} is gone"
    version = int(output.version)
    if not log.has(version):
        return None if version < log.version else f"version {version} of {output.name} is gone"
    files = log.files(version) or ()
    return damaged_file(f for f in files if f.partition.get("ds", ds) == ds)


def _sources_part(spec: Spec) -> dict[str, Any]:
    """Return what the dataset depends on in the declarations of the named sources that are read."""
    if not spec.sources:
        return {}
    sections = {
        name: {
            "columns": [c.model_dump() for c in spec.sources[name].table.columns],
            "event_time": spec.sources[name].table.event_time,
            "daily": spec.sources[name].source.daily,
            "timezone": spec.sources[name].source.timezone,
        }
        for name in Preparation.from_spec(spec).sources
    }
    return {"sources": sections} if sections else {}
