"""The experiments that the lists of a day are part of, as they stand on that day."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headrace.config import Experiment, Spec
from headrace.experiments.stops import Stop, all_stopped
from headrace.manifest import Input, fingerprint
from headrace.workspace import Workspace


@dataclass(frozen=True)
class Live:
    """An experiment on a day."""

    name: str
    experiment: Experiment
    #: Its arms that were stopped up to that day.
    stopped: Mapping[str, Stop]

    @property
    def salt(self) -> str:
        """Of the hash."""
        return self.experiment.salt or self.name

    def model_of(self, arm: str) -> str | None:
        """Whose scores the users of an arm get, as `score.model`; None: those of `score.model`."""
        given = self.experiment.control_arm if arm in self.stopped else arm
        return self.experiment.arms[given].model


def live_experiments(ws: Workspace, spec: Spec, ds: str) -> list[Live]:
    """Those that the lists of a day are part of, in the order of the section.

    Raises:
        UserError: what says that an arm was stopped is damaged.
    """
    found = []
    for name, experiment in (spec.experiments or {}).items():
        if experiment.live(ds):
            stops = all_stopped(ws, spec.pipeline, name, experiment.arms)
            found.append(Live(name, experiment, {arm: stop for arm, stop in stops.items() if stop.ds <= ds}))
    return found


def pinned(pipeline: str, experiments: Sequence[Live]) -> tuple[Input, ...]:
    """What decides who gets which model on a day, among a run's inputs; none where there are no experiments."""
    if not experiments:
        return ()
    said = [
        {
            "name": of.name,
            "salt": of.salt,
            "percent": of.experiment.percent,
            "arms": [(arm, share, of.model_of(arm), arm in of.stopped) for arm, share in of.experiment.shares.items()],
        }
        for of in experiments
    ]
    version = fingerprint({"experiments": said})
    return (Input(kind="experiments", name=f"experiments/{pipeline}", version=version),)
