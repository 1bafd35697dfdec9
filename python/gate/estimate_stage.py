"""The stage `estimate_policies`: what the models of an experiment's arms would have earned on the log."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from headrace.config import Spec
from headrace.errors import UserError
from headrace.gate.day_evaluation import evaluate_day, measured_part, rows_of_day, tables_of_day
from headrace.gate.figures import beside
from headrace.gate.models import gate_or_default
from headrace.gate.policies import raw_actions
from headrace.gate.predictions import check_columns
from headrace.manifest import Input, Manifest
from headrace.models.predictor import read_meta
from headrace.score.scoring_model import ScoringModel, scoring_model
from headrace.stage import Context, Result, Stage
from headrace.train.evaluation.off_policy import METRICS


class EstimatePolicies(Stage):
    """The arms' models, each by its own saved workflow, predict the logged rows of a day's split once for each action;
    values of each as a policy by the logged propensities, with intervals, and paired differences from the control's.
    """

    name = "estimate_policies"
    version = 1
    needs: tuple[str, ...] = ("ingest", "features", "train?", "baseline?", "second_stage?")

    def spec_part(self, spec: Spec) -> Mapping[str, Any]:
        """What is measured, of which rows, of which arms."""
        return {
            **measured_part(spec, gate_or_default(spec), of_policies=True),
            "arms": {name: list(experiment.arms) for name, experiment in (spec.experiments or {}).items()},
        }

    def inputs(self, ctx: Context) -> tuple[Input, ...]:
        """What the rows are made of, and the models. Raises UserError where one is not there."""
        return (*tables_of_day(ctx), *dict.fromkeys(model.input for model in models_of_arms(ctx).values()))

    def verify(self, ctx: Context, manifest: Manifest) -> str | None:
        """It leaves nothing but its manifest."""
        return None

    def run(self, ctx: Context) -> Result:
        """See the class. Raises UserError for what the spec, the data or a model lack."""
        policy = ctx.spec.train.evaluation.off_policy
        if policy is None:
            raise UserError(
                "no model can be measured as a policy: the log needs the propensity of each row's action; name its "
                "column in train.evaluation.off_policy (docs/training.md)"
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
            found = evaluate_day(ctx, spark, rows, folders, gate, actions=actions)
        told: list[dict[str, Any]] = []
        control: dict[str, int] = {}
        for (name, arm), model in arms.items():
            place = places[model.output.version]
            control.setdefault(name, place)
            if arm == (ctx.spec.experiments or {})[name].control_arm:
                control[name] = place
            of = found.told[place]
            told.append(
                {
                    "experiment": name,
                    "arm": arm,
                    "stage": model.stage,
                    "key": model.output.version,
                    "version": (model.facts.get("registered") or {}).get("version"),
                    "values": {m: of["metrics"].get(m) for m in METRICS},
                    "intervals": {m: of["intervals"][m] for m in METRICS if m in of["intervals"]},
                }
            )
        for of in told:
            mine, other = found.results[places[of["key"]]], found.results[control[of["experiment"]]]
            differences = beside(found.splits, mine, other, gate.bootstrap.confidence)["differences"]
            of["minus_control"] = {m: differences.get(m) for m in METRICS[1:]} if mine is not other else {}
        return Result(
            rows={"rows": found.rows, "models": len(models), "actions": len(actions.rows)},
            facts={"split": found.splits[0], "policy": policy.model_dump(mode="json"), "arms": told},
            peak_memory_mib={"worker": found.peak_mib},
        )


def models_of_arms(ctx: Context) -> dict[tuple[str, str], ScoringModel]:
    """By experiment and arm.

    Raises:
        UserError: one is not there.
    """
    found = {}
    for name, experiment in (ctx.spec.experiments or {}).items():
        for arm, given in experiment.arms.items():
            alone = ctx if given.model is None else replace(ctx, spec=ctx.spec.scored_by(given.model))
            found[name, arm] = scoring_model(alone)
    return found
