"""Items that are drawn for each row as batches are read (`train.negatives` with `as: candidates`).

What is drawn for a row follows from the seed, the step, the row's place in the step's global batch and, by method, from
the batch: any number of ranks, and a run that goes on from a checkpoint, draw the same. Numbers are hashes of these
(headrace.compute.counter_random), whole batches at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from headrace import config
from headrace.compute.counter_random import stream, uniform
from headrace.compute.jagged import JaggedArray
from headrace.config.schema import NULL_CODE, DatasetSchema, Feature, Kind
from headrace.dataset.batches import Batch
from headrace.dataset.negatives import drawn_column
from headrace.errors import UserError

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]

#: Most attempts to redraw a refused item; the last one draws from the allowed items alone.
_TRIES = 8


@dataclass(frozen=True)
class CandidateSampler:
    """Draws `count` items for each row, or `count` for all rows of a step.

    Never the row's own item, nor one of its list `exclude`; of raw ids, where the batch has no other, null.
    """

    #: The column's place among a batch's codes.
    column: int
    count: int
    method: Literal["uniform", "popularity", "in_batch"]
    seed: int
    #: Known codes are `first` to `cardinality` - 1; both 0 of raw ids.
    first: int
    cardinality: int
    shared: bool = False
    #: A list feature of the same vocabulary.
    exclude: str | None = None
    #: By known code; of the method `popularity`.
    popular: AliasTable | None = None

    @staticmethod
    def from_config(
        schema: DatasetSchema, negatives: config.Negatives | None, seed: int, counts: I64 | None = None
    ) -> CandidateSampler | None:
        """Return the sampler that a spec asks for; None where none is.

        Args:
            schema: the dataset's.
            negatives: `train.negatives`.
            seed: the run's.
            counts: how often each code of the column is in positive rows of the split train, int64 [cardinality]; of
                the method `popularity`.

        Raises:
            UserError: the column or the list to exclude does not fit.
        """
        if negatives is None or negatives.form != "candidates":
            return None
        feature, column = drawn_column(schema, negatives)
        if negatives.exclude is not None:
            _check_excluded(schema, negatives.exclude, feature)
        popular = None
        if negatives.method == "popularity" and counts is not None:
            known = counts[feature.first_code :].astype(np.float64)
            if not known.any():
                raise UserError(f"train.negatives: no positive row of the split train has a known '{feature.name}'")
            popular = AliasTable(known**negatives.exponent)
        return CandidateSampler(
            column,
            negatives.per_positive,
            negatives.method,
            seed,
            0 if feature.dynamic else feature.first_code,
            0 if feature.dynamic else feature.cardinality or 0,
            negatives.shared,
            negatives.exclude,
            popular,
        )

    def draw(self, step: int, first_row: int, rows_each: int, batch: Batch) -> I64:
        """Draw items for a rank's rows of a step: int64 [B, count], or [count] for all of them.

        Args:
            step: from 0.
            first_row: place of the rank's first row in the global batch.
            rows_each: rows of each stream; in_batch draws among the positive rows of a row's own.
            batch: the rows.
        """
        if self.shared:
            return self._draws(step, 0, np.arange(self.count), np.zeros(self.count, np.int64), _NO_POOL)
        own_items = batch.codes[:, self.column]
        excluded = None if self.exclude is None else _Excluded(batch.lists[self.exclude], self.cardinality)
        pool = self._pool(batch, rows_each) if self.method == "in_batch" else _NO_POOL
        row = np.repeat(np.arange(len(own_items)), self.count)
        counter = first_row * self.count + np.arange(len(row))
        drawn = self._draws(step, 0, counter, row, pool)
        wrong = np.arange(len(row))
        for attempt in range(1, _TRIES + 1):
            refused = drawn[wrong] == own_items[row[wrong]]
            if excluded is not None:
                refused |= excluded.has(row[wrong], drawn[wrong])
            wrong = wrong[refused]
            if not len(wrong):
                break
            if attempt < _TRIES:
                drawn[wrong] = self._draws(step, attempt, counter[wrong], row[wrong], pool)
            else:
                numbers = uniform(stream(self.seed, f"candidates/{step}/{attempt}"), counter[wrong])
                drawn[wrong] = [
                    self._from_the_rest(int(own_items[r]), excluded, int(r), pool, float(u))
                    for r, u in zip(row[wrong], numbers, strict=True)
                ]
        return drawn.reshape(len(own_items), self.count)

    def _draws(self, step: int, attempt: int, counter: I64, row: I64, pool: _Pool) -> I64:
        """Return one draw for each counter; they may be refused."""
        numbers = uniform(stream(self.seed, f"candidates/{step}/{attempt}"), counter)
        if self.popular is not None:
            return self.first + self.popular.draw(numbers)
        known = self.cardinality - self.first
        anything = self.first + np.minimum((numbers * known).astype(np.int64), max(known - 1, 0))
        if self.method != "in_batch":
            return anything
        part = row // pool.rows_each
        size = pool.offsets[part + 1] - pool.offsets[part]
        place = pool.offsets[part] + np.minimum((numbers * size).astype(np.int64), np.maximum(size - 1, 0))
        pool_items = np.append(pool.items, NULL_CODE)[place]
        return np.where(size > 0, pool_items, anything if known else NULL_CODE)

    def _from_the_rest(self, own_item: int, excluded: _Excluded | None, row: int, pool: _Pool, number: float) -> int:
        """Return one of the items allowed for a row, uniformly; any but its own where its list has all items."""
        if not self.cardinality:
            part = row // pool.rows_each
            rest = pool.items[pool.offsets[part] : pool.offsets[part + 1]]
        else:
            rest = np.arange(self.first, self.cardinality)
        rest = rest[rest != own_item]
        if excluded is not None:
            allowed = rest[~excluded.has(np.full(len(rest), row), rest)]
            rest = allowed if len(allowed) else rest
        return int(rest[min(int(number * len(rest)), len(rest) - 1)]) if len(rest) else NULL_CODE

    def _pool(self, batch: Batch, rows_each: int) -> _Pool:
        """Return the known items of positive rows, stream by stream."""
        own_items = batch.codes[:, self.column]
        is_known = (own_items >= self.first) if self.cardinality else (own_items != NULL_CODE)
        is_positive = is_known & (batch.labels > 0)
        parts = -(-len(own_items) // rows_each)
        sizes = np.bincount(np.flatnonzero(is_positive) // rows_each, minlength=parts)
        return _Pool(rows_each, own_items[is_positive], np.concatenate([[0], np.cumsum(sizes)]))


@dataclass(frozen=True)
class _Pool:
    """Items that rows of a stream's part of a batch draw from: part p has items[offsets[p]:offsets[p + 1]]."""

    rows_each: int
    items: I64
    offsets: I64


_NO_POOL = _Pool(1, np.empty(0, np.int64), np.zeros(1, np.int64))


class _Excluded:
    """Items that each row's list has."""

    def __init__(self, lists: JaggedArray, cardinality: int) -> None:
        self._cardinality = cardinality
        row = np.repeat(np.arange(len(lists)), np.diff(lists.offsets))
        self._keys = np.sort(row * cardinality + lists.flat())

    def has(self, rows: I64, items: I64) -> npt.NDArray[np.bool_]:
        """Return whether the list of each row [N] has the item beside it [N]."""
        keys = rows * self._cardinality + items
        place = np.searchsorted(self._keys, keys)
        is_listed: npt.NDArray[np.bool_] = np.append(self._keys, -1)[place] == keys
        return is_listed


def _check_excluded(schema: DatasetSchema, name: str, item: Feature) -> None:
    lists = {f.name: f for f in schema.of(Kind.CATEGORICAL) if f.is_list}
    feature = lists.get(name)
    if feature is None or item.dynamic or feature.vocabulary != item.vocabulary or item.vocabulary is None:
        known = [f.name for f in lists.values() if f.vocabulary == item.vocabulary and item.vocabulary is not None]
        raise UserError(
            f"train.negatives.exclude: '{name}' is no list of codes of the vocabulary of '{item.name}' (there are: "
            f"{', '.join(known) or 'none'})"
        )


class AliasTable:
    """Draws numbers 0 .. n - 1 in proportion to their weights, by Walker's alias method (ACM TOMS 3, 1977).

    Args:
        weights: float64 [n], at least 0, one of them above it.
    """

    def __init__(self, weights: F64) -> None:
        n = len(weights)
        scaled = weights / weights.sum() * n
        order = np.argsort(scaled, kind="stable")
        # Equal weights may all be just below 1, as 49 times 1 / 49 is; the greatest fills up the others.
        small, large = np.split(order, [min(int(np.searchsorted(scaled[order], 1.0)), n - 1)])
        # Place by place, what a small weight lacks of 1 is filled up by the large one that is first in line; a large
        # one that has given so much that it is below 1 itself is filled up by the next.
        lacks, spare = np.cumsum(1 - scaled[small]), np.cumsum(scaled[large] - 1)
        self._threshold = np.ones(n)
        self._alias = np.arange(n)
        self._threshold[small] = scaled[small]
        lacked_before = np.concatenate([[0.0], lacks[:-1]]) if len(small) else lacks
        last = len(large) - 1
        if len(small):
            self._alias[small] = large[np.minimum(np.searchsorted(spare, lacked_before, side="right"), last)]
            first = np.searchsorted(lacks, spare, side="right")  # the small one that takes more than is left
            # One that begins where the large one ends is the next one's.
            used = (first < len(small)) & (lacked_before[np.minimum(first, len(small) - 1)] < spare)
            used[-1:] = False  # nobody fills up the last one: all sums are equal, but for rounding
            missing = lacks[np.minimum(first, len(small) - 1)] - spare
            self._threshold[large[used]] = 1 - missing[used]
            self._alias[large[used]] = np.append(large[1:], large[-1:])[used]

    def draw(self, uniform: F64) -> I64:
        """Draw one number for each number uniform in [0, 1), of any shape."""
        n = len(self._threshold)
        scaled = uniform * n
        place = np.minimum(scaled.astype(np.int64), n - 1)
        return np.where(scaled - place < self._threshold[place], place, self._alias[place])

    def shares(self) -> F64:
        """Return how likely each number is: float64 [n]."""
        n = len(self._threshold)
        return (self._threshold + np.bincount(self._alias, weights=1 - self._threshold, minlength=n)) / n
