"""What a stage made, and from what. A stage is done when its manifest is there and verifies."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, ValidationError, model_serializer

from headrace import __version__
from headrace.errors import UserError
from headrace.schema import DatasetSchema
from headrace.storage import Fence, Location
from headrace.storage.fenced_file import put_fenced


class Input(BaseModel):
    """Something a stage read, pinned to a version that never means anything else."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    #: landing | delta | dataset | model | stage
    kind: str
    #: A path below the workspace's home where there is one, else a name.
    name: str
    version: str


class Output(BaseModel):
    """Something a stage wrote. Same kinds as `Input`, those of warehouses (`postgres`, `duckdb`, ...) and `file`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: str
    name: str
    version: str
    rows: int | None = None


class Removal(BaseModel):
    """An output that is there no more, on purpose: its run stands, and is made again when somebody asks for it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    #: The output's name.
    name: str
    at: datetime = Field(default_factory=lambda: datetime.now(UTC))
    #: Why: `retention`, `forget`.
    by: str = "retention"

    def __str__(self) -> str:
        return f"{self.name} was removed by {self.by} on {self.at:%Y-%m-%d}"


class Resources(BaseModel):
    """What a run has used, by all processes at work for it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    #: Seconds of processor time, of all cores.
    core_seconds: float
    #: Bytes from storage; what the page cache had at hand is not counted.
    read_bytes: int
    #: Bytes to storage.
    written_bytes: int


class Manifest(BaseModel):
    """The lineage record of one run of one stage."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    stage: str
    pipeline: str
    ds: str
    #: Fingerprint of the stage's inputs and of the part of the spec that it obeys: same key, same result.
    key: str
    spec_hash: str
    code_version: str = __version__
    inputs: tuple[Input, ...] = ()
    outputs: tuple[Output, ...] = ()
    #: Row counts by name, in the order in which a reader wants them (read, kept, quarantined, ...).
    rows: dict[str, int] = Field(default_factory=dict)
    #: Stage-specific facts: metrics, learning curve, paths, vocabulary sizes. JSON values only.
    facts: dict[str, Any] = Field(default_factory=dict)
    #: Features only: what the dataset holds.
    dataset_schema: DatasetSchema | None = None
    started: datetime = Field(default_factory=lambda: datetime.now(UTC))
    seconds: float = 0.0
    #: Seconds that the stage's process waited for the disk, in `seconds` and between the work and this record.
    sync_seconds: float | None = None
    #: Peak resident memory by process, MiB: `jvm`, `python`, `rank0`, ...
    peak_memory_mib: dict[str, float] = Field(default_factory=dict)
    #: None: of a run before it was measured, or of a machine that does not tell.
    resources: Resources | None = None
    #: By lease (headrace.storage.Fence): the token of who wrote this. An earlier holder does not write over it.
    fences: dict[str, int] = Field(default_factory=dict)
    #: Outputs that were removed since. Written before the first of their files goes.
    removed: tuple[Removal, ...] = ()

    @model_serializer(mode="wrap")
    def _without_what_is_not_known(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Manifests whose outputs are there are written as before any could go."""
        found: dict[str, Any] = serialize(self)
        for name in ("resources", "removed", "fences", "sync_seconds"):
            if not getattr(self, name):
                found.pop(name, None)
        return found

    def output(self, kind: str) -> Output:
        """The single output of that kind."""
        found = [o for o in self.outputs if o.kind == kind]
        if len(found) != 1:
            raise KeyError(f"manifest of {self.stage} has {len(found)} outputs of kind {kind!r}, not 1")
        return found[0]

    @property
    def why_removed(self) -> str | None:
        """What was removed when; None where all outputs are there as far as anybody has said."""
        return "; ".join(map(str, self.removed)) or None

    def without(self, names: Collection[str], by: str = "retention") -> Manifest:
        """The same run after outputs of these names are removed; itself where all are noted already."""
        noted = {r.name for r in self.removed}
        new = tuple(Removal(name=o.name, by=by) for o in self.outputs if o.name in names and o.name not in noted)
        return self.model_copy(update={"removed": (*self.removed, *new)}) if new else self

    def save(self, file: Location, fences: Sequence[Fence] = ()) -> Manifest:
        """Write in one step: a reader sees the old manifest or this one.

        Args:
            file: its place.
            fences: of the leases that the process holds; none: nobody else writes there.

        Returns:
            it as it is there.

        Raises:
            LeaseLost: what is there was written by a later holder of one of the leases, also where that was a moment
                ago: the file is written on the condition that it is still the one that was looked at.
        """
        tokens = {fence.lease: fence.token for fence in fences}
        fenced = self.model_copy(update={"fences": tokens})
        text = fenced.model_dump_json(indent=1) + "\n"
        put_fenced(file, text, fences, lambda there: Manifest._parsed(there, file).fences)
        return fenced

    @staticmethod
    def load(file: Location) -> Manifest | None:
        """The manifest in `file`; None where there is none.

        Raises:
            UserError: the file is there but is no manifest.
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
    """16 hex digits of SHA-256 over canonical JSON."""
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
