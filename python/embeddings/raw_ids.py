"""Raw ids in messages: owner of each id, requests between ranks, and their encoding.

Ids are divided by even ranges of their hash, so sorting a batch's hashes both removes duplicates and groups them by
owner, as sorting indices does for planned tables (headrace.embeddings.layout).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from headrace.embeddings.kernels import hashing
from headrace.embeddings.kernels.duplicates import Duplicates, find_duplicates
from headrace.embeddings.kernels.id_map import Ids, mix

#: Salt of the hash that decides the owner of an id.
_OWNER = 1


def owners(ids: Ids, ranks: int) -> Ids:
    """Return the owner of each id [N]: by its hash, so that any number of ranks is balanced."""
    return np.searchsorted(_range_starts(ranks), _hashes(ids), side="right") - 1


def _hashes(ids: Ids) -> Ids:
    """Hash ids: distinct ids have distinct hashes."""
    return mix(ids, _OWNER).view(np.int64)


def _hashes_of(ids: Tensor) -> Tensor:
    """Hash a tensor of ids on its device."""
    return torch.from_numpy(_hashes(ids.numpy())) if ids.device.type == "cpu" else hashing.mix(ids, _OWNER)


def _range_starts(ranks: int) -> Ids:
    """Return the smallest hash of each rank: int64 [W], ascending."""
    return np.array([2**64 * rank // ranks - 2**63 for rank in range(ranks)], dtype=np.int64)


@dataclass(frozen=True)
class RawIdRequest:
    """Ids of one table that a rank requests or answers, in order of the other side's ranks."""

    #: int64 [N].
    ids: Tensor
    #: Number of lookups of each: int64 [N].
    counts: Tensor
    #: Number of ids of each rank, [W].
    of_rank: list[int]

    def bucketized(self, ranks: Sequence[int], groups: int) -> RawIdRequest:
        """Return the ids of some ranks, in that order; consecutive ranks form `groups` groups, each of which counts as
        one rank.
        """
        ids, counts = torch.split(self.ids, self.of_rank), torch.split(self.counts, self.of_rank)
        each = len(ranks) // groups
        sizes = [sum(self.of_rank[r] for r in ranks[i * each : (i + 1) * each]) for i in range(groups)]
        return RawIdRequest(torch.cat([ids[r] for r in ranks]), torch.cat([counts[r] for r in ranks]), sizes)


@dataclass(frozen=True)
class UniqueRawIds(RawIdRequest):
    """Distinct ids that a rank requests from their owners."""

    #: Position of each among the original ids.
    duplicates: Duplicates

    @staticmethod
    def from_ids(ids: Tensor, ranks: int, counts: Tensor | None = None) -> UniqueRawIds:
        """Create a request from ids int64 [N] that may repeat.

        Args:
            ids: any 64-bit numbers.
            ranks: owners.
            counts: how often each was looked up, int64 [N]; None: once.
        """
        duplicates = find_duplicates(ids if ranks == 1 else _hashes_of(ids))
        times = torch.diff(duplicates.starts, append=torch.tensor([ids.numel()], device=ids.device))
        if counts is not None:
            times = torch.zeros_like(times).index_add_(0, duplicates.group, counts.index_select(0, duplicates.order))
        cuts = torch.searchsorted(duplicates.unique, torch.from_numpy(_range_starts(ranks)[1:]).to(ids.device)).tolist()
        of_rank = [end - start for start, end in pairwise([0, *cuts, duplicates.unique.numel()])]
        return UniqueRawIds(
            ids.index_select(0, duplicates.order.index_select(0, duplicates.starts)), times, of_rank, duplicates
        )


def pack(tables: Sequence[RawIdRequest], dtype: torch.dtype) -> tuple[Tensor, list[int]]:
    """Encode requests as one vector of `dtype` (int32 or int64); return it and its length for each rank.

    For each rank, how many ids of each table; then by table the ids, 64 bits each, and their counts.
    """
    split = [(torch.split(t.ids, t.of_rank), torch.split(t.counts, t.of_rank)) for t in tables]
    pieces: list[Tensor] = []
    lengths = []
    for rank in range(len(tables[0].of_rank)):
        message = [torch.tensor([t.of_rank[rank] for t in tables], dtype=dtype)]
        for ids, counts in split:
            message += [ids[rank].view(dtype), counts[rank].to(dtype)]
        pieces += message
        lengths.append(sum(p.numel() for p in message))
    return torch.cat(pieces), lengths


def unpack(message: Tensor, lengths: Sequence[int], tables: int) -> tuple[list[RawIdRequest], Tensor, list[int]]:
    """Decode requests of `pack` from each sender's part of a message.

    Args:
        message: of int32 or int64, senders in order; each part begins with what `pack` wrote.
        lengths: of the parts.
        tables: how many there are.

    Returns:
        By table what was asked, in order of the senders; what follows in each part, and its lengths.
    """
    words = 8 // message.element_size()
    by_table: list[tuple[list[Tensor], list[Tensor], list[int]]] = [([], [], []) for _ in range(tables)]
    further_parts = []
    for part in torch.split(message, list(lengths)):
        offset = tables
        for (ids, counts, sizes), n in zip(by_table, part[:tables].tolist(), strict=True):
            # A copy, since eight bytes that are read as one number must begin at a multiple of eight.
            ids.append(part[offset : offset + n * words].clone().view(torch.int64))
            counts.append(part[offset + n * words : offset + n * (words + 1)].long())
            sizes.append(n)
            offset += n * (words + 1)
        further_parts.append(part[offset:])
    requests = [RawIdRequest(torch.cat(ids), torch.cat(counts), sizes) for ids, counts, sizes in by_table]
    return requests, torch.cat(further_parts), [p.numel() for p in further_parts]
