"""Files of stages of other packages: those of old days, and those that no manifest names any more.

Tables of the lake are none of it: `tables` treats those of packages as headrace's own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial

from headrace.jobs.housekeeping.folders import removal
from headrace.jobs.housekeeping.workspace_state import CleanupStep, WorkspaceState, newest_write_ns, remove_all, size_of
from headrace.stage import package_stage
from headrace.stage.manifest import Manifest
from headrace.storage import Location

#: Parts of `writes` that differ from run to run, and what they look like.
_VARIABLE = {"ds": r"\d{4}-\d{2}-\d{2}", "key": r"[0-9a-f]+"}
#: Folders of the workspace in which headrace's own steps remove what no manifest names.
_OWN_FOLDERS = ("lake", "landing", "datasets", "models", "reports", "runs", "logs", "searches", "warehouse")


def package_steps(state: WorkspaceState) -> Iterator[CleanupStep]:
    """Yield outputs of days that a package's stage does not keep, and what it has left that no manifest names.

    Raises:
        UserError: a package's stage is not valid (`headrace.stage.package_stage`).
    """
    for name, settings in state.spec.stages.items():
        stage = package_stage(state.spec, name)
        days = stage.keep_days if settings.keep_days is None else settings.keep_days
        yield from _old_outputs(state, name, state.first_day(days))
        for pattern in stage.writes:
            yield from _unnamed(state, pattern)


def _old_outputs(state: WorkspaceState, stage: str, first: str) -> Iterator[CleanupStep]:
    live = {o.name for _, m in state.manifests() if m.stage != stage or m.ds >= first for o in m.outputs}
    for _, manifest in state.manifests():
        if manifest.stage != stage or manifest.ds >= first:
            continue
        for name in sorted(_present(manifest) - live):
            place = state.ws.locate(name)
            is_own = place.is_below(state.ws.lake) or place.is_below(state.ws.store)
            if is_own and not name.startswith("lake/") and place.exists():
                yield removal(state, "output", manifest.ds, place, f"of stage {stage}, before {first}", name)


def _present(manifest: Manifest) -> set[str]:
    """Return the names of a run's outputs that are not noted as removed."""
    return {output.name for output in manifest.outputs} - {removed.name for removed in manifest.removed}


def _unnamed(state: WorkspaceState, pattern: str) -> Iterator[CleanupStep]:
    """Yield what a pattern of `writes` covers, was not written for long, and no manifest names or has a part of."""
    places = [*_places(state, pattern)]
    if not places:
        return
    named = [state.ws.locate(name) for _, manifest in state.manifests() for name in _present(manifest)]
    idle = state.before_ns(state.keep.unfinished_days)
    for place in places:
        if any(output.is_below(place) or place.is_below(output) for output in named):
            continue
        if newest_write_ns(place) < idle:
            act = partial(remove_all, [place], state.lock)
            yield CleanupStep("unfinished", state.ws.name_of(place), "no manifest names it", size_of(place), act)


def _places(state: WorkspaceState, pattern: str) -> Iterator[Location]:
    """Yield existing places of a pattern with `{ds}` or `{key}`, below a folder that is the pipeline's alone."""
    parts = pattern.replace("{pipeline}", state.pipeline).split("/")
    fixed = next((i for i, part in enumerate(parts) if "{" in part), len(parts))
    is_shared = "{pipeline}" not in "/".join(pattern.split("/")[:fixed])
    if fixed in (0, len(parts)) or is_shared or parts[0] in (*_OWN_FOLDERS, ""):
        return
    places = [state.ws.locate("/".join(parts[:fixed]))]
    for part in parts[fixed:]:
        expression = re.compile(re.sub(r"\\{(\w+)\\}", lambda m: _VARIABLE.get(m[1], r"[^/]+"), re.escape(part)))
        places = [entry for place in places for entry in place.entries() if expression.fullmatch(entry.name)]
    yield from places
