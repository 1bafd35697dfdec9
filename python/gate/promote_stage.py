"""The stage `promote`: the day's models become champions, where they may."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.config import Spec
from headrace.errors import UserError
from headrace.gate.models import model_of_day, section
from headrace.gate.rules import PASSED
from headrace.manifest import Input, Manifest
from headrace.registry.promotion import Promotion, settle
from headrace.registry.store import missing_version
from headrace.stage import Context, Result, Stage

#: The stages that register a model.
_TRAINED = ("train", "baseline", "second_stage")


class Promote(Stage):
    """Give the alias `champion` of each model that the day has registered to its version (registry.promotion.settle),
    but of the one that the gate judges only where its verdict is that, and not where the challenger is to be champion.

    It leaves nothing but its manifest and what the registry has. A run that was killed does the rest; one that was done
    is not done again, so an alias that people have moved since stays where they put it.
    """

    name = "promote"
    version = 1
    needs: tuple[str, ...] = ("train", "baseline?", "second_stage?", "gate?")

    def spec_part(self, spec: Spec) -> Mapping[str, Any]:
        """Whether there is a gate: what it decides is in the inputs."""
        return {} if spec.gate is None else {"gate": spec.gate.model}

    def inputs(self, ctx: Context) -> tuple[Input, ...]:
        """None besides the stages. Raises UserError where the gate has not judged the day's model."""
        if ctx.spec.gate is not None:
            _verdict(ctx)
        return ()

    def verify(self, ctx: Context, manifest: Manifest) -> str | None:
        """The registry is there, with the versions that were promoted or left out."""
        models = manifest.facts.get("models") or {}
        of = ({"name": name, "version": told["version"]} for name, told in models.items())
        return next((why for one in of if (why := missing_version(ctx.ws, one))), missing_version(ctx.ws, None))

    def run(self, ctx: Context) -> Result:
        """See the class. Raises UserError where the registry cannot be used."""
        models: dict[str, Any] = {}
        beside: list[dict[str, Any]] = []
        judged = None if ctx.spec.gate is None else section(ctx.spec).stage
        for stage in _TRAINED:
            registered = ctx.upstream[stage].facts.get("registered") if stage in ctx.upstream else None
            if registered is None:
                continue
            name, version = registered["name"], str(registered["version"])
            if stage == judged:
                done = _settle_judged(ctx, name, version, _verdict(ctx))
                models[name] = _told(version, done[version])
                beside = [_told(other, of) for other, of in done.items() if other != version]
            else:
                models[name] = _told(version, settle(ctx.ws, name, version, check=ctx.check_lease))
        promoted = sum(m["champion"] == m["version"] for m in (*models.values(), *beside))
        facts = {"models": models, **({"challenger": beside[0]} if beside else {})}
        return Result(rows={"promoted": promoted}, facts=facts)


def _settle_judged(ctx: Context, name: str, version: str, verdict: Mapping[str, Any]) -> dict[str, Promotion]:
    """What becomes of the day's model and of its challenger, by version, as the gate has judged them.

    The one that is to be champion comes first, so that the alias moves once.
    """
    challenger, against = verdict.get("challenger"), verdict["champion"]
    instead = challenger is not None and challenger["becomes_champion"]
    judged = [(version, verdict["verdict"] == PASSED, not instead)]
    if challenger is not None:
        judged.insert(0 if instead else 1, (str(challenger["version"]), challenger["verdict"] == PASSED, instead))
    return {
        each: settle(ctx.ws, name, each, passed=passed, chosen=chosen, judged_against=against, check=ctx.check_lease)
        for each, passed, chosen in judged
    }


def _told(version: str, done: Promotion) -> dict[str, Any]:
    return {"version": version, "champion": done.now, "before": done.before, "stays": done.stays}


def _verdict(ctx: Context) -> Mapping[str, Any]:
    """The gate's facts about the day's model.

    Raises:
        UserError: it has not judged that one.
    """
    gate = ctx.upstream.get("gate")
    if gate is None or gate.facts["model"]["key"] != model_of_day(ctx).key:
        raise UserError(
            f"the gate has not judged the model of {ctx.ds}. Run: headrace run {ctx.spec.argument} --ds {ctx.ds} "
            f"--from evaluate --to promote"
        )
    return gate.facts
