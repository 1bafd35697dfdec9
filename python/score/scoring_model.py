"""Which model scores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace.config.evaluation import HIGHER_IS_BETTER
from headrace.errors import UserError
from headrace.manifest import Output
from headrace.stage import Context


@dataclass(frozen=True)
class ScoringModel:
    """The model that scores."""

    stage: str
    output: Output
    facts: Mapping[str, Any]


def scoring_model(ctx: Context) -> ScoringModel:
    """The model that `score.model` asks for.

    Raises:
        UserError: it asks for a baseline or a second stage that is not there.
    """
    spec = ctx.spec
    assert spec.score is not None
    neural = _model_of(ctx, "train")
    if spec.score.model == "second_stage":
        if "second_stage" not in ctx.upstream:
            raise UserError(
                f"score.model is 'second_stage', which has not finished for {ctx.ds}; run: headrace run "
                f"{spec.pipeline} --ds {ctx.ds} --from second_stage, or set score.model=neural"
            )
        return _model_of(ctx, "second_stage")
    has_baseline = spec.baseline is not None and "baseline" in ctx.upstream
    if spec.score.model == "neural" or (spec.score.model == "best" and not has_baseline):
        return neural
    if not has_baseline:
        why = "has no section `baseline`" if spec.baseline is None else f"has no finished baseline for {ctx.ds}"
        raise UserError(
            f"score.model is 'baseline', but pipeline '{spec.pipeline}' {why}; run: "
            f"headrace run {spec.pipeline} --ds {ctx.ds} --from baseline, or set score.model=neural"
        )
    baseline = _model_of(ctx, "baseline")
    if spec.score.model == "baseline":
        return baseline
    metric = spec.score.metric
    for candidate in (neural, baseline):
        if metric not in candidate.facts["metrics"]:
            raise UserError(
                f"score.model is 'best' by {metric}, by which the model of stage '{candidate.stage}' was not measured "
                f"(it has: {', '.join(candidate.facts['metrics'])}); ask for it in train.evaluation.metrics, or set "
                f"another score.metric"
            )
    mine, other = (c.facts["metrics"][metric] for c in (neural, baseline))
    # Where a day has one class only, no AUC is defined: such a model is the worse, and the neural one stays of two.
    if mine is None or other is None:
        return baseline if mine is None and other is not None else neural
    return baseline if (other > mine if HIGHER_IS_BETTER[metric] else other < mine) else neural


def _model_of(ctx: Context, stage: str) -> ScoringModel:
    manifest = ctx.upstream[stage]
    return ScoringModel(stage, manifest.output("model"), manifest.facts)
