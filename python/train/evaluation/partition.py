"""Rows to the ranks, so that each can compute its part of a metric alone: by range of their scores, or by user."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headrace.embeddings.kernels.id_map import mix
from headrace.train.evaluation.ranks import I64, Array, Ranks

#: Sampled keys of each rank, for each rank.
_SAMPLES = 64


def by_range(ranks: Ranks, keys: I64, columns: Sequence[Array] = ()) -> tuple[I64, list[Array]]:
    """Sort rows over all ranks: each rank gets a range of the keys, sorted. Collective.

    Splitters are sampled at equal distances in each rank's sorted keys (Shi and Schaeffer, 1992). Equal keys are told
    apart by their place, so that no rank gets more than twice its share, however many of them there are; they may then
    be on several ranks.

    Args:
        keys: int64 [n].
        columns: [n] each, which travel along.

    Returns:
        The keys of this rank, ascending; those of rank r + 1 are not below those of rank r. And their columns.
    """
    keys, columns = _sorted(keys, columns)
    size, rank, n = ranks.world.size, ranks.world.rank, len(keys)
    if size == 1:
        return keys, list(columns)
    samples = min(n, _SAMPLES * size)
    places = np.arange(samples) * n // max(samples, 1)
    # A table of one shape: a rank of few rows leaves places empty, without weight.
    table = np.zeros((_SAMPLES * size, 3), np.int64)
    table[:samples] = np.stack([keys[places], places, np.diff(np.append(places, n))], axis=1)
    gathered = ranks.gather(table)
    key, place, weight = gathered.reshape(-1, 3).T
    of_rank = np.repeat(np.arange(size), _SAMPLES * size)
    order = np.lexsort((place, of_rank, key))
    order = order[weight[order] > 0]
    before = np.cumsum(weight[order]) - weight[order]
    total = int(weight.sum())
    cuts = [0]
    for i in range(1, size):
        at = int(np.searchsorted(before, total * i // size))
        if at == len(order):
            cuts.append(n)
            continue
        chosen = order[at]
        if of_rank[chosen] == rank:
            cuts.append(int(place[chosen]))
        else:
            # Equal keys of the ranks before the splitter's are below it, those of the ranks behind it are not.
            cuts.append(int(np.searchsorted(keys, key[chosen], "right" if rank < of_rank[chosen] else "left")))
    cuts.append(n)
    received = ranks.send_rows([keys, *columns], np.diff(cuts).tolist())
    return _sorted(received[0], received[1:])


def by_id(ranks: Ranks, ids: I64, columns: Sequence[Array] = ()) -> tuple[I64, list[Array]]:
    """All rows of an id to one rank, that of its hash. Collective.

    Args:
        ids: int64 [n].
        columns: [n] each, which travel along.
    """
    size = ranks.world.size
    if size == 1:
        return ids, list(columns)
    to = (mix(np.ascontiguousarray(ids)) >> np.uint64(32)).astype(np.int64) % size
    order = np.argsort(to, kind="stable")
    counts = np.bincount(to, minlength=size).tolist()
    received = ranks.send_rows([c[order] for c in (ids, *columns)], counts)
    return received[0], received[1:]


def _sorted(keys: I64, columns: Sequence[Array]) -> tuple[I64, list[Array]]:
    if not columns:
        return np.sort(keys), []
    order = np.argsort(keys)
    return keys[order], [c[order] for c in columns]
