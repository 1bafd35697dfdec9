"""The items' features, made once and mapped: a file of numbers for each feature, in the order of the items' rows.

All tasks of a host read the same pages; an item's features are at its row, whichever user it is ranked for.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyspark.sql import SparkSession

from headrace.features.functions.arrays import one_batch
from headrace.features.workflow.fitted import FittedWorkflow
from headrace.jagged import JaggedArray
from headrace.lake.tasks import run_tasks
from headrace.schema import Feature
from headrace.score.items import ItemTable
from headrace.score.rank.pair_features import Columns, PairFeatures
from headrace.storage import Location

#: Items that are in memory at a time.
_ROWS = 65_536


@dataclass(frozen=True)
class ItemFeatures:
    """A handle on the files; small and picklable."""

    folder: Location
    rows: int
    #: (feature, type of its numbers, how many of them: of a list feature all lists' together) by number of the file.
    files: tuple[tuple[str, str, int], ...]
    #: Features that are lists: their offsets are in a file of their own.
    lists: frozenset[str]

    @staticmethod
    def write(
        items: ItemTable, workflow: Location, features: PairFeatures, folder: Location, spark: SparkSession | None
    ) -> ItemFeatures:
        """Transform the items by Spark tasks, a task for each part of the table.

        Args:
            items: has the key and the item's columns.
            workflow: the folder of the fitted workflow, visible to all executors.
            features: which columns of items they are made of.
            folder: of the files; it appears when it is whole, and an older one is replaced. The caller removes it.
            spark: whose tasks; None: here.
        """
        wanted = [f for f in features.fitted.features if f.name in features.of_item]
        with folder.new_folder() as building:
            for number, f in enumerate(wanted):
                if not f.is_list:
                    _make(building, _file(number), items.rows * np.dtype(f.dtype).itemsize)
            task = _Transform(items, workflow, dict(features.context), features.user, features.item, building)
            counts = run_tasks(spark, len(items.parts), task.part)
            ends = {name: list(accumulate(c[name] for c in counts)) for name in counts[0]}
            for number, f in enumerate(wanted):
                if f.is_list:
                    _make(building, _file(number), ends[f.name][-1] * np.dtype(f.dtype).itemsize)
                    _make(building, _offsets(number), (items.rows + 1) * np.dtype(_place(ends[f.name][-1])).itemsize)
            if ends:
                run_tasks(spark, len(items.parts), _Join(building, items, tuple(wanted), ends).part)
        files = tuple((f.name, f.dtype, ends[f.name][-1] if f.is_list else items.rows) for f in wanted)
        return ItemFeatures(folder, items.rows, files, frozenset(f.name for f in wanted if f.is_list))

    def open(self) -> Columns:
        """Features by name, mapped: [rows] each, or lists of them."""
        return _opened(self)


@dataclass(frozen=True)
class _Transform:
    """A part's features, into its place of each file; those that are lists into files of the part's own."""

    items: ItemTable
    workflow: Location
    context: dict[str, pa.Scalar]
    user: tuple[str, ...]
    item: tuple[str, ...]
    folder: Location

    def part(self, number: int) -> Iterator[dict[str, int]]:
        """Yields the numbers in all lists of the part, by list feature."""
        fitted = _fitted(self.workflow)
        features = PairFeatures(self.user, self.item, self.context, fitted)
        wanted = [f for f in fitted.features if f.name in features.of_item]
        first = sum(p.rows for p in self.items.parts[:number])
        rows = self.items.open().slice(first, self.items.parts[number].rows)
        rows = rows.select(list(dict.fromkeys(self.item)))
        found: dict[str, list[JaggedArray]] = {f.name: [] for f in wanted if f.is_list}
        for start in range(0, len(rows), _ROWS):
            made = features.item_columns(one_batch(rows.slice(start, _ROWS)))
            for i, f in enumerate(wanted):
                values = made[f.name]
                if isinstance(values, JaggedArray):
                    found[f.name].append(values)
                else:
                    _put(self.folder, _file(i), values, f.dtype, first + start)
        for i, f in enumerate(wanted):
            if f.is_list:
                _save(self.folder / f"{_file(i)}.{number}", [x.flat() for x in found[f.name]], f.dtype)
                _save(self.folder / f"{_offsets(i)}.{number}", [x.lengths for x in found[f.name]], "int64")
        yield {name: sum(len(x.flat()) for x in parts) for name, parts in found.items()}


@dataclass(frozen=True)
class _Join:
    """The parts' lists behind each other."""

    folder: Location
    items: ItemTable
    wanted: tuple[Feature, ...]
    #: By list feature, how many numbers there are up to the end of each part.
    ends: dict[str, list[int]]

    def part(self, number: int) -> Iterator[int]:
        """Yields the part's rows."""
        first = sum(p.rows for p in self.items.parts[:number])
        for i, f in enumerate(self.wanted):
            if not f.is_list:
                continue
            values, lengths = self.folder / f"{_file(i)}.{number}", self.folder / f"{_offsets(i)}.{number}"
            before = self.ends[f.name][number - 1] if number else 0
            _put(self.folder, _file(i), np.fromfile(values.local_path(), f.dtype), f.dtype, before)
            ends = before + np.cumsum(np.fromfile(lengths.local_path(), np.int64))
            _put(self.folder, _offsets(i), ends, _place(self.ends[f.name][-1]), first + 1)
        yield self.items.parts[number].rows


@lru_cache(maxsize=1)
def _fitted(workflow: Location) -> FittedWorkflow:
    return FittedWorkflow.load(workflow)


@lru_cache(maxsize=2)
def _opened(features: ItemFeatures) -> Columns:
    found: Columns = {}
    for i, (name, dtype, count) in enumerate(features.files):
        values = _mapped(features.folder / _file(i), dtype, count)
        if name in features.lists:
            found[name] = JaggedArray(_mapped(features.folder / _offsets(i), _place(count), features.rows + 1), values)
        else:
            found[name] = values
    return found


def _mapped(file: Location, dtype: str, count: int) -> NDArray[Any]:
    if not count:
        return np.empty(0, dtype)
    return np.asarray(np.memmap(file.local_path(), dtype, "r", shape=(count,)))


def _place(numbers: int) -> str:
    """The type of offsets of lists that have so many numbers together."""
    return "int32" if numbers < 2**31 else "int64"


def _file(number: int) -> str:
    return f"feature-{number}.numbers"


def _offsets(number: int) -> str:
    return f"feature-{number}.offsets"


def _make(folder: Location, name: str, size: int) -> None:
    """A file of zeros, which tasks fill: each writes its own place, the same whenever it runs again."""
    with open((folder / name).local_path(), "wb") as f:
        f.truncate(size)


def _put(folder: Location, name: str, values: NDArray[Any], dtype: str, at: int) -> None:
    data = np.ascontiguousarray(values, dtype)
    with open((folder / name).local_path(), "r+b") as f:
        content, done = data.tobytes(), 0
        while done < len(content):
            done += os.pwrite(f.fileno(), content[done:], at * data.itemsize + done)


def _save(file: Location, parts: list[NDArray[Any]], dtype: str) -> None:
    with file.new_file() as path, open(path, "wb") as f:
        for part in parts:
            np.ascontiguousarray(part, dtype).tofile(f)
