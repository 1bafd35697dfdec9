"""Models that a tracking server has: uploaded again from the store, where they have been rewritten by then."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from headrace.errors import UserError
from headrace.housekeeping.forget.models import META, look_into
from headrace.housekeeping.forget.persons import Persons
from headrace.housekeeping.forget.place import Place
from headrace.housekeeping.models import REGISTERED_SUFFIXES
from headrace.housekeeping.workspace_state import WorkspaceState
from headrace.registry.uploads import Upload, fetched, upload_again, uploads


def upload_places(
    state: WorkspaceState, persons: Persons, models: Sequence[Place], looked: set[str]
) -> Iterator[Place]:
    """Those that have some: as the store's model has, or had just now; of others the artifact is brought here.

    Args:
        state: the pipeline.
        persons: who.
        models: the store's that have some, by their names.
        looked: runs whose artifact has none, as an earlier look has found under the same lock; more are added.

    Raises:
        UserError: the server cannot be used, or a model is damaged.
    """
    ws = state.ws
    stored = {place.what: place for place in models}
    for suffix in REGISTERED_SUFFIXES:
        for one in uploads(ws, state.pipeline + suffix):
            if one.run_id in looked:
                continue
            rows, is_theirs, in_graph = 0, one.is_begun, False
            if not one.is_begun:
                if known := [stored[name] for name in _in_store(state, one) if name in stored]:
                    rows, is_theirs = sum(p.rows for p in known), any(p.rewritten for p in known)
                    in_graph = any(p.left for p in known)
                else:
                    rows, is_theirs, in_graph = _in_artifact(state, one, persons)
            if not is_theirs and not in_graph:
                looked.add(one.run_id)
                continue
            what = f"{one.name} version {one.version}" if one.version else f"a run of {one.name} without a version"
            can = is_theirs and not one.is_deleted and one.source is not None and one.source.is_dir()
            gone = (
                f"it cannot be written again: delete its run {one.run_id} with its artifacts (MLflow's delete_run, "
                f"then mlflow gc on the server)"
            )
            left = gone if in_graph or not can else ""
            act = partial(upload_again, ws, one) if can else None
            yield Place("model", f"{what} on {ws.registry_server}", rows, int(can), left=left, act=act)


def _in_store(state: WorkspaceState, one: Upload) -> list[str]:
    """The names of the saved models that an artifact was made of, as far as they are in the store."""
    # Late: it imports torch.
    from headrace.models.predictor import needed_models

    try:
        return [] if one.source is None else [state.ws.name_of(folder) for folder in needed_models(one.source)]
    except UserError:  # not whole: the artifact says more
        return []


def _in_artifact(state: WorkspaceState, one: Upload, persons: Persons) -> tuple[int, bool, bool]:
    """(rows, whether it has some, whether it keeps a graph with edges of theirs)."""
    rows, is_theirs, in_graph = 0, False, False
    with fetched(state.ws, one) as artifact:
        for file in artifact.files():
            if file.name == META:
                found, graph = look_into(state.spec, file.parent, persons)
                rows, in_graph = rows + found.rows, in_graph or graph
                is_theirs = is_theirs or bool(found.rows or found.files)
    return rows, is_theirs, in_graph
