"""The stage `gate`: the verdict on the day's model, and on its challenger."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from headrace.config import Spec
from headrace.gate.challenger import verdict_on_challenger
from headrace.gate.models import section
from headrace.gate.rules import REFUSED, judge, verdict_of
from headrace.manifest import Input, Manifest
from headrace.stage import Context, Result, Stage
from headrace.train.checkpoint.progress import spec_monitor

log = logging.getLogger("headrace.gate")


class JudgeModel(Stage):
    """Hold what `evaluate` and `drift` have measured against the rules of the spec. The verdict is always written, and
    the one on a challenger that was trained on the day beside it: it decides nothing about the day's model.
    """

    name = "gate"
    version = 1
    needs: tuple[str, ...] = ("evaluate", "drift?")

    def spec_part(self, spec: Spec) -> Mapping[str, Any]:
        """The rules; how much better a challenger must be, where one may become champion."""
        gate = section(spec)
        rules = gate.model_dump(mode="json")
        if gate.challenger == "promote" and spec.challenger is not None:
            rules |= {"behind": spec.challenger.behind, "monitor": spec.train.monitor}
        return rules

    def inputs(self, ctx: Context) -> tuple[Input, ...]:
        """None besides the stages."""
        return ()

    def verify(self, ctx: Context, manifest: Manifest) -> str | None:
        """It leaves nothing but its manifest."""
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
        """What is said of the day's challenger; None: there is none, or it could not be measured."""
        challenger = facts.get("challenger")
        if challenger is None or challenger["note"]:
            return None
        behind = 0.0 if spec.challenger is None else spec.challenger.behind
        told = verdict_on_challenger(section(spec), facts, drift, verdict, spec_monitor(spec).metric, behind)
        broken = [rule for rule in told["rules"] if rule["passed"] is False]
        becomes = "; it becomes champion" if told["becomes_champion"] else ""
        log.info("gate: the challenger, version %s, is %s%s", challenger["version"], told["verdict"], becomes)
        for rule in broken:
            log.info("gate: of the challenger: %s (%s)", rule["text"], rule["key"])
        return {**{name: challenger[name] for name in ("version", "key", "name")}, **told}
