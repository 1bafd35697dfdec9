"""The score stage: users x candidate items, the best of each user, one Delta commit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.config import Score, Spec
from headrace.errors import UserError
from headrace.features.build.plan import pinned_table
from headrace.features.table_ops.base import ExternalTable
from headrace.features.table_ops.preparation import pin
from headrace.lake.delta.day_table import verify_day
from headrace.score.assignment import live_experiments, pinned
from headrace.score.columns import check_columns, check_rule_columns
from headrace.score.scoring_model import models_of_run, pinned_model, scoring_model
from headrace.stage import Context, Result, Stage
from headrace.stage.manifest import Input, Manifest


class ScoreCandidates(Stage):
    """Score active users x candidate items on Spark with the registered model; keep the top K of each user."""

    name = "score"
    version = 3
    needs: tuple[str, ...] = ("train?", "features", "ingest", "baseline?", "second_stage?")

    def spec_part(self, spec: Spec) -> Mapping[str, Any]:
        """Return the section; columns, window and label are part of the upstream stages' keys."""
        return {
            "score": spec.score.model_dump(mode="json") if spec.score else None,
            "event_time": spec.table.event_time,
        }

    def inputs(self, ctx: Context) -> tuple[Input, ...]:
        """Return the events at ingest's version, the models, and the assignment of users.

        Raises:
            UserError: columns or a model are missing.
        """
        assert ctx.spec.score is not None
        check_columns(ctx.spec, ctx.spec.score)
        check_rule_columns(ctx.spec)
        events, score = pinned_table(ctx), ctx.spec.score
        experiments = live_experiments(ctx.ws, ctx.spec, ctx.ds)
        return (
            Input(kind=events.kind, name=events.name, version=events.version),
            *dict.fromkeys(model.chosen.input for model in models_of_run(ctx, experiments, scoring_model)),
            *pinned(ctx.spec.pipeline, experiments),
            *pin(ctx.ws, _tables(score)),
        )

    def verify(self, ctx: Context, manifest: Manifest) -> str | None:
        """Check that the table's version still has this day's rows, and that their files exist."""
        return verify_day(ctx.ws, manifest.output("delta"), ctx.ds)

    def run(self, ctx: Context) -> Result:
        """See the class. Raises UserError for what the spec, the data or the model lack."""
        # Late: a day that is scored already is found out without Spark.
        from headrace.lake.spark.session import session
        from headrace.models.predictor import read_meta
        from headrace.score.run import check_table, score_day

        experiments = live_experiments(ctx.ws, ctx.spec, ctx.ds)
        if any(pinned_input not in ctx.inputs for pinned_input in pinned(ctx.spec.pipeline, experiments)):
            raise UserError(f"an arm of an experiment was stopped since the run of {ctx.ds} began; run it again")
        models = models_of_run(ctx, experiments, pinned_model)
        for model in models:
            read_meta(ctx.ws.locate(model.chosen.output.name))
        check_table(ctx)
        with session(ctx.spec.spark, ctx.ws, f"score {ctx.spec.pipeline} {ctx.ds}") as spark:
            return score_day(ctx, models, experiments, spark)


def _tables(score: Score) -> tuple[ExternalTable, ...]:
    """Return the tables that candidates and filters read by their paths."""
    if score.candidates is None and not score.filters:
        return ()
    from headrace.score.candidates.shared_lists import tables_of_score

    return tables_of_score(score)
