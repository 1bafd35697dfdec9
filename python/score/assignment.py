"""Assignment of users to arms by a salted hash: the same every day, independent between experiments.

A user's place in an experiment is a hash of the experiment's salt and the user's key, not stored anywhere. Whether a
user takes part and in which arm are separate hashes: a user who takes part at 10 % takes part at 50 %, in the same arm.

An arm that was stopped has a file, written once and never changed, with who stopped it, when and why. From its day on
the users of the arm get the control's model, and their lists no longer name the arm. Lists of earlier days stay as they
were, also when they are made again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from headrace.config import Experiment, Spec
from headrace.config.experiments import PARTS
from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.stage.manifest import Input, fingerprint
from headrace.stage.resources import user_name
from headrace.udfs.arrow import xxhash64_integers, xxhash64_strings

I64 = npt.NDArray[np.int64]
#: Suffixes of an experiment's salt: for the arm, and for whether a user takes part.
ARM, PART = "arm", "part"

RULE = "rule"


def bucket(users: pa.Array, salt: str) -> I64:
    """Return the place of each user in [0, PARTS): `pmod(xxhash64(salt, user), PARTS)` of Spark.

    Args:
        users: whole numbers or texts without nulls, [n].
        salt: different salts give independent places.
    """
    seed = np.repeat(xxhash64_strings(pa.array([salt])), len(users))
    if pa.types.is_integer(users.type):
        return xxhash64_integers(users.cast(pa.int64()).to_numpy(), seed) % PARTS
    return xxhash64_strings(users.cast(pa.string()), seed) % PARTS


def arms(users: pa.Array, salt: str, shares: Mapping[str, float], percent: float) -> I64:
    """Return the position of each user's arm in `shares`, -1 of those who take no part. int64 [n].

    Args:
        users: whole numbers or texts without nulls, [n].
        salt: of the experiment.
        shares: of the arms among those who take part, above 0; their sum is 1.
        percent: share of all users who take part, in [0, 100]. Raising it moves no user to another arm.
    """
    positions = np.searchsorted(edges(shares)[:-1], bucket(users, f"{salt}/{ARM}"), side="right")
    return np.where(bucket(users, f"{salt}/{PART}") < parts_of(percent), positions, -1)


def edges(shares: Mapping[str, float]) -> I64:
    """Return the places at which the arms end, by their shares. int64 [arms]."""
    ends: I64 = np.round(np.cumsum(list(shares.values())) * PARTS).astype(np.int64)
    return ends


def parts_of(percent: float) -> int:
    """Return how many of the PARTS places a percentage is."""
    return round(percent * PARTS / 100)


class Stop(BaseModel):
    """Record of a stopped arm."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    experiment: str
    arm: str
    #: The first day whose lists are made without the arm.
    ds: str
    #: A user, or `rule` where the daily run obeyed `experiments.NAME.stop`.
    by: str
    #: UTC.
    at: datetime
    reason: str
    #: The figures that the rule decided by. JSON values.
    figures: dict[str, Any] = Field(default_factory=dict)


def stop_arm(ws: Workspace, pipeline: str, stop: Stop) -> Stop:
    """Record a stop, unless the arm was stopped before; return the record."""
    file = ws.stopped_arm(pipeline, stop.experiment, stop.arm)
    if file.put_new_text(stop.model_dump_json(indent=1) + "\n"):
        return stop
    existing = stopped(ws, pipeline, stop.experiment, stop.arm)
    assert existing is not None, "the record exists, and nothing removes it"
    return existing


def stopped(ws: Workspace, pipeline: str, experiment: str, arm: str) -> Stop | None:
    """Return the record of a stopped arm; None where it was not stopped.

    Raises:
        UserError: the file is damaged.
    """
    file = ws.stopped_arm(pipeline, experiment, arm)
    try:
        return Stop.model_validate_json(file.read_text())
    except FileNotFoundError:
        return None
    except ValidationError as e:
        raise UserError(f"{file} does not say who stopped the arm and when: {e.errors()[0]['msg']}") from e


def all_stopped(ws: Workspace, pipeline: str, experiment: str, arms: Iterable[str]) -> dict[str, Stop]:
    """Return the records of the stopped arms of an experiment, by name."""
    stops = {arm: stopped(ws, pipeline, experiment, arm) for arm in arms}
    return {arm: stop for arm, stop in stops.items() if stop is not None}


def by_hand(experiment: str, arm: str, ds: str, reason: str) -> Stop:
    """Return a record of a stop by this process's user, now."""
    return Stop(experiment=experiment, arm=arm, ds=ds, by=user_name(), at=datetime.now(UTC), reason=reason)


@dataclass(frozen=True)
class Live:
    """Experiment as it is on a day."""

    name: str
    experiment: Experiment
    #: Its arms that were stopped up to that day.
    stopped: Mapping[str, Stop]

    @property
    def salt(self) -> str:
        """Return the salt of the hash."""
        return self.experiment.salt or self.name

    def model_of(self, arm: str) -> str | None:
        """Return the model whose scores the users of an arm get, as `score.model`; None: those of `score.model`."""
        effective_arm = self.experiment.control_arm if arm in self.stopped else arm
        return self.experiment.arms[effective_arm].model


def live_experiments(ws: Workspace, spec: Spec, ds: str) -> list[Live]:
    """List the experiments that the lists of a day are part of, in the order of the section.

    Raises:
        UserError: the record of a stopped arm is damaged.
    """
    live = []
    for name, experiment in (spec.experiments or {}).items():
        if experiment.live(ds):
            stops = all_stopped(ws, spec.pipeline, name, experiment.arms)
            live.append(Live(name, experiment, {arm: stop for arm, stop in stops.items() if stop.ds <= ds}))
    return live


def pinned(pipeline: str, experiments: Sequence[Live]) -> tuple[Input, ...]:
    """Return the input that pins which users get which model on a day; none where there are no experiments."""
    if not experiments:
        return ()
    parts = [
        {
            "name": live.name,
            "salt": live.salt,
            "percent": live.experiment.percent,
            "arms": [
                (arm, share, live.model_of(arm), arm in live.stopped) for arm, share in live.experiment.shares.items()
            ],
        }
        for live in experiments
    ]
    version = fingerprint({"experiments": parts})
    return (Input(kind="experiments", name=f"experiments/{pipeline}", version=version),)
