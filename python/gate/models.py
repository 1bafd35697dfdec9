"""The model that a gate judges, and the one that it is held against."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from headrace.config import Gate, Spec
from headrace.errors import UserError
from headrace.manifest import Input, Manifest
from headrace.registry.promotion import JUDGED_AGAINST, champion_of_day, judged_against
from headrace.registry.versions import by_key, registered_name
from headrace.stage import Context


@dataclass(frozen=True)
class JudgedModel:
    """A version of a registered model: its number, its key, and the saved model's name below the workspace."""

    version: str
    key: str
    name: str

    @property
    def input(self) -> Input:
        """It, among the inputs of a run."""
        return Input(kind="model", name=self.name, version=self.key)

    def fact(self) -> dict[str, str]:
        """As JSON."""
        return asdict(self)

    @staticmethod
    def of(fact: Any) -> JudgedModel | None:
        """What `fact` gave; None of None."""
        return None if fact is None else JudgedModel(fact["version"], fact["key"], fact["name"])


def section(spec: Spec) -> Gate:
    """The section `gate`, of a stage that there is with it alone."""
    assert spec.gate is not None, "headrace.stages: no stage without the section"
    return spec.gate


def gate_or_default(spec: Spec) -> Gate:
    """The section `gate`, or what it says by default: how models are measured that nobody judges."""
    return spec.gate or Gate()


def model_of_day(ctx: Context) -> JudgedModel:
    """The day's model that the gate judges.

    Raises:
        UserError: its stage has not finished.
    """
    stage = section(ctx.spec).stage
    if stage not in ctx.upstream:
        raise UserError(
            f"the gate of '{ctx.spec.pipeline}' judges the model of stage '{stage}', which has not finished for "
            f"{ctx.ds}. Run: headrace run {ctx.spec.argument} --ds {ctx.ds} --from {stage} --to promote"
        )
    manifest = ctx.upstream[stage]
    output = manifest.output("model")
    return JudgedModel(str(manifest.facts["registered"]["version"]), output.version, output.name)


def challenger_of_day(ctx: Context) -> JudgedModel | None:
    """The challenger that was trained on the day, for the gate to judge; None: none was, or it judges another kind."""
    if ctx.spec.challenger is None or section(ctx.spec).model != "neural":
        return None
    manifest = Manifest.load(ctx.ws.manifest(ctx.spec.pipeline, ctx.ds, "challenger"))
    registered = None if manifest is None else manifest.facts.get("registered")
    if manifest is None or registered is None:
        return None
    output = manifest.output("model")
    return JudgedModel(str(registered["version"]), output.version, output.name)


def challenger_to_evaluate(ctx: Context, model: JudgedModel) -> JudgedModel | None:
    """The day's challenger, to be measured beside its model; None: there is none.

    Nor is there for a model that was evaluated without it though it was there, before challengers were judged: such a
    day stays as it was judged, with the lists that were made by that.

    Args:
        ctx: the day.
        model: its model.
    """
    found, stages = challenger_of_day(ctx), ("challenger", "evaluate")
    trained, evaluated = (Manifest.load(ctx.ws.manifest(ctx.spec.pipeline, ctx.ds, stage)) for stage in stages)
    if found is None or trained is None or evaluated is None or "challenger" in evaluated.facts:
        return found
    there = trained.started + timedelta(seconds=trained.seconds) <= evaluated.started
    return None if there and evaluated.facts["model"]["key"] == model.key else found


def champion_before(ctx: Context, model: JudgedModel) -> JudgedModel | None:
    """The champion that a day's model is held against; None: there is none yet.

    What its verdict was settled on, where it was: the champion of the time, not the day's own models, one of which may
    be it by now. Else what the alias says, as the day may know it.
    """
    name = registered_name(ctx.spec.pipeline, section(ctx.spec).stage)
    version = by_key(ctx.ws, name, model.key)
    if version is not None and JUDGED_AGAINST in version.tags:
        return JudgedModel.of(judged_against(version))
    beside_it = challenger_of_day(ctx)
    besides = [model.key, *([] if beside_it is None else [beside_it.key])]
    found = champion_of_day(ctx.ws, name, ctx.ds, besides)
    return None if found is None else JudgedModel(found.version, found.key, ctx.ws.name_of(found.source))
