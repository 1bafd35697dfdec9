"""Exact search for each user's items of the greatest dot products, in blocks of users and of items.

There is never a score for each user and item at once. The best so far are kept, and a lower score is dropped. The loop
is in C++ (native/cpp/top_k.cpp), which drops such scores in a register, where `make native` has built it. Elsewhere
NumPy computes the scores of a block of users and a block of items.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.compute import native
from headrace.compute.jagged import JaggedArray
from headrace.errors import UserError

#: Raise it, here and in native/cpp/top_k.cpp, when a function's name, arguments or meaning change.
_VERSION = 1
_I64, _I32, _P = ctypes.c_int64, ctypes.c_int, ctypes.c_void_p
RETRIEVAL = native.Interface(
    "libheadrace_retrieval.so",
    "headrace_retrieval_version",
    {
        "headrace_top_k_add": (None, (_P, _I64, _I64, _P, _I64, _I64, _I64, _I64, *(_P,) * 5, _I32)),
        "headrace_top_k_take": (None, (_I64, _I64, _I64, *(_P,) * 4, _I32)),
    },
)


def top_k(scores: NDArray[np.float32], k: int) -> NDArray[np.int64]:
    """Return the columns of each row's k highest scores, best first; among equal scores the lower column first.

    A score and its column become one int64 that sorts as wanted: no two are equal, so a partition (linear in the
    number of columns) finds the same k every time.

    Args:
        scores: float32 [n, m], no NaN; minus infinity sorts last.
        k: at most m are found.

    Returns:
        int64 [n, min(k, m)].
    """
    m = scores.shape[1]
    k = min(k, m)
    # Adding 0 makes -0 a 0. As integers, floats of IEEE 754 sort like their values once negatives are flipped.
    bits = np.ascontiguousarray(scores + np.float32(0)).view(np.int32)
    ordered = (bits ^ ((bits >> 31) & np.int32(0x7FFFFFFF))).astype(np.int64)
    keys = (-ordered << 32) | np.arange(m, dtype=np.int64)
    if k < m:
        keys = np.partition(keys, k - 1, axis=1)[:, :k]
    return np.sort(keys, axis=1) & 0xFFFFFFFF


@cache
def library() -> ctypes.CDLL | None:
    """Return the library, or None where it was not built (or from other sources, which is logged)."""
    return RETRIEVAL.load(RETRIEVAL.path(), _VERSION)


#: Memory for a thread's best items so far, in bytes.
BLOCK_BYTES = 32 << 20
#: Users of a block, per thread, so that their vectors and thresholds stay in the second-level cache.
_BLOCK_USERS = 2_048
#: Items of a block, and scores in memory at once, without the C++ library.
_BLOCK_ITEMS, _BLOCK_SCORES = 8_192, 1 << 22

#: Vectors of items in order: (number of the first one, float32 [n, D]).
Blocks = Sequence[tuple[int, NDArray[np.float32]]]


@dataclass(frozen=True)
class TopItems:
    """The best items of some users, best first; of equal scores, the lower number first."""

    #: int32 [users, k]: numbers of items, -1 behind the last one.
    items: NDArray[np.int32]
    #: float32 [users, k]: the dot products; minus infinity behind the last one.
    scores: NDArray[np.float32]


def best_items(
    queries: NDArray[np.float32],
    blocks: Blocks,
    k: int,
    *,
    excluded: JaggedArray | None = None,
    threads: int = 1,
    block_bytes: int = BLOCK_BYTES,
) -> TopItems:
    """Return the k best items of each user; fewer where there are fewer that are not excluded.

    Where the C++ library is, what is found for a user depends on the user's own vector and exclusions alone, not on who
    else is in the block nor on the number of threads. (NumPy's matrix product may round otherwise in another block.)

    Args:
        queries: users' vectors, float32 [U, D], finite.
        blocks: items' vectors, finite; numbers ascend from block to block.
        k: at least 1.
        excluded: for each user, numbers of items that must not be found, in any order; others than those of `blocks`
            may be among them.
        threads: that may work at once.
        block_bytes: bound of what a thread keeps of its users' best items.

    Raises:
        UserError: a query, or a score, is not finite.
    """
    if k < 1:
        raise ValueError(f"k is {k}")
    check_finite(queries, "users")
    queries = np.ascontiguousarray(queries, np.float32)
    work: Callable[..., TopItems] = _native if library() is not None else _numpy
    # Room for as many candidates beside the best; when it is full, all but the best k are dropped.
    room = 2 * k + 32
    users = max(1, min(_BLOCK_USERS, block_bytes // (8 * room))) * max(1, threads)
    ordered = None if excluded is None else ascending(excluded)
    parts = [
        work(queries[start : start + users], blocks, k, room, _part(ordered, start, start + users), threads)
        for start in range(0, len(queries), users)
    ]
    if not parts:
        return TopItems(np.empty((0, k), np.int32), np.empty((0, k), np.float32))
    return TopItems(np.concatenate([p.items for p in parts]), np.concatenate([p.scores for p in parts]))


def check_finite(vectors: NDArray[np.float32], side: str) -> None:
    """Raise UserError where a number is NaN or infinite."""
    if not np.isfinite(vectors).all():
        raise UserError(f"the model's vectors of {side} are not all finite: train it again (a lower rate?)")


def check_products(longest_query: float, longest_item: float) -> None:
    """Raise UserError where a dot product of vectors of these lengths may exceed float32."""
    if longest_query * longest_item > float(np.finfo(np.float32).max):
        raise UserError(
            f"vectors of lengths up to {longest_query:.3g} (users) and {longest_item:.3g} (items) have dot products "
            "beyond float32: train the model again (a lower rate?)"
        )


def longest(vectors: NDArray[np.float32]) -> float:
    """Return the largest Euclidean length of vectors [n, D]; 0 of none."""
    return float(np.sqrt(np.einsum("nd,nd->n", vectors, vectors, dtype=np.float64).max(initial=0.0)))


def ascending(lists: JaggedArray) -> JaggedArray:
    """Return the same lists, each in ascending order: int64 offsets from 0, int32 values."""
    values = lists.flat()
    offsets = (lists.offsets - lists.offsets[0]).astype(np.int64)
    owner = np.repeat(np.arange(len(lists)), lists.lengths)
    if not np.all((values[1:] >= values[:-1]) | (owner[1:] != owner[:-1])):
        values = values[np.lexsort((values, owner))]
    return JaggedArray(offsets, np.ascontiguousarray(values, np.int32))


def _part(lists: JaggedArray | None, start: int, stop: int) -> JaggedArray | None:
    return None if lists is None else lists.rows(start, min(stop, len(lists)))


def _native(
    queries: NDArray[np.float32], blocks: Blocks, k: int, room: int, excluded: JaggedArray | None, threads: int
) -> TopItems:
    lib = library()
    assert lib is not None
    users, width = queries.shape
    keys, counts = np.empty((users, room), np.uint64), np.zeros(users, np.int32)
    least = np.full(users, -np.inf, np.float32)
    offsets, values = (None, None) if excluded is None else (excluded.offsets, excluded.values)
    for first, vectors in blocks:
        _check_block(vectors, width)
        lib.headrace_top_k_add(
            queries.ctypes.data,
            users,
            width,
            vectors.ctypes.data,
            len(vectors),
            first,
            k,
            room,
            _address(offsets),
            _address(values),
            keys.ctypes.data,
            counts.ctypes.data,
            least.ctypes.data,
            threads,
        )
    top = TopItems(np.empty((users, k), np.int32), np.empty((users, k), np.float32))
    lib.headrace_top_k_take(
        users, k, room, keys.ctypes.data, counts.ctypes.data, top.items.ctypes.data, top.scores.ctypes.data, threads
    )
    return top


def _check_block(vectors: NDArray[np.float32], width: int) -> None:
    if vectors.dtype != np.float32 or vectors.shape[1] != width or not vectors.flags.c_contiguous:
        raise ValueError(f"items' vectors are {vectors.dtype} {vectors.shape}, users' have {width} columns")


def _address(x: NDArray[Any] | None) -> int | None:
    return None if x is None else x.ctypes.data


def _numpy(
    queries: NDArray[np.float32], blocks: Blocks, k: int, room: int, excluded: JaggedArray | None, threads: int
) -> TopItems:
    """Find the best items by NumPy. The result does not depend on room and threads."""
    users = max(1, _BLOCK_SCORES // _BLOCK_ITEMS)
    parts = [
        _numpy_block(queries[start : start + users], blocks, k, _part(excluded, start, start + users))
        for start in range(0, len(queries), users)
    ]
    return TopItems(np.concatenate([f.items for f in parts]), np.concatenate([f.scores for f in parts]))


def _numpy_block(queries: NDArray[np.float32], blocks: Blocks, k: int, excluded: JaggedArray | None) -> TopItems:
    users, width = queries.shape
    items, scores = np.empty((users, 0), np.int32), np.empty((users, 0), np.float32)
    owner = None if excluded is None else np.repeat(np.arange(users), excluded.lengths)
    for first, vectors in _cut(blocks):
        _check_block(vectors, width)
        products = queries @ vectors.T
        if excluded is not None and owner is not None:
            positions = excluded.flat().astype(np.int64) - first
            in_block = (positions >= 0) & (positions < len(vectors))
            products[owner[in_block], positions[in_block]] = -np.inf
        numbers = np.broadcast_to(np.arange(first, first + len(vectors), dtype=np.int32), products.shape)
        # Earlier blocks have lower numbers, so among equal scores the lower column is the lower number.
        items, scores = np.concatenate([items, numbers], axis=1), np.concatenate([scores, products], axis=1)
        best = top_k(scores, k)
        items, scores = np.take_along_axis(items, best, axis=1), np.take_along_axis(scores, best, axis=1)
    missing = ((0, 0), (0, k - items.shape[1]))
    items = np.pad(items, missing, constant_values=-1)
    scores = np.pad(scores, missing, constant_values=-np.inf)
    items[np.isneginf(scores)] = -1
    return TopItems(items, scores)


def _cut(blocks: Blocks) -> Iterable[tuple[int, NDArray[np.float32]]]:
    for first, vectors in blocks:
        for start in range(0, len(vectors), _BLOCK_ITEMS):
            yield first + start, vectors[start : start + _BLOCK_ITEMS]
