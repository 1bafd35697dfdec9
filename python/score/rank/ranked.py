"""The best items of each of some users, and what may become of them before they are written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headrace.score.items import ItemTable
from headrace.score.rank.top_k import top_k


@dataclass(frozen=True)
class Ranked:
    """The items of n users, N in all, those of a user one after the other, best first.

    users: the users' keys [n]. offsets: int64 [n + 1], where each user's items begin. item_rows: int32 [N], rows of the
    ItemTable. scores: float32 [N]. sources: int32 [N], a bit by position in `score.candidates.sources`; None: all items
    were ranked.
    """

    users: pa.Array
    offsets: NDArray[np.int64]
    item_rows: NDArray[np.int32]
    scores: NDArray[np.float32]
    sources: NDArray[np.int32] | None = None


@dataclass(frozen=True)
class Listed:
    """What is written of n users, M rows: those of a user one after the other, in the order of their ranks.

    offsets: int64 [n + 1]. rows: int64 [M], which of the N ranked items. propensity: float64 [M], the probability that
    this item stands at this rank. reason: text [M]. unmet: lists by what could not be had, (rule, what of it).
    """

    offsets: NDArray[np.int64]
    rows: NDArray[np.int64]
    propensity: NDArray[np.float64]
    reason: pa.StringArray
    unmet: Mapping[tuple[str, str], int] = field(default_factory=dict)


class Reranker(Protocol):
    """Makes lists of ranked items; picklable, and a function of what it is given alone."""

    def __call__(self, ranked: Ranked, items: ItemTable) -> Listed:
        """The users' lists, none longer than `score.top_k`."""
        ...


def best_of_all(users: pa.Array, scores: NDArray[np.float32], k: int) -> Ranked:
    """The best k items of users for whom all items were scored; minus infinity is no item's score.

    Args:
        users: keys [n].
        scores: float32 [n, items], no NaN. Of equal scores the lower row comes first.
        k: at most so many for each.
    """
    best = top_k(scores, k)
    values = np.take_along_axis(scores, best, axis=1)
    there = values > -np.inf
    return Ranked(users, _offsets(there.sum(1)), best[there].astype(np.int32), values[there])


def best_of_lists(
    users: pa.Array,
    lengths: NDArray[np.int64],
    item_rows: NDArray[np.int32],
    scores: NDArray[np.float32],
    sources: NDArray[np.int32] | None,
    k: int,
) -> Ranked:
    """The best k items of each user's own, whatever the order of the lists.

    Args:
        users: keys [n].
        lengths: how many items each user has, [n], N in all.
        item_rows: int32 [N], distinct within a user.
        scores: float32 [N], no NaN. Of equal scores the lower row comes first.
        sources: int32 [N] or None.
        k: at most so many for each.
    """
    # Adding 0 makes -0 a 0, as `top_k` does.
    order = np.lexsort((item_rows, -(scores + np.float32(0)), np.repeat(np.arange(len(lengths)), lengths)))
    place = np.arange(len(order)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    kept = order[place < k]
    of = None if sources is None else sources[kept]
    return Ranked(users, _offsets(np.minimum(lengths, k)), item_rows[kept], scores[kept], of)


def places(offsets: NDArray[np.int64]) -> NDArray[np.int32]:
    """Ranks from 1 of rows in lists that begin at offsets [n + 1]: int32 [offsets[-1]]."""
    total = int(offsets[-1])
    found: NDArray[np.int32] = (np.arange(total) - np.repeat(offsets[:-1], np.diff(offsets)) + 1).astype(np.int32)
    return found


def _offsets(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    found = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=found[1:])
    return found
