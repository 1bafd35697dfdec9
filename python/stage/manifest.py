"""Manifests: the records of finished runs of stages.

A stage is done for a day when its manifest exists and verifies.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, ValidationError, model_serializer

from headrace import __version__
from headrace.config.schema import DatasetSchema
from headrace.errors import UserError
from headrace.storage import Fence, Location
from headrace.storage.location import put_fenced


class Input(BaseModel):
    """An input of a stage, pinned to a version that always means the same content."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    #: landing | delta | dataset | model | stage
    kind: str
    #: A path below the workspace's home where there is one, else a name.
    name: str
    version: str


class Output(BaseModel):
    """An output of a stage. Kinds are those of `Input`, those of warehouses (`postgres`, `duckdb`, ...) and `file`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: str
    name: str
    version: str
    rows: int | None = None


class Removal(BaseModel):
    """An output that was removed on purpose: its run stays valid, and the output is rebuilt when it is needed."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    #: The output's name.
    name: str
    at: datetime = Field(default_factory=lambda: datetime.now(UTC))
    #: The reason: `retention` or `forget`.
    by: str = "retention"

    def __str__(self) -> str:
        return f"{self.name} was removed by {self.by} on {self.at:%Y-%m-%d}"


class Resources(BaseModel):
    """Processor time and storage that all processes of a run have used."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    #: Seconds of processor time, of all cores.
    core_seconds: float
    #: Bytes read from storage, without reads that the page cache served.
    read_bytes: int
    #: Bytes written to storage.
    written_bytes: int


class Manifest(BaseModel):
    """The lineage record of one run of one stage."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    stage: str
    pipeline: str
    ds: str
    #: Fingerprint of the stage's inputs and of its part of the spec: the same key means the same result.
    key: str
    spec_hash: str
    code_version: str = __version__
    inputs: tuple[Input, ...] = ()
    outputs: tuple[Output, ...] = ()
    #: Row counts by name, in the order in which a reader wants them (read, kept, quarantined, ...).
    rows: dict[str, int] = Field(default_factory=dict)
    #: Stage-specific facts: metrics, learning curve, paths, vocabulary sizes. JSON values only.
    facts: dict[str, Any] = Field(default_factory=dict)
    #: Stage `features` only: the columns of the dataset.
    dataset_schema: DatasetSchema | None = None
    started: datetime = Field(default_factory=lambda: datetime.now(UTC))
    seconds: float = 0.0
    #: Seconds that the stage's process waited for fsync, within `seconds` and before this record was written.
    sync_seconds: float | None = None
    #: Peak resident memory by process, MiB: `jvm`, `python`, `rank0`, ...
    peak_memory_mib: dict[str, float] = Field(default_factory=dict)
    #: None: an older run, or a machine that does not report them.
    resources: Resources | None = None
    #: The writer's fencing token by lease (headrace.storage.Fence). An earlier holder cannot overwrite this record.
    fences: dict[str, int] = Field(default_factory=dict)
    #: Outputs that were removed since. Recorded before the first of their files is deleted.
    removed: tuple[Removal, ...] = ()

    @model_serializer(mode="wrap")
    def _serialize_without_empty(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out fields that have no value, so that older releases read the manifest."""
        fields: dict[str, Any] = serialize(self)
        for name in ("resources", "removed", "fences", "sync_seconds"):
            if not getattr(self, name):
                fields.pop(name, None)
        return fields

    def output(self, kind: str) -> Output:
        """Return the single output of a kind.

        Raises:
            KeyError: there is none, or more than one.
        """
        outputs = [o for o in self.outputs if o.kind == kind]
        if len(outputs) != 1:
            raise KeyError(f"manifest of {self.stage} has {len(outputs)} outputs of kind {kind!r}, not 1")
        return outputs[0]

    @property
    def why_removed(self) -> str | None:
        """Removed outputs, each with reason and day, for messages; None where no removal is recorded."""
        return "; ".join(map(str, self.removed)) or None

    def with_removed(self, names: Collection[str], by: str = "retention") -> Manifest:
        """Return the manifest with outputs of these names recorded as removed; itself where all are already."""
        recorded = {r.name for r in self.removed}
        new = tuple(Removal(name=o.name, by=by) for o in self.outputs if o.name in names and o.name not in recorded)
        return self.model_copy(update={"removed": (*self.removed, *new)}) if new else self

    def save(self, file: Location, fences: Sequence[Fence] = ()) -> Manifest:
        """Write the manifest in one step: a reader sees the old manifest or this one.

        Args:
            file: the manifest's file.
            fences: those of the leases that the process holds; empty: no other process writes there.

        Returns:
            the manifest as it was written, with its fencing tokens.

        Raises:
            LeaseLost: a later holder of one of the leases has written the existing file, even a moment ago: the write
                is conditional on the file being the one that was read.
        """
        tokens = {fence.lease: fence.token for fence in fences}
        fenced = self.model_copy(update={"fences": tokens})
        text = fenced.model_dump_json(indent=1) + "\n"
        put_fenced(file, text, fences, lambda existing: Manifest._parsed(existing, file).fences)
        return fenced

    @staticmethod
    def load(file: Location) -> Manifest | None:
        """Read the manifest in `file`; None where the file does not exist.

        Raises:
            UserError: the file exists but is no manifest.
        """
        try:
            text = file.read_text()
        except FileNotFoundError:
            return None
        return Manifest._parsed(text, file)

    @staticmethod
    def _parsed(text: str, file: Location) -> Manifest:
        try:
            return Manifest.model_validate_json(text)
        except ValidationError as e:
            raise UserError(
                f"{file} is not a manifest that headrace {__version__} reads: {e.errors()[0]['msg']}. "
                f"Delete it to run that stage again."
            ) from e


def fingerprint(parts: Mapping[str, Any]) -> str:
    """Return the first 16 hex digits of the SHA-256 of canonical JSON."""
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
