"""The items' features, made once and mapped: a file of numbers for each feature, in the order of the items' rows.

All tasks of a host read the same pages; an item's features are at its row, whichever user it is ranked for. Tasks write
to their places of the same files; where hosts share no folder, they leave the features of each part of the items in
files of its own, and the first task on a host that wants features puts the parts behind each other there.

Files of a part are named after the attempt at its task: of a task that ran twice, those that the handle does not name
are read by nobody. (The same name written twice is, in most stores, a file that was changed.)
"""

from __future__ import annotations

import hashlib
import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyspark.sql import SparkSession

from headrace.compute.jagged import JaggedArray
from headrace.features.functions.arrays import one_batch
from headrace.lake.spark.tasks import run_tasks
from headrace.score.items import ItemTable
from headrace.score.loaded_model import Columns, PairFeatures, loaded_workflow
from headrace.storage import Location, release_copy
from headrace.storage.host_scratch import HostPlace, RunFolder, create_once

#: Items in memory at once.
_ROWS = 65_536


@dataclass(frozen=True)
class FeatureFile:
    """A feature of all items: a file of its numbers, and of lists one of offsets."""

    feature: str
    dtype: str
    is_list: bool
    #: Values up to the end of each part of the items; for a list feature, the values of all lists.
    ends: tuple[int, ...]


@dataclass(frozen=True)
class ItemFeatures:
    """A handle on the files; small and picklable."""

    folder: Location
    #: Features in the order of their files' numbers.
    files: tuple[FeatureFile, ...]
    #: Items up to the end of each part.
    ends: tuple[int, ...]
    #: Suffix of each part's files, if each part has files of its own.
    parts: tuple[str, ...] = ()
    #: Where each host joins the parts in `folder` to whole files; None: `folder` has whole files already.
    hosts: RunFolder | None = None

    @staticmethod
    def write(
        items: ItemTable,
        model: Location,
        features: PairFeatures,
        folder: Location,
        spark: SparkSession | None,
        maps: HostPlace | None = None,
    ) -> ItemFeatures:
        """Transform the items by Spark tasks, a task for each part of the table.

        Args:
            items: has the key and the item's columns.
            model: the folder of the saved model, with its fitted workflow, visible to all executors.
            features: which columns of items they are made of.
            folder: of the files; it appears when it is whole, and an older one is replaced. The caller removes it.
            spark: whose tasks; None: here.
            maps: where workers map the model's vocabularies; None: they are in memory. Of a folder of each host's own,
                `folder` is not one whose files all tasks can write to.
        """
        hosts = maps if isinstance(maps, RunFolder) else None
        item_features = [f for f in features.fitted.features if f.name in features.of_item]
        ends = tuple(accumulate(p.rows for p in items.parts))
        with folder.new_folder() as building:
            for number, f in enumerate(item_features):
                if not f.is_list and hosts is None:
                    _create(building, _file(number), ends[-1], f.dtype)
            task = _Transform(
                items, model, maps, dict(features.context), features.user, features.item, building, hosts is not None
            )
            written = run_tasks(spark, len(items.parts), task.part)
            counts, parts = [w["numbers"] for w in written], tuple(str(w["part"]) for w in written)
            lists = {name: tuple(accumulate(c[name] for c in counts)) for name in counts[0]}
            files = tuple(FeatureFile(f.name, f.dtype, f.is_list, lists.get(f.name, ends)) for f in item_features)
            if lists and hosts is None:
                join = _Join(files, ends, parts, building, building, lists_alone=True)
                join.make()
                run_tasks(spark, len(items.parts), join.part)
        return ItemFeatures(folder, files, ends, parts, hosts)

    def open(self) -> Columns:
        """Return the features by name, mapped: [rows] each, or lists of them."""
        return _opened(self)

    def first(self, rows: int) -> Columns:
        """Return the features of the first items, at least so many or all: of a store, no more is fetched than they
        need.
        """
        if self.hosts is None:
            return self.open()
        count = next((i + 1 for i, end in enumerate(self.ends) if end >= rows), len(self.ends))
        return {file.feature: self._read(number, file, count) for number, file in enumerate(self.files)}

    def _read(self, number: int, file: FeatureFile, count: int) -> NDArray[Any] | JaggedArray:
        parts = self.parts[:count]
        values: NDArray[Any] = np.concatenate([_read_part(self.folder, _file(number), p, file.dtype) for p in parts])
        if not file.is_list:
            return values
        lengths = np.concatenate([_read_part(self.folder, _offsets(number), p, "int64") for p in parts])
        return JaggedArray(np.append(0, lengths.cumsum()).astype(_offset_type(file.ends[-1])), values)

    def on_this_host(self) -> Location:
        """Return the folder of the whole files on this host."""
        if self.hosts is None:
            return self.folder
        name = hashlib.sha256(str(self.folder).encode()).hexdigest()[:16]
        return create_once(self.hosts.of_run().transient() / f"item-features-{name}", self._join_here)

    def _join_here(self, building: Location) -> None:
        join = _Join(self.files, self.ends, self.parts, self.folder, building)
        join.make()
        for number in range(len(self.ends)):
            for _ in join.part(number):
                pass


@dataclass(frozen=True)
class _Transform:
    """A part's features, into its place of each file; those that are lists into files of the part's own."""

    items: ItemTable
    model: Location
    maps: HostPlace | None
    context: dict[str, pa.Scalar]
    user: tuple[str, ...]
    item: tuple[str, ...]
    folder: Location
    #: True if each part writes files of its own.
    separate_files: bool

    def part(self, number: int) -> Iterator[dict[str, Any]]:
        """Yield the suffix of the part's files, and the number of values in all its lists by list feature."""
        fitted = loaded_workflow(self.model, self.maps)
        features = PairFeatures(self.user, self.item, self.context, fitted)
        item_features = [f for f in fitted.features if f.name in features.of_item]
        first = sum(p.rows for p in self.items.parts[:number])
        rows = self.items.open().slice(first, self.items.parts[number].rows)
        rows = rows.select(list(dict.fromkeys(self.item)))
        buffered: dict[str, list[Any]] = {f.name: [] for f in item_features if f.is_list or self.separate_files}
        for start in range(0, len(rows), _ROWS):
            columns = features.item_columns(one_batch(rows.slice(start, _ROWS)))
            for i, f in enumerate(item_features):
                if f.name in buffered:
                    buffered[f.name].append(columns[f.name])
                else:
                    _put(self.folder, _file(i), columns[f.name], f.dtype, first + start)
        numbers, part = {}, f"{number}-{uuid.uuid4()}"
        for i, f in enumerate(item_features):
            if f.is_list:
                flat = [x.flat() for x in buffered[f.name]]
                numbers[f.name] = sum(map(len, flat))
                _save(self.folder, _file(i), part, flat, f.dtype)
                _save(self.folder, _offsets(i), part, [x.lengths for x in buffered[f.name]], "int64")
            elif self.separate_files:
                _save(self.folder, _file(i), part, buffered[f.name], f.dtype)
        yield {"part": part, "numbers": numbers}


@dataclass(frozen=True)
class _Join:
    """Parts behind each other."""

    files: tuple[FeatureFile, ...]
    #: Items up to the end of each part.
    ends: tuple[int, ...]
    #: Suffix of each part's files.
    parts: tuple[str, ...]
    #: Folder of the parts.
    source: Location
    #: Folder of the joined files.
    folder: Location
    #: True if only lists are joined, since the other files are whole.
    lists_alone: bool = False

    def make(self) -> None:
        """Make the files that parts are put into."""
        for number, file in self._files():
            _create(self.folder, _file(number), file.ends[-1], file.dtype)
            if file.is_list:
                _create(self.folder, _offsets(number), self.ends[-1] + 1, _offset_type(file.ends[-1]))

    def part(self, number: int) -> Iterator[int]:
        """Put a part into its place; yields the items up to its end."""
        for i, file in self._files():
            value_start, part = file.ends[number - 1] if number else 0, self.parts[number]
            _put(self.folder, _file(i), _read_part(self.source, _file(i), part, file.dtype), file.dtype, value_start)
            if file.is_list:
                first = self.ends[number - 1] if number else 0
                ends = value_start + np.cumsum(_read_part(self.source, _offsets(i), part, "int64"))
                _put(self.folder, _offsets(i), ends, _offset_type(file.ends[-1]), first + 1)
        yield self.ends[number]

    def _files(self) -> Iterator[tuple[int, FeatureFile]]:
        return ((i, file) for i, file in enumerate(self.files) if file.is_list or not self.lists_alone)


@lru_cache(maxsize=2)
def _opened(features: ItemFeatures) -> Columns:
    columns: Columns = {}
    folder, rows = features.on_this_host(), features.ends[-1]
    for i, file in enumerate(features.files):
        count = file.ends[-1]
        values = _mapped(folder / _file(i), file.dtype, count)
        if file.is_list:
            columns[file.feature] = JaggedArray(_mapped(folder / _offsets(i), _offset_type(count), rows + 1), values)
        else:
            columns[file.feature] = values
    return columns


def _mapped(file: Location, dtype: str, count: int) -> NDArray[Any]:
    if not count:
        return np.empty(0, dtype)
    return np.asarray(np.memmap(file.local_path(), dtype, "r", shape=(count,)))


def _offset_type(numbers: int) -> str:
    """Return the type of offsets of lists that have so many numbers together."""
    return "int32" if numbers < 2**31 else "int64"


def _file(number: int) -> str:
    return f"feature-{number}.numbers"


def _offsets(number: int) -> str:
    return f"feature-{number}.offsets"


def _create(folder: Location, name: str, count: int, dtype: str) -> None:
    """Make a file of zeros, which tasks fill: each writes its own range, the same whenever it runs again."""
    with open((folder / name).local_path(), "wb") as f:
        f.truncate(count * np.dtype(dtype).itemsize)


def _put(folder: Location, name: str, values: Any, dtype: str, offset: int) -> None:
    data = np.ascontiguousarray(values, dtype)
    with open((folder / name).local_path(), "r+b") as f:
        content, done = data.tobytes(), 0
        while done < len(content):
            done += os.pwrite(f.fileno(), content[done:], offset * data.itemsize + done)


def _save(folder: Location, name: str, part: str, arrays: list[NDArray[Any]], dtype: str) -> None:
    """Save arrays of a part, one after the other."""
    with (folder / f"{name}.{part}").new_file() as path, open(path, "wb") as f:
        for values in arrays:
            np.ascontiguousarray(values, dtype).tofile(f)


def _read_part(folder: Location, name: str, part: str, dtype: str) -> NDArray[Any]:
    """Return the saved arrays of a part. A host usually reads them once, so its copy of a store's file goes first."""
    file = folder / f"{name}.{part}"
    try:
        path = file.local_path()
        values: NDArray[Any] = np.fromfile(path, dtype)
    except FileNotFoundError:  # evicted from the host's cache meanwhile: fetch it again
        path = file.local_path()
        values = np.fromfile(path, dtype)
    release_copy(path)
    return values
