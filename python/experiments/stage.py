"""The stage `experiments`: what the arms have brought by the day; a losing one is stopped where the spec says so."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from headrace.config import Experiment, Spec
from headrace.errors import UserError
from headrace.experiments.figures import figures, losing
from headrace.experiments.stops import RULE, Stop, all_stopped, stop_arm, stopped
from headrace.experiments.totals import ServedOutcomes, Totals, first_day, served_outcomes
from headrace.manifest import Input, Manifest, fingerprint
from headrace.stage import Context, Result, Stage
from headrace.workspace import Workspace

log = logging.getLogger("headrace.experiments")


class JudgeExperiments(Stage):
    """Compare the arms of each experiment; stop those that lose by its rule, from this day's scores on."""

    name = "experiments"
    version = 1
    needs: tuple[str, ...] = ("outcomes",)

    def spec_part(self, spec: Spec) -> Mapping[str, Any]:
        """The section, and which rows count."""
        assert spec.score is not None
        assert spec.outcomes is not None
        return {
            "experiments": {name: of.model_dump(mode="json") for name, of in section(spec).items()},
            "ripe": {name: spec.days_until_ripe(name) for name in spec.outcomes.labels},
            "user": spec.score.user.key,
        }

    def inputs(self, ctx: Context) -> tuple[Input, ...]:
        """The outcomes as their runs have them, and the arms that were stopped before."""
        tables = {of.input for served in _served(ctx).values() for of in served if of.run_ds != ctx.ds}
        stops = [stop for name, of in section(ctx.spec).items() for stop in stops_before(ctx, name, of).values()]
        version = fingerprint({"stops": sorted((s.experiment, s.arm, s.ds) for s in stops)})
        return (
            *sorted(tables, key=lambda i: int(i.version)),
            Input(kind="stopped_arms", name=f"experiments/{ctx.spec.pipeline}", version=version),
        )

    def verify(self, ctx: Context, manifest: Manifest) -> str | None:
        """The arms that it stopped, or found stopped from its day on, are still recorded as such."""
        for told in manifest.facts["experiments"]:
            from_now = [arm for arm, of in told["arms"].items() if of["stopped"] and of["stopped"]["ds"] == ctx.ds]
            for arm in {*told["stopped_now"], *from_now}:
                if stopped(ctx.ws, ctx.spec.pipeline, told["name"], arm) is None:
                    return f"{ctx.ws.stopped_arm(ctx.spec.pipeline, told['name'], arm)} is gone"
        return None

    def run(self, ctx: Context) -> Result:
        """See the class.

        Raises:
            UserError: outcomes were made again in the meantime, or their files are gone.
        """
        found = []
        for name, served in _served(ctx).items():
            if any(of.run_ds != ctx.ds and of.input not in ctx.inputs for of in served):
                raise UserError("outcomes have been made again in the meantime: run the stage experiments again")
            experiment = section(ctx.spec)[name]
            told = known_of(ctx.ws, ctx.spec, name, experiment, ctx.ds, served, stops_before(ctx, name, experiment))
            if not told["sample_ratio"]["ok"]:
                log.warning(
                    "experiment %s: users of the arms are not those that were sent there (p %.2g): no difference can "
                    "be believed",
                    name,
                    told["sample_ratio"]["p"],
                )
            lost = losing(experiment, told)
            for arm in lost:
                reason = _reason(experiment, told["differences"][arm])
                # Killed behind this line, the next run decides the same, and finds what is written here.
                stop_arm(ctx.ws, ctx.spec.pipeline, _stop(name, arm, ctx.ds, reason, told["differences"][arm]))
                log.warning("experiment %s: arm %s is stopped: %s", name, arm, reason)
            for arm, stop in _stopped_from(ctx, name, experiment).items():
                # Also what an earlier run of the day has decided by other outcomes: the lists obey it.
                told["arms"][arm]["stopped"] = stop.model_dump(mode="json")
            found.append({**told, "stopped_now": lost})
        running = sum(told["state"] == "running" for told in found)
        return Result(
            rows={"running": running, "stopped": sum(len(told["stopped_now"]) for told in found)},
            facts={"experiments": found},
        )


def known_of(
    ws: Workspace,
    spec: Spec,
    name: str,
    experiment: Experiment,
    ds: str,
    served: list[ServedOutcomes],
    stops: Mapping[str, Stop],
) -> dict[str, Any]:
    """What is known of an experiment by a day; see `figures`."""
    return figures(spec, name, experiment, Totals.read(ws, spec, name, experiment, served), ds, stops)


def section(spec: Spec) -> Mapping[str, Experiment]:
    """The section, which a pipeline with the stage has."""
    assert spec.experiments is not None, "headrace.stages: no stage without the section"
    return spec.experiments


def stops_before(ctx: Context, name: str, experiment: Experiment) -> dict[str, Stop]:
    """The arms that were stopped when the day began, or by hand from that day on: not what its own rule has decided."""
    stops = all_stopped(ctx.ws, ctx.spec.pipeline, name, experiment.arms)
    return {a: s for a, s in stops.items() if s.ds < ctx.ds or (s.ds == ctx.ds and s.by != RULE)}


def _stopped_from(ctx: Context, name: str, experiment: Experiment) -> dict[str, Stop]:
    """The arms that were stopped from the day on, by whom ever."""
    stops = all_stopped(ctx.ws, ctx.spec.pipeline, name, experiment.arms)
    return {arm: stop for arm, stop in stops.items() if stop.ds == ctx.ds}


def _served(ctx: Context) -> dict[str, list[ServedOutcomes]]:
    """By experiment, the outcomes that tell of it."""
    return {
        name: served_outcomes(ctx.ws, ctx.spec, ctx.ds, first_day(experiment))
        for name, experiment in section(ctx.spec).items()
    }


def _reason(experiment: Experiment, told: Mapping[str, Any]) -> str:
    assert experiment.stop is not None
    bounds = told["sequential"]
    unit = "rate" if experiment.metric == "rate" else "per user"
    than = f" by more than {experiment.stop.worse_than:g}" if experiment.stop.worse_than else ""
    return (
        f"surely worse than {experiment.control_arm}{than}: {unit} {told['treatment']:.4f}, the control's "
        f"{told['control']:.4f}, sequential interval of the difference {bounds['low']:.4f} to {bounds['high']:.4f} "
        f"after {len(told['days'])} days"
    )


def _stop(name: str, arm: str, ds: str, reason: str, told: Mapping[str, Any]) -> Stop:
    return Stop(experiment=name, arm=arm, ds=ds, by=RULE, at=datetime.now(UTC), reason=reason, figures=dict(told))
