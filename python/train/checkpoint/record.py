"""Checkpoints: all that a run needs to go on as if it had never stopped, on any number of ranks.

    checkpoints/step-00000200/
        embeddings/...        rows and optimizer states by table and range (headrace.embeddings.checkpoint.shards)
        dynamic/...           tables of raw ids, where there are any (headrace.embeddings.checkpoint.dynamic)
        dense.safetensors     `model/<name>` and `optimizer/<number>/<state>`
        checkpoint.json       the loop's position and history, the dense file's checksum; written last

The folder appears by one rename when all ranks have written. A kill at any moment leaves the checkpoints there were.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Protocol

from pydantic import BaseModel, ConfigDict

from headrace.embeddings.checkpoint.tensors import FileRecord
from headrace.embeddings.dynamic.tables import DynamicEmbeddings
from headrace.embeddings.layer import ShardedEmbeddings
from headrace.train.checkpoint.progress import Progress

RECORD = "checkpoint.json"
DENSE = "dense.safetensors"
EMBEDDINGS = "embeddings"
DYNAMIC = "dynamic"


class Model(Protocol):
    """What a checkpoint needs of a model: its sharded tables, and the rest as a state dict."""

    @property
    def embeddings(self) -> ShardedEmbeddings: ...

    #: Tables of raw ids.
    @property
    def dynamic(self) -> DynamicEmbeddings | None: ...

    def dense_state(self) -> dict[str, Any]: ...

    def load_dense_state(self, state: Mapping[str, Any]) -> Any: ...


class CheckpointRecord(BaseModel):
    """checkpoint.json. `sha256` is of this record with an empty one."""

    model_config = ConfigDict(extra="forbid")

    #: Fingerprint of what must not change between a run and its continuation.
    config: str
    progress: Progress
    dense: FileRecord
    sha256: str = ""

    def digest(self) -> str:
        return hashlib.sha256(self.model_copy(update={"sha256": ""}).model_dump_json().encode()).hexdigest()
