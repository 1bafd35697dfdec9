"""Stages that measure models over the rows of a day.

`evaluate` compares the day's model with the champion and a challenger, `compare_versions` registered versions, and
`estimate_policies` the models of an experiment's arms by what they would have earned on the log.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from headrace.config import Spec
from headrace.errors import UserError
from headrace.models.predictor import needed_models, read_meta
from headrace.models.registry.versions import champion, numbered, registered_name
from headrace.quality.gate.day_evaluation import (
    DayEvaluation,
    compare_models,
    evaluate_day,
    evaluation_settings,
    rows_of_day,
    tables_of_day,
)
from headrace.quality.gate.predictions import check_columns, raw_actions
from headrace.quality.gate.stage import (
    JudgedModel,
    challenger_to_evaluate,
    champion_before,
    gate_or_default,
    model_of_day,
    section,
)
from headrace.score.scoring_model import ScoringModel, scoring_model
from headrace.stage import Context, Result, Stage
from headrace.stage.manifest import Input, Manifest
from headrace.train.evaluation.policy import POLICY_METRICS

log = logging.getLogger("headrace.gate")


class Evaluate(Stage):
    """Stage in which the day's model and the champion predict the same raw rows, each by its own saved workflow.

    It measures the metrics of both, paired intervals of their differences, by slice too, the distance of their
    predictions, their sizes and speeds. A challenger that was trained on the day is compared with both. It never
    changes their figures: where it lacks a number for a row that they have one for, it is not measured.

    The rules come later (the stage `gate`): changing one evaluates nothing again, unless it names another metric.
    """

    name = "evaluate"
    version = 1
    needs: tuple[str, ...] = ("ingest", "features", "train", "baseline?", "second_stage?")

    def spec_part(self, spec: Spec) -> Mapping[str, Any]:
        """Return what is measured, of which rows; the latency's batch."""
        return evaluation_settings(spec, section(spec))

    def inputs(self, ctx: Context) -> tuple[Input, ...]:
        """Return what the rows are made of, the champion before this day's model, the day's challenger."""
        model = model_of_day(ctx)
        references = (champion_before(ctx, model), challenger_to_evaluate(ctx, model))
        return (*tables_of_day(ctx), *(reference.input for reference in references if reference is not None))

    def verify(self, ctx: Context, manifest: Manifest) -> str | None:
        """Return None: the stage has no output besides its manifest."""
        return None

    def run(self, ctx: Context) -> Result:
        """See the class. Raises UserError for what the spec, the data or the day's model lack."""
        gate, model = section(ctx.spec), model_of_day(ctx)
        champion, challenger = champion_before(ctx, model), challenger_to_evaluate(ctx, model)
        for role, reference in (("champion", champion), ("challenger", challenger)):
            if reference is not None and reference.input not in ctx.inputs:
                raise UserError(f"the {role} has become version {reference.version} since the run began; run it again")
        folder = ctx.ws.locate(model.name)
        needed_models(folder)
        with rows_of_day(ctx, self.name) as (spark, rows):
            champion_problem = _prediction_problem(ctx, "champion", champion, rows.columns)
            champion_folders = [] if champion is None or champion_problem else [ctx.ws.locate(champion.name)]
            challenger_problem = _prediction_problem(ctx, "challenger", challenger, rows.columns)
            challenger_folders = [] if challenger is None or challenger_problem else [ctx.ws.locate(challenger.name)]
            evaluation = evaluate_day(
                ctx,
                spark,
                rows,
                [folder, *champion_folders, *challenger_folders],
                gate,
                optional=len(challenger_folders),
            )
        confidence = gate.bootstrap.confidence
        facts: dict[str, Any] = {
            "split": evaluation.splits[0],
            "registered": registered_name(ctx.spec.pipeline, gate.stage),
            "model": {
                **model.fact(),
                **evaluation.facts[0],
                "own_metrics": ctx.upstream[gate.stage].facts.get("metrics", {}),
            },
            "champion": None
            if champion is None
            else {**champion.fact(), **(evaluation.facts[1] if champion_folders else {})},
            "note": champion_problem,
        }
        if champion_folders:
            facts |= compare_models(evaluation.splits, evaluation.results[0], evaluation.results[1], confidence)
        if challenger is not None:
            facts["challenger"] = {**challenger.fact(), "note": challenger_problem}
        if challenger_folders:
            facts["challenger"] |= _challenger_facts(ctx, evaluation, bool(champion_folders), confidence)
        metrics = evaluation.facts[0]["metrics"]
        metrics_text = ", ".join(
            f"{name} {metrics[name]:.4f}" for name in ("auc", "log_loss") if metrics.get(name) is not None
        )
        log.info("evaluate: %s rows of %s: %s", f"{evaluation.rows:,}", evaluation.splits[0], metrics_text)
        return Result(rows={"rows": evaluation.rows}, facts=facts, peak_memory_mib={"worker": evaluation.peak_mib})


def _challenger_facts(ctx: Context, evaluation: DayEvaluation, has_champion: bool, confidence: float) -> dict[str, Any]:
    """Return the challenger's facts: alone, compared with the day's model, compared with the champion."""
    trained = Manifest.load(ctx.ws.manifest(ctx.spec.pipeline, ctx.ds, "challenger"))
    challenger = evaluation.results[-1]
    return {
        **evaluation.facts[-1],
        "own_metrics": {} if trained is None else trained.facts.get("metrics", {}),
        "beside_model": compare_models(evaluation.splits, challenger, evaluation.results[0], confidence)["differences"],
        "beside_champion": compare_models(evaluation.splits, challenger, evaluation.results[1], confidence)
        if has_champion
        else None,
    }


def _prediction_problem(ctx: Context, role: str, model: JudgedModel | None, columns: Sequence[str]) -> str:
    """Return why a model cannot predict rows with these columns; empty where it can, or there is none."""
    if model is None:
        return ""
    folder = ctx.ws.locate(model.name)
    try:
        needed_models(folder)
        check_columns(folder, columns)
    except UserError as e:
        log.warning("evaluate: the %s, version %s, cannot predict the rows: %s", role, model.version, e)
        return str(e)
    return ""


class CompareVersions(Stage):
    """Stage in which registered versions, whichever days they were trained for, predict the rows of a day's split.

    Each predicts by its own saved workflow. The stage measures their metrics, and the differences with paired
    intervals.
    """

    name = "compare_versions"
    version = 1
    needs: tuple[str, ...] = ("ingest", "features", "train?", "baseline?", "second_stage?")

    def spec_part(self, spec: Spec) -> Mapping[str, Any]:
        """Return what is measured, of which rows."""
        return dict(evaluation_settings(spec, gate_or_default(spec)))

    def inputs(self, ctx: Context) -> tuple[Input, ...]:
        """Return what the rows are made of, and the models. Raises UserError where one is not there."""
        return (*tables_of_day(ctx), *(model.input for model in _models(ctx).values()))

    def verify(self, ctx: Context, manifest: Manifest) -> str | None:
        """Return None: the stage has no output besides its manifest."""
        return None

    def run(self, ctx: Context) -> Result:
        """See the class. Raises UserError for what the spec, the data or a model lack."""
        models, started = _models(ctx), time.perf_counter()
        changed = [m for m in models.values() if m.input not in ctx.inputs]
        if changed:
            raise UserError(f"version {changed[0].version} is another model since the run began; run it again")
        folders = {label: ctx.ws.locate(model.name) for label, model in models.items()}
        with rows_of_day(ctx, self.name) as (spark, rows):
            for label, folder in folders.items():
                try:
                    read_meta(folder)
                    check_columns(folder, rows.columns)
                except UserError as e:
                    raise UserError(f"{label} cannot predict the rows of {ctx.ds}: {e}") from None
            evaluation = evaluate_day(ctx, spark, rows, list(folders.values()), gate_or_default(ctx.spec))
        reference, *compared = models
        records = [
            {
                "name": label,
                "stage": gate_or_default(ctx.spec).stage,
                "class": read_meta(folders[label])["kind"],
                "metrics": facts["metrics"],
                "intervals": facts["intervals"],
                "steps": None,
                "seconds": round(time.perf_counter() - started, 3),
                "peak_memory_mib": {"worker": evaluation.peak_mib},
                "mib": round(facts["bytes"] / 2**20, 3),
                "key": models[label].key,
                "version": models[label].version,
                "rows_per_second": facts["rows_per_second"],
                "against": {},
            }
            for label, facts in zip(models, evaluation.facts, strict=True)
        ]
        confidence = gate_or_default(ctx.spec).bootstrap.confidence
        for i, _ in enumerate(compared, 1):
            differences = compare_models(evaluation.splits, evaluation.results[i], evaluation.results[0], confidence)[
                "differences"
            ]
            records[i]["against"] = {m: d for m, d in differences.items() if d is not None}
        return Result(
            rows={"rows": evaluation.rows, "models": len(records)},
            facts={"reference": reference, "split": evaluation.splits[0], "models": records},
            peak_memory_mib={"worker": evaluation.peak_mib},
        )


def _models(ctx: Context) -> dict[str, JudgedModel]:
    """Return the models by their labels.

    Raises:
        UserError: one is not there.
    """
    assert ctx.spec.compare is not None
    name = registered_name(ctx.spec.pipeline, gate_or_default(ctx.spec).stage)
    models: dict[str, JudgedModel] = {}
    for requested in ctx.spec.compare.versions:
        version = champion(ctx.ws, name, requested[1:]) if requested[0] == "@" else numbered(ctx.ws, name, requested)
        if version is None:
            raise UserError(
                f"model '{name}' has no {'alias' if requested[0] == '@' else 'version'} {requested.lstrip('@')}"
            )
        label = f"version {version.version}" if requested[0] != "@" else f"{requested} (version {version.version})"
        models[label] = JudgedModel(version.version, version.key, ctx.ws.name_of(version.source))
    return models


class EstimatePolicies(Stage):
    """Stage in which the arms' models predict a day's logged rows once for each action.

    Each predicts by its own saved workflow. The stage estimates the value of each as a policy by the logged
    propensities, with intervals, and paired differences from the control's.
    """

    name = "estimate_policies"
    version = 1
    needs: tuple[str, ...] = ("ingest", "features", "train?", "baseline?", "second_stage?")

    def spec_part(self, spec: Spec) -> Mapping[str, Any]:
        """Return what is measured, of which rows, of which arms."""
        return {
            **evaluation_settings(spec, gate_or_default(spec), for_policies=True),
            "arms": {name: list(experiment.arms) for name, experiment in (spec.experiments or {}).items()},
        }

    def inputs(self, ctx: Context) -> tuple[Input, ...]:
        """Return what the rows are made of, and the models. Raises UserError where one is not there."""
        return (*tables_of_day(ctx), *dict.fromkeys(model.input for model in models_of_arms(ctx).values()))

    def verify(self, ctx: Context, manifest: Manifest) -> str | None:
        """Return None: the stage has no output besides its manifest."""
        return None

    def run(self, ctx: Context) -> Result:
        """See the class. Raises UserError for what the spec, the data or a model lack."""
        policy = ctx.spec.train.evaluation.off_policy
        if policy is None:
            raise UserError(
                "no model can be measured as a policy: the log needs the propensity of each row's action; name its "
                "column in train.evaluation.off_policy (docs/evaluation.md)"
            )
        arms, gate = models_of_arms(ctx), gate_or_default(ctx.spec)
        if [model for model in arms.values() if model.input not in ctx.inputs]:
            raise UserError("an arm has another model since the run began; run it again")
        models = {model.output.version: model for model in arms.values()}
        places = {key: i for i, key in enumerate(models)}
        folders = [ctx.ws.locate(model.output.name) for model in models.values()]
        schema = ctx.upstream["features"].dataset_schema
        assert schema is not None, "the stage features describes its dataset"
        with rows_of_day(ctx, self.name) as (spark, rows):
            for (name, arm), model in arms.items():
                folder = ctx.ws.locate(model.output.name)
                try:
                    read_meta(folder)
                    check_columns(folder, rows.columns)
                except UserError as e:
                    raise UserError(f"the model of arm '{arm}' of '{name}' cannot predict the log: {e}") from None
            actions = raw_actions(rows, schema, policy)
            evaluation = evaluate_day(ctx, spark, rows, folders, gate, actions=actions)
        arm_records: list[dict[str, Any]] = []
        control: dict[str, int] = {}
        for (name, arm), model in arms.items():
            place = places[model.output.version]
            control.setdefault(name, place)
            if arm == (ctx.spec.experiments or {})[name].control_arm:
                control[name] = place
            facts = evaluation.facts[place]
            arm_records.append(
                {
                    "experiment": name,
                    "arm": arm,
                    "stage": model.stage,
                    "key": model.output.version,
                    "version": (model.facts.get("registered") or {}).get("version"),
                    "values": {m: facts["metrics"].get(m) for m in POLICY_METRICS},
                    "intervals": {m: facts["intervals"][m] for m in POLICY_METRICS if m in facts["intervals"]},
                }
            )
        for record in arm_records:
            result = evaluation.results[places[record["key"]]]
            control_result = evaluation.results[control[record["experiment"]]]
            differences = compare_models(evaluation.splits, result, control_result, gate.bootstrap.confidence)[
                "differences"
            ]
            record["minus_control"] = (
                {m: differences.get(m) for m in POLICY_METRICS[1:]} if result is not control_result else {}
            )
        return Result(
            rows={"rows": evaluation.rows, "models": len(models), "actions": len(actions.rows)},
            facts={"split": evaluation.splits[0], "policy": policy.model_dump(mode="json"), "arms": arm_records},
            peak_memory_mib={"worker": evaluation.peak_mib},
        )


def models_of_arms(ctx: Context) -> dict[tuple[str, str], ScoringModel]:
    """Return the models by experiment and arm.

    Raises:
        UserError: one is not there.
    """
    models = {}
    for name, experiment in (ctx.spec.experiments or {}).items():
        for arm, arm_spec in experiment.arms.items():
            arm_ctx = ctx if arm_spec.model is None else replace(ctx, spec=ctx.spec.scored_by(arm_spec.model))
            models[name, arm] = scoring_model(arm_ctx)
    return models
