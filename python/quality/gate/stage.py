"""Stages `gate` and `promote`: the verdict on the day's model and its challenger, and the alias `champion`."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from headrace.config import Gate, Spec
from headrace.errors import UserError
from headrace.models.registry.client import missing_version
from headrace.models.registry.promotion import JUDGED_AGAINST, Promotion, champion_of_day, judged_against, settle
from headrace.models.registry.versions import by_key, registered_name
from headrace.quality.gate.rules import PASSED, REFUSED, judge, verdict_of, verdict_on_challenger
from headrace.stage import Context, Result, Stage
from headrace.stage.manifest import Input, Manifest
from headrace.train.callbacks.progress import spec_monitor

log = logging.getLogger("headrace.gate")

#: The stages that register a model.
_TRAINED = ("train", "baseline", "second_stage")


@dataclass(frozen=True)
class JudgedModel:
    """A version of a registered model: its number, its key, and the saved model's name below the workspace."""

    version: str
    key: str
    name: str

    @property
    def input(self) -> Input:
        """Return the model as an input of a run."""
        return Input(kind="model", name=self.name, version=self.key)

    def fact(self) -> dict[str, str]:
        """Return the model as JSON values; `from_fact` is the inverse."""
        return asdict(self)

    @staticmethod
    def from_fact(fact: Any) -> JudgedModel | None:
        """Rebuild the model from `fact`; None stays None."""
        return None if fact is None else JudgedModel(fact["version"], fact["key"], fact["name"])


def section(spec: Spec) -> Gate:
    """Return the section `gate`, which every pipeline with these stages has."""
    assert spec.gate is not None, "headrace.config.stages: no stage without the section"
    return spec.gate


def gate_or_default(spec: Spec) -> Gate:
    """Return the section `gate`, or its defaults, by which models without a gate are measured."""
    return spec.gate or Gate()


def model_of_day(ctx: Context) -> JudgedModel:
    """Return the day's model that the gate judges.

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
    """Return the day's challenger for the gate to judge; None: none was trained, or the gate judges another kind."""
    if ctx.spec.challenger is None or section(ctx.spec).model != "neural":
        return None
    manifest = Manifest.load(ctx.ws.manifest(ctx.spec.pipeline, ctx.ds, "challenger"))
    registered = None if manifest is None else manifest.facts.get("registered")
    if manifest is None or registered is None:
        return None
    output = manifest.output("model")
    return JudgedModel(str(registered["version"]), output.version, output.name)


def challenger_to_evaluate(ctx: Context, model: JudgedModel) -> JudgedModel | None:
    """Return the day's challenger, to be measured beside its model; None: there is none.

    None also for a model that was evaluated without an existing challenger, before challengers were judged: such a day
    keeps its verdict and the lists that were made by it.

    Args:
        ctx: the day.
        model: its model.
    """
    challenger, stages = challenger_of_day(ctx), ("challenger", "evaluate")
    trained, evaluated = (Manifest.load(ctx.ws.manifest(ctx.spec.pipeline, ctx.ds, stage)) for stage in stages)
    if challenger is None or trained is None or evaluated is None or "challenger" in evaluated.facts:
        return challenger
    existed = trained.started + timedelta(seconds=trained.seconds) <= evaluated.started
    return None if existed and evaluated.facts["model"]["key"] == model.key else challenger


def champion_before(ctx: Context, model: JudgedModel) -> JudgedModel | None:
    """Return the champion that a day's model is compared with; None: there is none yet.

    Where the day was judged it is the champion of that time, not one of the day's own models, which may be champion by
    now. Else it is the alias, as the day may know it.
    """
    name = registered_name(ctx.spec.pipeline, section(ctx.spec).stage)
    version = by_key(ctx.ws, name, model.key)
    if version is not None and JUDGED_AGAINST in version.tags:
        return JudgedModel.from_fact(judged_against(version))
    challenger = challenger_of_day(ctx)
    besides = [model.key, *([] if challenger is None else [challenger.key])]
    champion = champion_of_day(ctx.ws, name, ctx.ds, besides)
    return None if champion is None else JudgedModel(champion.version, champion.key, ctx.ws.name_of(champion.source))


class JudgeModel(Stage):
    """Stage that checks the figures of `evaluate` and `drift` against the rules of the spec.

    The verdict is always written, and with it one on a challenger that was trained on the day, which decides nothing
    about the day's model.
    """

    name = "gate"
    version = 1
    needs: tuple[str, ...] = ("evaluate", "drift?")

    def spec_part(self, spec: Spec) -> Mapping[str, Any]:
        """Return the rules; how much better a challenger must be, where one may become champion."""
        gate = section(spec)
        rules = gate.model_dump(mode="json")
        if gate.challenger == "promote" and spec.challenger is not None:
            rules |= {"behind": spec.challenger.behind, "monitor": spec.train.monitor}
        return rules

    def inputs(self, ctx: Context) -> tuple[Input, ...]:
        """Return no inputs besides the stages."""
        return ()

    def verify(self, ctx: Context, manifest: Manifest) -> str | None:
        """Return None: the stage has no output besides its manifest."""
        return None

    def run(self, ctx: Context) -> Result:
        """See the class. Raises UserError where a rule names what was not measured."""
        evaluated, drift = ctx.upstream["evaluate"], ctx.upstream.get("drift")
        facts = {**evaluated.facts, "rows": evaluated.rows["rows"]}
        counted = None if drift is None else {**drift.facts, "over_limit": drift.rows["over_limit"]}
        rules = judge(section(ctx.spec), facts, counted)
        verdict = verdict_of(rules)
        broken = [rule for rule in rules if rule.passed is False]
        log.info("gate: %s, %d of %d rules broken", verdict, len(broken), len(rules))
        for rule in broken:
            log.warning("gate: %s (%s)", rule.text, rule.key)
        champion = facts["champion"]
        if verdict == REFUSED:
            against = "nothing" if champion is None else f"version {champion['version']}"
            log.warning("gate: version %s is refused; it was held against %s", facts["model"]["version"], against)
        identity = ("version", "key", "name")
        challenger = self._on_challenger(ctx.spec, facts, counted, verdict)
        return Result(
            rows={"rules": len(rules), "broken": len(broken)},
            facts={
                "verdict": verdict,
                "registered": facts["registered"],
                "split": facts["split"],
                "rows": facts["rows"],
                "model": {name: facts["model"][name] for name in identity},
                "champion": None if champion is None else {name: champion[name] for name in identity},
                "note": facts["note"],
                "rules": [rule.fact() for rule in rules],
                **({} if challenger is None else {"challenger": challenger}),
            },
        )

    def _on_challenger(
        self, spec: Spec, facts: Mapping[str, Any], drift: Mapping[str, Any] | None, verdict: str
    ) -> dict[str, Any] | None:
        """Return the facts of the day's challenger; None: there is none, or it could not be measured."""
        challenger = facts.get("challenger")
        if challenger is None or challenger["note"]:
            return None
        required_gain = 0.0 if spec.challenger is None else spec.challenger.behind
        verdict_facts = verdict_on_challenger(
            section(spec), facts, drift, verdict, spec_monitor(spec).metric, required_gain
        )
        broken = [rule for rule in verdict_facts["rules"] if rule["passed"] is False]
        becomes = "; it becomes champion" if verdict_facts["becomes_champion"] else ""
        log.info("gate: the challenger, version %s, is %s%s", challenger["version"], verdict_facts["verdict"], becomes)
        for rule in broken:
            log.info("gate: of the challenger: %s (%s)", rule["text"], rule["key"])
        return {**{name: challenger[name] for name in ("version", "key", "name")}, **verdict_facts}


class Promote(Stage):
    """Stage that gives the alias `champion` to the versions that the day has registered (registry.promotion.settle).

    A model that the gate judges gets it only if it has passed, and not where the challenger becomes champion. The stage
    writes its manifest and the registry alone. The rerun of a killed run does the rest; a finished run is not repeated,
    so an alias that people have moved since stays where they put it.
    """

    name = "promote"
    version = 1
    needs: tuple[str, ...] = ("train", "baseline?", "second_stage?", "gate?")

    def spec_part(self, spec: Spec) -> Mapping[str, Any]:
        """Return whether there is a gate: what it decides is in the inputs."""
        return {} if spec.gate is None else {"gate": spec.gate.model}

    def inputs(self, ctx: Context) -> tuple[Input, ...]:
        """Return no inputs besides the stages. Raises UserError where the gate has not judged the day's model."""
        if ctx.spec.gate is not None:
            _verdict(ctx)
        return ()

    def verify(self, ctx: Context, manifest: Manifest) -> str | None:
        """Check that the registry exists, with the versions that were promoted or left out."""
        models = manifest.facts.get("models") or {}
        versions = ({"name": name, "version": model_facts["version"]} for name, model_facts in models.items())
        return next(
            (reason for version in versions if (reason := missing_version(ctx.ws, version))),
            missing_version(ctx.ws, None),
        )

    def run(self, ctx: Context) -> Result:
        """See the class. Raises UserError where the registry cannot be used."""
        models: dict[str, Any] = {}
        challengers: list[dict[str, Any]] = []
        judged = None if ctx.spec.gate is None else section(ctx.spec).stage
        for stage in _TRAINED:
            registered = ctx.upstream[stage].facts.get("registered") if stage in ctx.upstream else None
            if registered is None:
                continue
            name, version = registered["name"], str(registered["version"])
            if stage == judged:
                done = _settle_judged(ctx, name, version, _verdict(ctx))
                models[name] = _promotion_facts(version, done[version])
                challengers = [
                    _promotion_facts(challenger_version, promotion)
                    for challenger_version, promotion in done.items()
                    if challenger_version != version
                ]
            else:
                models[name] = _promotion_facts(version, settle(ctx.ws, name, version, check=ctx.check_lease))
        promoted = sum(m["champion"] == m["version"] for m in (*models.values(), *challengers))
        facts = {"models": models, **({"challenger": challengers[0]} if challengers else {})}
        return Result(rows={"promoted": promoted}, facts=facts)


def _settle_judged(ctx: Context, name: str, version: str, verdict: Mapping[str, Any]) -> dict[str, Promotion]:
    """Settle the day's model and its challenger as the gate has judged them; return the promotions by version.

    The one that is to be champion comes first, so that the alias moves once.
    """
    challenger, against = verdict.get("challenger"), verdict["champion"]
    instead = challenger is not None and challenger["becomes_champion"]
    judged = [(version, verdict["verdict"] == PASSED, not instead)]
    if challenger is not None:
        judged.insert(0 if instead else 1, (str(challenger["version"]), challenger["verdict"] == PASSED, instead))
    return {
        judged_version: settle(
            ctx.ws, name, judged_version, passed=passed, chosen=chosen, judged_against=against, check=ctx.check_lease
        )
        for judged_version, passed, chosen in judged
    }


def _promotion_facts(version: str, promotion: Promotion) -> dict[str, Any]:
    return {"version": version, "champion": promotion.now, "before": promotion.previous, "stays": promotion.stays}


def _verdict(ctx: Context) -> Mapping[str, Any]:
    """Return the gate's facts about the day's model.

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
