"""Arms that were stopped: a file each, written once and never changed, with who stopped it, when and why.

From its day on the users of the arm get the control's model, and their lists no longer name the arm. Lists of earlier
days stay as they were, also when they are made again.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from headrace.account import user_name
from headrace.errors import UserError
from headrace.workspace import Workspace


class Stop(BaseModel):
    """That an arm was stopped."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    experiment: str
    arm: str
    #: The first day whose lists are made without it.
    ds: str
    #: A user, or `rule` where the daily run obeyed `experiments.NAME.stop`.
    by: str
    #: UTC.
    at: datetime
    reason: str
    #: What the rule saw. JSON values.
    figures: dict[str, Any] = Field(default_factory=dict)


RULE = "rule"


def stop_arm(ws: Workspace, pipeline: str, stop: Stop) -> Stop:
    """Record it, unless the arm was stopped before; what is recorded."""
    file = ws.stopped_arm(pipeline, stop.experiment, stop.arm)
    if file.put_new_text(stop.model_dump_json(indent=1) + "\n"):
        return stop
    found = stopped(ws, pipeline, stop.experiment, stop.arm)
    assert found is not None, "it is there, and nothing removes it"
    return found


def stopped(ws: Workspace, pipeline: str, experiment: str, arm: str) -> Stop | None:
    """That an arm was stopped; None where it was not.

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
    """Those arms of an experiment that were stopped, by name."""
    found = {arm: stopped(ws, pipeline, experiment, arm) for arm in arms}
    return {arm: stop for arm, stop in found.items() if stop is not None}


def by_hand(experiment: str, arm: str, ds: str, reason: str) -> Stop:
    """A record of this process's user, now."""
    return Stop(experiment=experiment, arm=arm, ds=ds, by=user_name(), at=datetime.now(UTC), reason=reason)
