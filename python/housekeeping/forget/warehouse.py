"""The warehouse's rows of all days, and the store of keys and values."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from headrace.housekeeping.forget.persons import Persons
from headrace.housekeeping.forget.place import Place
from headrace.housekeeping.workspace_state import WorkspaceState
from headrace.publish.online.store import open_store
from headrace.publish.target import Key, Target
from headrace.publish.warehouses import open_target


def warehouse_places(state: WorkspaceState, persons: Persons) -> Iterator[Place]:
    """Of a pipeline that has published, where the column is one of the scores' keys.

    Raises:
        UserError: the warehouse or the store cannot be reached.
    """
    spec, ws = state.spec, state.ws
    if spec.publish is None or spec.score is None or persons.column not in (spec.score.user.key, spec.score.item.key):
        return
    if not any(m.stage in ("score", "publish") for _, m in state.manifests()):
        return
    keys: list[Key] = sorted(map(int, persons.texts)) if persons.integers else sorted(persons.texts)
    with open_target(spec, ws, state.lock) as target:
        rows, files = target.rows_with(persons.column, keys), target.leftovers(persons.column, keys)
        if rows or files:
            note = f"{len(rows)} days, {min(rows)} to {max(rows)}" if rows else "of no published day"
            note = "; ".join(filter(None, (note, target.not_reached)))
            act = partial(_erase, target, persons.column, keys)
            yield Place("warehouse", target.label, sum(rows.values()), removed=files, note=note, act=act)
        if kept := target.kept():
            yield Place(
                "warehouse", ", ".join(kept), removed=len(kept), note="failed audits", act=partial(_drop, target)
            )
    if spec.publish.online is None or persons.column != spec.score.user.key:
        return
    with open_store(spec, ws, state.lock) as store:
        users = store.users_with(sorted(persons.texts))
        if users:
            yield Place("online", store.label, users, act=partial(store.erase, sorted(persons.texts)))


def claim_warehouse(state: WorkspaceState) -> None:
    """The same as `claim_tables` of where the pipeline has published.

    Raises:
        UserError: the warehouse or the store cannot be reached.
        LeaseLost: another process is at work by now.
    """
    spec = state.spec
    if spec.publish is not None and any(m.stage in ("score", "publish") for _, m in state.manifests()):
        with open_target(spec, state.ws, state.lock) as target:
            target.claim()
        if spec.publish.online is not None:
            with open_store(spec, state.ws, state.lock) as store:
                store.claim()


def _erase(target: Target, column: str, keys: list[Key]) -> str:
    return target.erase(column, keys)


def _drop(target: Target) -> None:
    target.drop_kept()
