"""Erasure of persons in all places, in order, and the second look that must find none."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import datetime

from headrace.config import LandingSource, Spec
from headrace.config.schema import quoted
from headrace.config.workspace import Workspace
from headrace.errors import IncompleteError, UserError
from headrace.jobs.housekeeping.folders import discard_unfinished
from headrace.jobs.housekeeping.forget import proof
from headrace.jobs.housekeeping.forget.models import model_places, upload_places
from headrace.jobs.housekeeping.forget.persons import Persons, Place, sources_with
from headrace.jobs.housekeeping.forget.places import (
    cache_places,
    claim_tables,
    claim_warehouse,
    dataset_places,
    host_places,
    other_hosts,
    search_places,
    table_places,
    text_places,
    training_places,
    warehouse_places,
)
from headrace.jobs.housekeeping.forget.proof import ErasureRequest, Scan, begin, is_erased, scan, scan_copies
from headrace.jobs.housekeeping.workspace_state import WorkspaceState
from headrace.stage import run_lock
from headrace.storage import Location


def found_places(spec: Spec, ws: Workspace, persons: Persons, now: datetime) -> Iterator[Place]:
    """Yield the places that would be erased. Changes nothing and takes no lock.

    Raises:
        UserError: a file of ours cannot be read, or the warehouse cannot be reached.
    """
    state = WorkspaceState(spec, ws, now)
    yield from _places(state, persons, "", set(), is_again=is_erased(ws, spec.pipeline, persons))
    yield from host_places(state)
    yield from _unreachable_places(state, persons)


def forget(
    spec: Spec, ws: Workspace, persons: Persons, now: datetime
) -> Iterator[Place | tuple[ErasureRequest, Location]]:
    """Erase them: each place after it is done, then the request with the file of its proof.

    May be killed anywhere: the list of hashes and the request are written first, and the same call does the rest.

    Raises:
        BusyError: a stage of the pipeline is at work.
        UserError: as `found_places`; or something is left, which the proof names. (IncompleteError) All that is left is
            done by the same call later.
    """
    with run_lock(ws, spec.pipeline) as lease:
        state = WorkspaceState(spec, ws, now, lease)
        discard_unfinished(state)
        again = is_erased(ws, spec.pipeline, persons)
        request = begin(ws, spec.pipeline, persons, now)
        # A paused run that read the list before the values were on it must not bring rows back.
        claim_tables(state)
        claim_warehouse(state)
        looked = set[str]()
        if again and any(True for _ in _places(state, persons, request.id, looked, is_again=True)):
            # Rows have come back: outputs computed from them must go as well.
            again = False
        if not again:
            request = request.model_copy(update={"erased": None, "finished": None})
            request.save(ws.forgotten(spec.pipeline))
        left: list[Place] = []
        for place in _places(state, persons, request.id, looked, again):
            lease.check()
            done = _erase(ws, request, place, now)
            left += [done] if done.left else []
            yield done
        for place in _unreachable_places(state, persons):
            proof.note(ws, request, place, now)
            yield place
        second = list(_places(state, persons, request.id, looked, is_again=True))
        searched = scan(state, persons)
        is_ours_done = not (second or searched.matches or searched.unread or left)
        for place in host_places(state):
            done = _erase(ws, request, place, now)
            left += [done] if done.left else []
            yield done
        searched = scan_copies(state, persons, searched)
        lease.check()
        is_done = not (second or searched.matches or searched.unread or left)
        times = {"erased": (request.erased or now) if is_ours_done else None, "finished": now if is_done else None}
        request = request.model_copy(update=times)
        file = proof.write(ws, request, second, searched, left, now)
        request.save(ws.forgotten(spec.pipeline))
        yield request, file
        if not is_done:
            raise _remainder(second, searched, left, file)


def _remainder(second: Sequence[Place], searched: Scan, left: Sequence[Place], file: Location) -> UserError:
    """Return the error that lists what remains, and says whether running the command again later is enough."""
    remaining = [*(p.name for p in second), *searched.matches, *(f"{p.name}: {p.left}" for p in left)]
    remaining += [f"{name} cannot be read: restore or remove it" for name in searched.unread]
    listed = "; ".join(dict.fromkeys(remaining))
    if not (second or searched.matches or searched.unread) and all(p.later for p in left):
        return IncompleteError(f"not all is erased yet: {listed}. The rest is ({file})")
    return UserError(
        f"not all is erased: {listed}. The rest is; do what is said, and run the same command again ({file})"
    )


def _erase(ws: Workspace, request: ErasureRequest, place: Place, now: datetime) -> Place:
    """Note a place, then erase it; return the place with what remains to be done."""
    proof.note(ws, request, place, now)
    left = place.act() if place.act is not None else None
    done = replace(place, left="; ".join(x for x in (place.left, left) if x), later=place.later and not left)
    if left:
        proof.note(ws, request, done, now)
    return done


def _places(state: WorkspaceState, persons: Persons, request: str, looked: set[str], is_again: bool) -> Iterator[Place]:
    """Yield all places; each kind sees what the ones before it have left.

    `looked`: see `upload_places`. `is_again`: search for the values alone: outputs computed from rows were removed by
    an earlier run, and existing ones are newer.
    """
    if not is_again:
        yield from dataset_places(state)
        yield from search_places(state)
        yield from training_places(state)
        yield from cache_places(state)
    yield from text_places(state, persons)
    models = list[Place]()
    for place in model_places(state, persons):
        models.append(place)
        yield place
    yield from upload_places(state, persons, models, looked)
    yield from warehouse_places(state, persons)
    yield from table_places(state, persons, request)


def _unreachable_places(state: WorkspaceState, persons: Persons) -> Iterator[Place]:
    """Yield what headrace does not write (landing files and tables of the user's) or cannot reach (other hosts)."""
    spec = state.spec
    for name, table in sources_with(spec, persons.column):
        if table is not None:
            note = f"yours: every stage leaves the rows out; DELETE them WHERE {quoted(persons.column)} IN (...)"
            yield Place("source", table.title, note=note)
            continue
        source = spec.source if name is None else spec.sources[name].source
        assert isinstance(source, LandingSource)
        yield Place(
            "landing", source.path, note="yours: ingest leaves the rows out; remove them, or the files, yourself"
        )
    yield from other_hosts(state)
