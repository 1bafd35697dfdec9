"""The stage `evaluate`: the day's model, the champion and a challenger predict the same rows of the day."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.config import Spec
from headrace.errors import UserError
from headrace.gate.day_evaluation import DayEvaluation, evaluate_day, measured_part, rows_of_day, tables_of_day
from headrace.gate.figures import beside
from headrace.gate.models import JudgedModel, challenger_to_evaluate, champion_before, model_of_day, section
from headrace.gate.predictions import check_columns
from headrace.manifest import Input, Manifest
from headrace.models.predictor import needed_models
from headrace.registry.versions import registered_name
from headrace.stage import Context, Result, Stage

log = logging.getLogger("headrace.gate")


class Evaluate(Stage):
    """Both models predict the same raw rows, each by its own saved workflow, on Spark's tasks; metrics of both, paired
    intervals of their differences, by slice too, how far their predictions are apart, how large and how fast they are.
    A challenger that was trained on the day is a third, held against both. It changes nothing of what is said of them:
    where it has no number for a row that they have one for, it is not measured.

    The rules come later (the stage `gate`): changing one evaluates nothing again, unless it names another metric.
    """

    name = "evaluate"
    version = 1
    needs: tuple[str, ...] = ("ingest", "features", "train", "baseline?", "second_stage?")

    def spec_part(self, spec: Spec) -> Mapping[str, Any]:
        """What is measured, of which rows; the latency's batch."""
        return measured_part(spec, section(spec))

    def inputs(self, ctx: Context) -> tuple[Input, ...]:
        """What the rows are made of, the champion before this day's model, the day's challenger."""
        model = model_of_day(ctx)
        others = (champion_before(ctx, model), challenger_to_evaluate(ctx, model))
        return (*tables_of_day(ctx), *(other.input for other in others if other is not None))

    def verify(self, ctx: Context, manifest: Manifest) -> str | None:
        """It leaves nothing but its manifest."""
        return None

    def run(self, ctx: Context) -> Result:
        """See the class. Raises UserError for what the spec, the data or the day's model lack."""
        gate, model = section(ctx.spec), model_of_day(ctx)
        champion, challenger = champion_before(ctx, model), challenger_to_evaluate(ctx, model)
        for role, other in (("champion", champion), ("challenger", challenger)):
            if other is not None and other.input not in ctx.inputs:
                raise UserError(f"the {role} has become version {other.version} since the run began; run it again")
        folder = ctx.ws.locate(model.name)
        needed_models(folder)
        with rows_of_day(ctx, self.name) as (spark, rows):
            note = _why_not(ctx, "champion", champion, rows.columns)
            beside_it = [] if champion is None or note else [ctx.ws.locate(champion.name)]
            why = _why_not(ctx, "challenger", challenger, rows.columns)
            third = [] if challenger is None or why else [ctx.ws.locate(challenger.name)]
            found = evaluate_day(ctx, spark, rows, [folder, *beside_it, *third], gate, optional=len(third))
        confidence = gate.bootstrap.confidence
        facts: dict[str, Any] = {
            "split": found.splits[0],
            "registered": registered_name(ctx.spec.pipeline, gate.stage),
            "model": {
                **model.fact(),
                **found.told[0],
                "own_metrics": ctx.upstream[gate.stage].facts.get("metrics", {}),
            },
            "champion": None if champion is None else {**champion.fact(), **(found.told[1] if beside_it else {})},
            "note": note,
        }
        if beside_it:
            facts |= beside(found.splits, found.results[0], found.results[1], confidence)
        if challenger is not None:
            facts["challenger"] = {**challenger.fact(), "note": why}
        if third:
            facts["challenger"] |= _third(ctx, found, bool(beside_it), confidence)
        metrics = found.told[0]["metrics"]
        shown = ", ".join(
            f"{name} {metrics[name]:.4f}" for name in ("auc", "log_loss") if metrics.get(name) is not None
        )
        log.info("evaluate: %s rows of %s: %s", f"{found.rows:,}", found.splits[0], shown)
        return Result(rows={"rows": found.rows}, facts=facts, peak_memory_mib={"worker": found.peak_mib})


def _third(ctx: Context, found: DayEvaluation, has_champion: bool, confidence: float) -> dict[str, Any]:
    """What is said of the challenger, the last of the models: alone, beside the day's model, beside the champion."""
    trained = Manifest.load(ctx.ws.manifest(ctx.spec.pipeline, ctx.ds, "challenger"))
    mine = found.results[-1]
    return {
        **found.told[-1],
        "own_metrics": {} if trained is None else trained.facts.get("metrics", {}),
        "beside_model": beside(found.splits, mine, found.results[0], confidence)["differences"],
        "beside_champion": beside(found.splits, mine, found.results[1], confidence) if has_champion else None,
    }


def _why_not(ctx: Context, role: str, model: JudgedModel | None, there: Sequence[str]) -> str:
    """Why a model cannot predict rows with these columns; empty where it can, or there is none."""
    if model is None:
        return ""
    folder = ctx.ws.locate(model.name)
    try:
        needed_models(folder)
        check_columns(folder, there)
    except UserError as e:
        log.warning("evaluate: the %s, version %s, cannot predict the rows: %s", role, model.version, e)
        return str(e)
    return ""
