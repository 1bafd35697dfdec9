"""Choice of the model that scores."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from headrace.config.evaluation import HIGHER_IS_BETTER
from headrace.errors import RefusedError, UserError
from headrace.models.registry.promotion import champion_of_day
from headrace.models.registry.versions import Version, champion, numbered, registered_name
from headrace.stage import Context
from headrace.stage.manifest import Input, Manifest, Output

if TYPE_CHECKING:
    from headrace.score.assignment import Live


@dataclass(frozen=True)
class ScoringModel:
    """The model that scores."""

    stage: str
    output: Output
    facts: Mapping[str, Any]

    @property
    def input(self) -> Input:
        """Return the model as an input of a run."""
        return Input(kind="model", name=self.output.name, version=self.output.version)


def pinned_model(ctx: Context) -> ScoringModel:
    """Return the model that the run's inputs name: all of a run is by one.

    Raises:
        UserError: another one is asked for by now (an alias of the registry has moved), or see `scoring_model`.
    """
    chosen = scoring_model(ctx)
    if chosen.input not in ctx.inputs:
        assert ctx.spec.score is not None
        raise UserError(
            f"score.model: '{ctx.spec.score.model}' has become version {chosen.output.version} of the model since the "
            f"run began; run it again"
        )
    return chosen


def scoring_model(ctx: Context) -> ScoringModel:
    """Return the model that `score.model` names.

    Raises:
        UserError: it asks for one that is not there.
    """
    spec = ctx.spec
    assert spec.score is not None
    if spec.score.of_registry:
        return _registered(ctx, spec.score.model)
    if spec.score.model == "today":
        return _model_of(ctx, _judged_stage(ctx))
    if spec.gate is not None:
        return _champion(ctx)
    if spec.score.model == "second_stage":
        _model_of(ctx, "train")
        if "second_stage" not in ctx.upstream:
            raise UserError(
                f"score.model is 'second_stage', which has not finished for {ctx.ds}; run: headrace run "
                f"{spec.argument} --ds {ctx.ds} --from second_stage, or set score.model=neural"
            )
        return _model_of(ctx, "second_stage")
    has_baseline = spec.baseline is not None and "baseline" in ctx.upstream
    if spec.score.model == "baseline":
        if not has_baseline:
            reason = "has no section `baseline`" if spec.baseline is None else f"has no finished baseline for {ctx.ds}"
            raise UserError(
                f"score.model is 'baseline', but pipeline '{spec.pipeline}' {reason}; run: "
                f"headrace run {spec.argument} --ds {ctx.ds} --from baseline, or set score.model=neural"
            )
        return _model_of(ctx, "baseline")
    neural = _model_of(ctx, "train")
    if spec.score.model == "neural" or not has_baseline:
        return neural
    baseline = _model_of(ctx, "baseline")
    metric = spec.score.metric
    for candidate in (neural, baseline):
        if metric not in candidate.facts["metrics"]:
            raise UserError(
                f"score.model is 'best' by {metric}, by which the model of stage '{candidate.stage}' was not measured "
                f"(it has: {', '.join(candidate.facts['metrics'])}); ask for it in train.evaluation.metrics, or set "
                f"another score.metric"
            )
    neural_value, baseline_value = (c.facts["metrics"][metric] for c in (neural, baseline))
    # A day with a single class has no AUC. A model without a value loses; if both lack one, the neural model stays.
    if neural_value is None or baseline_value is None:
        return baseline if neural_value is None and baseline_value is not None else neural
    return (
        baseline
        if (baseline_value > neural_value if HIGHER_IS_BETTER[metric] else baseline_value < neural_value)
        else neural
    )


def _registered(ctx: Context, requested: str) -> ScoringModel:
    """Return a version of the registered model, trained for whatever day.

    Raises:
        UserError: there is none, or its folder is gone.
    """
    name = registered_name(ctx.spec.pipeline, _judged_stage(ctx))
    version = champion(ctx.ws, name, requested[1:]) if requested[0] == "@" else numbered(ctx.ws, name, requested)
    if version is None:
        description = f"alias '{requested[1:]}'" if requested[0] == "@" else f"version {requested}"
        raise UserError(
            f"the registry {ctx.ws.registry_uri} has no {description} of model '{name}': score.model asks for it"
        )
    return _of_version(ctx, version)


def _champion(ctx: Context) -> ScoringModel:
    """Return the champion as the day may know it, where there is a gate.

    Raises:
        RefusedError: there is none, and the gate has refused the day's model.
        UserError: there is none, or its folder is gone.
    """
    name = registered_name(ctx.spec.pipeline, _judged_stage(ctx))
    version = champion_of_day(ctx.ws, name, ctx.ds)
    if version is None:
        gate = Manifest.load(ctx.ws.manifest(ctx.spec.pipeline, ctx.ds, "gate"))
        refused = gate is not None and gate.facts.get("verdict") == "refused"
        raise (RefusedError if refused else UserError)(
            f"model '{name}' has no champion up to {ctx.ds}: no version has passed the gate. See headrace gate "
            f"{ctx.spec.argument} --ds {ctx.ds}; promote one by hand (headrace promote), or score with the day's own: "
            f"--model today"
        )
    return _of_version(ctx, version)


def _of_version(ctx: Context, version: Version) -> ScoringModel:
    if not version.source.is_dir():
        raise UserError(
            f"{version.source}, version {version.version} of model '{version.name}', is gone: choose another one"
        )
    output = Output(kind="model", name=ctx.ws.name_of(version.source), version=version.key)
    facts = {"metrics": version.metrics, "registered": {"name": version.name, "version": version.version}}
    return ScoringModel(_judged_stage(ctx), output, facts)


def _judged_stage(ctx: Context) -> str:
    """Return the stage whose models the registry's aliases are about."""
    return "train" if ctx.spec.gate is None else ctx.spec.gate.stage


def _model_of(ctx: Context, stage: str) -> ScoringModel:
    if stage not in ctx.upstream:
        raise UserError(
            f"stage 'score' of '{ctx.spec.pipeline}' for {ctx.ds} needs stage '{stage}', which has not finished. Run: "
            f"headrace run {ctx.spec.argument} --ds {ctx.ds} --from {stage} --to score, or choose a registered model: "
            f"--model @champion"
        )
    manifest = ctx.upstream[stage]
    return ScoringModel(stage, manifest.output("model"), manifest.facts)


@dataclass(frozen=True)
class ModelOfRun:
    """A model that scores some of a run's users."""

    #: Context as if this model scored all users: `score.model` names it, and its scratch files have a key of their own.
    ctx: Context
    chosen: ScoringModel
    #: Values of `score.model` that chose it; None stands for the spec's own.
    requested_by: tuple[str | None, ...]


def models_of_run(
    ctx: Context, experiments: Sequence[Live], choose: Callable[[Context], ScoringModel]
) -> list[ModelOfRun]:
    """Return the model of `score.model`, and then those of arms, each once.

    Args:
        ctx: the run.
        experiments: of its day.
        choose: the model that `score.model` of a run asks for.

    Raises:
        UserError: as of `choose`.
    """
    models = [ModelOfRun(ctx, choose(ctx), (None,))]
    for requested in dict.fromkeys(live.model_of(arm) for live in experiments for arm in live.experiment.arms):
        if requested is None:
            continue
        model_ctx = replace(ctx, spec=ctx.spec.scored_by(requested), key=f"{ctx.key}-{len(models)}")
        chosen = choose(model_ctx)
        same = next((i for i, m in enumerate(models) if m.chosen.input == chosen.input), None)
        if same is None:
            models.append(ModelOfRun(model_ctx, chosen, (requested,)))
        else:
            models[same] = replace(models[same], requested_by=(*models[same].requested_by, requested))
    return models
