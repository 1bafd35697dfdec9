"""The vocabularies that a pipeline's datasets and models have beside them: copies of its vocabulary table."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from headrace.features.vocabulary.restoration import SavedCopies
from headrace.features.workflow.saved import whole_vocabularies
from headrace.manifest import Manifest
from headrace.workspace import Workspace

#: Stages whose manifests name a folder with a saved workflow, and what they call it.
_HOLDERS = (("features", "dataset"), ("train", "model"))


def saved_copies(ws: Workspace, pipeline: str) -> SavedCopies:
    """Return the copies of a pipeline's vocabularies, and the version of the table that its last day names."""
    return SavedCopies(_named_version(ws, pipeline), lambda: _vocabularies(ws, pipeline))


def _named_version(ws: Workspace, pipeline: str) -> int | None:
    """Read one manifest: versions only grow from day to day, unless older days are made after newer ones."""
    for ds in reversed(ws.days_of_stages(pipeline).get("features", [])):
        manifest = Manifest.load(ws.manifest(pipeline, ds, "features"))
        if manifest is not None:
            version: int | None = manifest.facts.get("vocabulary_version")
            return version
    return None


def _vocabularies(ws: Workspace, pipeline: str) -> Iterator[tuple[str, str, pa.Table]]:
    for ds in sorted(ws.days(pipeline)):
        for stage, kind in _HOLDERS:
            manifest = Manifest.load(ws.manifest(pipeline, ds, stage))
            if manifest is None or manifest.removed:
                continue
            for output in manifest.outputs:
                if output.kind == kind:
                    for name, vocabulary in whole_vocabularies(ws.locate(output.name) / "workflow"):
                        yield ds, name, vocabulary
