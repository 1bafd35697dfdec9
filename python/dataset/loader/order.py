"""The order in which a stream gives its rows: pure functions of (seed, epoch, stream), the same on any machine.

A stream is endless: epoch after epoch over its row groups, each epoch in an order of its own, both of row groups and
of rows inside them. So any position can be found without reading what comes before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headrace.dataset import native

_GROUPS, _ROWS, _NEGATIVES, _UNKNOWN = 0, 1, 2, 3
_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class RowGroupRead:
    """One reading of a row group: which of the stream's groups, in which epoch, and how many rows to pass over."""

    epoch: int
    group: int
    skip: int


def row_group_reads(
    seed: int, stream: int, sizes: Sequence[int], start: int = 0, shuffle: bool = True
) -> Iterator[RowGroupRead]:
    """All readings from row `start` of the endless stream on. Whole row groups before it are never visited.

    Args:
        sizes: rows of each of the stream's row groups, all above 0.
        start: rows already given, over all epochs.
    """
    epoch, skip = divmod(start, sum(sizes))
    while True:
        for group in group_order(seed, epoch, stream, len(sizes)) if shuffle else range(len(sizes)):
            if skip >= sizes[group]:
                skip -= sizes[group]
                continue
            yield RowGroupRead(epoch, int(group), skip)
            skip = 0
        epoch += 1


def group_order(seed: int, epoch: int, stream: int, groups: int) -> npt.NDArray[np.int64]:
    """The order of a stream's row groups in one epoch."""
    return _generator(seed, epoch, stream, _GROUPS).permutation(groups)


def row_order(seed: int, epoch: int, stream: int, group: int, rows: int) -> npt.NDArray[np.int32]:
    """The order of the rows inside one row group in one epoch."""
    return native.permutation(_generator(seed, epoch, stream, _ROWS, group), rows)


def negatives_generator(seed: int, epoch: int, stream: int, group: int) -> np.random.Generator:
    """Randomness of the negatives drawn for one row group in one epoch."""
    return _generator(seed, epoch, stream, _NEGATIVES, group)


def unknown_generator(seed: int, epoch: int, stream: int, group: int) -> np.random.Generator:
    """Randomness of which ids of one row group are unknown in one epoch."""
    return _generator(seed, epoch, stream, _UNKNOWN, group)


def _generator(seed: int, *key: int) -> np.random.Generator:
    return np.random.default_rng(np.random.SeedSequence([seed & _MASK, *key]))
