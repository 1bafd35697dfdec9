"""Statistics in groups as Spark makes them: here where they are small, else a frame of which tasks make tables."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import reduce

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark import StorageLevel
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from headrace.features.engines import keyed_exchange
from headrace.features.engines.blocks import cut, packed
from headrace.features.learn.exact_sums import I64
from headrace.features.learn.statistics import Partial, assemble
from headrace.features.vocabulary.frame_codes import PARTITION_BYTES, PARTITION_VALUES

#: Bytes of a number of a group.
_NUMBER = 8
#: Which groups a row is of, in a frame of several.
_FORM = "form"


@dataclass(frozen=True)
class GroupsForm:
    """What the columns of groups mean."""

    #: By the value of `v`: the place of the statistic among those requested.
    order: tuple[int, ...]
    #: By the value of `v`: those of the columns `key` and `fold` that its groups have.
    keys: tuple[tuple[str, ...], ...]
    #: Columns by the names of a partial's.
    measures: Mapping[str, str]

    def partials(self, answer: pa.Table) -> dict[int, Partial]:
        """The statistics by their places; those that have no group, too."""
        answer = answer.combine_chunks()
        which = answer.column("v").to_numpy()
        out = {}
        for v, (i, keys) in enumerate(zip(self.order, self.keys, strict=True)):
            mine = answer.filter(pa.array(which == v))
            out[i] = partial_of(mine, self.measures, {name: mine.column(name) for name in keys})
        return out


@dataclass(frozen=True)
class Groups:
    """Statistics of one form: groups (v, key, fold where there are folds, numbers), none twice."""

    frame: DataFrame
    form: GroupsForm


@dataclass(frozen=True)
class LargeStatistics:
    """Statistics that the driver does not hold."""

    #: (name int, statistic binary), `name` being the place among those requested; all groups of a key in one partition.
    statistics: DataFrame
    #: Places among those requested.
    names: frozenset[int]
    persisted: tuple[DataFrame, ...]

    def release(self) -> None:
        """Free what the frame reads, on the executors' disks."""
        for frame in self.persisted:
            frame.unpersist()


def held(groups: Sequence[Groups], by_key: Collection[int]) -> tuple[dict[int, Partial], LargeStatistics | None]:
    """The statistics of groups: here, but for those at the places `by_key`, where all of them together are large."""
    out: dict[int, Partial] = {}
    mixed = []
    for found in groups:
        if by_key and not set(by_key).isdisjoint(found.form.order):
            mixed.append(found)
        else:
            out |= found.form.partials(found.frame.toArrow())
    if not mixed:
        return out, None
    # They are looked at more than once; a lost part is made again.
    frames = tuple(found.frame.persist(StorageLevel.DISK_ONLY) for found in mixed)
    with ExitStack() as stack:
        for frame in frames:
            stack.callback(frame.unpersist)
        of_keys = [_where(frame, found.form, by_key) for found, frame in zip(mixed, frames, strict=True)]
        rows, text, size = _size(of_keys)
        if size <= keyed_exchange.most_in_driver(frames[0].sparkSession):
            for found, frame in zip(mixed, frames, strict=True):
                out |= found.form.partials(frame.toArrow())
            return out, None
        for found, frame in zip(mixed, frames, strict=True):
            if others := set(found.form.order) - set(by_key):
                answer = found.form.partials(_where(frame, found.form, others).toArrow())
                out |= {i: partial for i, partial in answer.items() if i in others}
        pack = _Pack(tuple(found.form for found in mixed))
        # The same numbers have other names in each of them.
        parts = reduce(
            lambda a, b: a.unionByName(b, allowMissingColumns=True),
            (pack.renamed(number, frame) for number, frame in enumerate(of_keys)),
        )
        partitions = max(1, -(-rows // PARTITION_VALUES), -(-text // PARTITION_BYTES))
        statistics = parts.repartition(partitions, "key").mapInArrow(pack.run, "name int, statistic binary")
        stack.pop_all()
        return out, LargeStatistics(statistics, frozenset(by_key), frames)


def _where(frame: DataFrame, form: GroupsForm, places: Collection[int]) -> DataFrame:
    """The groups of some statistics."""
    return frame.where(F.col("v").isin([v for v, i in enumerate(form.order) if i in places]))


def _size(frames: Sequence[DataFrame]) -> tuple[int, int, int]:
    """(groups, bytes of their keys, bytes)."""
    rows = text = size = 0
    for frame in frames:
        n, keys = frame.agg(F.count("key"), F.sum(F.octet_length("key"))).collect()[0]
        rows, text = rows + n, text + (keys or 0)
        size += (keys or 0) + n * _NUMBER * (len(frame.columns) - 1)
    return rows, text, size


@dataclass(frozen=True)
class _Pack:
    """In a task: the statistics of the keys of its partition."""

    forms: tuple[GroupsForm, ...]

    def renamed(self, number: int, frame: DataFrame) -> DataFrame:
        """Groups with names of columns that no others have."""
        columns = [F.col(name).alias(_own(number, name)) for name in self.forms[number].measures.values()]
        shared = [name for name in frame.columns if name in ("v", "key", "fold")]
        return frame.select(F.lit(number).alias(_FORM), *shared, *columns)

    def run(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """(name, statistic)."""
        came = list(batches)
        if not came:
            return
        whole = pa.Table.from_batches(came)
        for number, form in enumerate(self.forms):
            mine = whole.filter(pc.equal(whole.column(_FORM), number))
            measures = {name: _own(number, alias) for name, alias in form.measures.items()}
            for i, partial in GroupsForm(form.order, form.keys, measures).partials(mine).items():
                for piece in cut(partial) if partial.num_rows else ():
                    yield pa.RecordBatch.from_arrays(
                        [pa.array([i], pa.int32()), pa.array([packed(piece, i)], pa.binary())], ["name", "statistic"]
                    )


def _own(number: int, name: str) -> str:
    return f"{name}_{number}"


def partial_of(answer: pa.Table, measures: Mapping[str, str], keys: Mapping[str, pa.ChunkedArray]) -> Partial:
    """A statistic's table of an answer's columns."""
    columns: dict[str, pa.Array] = {name: key.combine_chunks() for name, key in keys.items()}
    sums: dict[tuple[str, str], dict[int, I64]] = {}
    for name, alias in measures.items():
        column = answer.column(alias)
        number, _, rest = name.partition(".")
        measure, _, place = rest.partition(".")
        if place:
            # A sum of no number is null.
            sums.setdefault((number, measure), {})[int(place)] = np.asarray(column.fill_null(0).to_numpy(), np.int64)
        elif name == "day":
            columns[name] = column.fill_null(np.iinfo(np.int64).max).combine_chunks()
        else:
            columns[name] = column.combine_chunks()
    return assemble(columns, sums)
