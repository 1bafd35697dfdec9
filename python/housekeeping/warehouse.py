"""The warehouse: days that `publish.retain_days` does not keep, and scores that failed their audit long ago."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import date, timedelta
from functools import partial

from headrace.housekeeping.step import Step
from headrace.housekeeping.workspace_state import WorkspaceState
from headrace.publish.target import Target, beyond_retention
from headrace.publish.warehouses import open_target


def warehouse_steps(state: WorkspaceState) -> Iterator[Step]:
    """Of a pipeline that has published.

    Raises:
        UserError: the warehouse cannot be reached.
    """
    ws, publish = state.ws, state.spec.publish
    if publish is None or not any(m.stage in ("score", "publish") for _, m in state.manifests()):
        return
    with open_target(state.spec, ws, state.lock) as target:
        old = beyond_retention(target.days(), publish.retain_days)
        if old:
            what = f"{target.label}: {len(old)} days up to {old[-1]}"
            reason = f"publish.retain_days is {publish.retain_days}"
            yield Step("published", what, reason, act=partial(target.drop_days, old))
        days = _days_before(state)
        kept = target.kept(days)
        if kept:
            yield Step("staged", ", ".join(kept), "their audits failed", act=partial(_drop_kept, target, days))


def _days_before(state: WorkspaceState) -> list[str]:
    """Days that have run and are older than `unfinished_days`, by the pipeline's days."""
    if state.newest_day is None:
        return []
    first = (date.fromisoformat(state.newest_day) - timedelta(days=state.keep.unfinished_days)).isoformat()
    return [day for day in state.ws.days(state.pipeline) if day < first]


def _drop_kept(target: Target, days: list[str]) -> None:
    target.drop_kept(days)
