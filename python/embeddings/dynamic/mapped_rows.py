"""Rows of raw ids in files that all processes of a host map: to score, so nothing is counted, admitted or learned.

An id is found by binary search in the sorted ids of those who have its hash: the ranks that saved the table, each a
part, one behind the other. No process has a hash table of the ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor

from headrace.config import EmbeddingOptimizer
from headrace.embeddings.dynamic.rows_cpu import HostRows
from headrace.embeddings.dynamic.spec import DynamicSpec
from headrace.embeddings.input.raw_ids import owners
from headrace.embeddings.kernels.id_map_cpu import Ids
from headrace.world import World


class SortedIds:
    """Which row an id has: what `IdMap` says, from ids that are sorted part by part.

    Args:
        ids: int64 [rows], perhaps mapped; in each part ascending.
        parts: rows of each part, those of the ranks among which ids were divided.
    """

    def __init__(self, ids: Ids, parts: Sequence[int]) -> None:
        self.ids = ids
        self._ends = [0, *accumulate(parts)]

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def load(self) -> float:
        """Share of places that are taken: all."""
        return 1.0 if len(self) else 0.0

    @property
    def nbytes(self) -> int:
        """Bytes of this process's own: none."""
        return 0

    def find(self, ids: Ids) -> Ids:
        """The row of each id [N]; -1 where it has none."""
        found = np.full(len(ids), -1, np.int64)
        ranks = len(self._ends) - 1
        part_of = owners(np.ascontiguousarray(ids), ranks) if ranks > 1 else np.zeros(len(ids), np.int64)
        for part in range(ranks):
            start, end = self._ends[part], self._ends[part + 1]
            places = np.flatnonzero(part_of == part)
            if start == end or not len(places):
                continue
            here = self.ids[start:end]
            at = np.minimum(np.searchsorted(here, ids[places]), len(here) - 1)
            known = here[at] == ids[places]
            found[places[known]] = start + at[known]
        return found


class MappedRows(HostRows):
    """A saved table of raw ids whose ids and rows are mapped.

    Args:
        spec: what is asked of the table.
        world: this process alone.
        ids: see SortedIds.
        weight: the rows as they were stored, [rows, D].
    """

    _map: SortedIds  # type: ignore[assignment]

    def __init__(self, spec: DynamicSpec, world: World, ids: SortedIds, weight: Tensor) -> None:
        super().__init__(spec, world, seed=0)  # of rows' starts: none starts here
        self._map, self._weight = ids, weight

    @property
    def ids(self) -> Ids:
        """The id of each row: int64 [rows]."""
        return self._map.ids

    @property
    def nbytes(self) -> int:
        """Bytes of this process's own: none."""
        return 0

    def look_up(self, ids: Ids, counts: Ids, training: bool) -> Ids:
        """Row of each id [N], -1 where it has none; see HostRows. Raises RuntimeError in training."""
        if training:
            _refuse()
        return super().look_up(ids, counts, training)

    def rows_at(self, rows: Ids) -> Tensor:
        """The vectors of rows [N], zeros where -1: float32 [N, D]."""
        return super().rows_at(rows).to(torch.float32)

    def configure_optimizer(self, optimizer: EmbeddingOptimizer) -> None:
        """Raises RuntimeError: nothing is learned here."""
        _refuse()


def _refuse() -> NoReturn:
    raise RuntimeError("rows that are mapped are read alone: load the model to train it")
