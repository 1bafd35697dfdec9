"""The lookups of a network that says what it looks up: from a batch to ids in tables, and from vectors to names."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from headrace.embeddings.input.jagged import JaggedTensor
from headrace.embeddings.lookup.handle import LookupHandle
from headrace.embeddings.sharded import ShardedEmbeddings
from headrace.models.categorical import BatchIds
from headrace.models.lookups import EmbeddingLookup
from headrace.models.tables import ModelTables, table_name
from headrace.schema import DatasetSchema, Kind


class NetworkLookups:
    """Lookups by name, in the order of a plan and of tables of raw ids.

    Args:
        wanted: of the network.
        schema: the dataset's.
        tables: made of both.
    """

    def __init__(self, wanted: Sequence[EmbeddingLookup], schema: DatasetSchema, tables: ModelTables) -> None:
        self.wanted = tuple(wanted)
        self._features = {f.name: f for f in schema.of(Kind.CATEGORICAL)}
        self._planned = [w for w in self.wanted if not self._features[w.feature].dynamic]
        #: By table of raw ids, who looks there.
        self._raw = [
            [w for w in self.wanted if table_name(w, self._features[w.feature]) == spec.name] for spec in tables.dynamic
        ]
        self._dims = [w.dim for w in self._planned if not _is_sequence(w)]

    def prepare(self, embeddings: ShardedEmbeddings, ids: BatchIds) -> LookupHandle:
        """Begin the lookups of a batch. Collective; see ShardedEmbeddings.prepare."""
        batch = [self._ids(w, ids) for w in self._planned]
        raw = [[_flat(self._ids(w, ids)) for w in of_table] for of_table in self._raw]
        nothing = torch.zeros(ids.samples, 0, dtype=torch.int64)
        return embeddings.prepare(batch or nothing, raw=[torch.cat(of_table) for of_table in raw])

    def found(
        self, embeddings: ShardedEmbeddings, handle: LookupHandle, ids: BatchIds, absent: Sequence[nn.Parameter]
    ) -> dict[str, Tensor | JaggedTensor]:
        """What was looked up, by name. Collective: the lookup ends.

        Args:
            embeddings: the tables.
            handle: what `prepare` gave.
            ids: of the same batch.
            absent: by table of raw ids, what stands for an id without a row, [D].
        """
        side_by_side, *sequences = embeddings.outputs(handle)
        pooled = iter(torch.split(side_by_side, self._dims, dim=1) if self._dims else ())
        rest = iter(sequences)
        found = {w.name: self._shaped(w, next(rest), ids) if _is_sequence(w) else next(pooled) for w in self._planned}
        for of_table, (vectors, has_row), missing in zip(self._raw, handle.found, absent, strict=True):
            known = torch.where(has_row.unsqueeze(1), vectors, missing)
            sizes = [_flat(self._ids(w, ids)).numel() for w in of_table]
            for w, part in zip(of_table, torch.split(known, sizes), strict=True):
                found[w.name] = self._shaped(w, part, ids)
        return {w.name: found[w.name] for w in self.wanted}

    def _ids(self, w: EmbeddingLookup, ids: BatchIds) -> Tensor | JaggedTensor:
        if w.ids == "all":
            return torch.arange(self._features[w.feature].cardinality or 0, device=ids.device)
        return ids.negatives.reshape(-1) if w.ids == "negatives" else ids[w.feature]

    def _shaped(self, w: EmbeddingLookup, vectors: Tensor, ids: BatchIds) -> Tensor | JaggedTensor:
        """What a lookup gives, from the vectors [N, D] of its ids."""
        if w.ids == "negatives":
            return vectors.view(*ids.negatives.shape, w.dim)
        given = self._ids(w, ids)
        if not isinstance(given, JaggedTensor):
            return vectors
        jagged = JaggedTensor(vectors, given.offsets)
        return jagged if w.pooling == "none" else jagged.pooled(w.pooling)


def _is_sequence(w: EmbeddingLookup) -> bool:
    """Whether each id has a vector of its own in what the tables give."""
    return w.ids != "batch" or w.pooling == "none"


def _flat(ids: Tensor | JaggedTensor) -> Tensor:
    return ids.values if isinstance(ids, JaggedTensor) else ids.contiguous()
