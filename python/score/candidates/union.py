"""The candidates of several sources in one list for each user: quotas, duplicates, and which source gave what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray


@dataclass(frozen=True)
class Quotas:
    """How many places there are, and for whom."""

    #: The most candidates of a user.
    limit: int
    #: By source, in the order of the spec: its best candidates for which there are places whatever others give. All
    #: of them are no more than `limit`.
    places: tuple[int, ...]


@dataclass(frozen=True)
class United:
    """Lists of n users: offsets int64 [n + 1] over items int32 [N] and sources int32 [N]; and what they are made of."""

    offsets: NDArray[np.int64]
    items: NDArray[np.int32]
    #: Bit i: source i gave the item.
    sources: NDArray[np.int32]
    #: int32 [n, sources, sources]: a user's candidates that both sources gave; on the diagonal, one source.
    shared: NDArray[np.int32]
    #: int32 [n, sources]: a user's candidates that no other source gave.
    alone: NDArray[np.int32]


def unite(lists: Sequence[tuple[NDArray[np.int64], NDArray[np.int32]]], quotas: Quotas) -> United:
    """The union of what the sources give each user.

    First come the kept places: the first `places[i]` of each source i. Sources fill the others in their order, each by
    its own. The list is in the same order: by the first source that gave an item, and by its order.

    Args:
        lists: for each source (offsets int64 [n + 1], items int32), a user's items distinct and best first.
        quotas: the places.
    """
    n, n_sources = len(lists[0][0]) - 1, len(lists)
    lengths = [np.diff(offsets) for offsets, _ in lists]
    users = np.concatenate([np.repeat(np.arange(n), length) for length in lengths])
    items = np.concatenate([values[offsets[0] : offsets[-1]] for offsets, values in lists]).astype(np.int32)
    source = np.repeat(np.arange(n_sources), [int(length.sum()) for length in lengths])
    place = np.concatenate([_places(v) for v in lengths])
    kept = place < np.asarray(quotas.places)[source]
    # One entry for each user and item: that of the first source; bits and kept places of all.
    order = np.lexsort((source, items, users))
    users, items, source, place, kept = users[order], items[order], source[order], place[order], kept[order]
    first = np.flatnonzero(np.r_[True, (users[1:] != users[:-1]) | (items[1:] != items[:-1])][: len(users)])
    bits = np.int32(1) << source.astype(np.int32)
    if len(first):
        bits, kept = np.bitwise_or.reduceat(bits, first), np.logical_or.reduceat(kept, first)
    users, items, source, place = users[first], items[first], source[first], place[first]
    # Who gets a place: kept ones, then by source and its order.
    order = np.lexsort((place, source, ~kept, users))
    starts = np.searchsorted(users, np.arange(n))
    chosen = np.zeros(len(users), bool)
    chosen[order] = np.arange(len(users)) - starts[users[order]] < quotas.limit
    order = np.lexsort((place, source, users))
    order = order[chosen[order]]
    users, items, bits = users[order], items[order], bits[order]
    offsets = np.r_[0, np.cumsum(np.bincount(users, minlength=n))].astype(np.int64)
    shared, alone = _overlaps(users, bits, n, n_sources)
    return United(offsets, items, bits, shared, alone)


def _places(lengths: NDArray[Any]) -> NDArray[np.int64]:
    """0, 1, ... within each list."""
    ends: NDArray[np.int64] = np.cumsum(lengths)
    places: NDArray[np.int64] = np.arange(int(ends[-1])) - np.repeat(ends - lengths, lengths)
    return places


def _overlaps(
    users: NDArray[np.int64], bits: NDArray[np.int32], n: int, n_sources: int
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    has = [(bits >> s) & 1 == 1 for s in range(n_sources)]
    shared = np.zeros((n, n_sources, n_sources), np.int32)
    alone = np.zeros((n, n_sources), np.int32)
    for s in range(n_sources):
        alone[:, s] = np.bincount(users[bits == 1 << s], minlength=n)
        for t in range(s, n_sources):
            shared[:, s, t] = shared[:, t, s] = np.bincount(users[has[s] & has[t]], minlength=n)
    return shared, alone


def flat(lists: pa.ListArray) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """(offsets int64 [n + 1] from 0, values int32) of an Arrow array of lists without nulls."""
    offsets = np.asarray(lists.offsets).astype(np.int64)
    return offsets - offsets[0], np.asarray(lists.flatten()).astype(np.int32)
