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
        self, count_statistics: CountStatistics | None = None, on_step_end: Callable[[str], None] = lambda step: None
    ) -> None:
        """Create the stage.

        Args:
            count_statistics: counts the day's statistics; needed if the spec has the section `drift`.
            on_step_end: called with the name of each ended step (rows, fit, write), for the check of GPU plans.
        """
        self._count_statistics, self._on_step_end = count_statistics, on_step_end

    def spec_part(self, spec: Spec) -> Mapping[str, Any]:
        """Return the section `features`, and what it needs of the table's declaration."""
        features = spec.features.model_dump(mode="json") | {"engine": engine_of(spec)}
        # Only keys that affect the counts: limits belong to the stage `drift`.
        statistics = spec.drift and spec.drift.model_dump(include={"quantiles", "top_values"})
        return {
            "features": features,
            "columns": [c.model_dump() for c in spec.table.columns],
            "event_time": spec.table.event_time,
            "daily": spec.source.daily,
            **({"statistics": statistics} if statistics else {}),
            **_sources_part(spec),
        }

    def inputs(self, ctx: Context) -> tuple[Input, ...]:
        """Return the events at ingest's version, other tables that operators read, and the dataset to append to."""
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
        """Check that files of the dataset, the vocabularies and the day's statistics have their recorded sizes."""
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
            if output.kind == "delta" and (
                fault := _damage_of_table(DeltaLog(ctx.ws.locate(output.name)), output, ctx.ds)
            ):
                return fault
        # The newest version: older ones lose their files to VACUUM, and each day's codes are in all later ones.
        table = ctx.ws.table(ctx.spec.pipeline, "vocabulary")
        damage = damage_of(table, None, manifest.facts.get("vocabulary_version"))
        return None if damage is None else damage.reason

    def run(self, ctx: Context) -> Result:
        """Build the day's dataset.

        Raises:
            UserError: the spec or the data cannot be used.
        """
        # Imported here: a day that is done needs no Spark.
        from headrace.features.build.rows import day_rows
        from headrace.features.build.run import append_day, build, day_events
        from headrace.features.vocabulary.delta_table import retry_if_overtaken
        from headrace.lake.spark.session import session

        workflow = checked_workflow(ctx.spec)
        with (
            session(ctx.spec.spark, ctx.ws, f"features {ctx.spec.pipeline} {ctx.ds}") as spark,
            day_rows(ctx, day_events(ctx, workflow, spark), from_files=engine_of(ctx.spec) == "arrow") as rows,
        ):
            count = self._statistics_counter(ctx.spec)
            if ctx.spec.features.append is not None:
                return retry_if_overtaken(lambda: append_day(ctx, workflow, rows, spark, count, self.version))
            return retry_if_overtaken(lambda: build(ctx, workflow, rows, spark, count, self._on_step_end))

    def _statistics_counter(self, spec: Spec) -> CountStatistics:
        if spec.drift is None:
            return lambda *_: ()
        if self._count_statistics is None:
            raise RuntimeError(
                "the spec has a section `drift`: this stage needs headrace.quality.drift.count_day to count for it"
            )
        return self._count_statistics


def _damage_of_table(log: DeltaLog, output: Output, ds: str) -> str | None:
    """Return why a table lacks the rows of a run, or None; another program may have removed the version's log."""
    if log.version is None:
        return f"the table {output.name} is gone"
    version = int(output.version)
    if not log.has(version):
        return None if version < log.version else f"version {version} of {output.name} is gone"
    files = log.files(version) or ()
    return damaged_file(f for f in files if f.partition.get("ds", ds) == ds)


def _sources_part(spec: Spec) -> dict[str, Any]:
    """Return the part of the named sources' declarations on which the dataset depends."""
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
