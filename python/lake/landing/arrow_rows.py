"""Batches of landing files that Arrow reads: whether it may, in which parts and tasks, and what comes of it.

The result is counts, data files of good rows, and the rows of lines that Arrow is unsure of.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import reduce
from itertools import pairwise

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from headrace.config import LandingSource, Table
from headrace.config.schema import quoted_names
from headrace.lake.delta.data_files import WrittenFile, data_schema, footer, remove_files
from headrace.lake.faults import GOOD
from headrace.lake.forgotten import ForgottenValues
from headrace.lake.landing.blocks import Declaration, Part, TimeRange
from headrace.lake.landing.compression import LEAST_BYTES, ending, unpack
from headrace.lake.landing.expectations import FileProfile, UnreadableValues
from headrace.lake.landing.formats import FileDamaged, LandingBatch, reader_of
from headrace.lake.landing.repeats import REPEATED, HashTask, KeyedFile, RepeatTask, SuspectTask, save_array
from headrace.lake.landing.spellings import spellings_of
from headrace.lake.landing.unsure_lines import JudgedCounts
from headrace.lake.landing.write_rows import CountTask, Dropped, PartCounts, ReadTask, RewriteTask, SourceFile
from headrace.lake.spark.tasks import cores_of, run_tasks
from headrace.storage import Location

#: Uncompressed files are split into parts of so many bytes: at least, and at most.
PART_BYTES, _MOST_PART_BYTES = 64 << 20, 256 << 20
#: Files are left whole where the busiest core then has at most so many times its share: one that is split is read
#: twice, to count its lines.
_EVEN = 1.1
#: A task is to have at least so many bytes, so that small landing files make no small data files.
_LEAST_TASK_BYTES = 16 << 20
_TASKS_A_CORE = 2
#: Bytes of text that a byte of a compressed file may stand for.
COMPRESSED_TO = 4
_LOG = logging.getLogger("headrace.lake")

#: Less is read in the driver: Spark's Python workers take longer to start.
DRIVER_BYTES = 8 << 20
#: Hashes that are sorted at once: 16 MiB, and as much again for those of the table.
_HASHES_AT_ONCE = 1 << 21
#: So many times the driver itself sorts them: 0.1 s, and a task costs as much.
_DRIVER_SORTS = 2
#: Of so many rows the driver itself hashes the keys.
_DRIVER_ROWS = 1 << 20


@dataclass(frozen=True)
class ArrowPlan:
    """Files and declaration of a batch that Arrow reads."""

    files: Mapping[int, SourceFile]
    declaration: Declaration
    #: Whether undeclared columns become columns of the table.
    accept: bool
    #: Whether all rows are judged one by one, for a format that makes rows anew of them.
    judges_all: bool = False


def arrow_plan(batch: LandingBatch, extra: Sequence[str]) -> ArrowPlan:
    """Return how tasks read a batch.

    Args:
        batch: what is read.
        extra: undeclared columns that the events' table has.

    Raises:
        UserError: a header that is refused.
    """
    source, table = batch.source, batch.table
    accept = table.new_columns == "accept"
    reader = reader_of(source)
    forms = [reader.form(batch, i) for i in range(len(batch.files))]
    kept_columns = dict.fromkeys(extra)
    if accept:
        declared = {str(c.steps[0]) for c in table.columns}
        kept_columns |= dict.fromkeys(n for form in forms if form is not None for n in form.names if n not in declared)
    # Names that the table cannot have are reported when the day is assessed.
    names, taken = list[str](), {c.name.lower() for c in table.columns} | {"ds"}
    for name in kept_columns:
        if not name.startswith("_") and name.lower() not in taken:
            names.append(name)
            taken.add(name.lower())
    files = {}
    for i, ((ds, file), form) in enumerate(zip(batch.files, forms, strict=True)):
        first, end = batch.event_times(ds)
        micros = TimeRange(None if first is None else _micros(first), _micros(end))
        files[i] = SourceFile(ds, file.name, micros, form)
    return ArrowPlan(files, declaration_of(source, table, tuple(names), batch.ids), accept, reader.remakes_rows)


def declaration_of(source: LandingSource, table: Table, extra: Sequence[str], ids: Collection[str] = ()) -> Declaration:
    """Return what a reader of blocks needs to know of a spec's sections.

    Args:
        source: the spec's.
        table: the spec's.
        extra: undeclared columns that the table has.
        ids: declared text columns whose values are ids.
    """
    return Declaration(
        table.columns,
        tuple(extra),
        source.timezone,
        {name: unit for name in source.timestamps if (unit := source.epoch_unit(name)) is not None},
        dict(table.expectations.ranges),
        table.event_time,
        tuple(sorted(ids)),
        table.ids.max_bytes,
        table.ids.empty == "keep",
        spellings_of(source, table),
        table.ids.nul == "keep",
        table.text_nul == "keep",
        table.late_days,
        source.complete.watermark.column if source.complete and source.complete.watermark else None,
    )


def part_size(sizes: Sequence[int], cores: int) -> int:
    """Return the bytes of parts into which files of these sizes are split, so that `cores` have about equal work."""
    total, busy = sum(sizes), [0] * cores
    for size in sorted(sizes, reverse=True):
        busy[busy.index(min(busy))] += size
    if max(sizes, default=0) <= _MOST_PART_BYTES and max(busy) * cores <= _EVEN * total:
        return _MOST_PART_BYTES
    return max(PART_BYTES, min(_MOST_PART_BYTES, total // (2 * _TASKS_A_CORE * cores)))


def split_files(batch: LandingBatch, part_bytes: int, unsplit: Collection[int] = ()) -> list[Part]:
    """Return parts of the files, in their order; first lines are those of whole files. `unsplit`: their numbers."""
    parts = []
    for i, (_, file) in enumerate(batch.files):
        if ending(file.name) or file.size <= part_bytes or i in unsplit:
            parts.append(Part(i, file.path))
            continue
        count = -(-file.size // part_bytes)
        edges = [file.size * k // count for k in range(count + 1)]
        parts += [Part(i, file.path, a, b) for a, b in pairwise(edges)]
    return parts


def grouped_by_day(batch: LandingBatch, parts: Sequence[Part], cores: int) -> list[tuple[Part, ...]]:
    """Return parts for tasks, about even: each task's are of one day, in their order."""
    files = batch.files

    def size(part: Part) -> int:
        file_size = files[part.file][1].size
        return part.end - part.start if part.end is not None else file_size * (COMPRESSED_TO if part.compression else 1)

    total = sum(size(p) for p in parts)
    most = max(_LEAST_TASK_BYTES, min(PART_BYTES, total // (_TASKS_A_CORE * cores)))
    groups: list[tuple[int, list[Part]]] = []
    for part in parts:
        filled, group = groups[-1] if groups else (0, [])
        if not group or filled + size(part) > most or files[group[0].file][0] != files[part.file][0]:
            groups.append((size(part), [part]))
        else:
            groups[-1] = (filled + size(part), [*group, part])
    return [tuple(g) for _, g in sorted(groups, key=lambda pair: -pair[0])]


def _micros(moment: datetime) -> int:
    return (moment - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)


@dataclass(frozen=True)
class _Data:
    """A data file with the lines that it is made of."""

    file: WrittenFile
    #: (file, first line, last line).
    lines: tuple[tuple[int, int, int], ...]
    #: Name of its rows' hashes.
    hashes: str


@dataclass(frozen=True)
class ArrowRows:
    """The rows of a batch."""

    #: None: tasks run in the driver.
    spark: SparkSession | None
    plan: ArrowPlan
    table: Location
    #: Of the data files.
    schema: pa.Schema
    #: Of the load, for what tasks hand to each other.
    folder: Location
    codec: str
    data: tuple[_Data, ...]
    counts: Mapping[int, tuple[PartCounts, ...]]
    keys: tuple[str, ...]
    #: (day, file) of the rows of lines that Arrow is unsure of (headrace.lake.landing.unsure_lines).
    judged_files: tuple[tuple[str, Location], ...]

    @property
    def judged_paths(self) -> list[Location]:
        """The files of rows that were judged one by one; one may have rows of several days."""
        return list(dict.fromkeys(file for _, file in self.judged_files))

    @property
    def bad(self) -> int:
        """The number of bad rows."""
        return sum(p.judged.bad for parts in self.counts.values() for p in parts)

    def judged_rows(self, spark: SparkSession) -> DataFrame | None:
        """Return the rows that were judged one by one; None where there are none."""
        return spark.read.parquet(*spark_paths(self.judged_paths)) if self.judged_files else None

    def good_rows(self, batch: LandingBatch, columns: Sequence[str] = ()) -> DataFrame | None:
        """Return the good rows; None where there are none.

        Args:
            batch: whose rows they are.
            columns: declared ones to give, in Spark's quotes.

        Returns:
            the columns, `_ds`, `_file`, `_source_file`, `_line`, `_copy` and `_state`.
        """
        names = [*columns, "_ds", "_file", "_source_file", "_line", "_copy", "_state"]
        spark, frames = batch.spark, list[DataFrame]()
        files = [(ds, file.name, i) for i, (ds, file) in enumerate(batch.files)]
        numbers = F.broadcast(spark.createDataFrame(files, "_ds string, _source_file string, _file int"))
        by_day: dict[str, list[Location]] = {}
        for written in self.written:
            by_day.setdefault(written.ds, []).append(self.table / written.path)
        for ds, paths in by_day.items():
            rows = spark.read.parquet(*spark_paths(paths)).withColumn("_ds", F.lit(ds))
            rows = rows.select("*", F.col("_source_line").alias("_line"), F.lit(0).alias("_copy"))
            frames.append(rows.join(numbers, ["_ds", "_source_file"]).select("*", F.lit(GOOD).alias("_state")))
        judged = self.judged_rows(spark)
        if judged is not None:
            frames.append(judged)
        selected = [frame.where(F.col("_state") == GOOD).select(*names) for frame in frames]
        return reduce(DataFrame.unionByName, selected) if selected else None

    @property
    def judged(self) -> int:
        """The number of rows of lines that Arrow is unsure of."""
        return sum(p.judged.good + p.judged.bad for parts in self.counts.values() for p in parts)

    @property
    def written(self) -> list[WrittenFile]:
        """The data files."""
        return [d.file for d in self.data]

    @property
    def numbers(self) -> Mapping[tuple[str, str], int]:
        """Numbers of the files, by day and name."""
        return {(f.ds, f.name): i for i, f in self.plan.files.items()}

    def profile(self, i: int, empty: FileProfile) -> FileProfile:
        """Return the profile of a file; `empty` has none of its rows."""
        parts = self.counts.get(i, ())
        rest = with_judged(empty, [p.judged for p in parts], [c.name for c in self.plan.declaration.columns])
        columns = [c.name for c in self.plan.declaration.columns]
        profile = replace(rest)
        good = sum(p.good for p in parts)
        profile.forgotten = rest.forgotten + sum(p.forgotten for p in parts)
        profile.read = rest.read + good + sum(p.forgotten for p in parts)
        profile.good = rest.good + good
        readable = [sum(p.readable[k] for p in parts) for k in range(len(columns))]
        profile.readable = {name: n + rest.readable.get(name, 0) for name, n in zip(columns, readable, strict=True)}
        place = {name: k for k, name in enumerate(columns)}
        profile.nulls = {name: n + good - readable[place[name]] for name, n in rest.nulls.items()}
        profile.extra = rest.extra | {name for p in parts for name in p.extra}
        present = {name for p in parts for name in p.present}
        if rest.read:
            present |= set(columns) - rest.absent
        profile.absent = frozenset(columns) - present if profile.read else frozenset()
        profile.newest = _latest(rest.newest, [p.newest for p in parts])
        profile.watermark = _latest(rest.watermark, [p.watermark for p in parts])
        return profile

    def suspects(
        self, typed: Sequence[Location], loaded: Sequence[tuple[str, Location]]
    ) -> tuple[tuple[Location, ...], tuple[Location, ...]] | None:
        """Return the rows whose key may occur twice.

        Args:
            typed: Parquet files of rows that were judged one by one.
            loaded: (day, data file) of the rows of the table that they are compared with.

        Returns:
            (keys, `_ds`, `_file` and `_line` of rows here; keys and `ds` of rows in the table), as Parquet files, none
            where there are no rows; None where no hash is there twice.
        """
        new_files = [KeyedFile(self.table / d.file.path, d.file.ds, hashes=d.hashes) for d in self.data]
        loaded_files = [KeyedFile(path, ds) for ds, path in loaded]
        typed_keyed = [KeyedFile(path, is_typed=True) for path in typed]
        hashed = (*loaded_files, *typed_keyed)
        rows = sum(d.file.rows for d in self.data)
        rows += sum(footer(f.path).num_rows for f in hashed)
        spark = None if rows <= _DRIVER_ROWS else self.spark
        results = run_tasks(spark, len(hashed), HashTask(hashed, self.keys, self.folder))
        names = {f["file"]: f["hashes"] for f in results}
        loaded_files = [replace(f, hashes=names[k]) for k, f in enumerate(loaded_files)]
        new_hashes = [*(f.hashes for f in new_files), *(names[len(loaded_files) + k] for k in range(len(typed_keyed)))]
        shares = max(1, -(-rows // _HASHES_AT_ONCE))
        task = RepeatTask(tuple(new_hashes), tuple(f.hashes for f in loaded_files), self.folder, shares)
        results = run_tasks(spark if shares > _DRIVER_SORTS else None, shares, task)
        # In ascending order, as the shares are.
        hashes = np.concatenate([np.load((self.folder / f["path"]).local_path()) for f in results])
        if not len(hashes):
            return None
        save_array(self.folder / REPEATED, hashes)
        copies: list[tuple[Location, ...]] = []
        for files, numbers in ((new_files, self.numbers), (loaded_files, None)):
            copy = SuspectTask(tuple(files), self.keys, numbers, self.folder, self.schema)
            copies.append(tuple(self.folder / f["path"] for f in run_tasks(spark, len(files), copy)))
        return copies[0], copies[1]

    def drop_rows(self, dropped: Dropped) -> ArrowRows:
        """Return the same batch; its data files lack some rows."""
        places = dropped.load()
        affected = []
        for k, d in enumerate(self.data):
            for landing, first, last in d.lines:
                lines = places.get(landing, np.zeros(0, np.int64)) >> 20
                if ((lines >= first) & (lines <= last)).any():
                    affected.append(k)
                    break
        if not affected:
            return self
        files = tuple(self.data[k].file for k in affected)
        task = RewriteTask(files, self.numbers, dropped, self.table, self.schema, self.codec)
        rewritten = {affected[f["old"]]: f["new"] for f in run_tasks(self.spark, len(files), task)}
        data = []
        for k, d in enumerate(self.data):
            if k not in rewritten:
                data.append(d)
            elif rewritten[k] is not None:
                data.append(replace(d, file=WrittenFile(**rewritten[k])))
        for file in files:
            (self.table / file.path).remove_quietly()
        return replace(self, data=tuple(data))


def read_by_arrow(
    batch: LandingBatch,
    plan: ArrowPlan,
    table: Location,
    folder: Location,
    codec: str,
    forgotten: ForgottenValues | None = None,
) -> ArrowRows:
    """Read a batch and write its data files, which no commit names yet.

    Raises:
        FileDamaged: a file cannot be read to its end.
    """
    size = sum(f.size * (COMPRESSED_TO if ending(f.name) else 1) for _, f in batch.files)
    spark = batch.spark if size > DRIVER_BYTES else None
    cores = cores_of(batch.spark)
    unsplit = [i for i, file in plan.files.items() if file.over_lines is not None]
    tasks = grouped_by_day(batch, _parts(spark, batch, cores, folder, unsplit), cores)
    keys = batch.table.keys
    extra = (f"{name} string" for name in quoted_names(plan.declaration.extra))
    schema = data_schema(", ".join([batch.table.spark_schema, *extra]))
    work = ReadTask(
        tuple(tasks),
        plan.files,
        plan.declaration,
        plan.accept,
        keys,
        table,
        schema,
        folder,
        codec,
        forgotten,
        plan.judges_all,
    )
    data: list[_Data] = []
    judged: list[tuple[str, Location]] = []
    counts: dict[int, list[PartCounts]] = {}
    damaged: FileDamaged | None = None
    for task, result in zip(tasks, run_tasks(spark, len(tasks), work), strict=True):
        if "unreadable" in result:
            number, cause, is_of_content = result["unreadable"]
            ds, file = batch.files[number]
            damaged = damaged or FileDamaged(ds, file, cause, is_of_content)
            continue
        part_counts = [PartCounts.of_result(p) for p in result["parts"]]
        for part in part_counts:
            counts.setdefault(part.file, []).append(part)
        if result["judged"] is not None:
            judged.append((plan.files[task[0].file].ds, folder / result["judged"]))
        if result["data"] is not None:
            lines = tuple(
                (part.file, part.first_line, part.first_line + count.lines)
                for part, count in zip(task, part_counts, strict=True)
            )
            data.append(_Data(WrittenFile(**result["data"]), lines, result["hashes"] or ""))
    by_file = {i: tuple(p) for i, p in counts.items()}
    rows = ArrowRows(spark, plan, table, schema, folder, codec, tuple(data), by_file, keys, tuple(judged))
    if damaged is not None:
        remove_files(table, rows.written)
        raise damaged
    for i, counts_of_file in rows.counts.items():
        if any(p.lines != p.counted for p in counts_of_file):
            raise RuntimeError(f"lines of landing file {plan.files[i].name} were lost: {counts_of_file}")
    return rows


def _latest(moment: datetime | None, micros: Sequence[int | None]) -> datetime | None:
    """Return the greatest of some moments; None where there is none."""
    moments = [FileProfile.moment(n) for n in micros if n is not None]
    return max([*moments, *([] if moment is None else [moment])], default=None)


def with_judged(profile: FileProfile, judged: Sequence[JudgedCounts], columns: Sequence[str]) -> FileProfile:
    """Return an empty profile with the counts of the rows that the tasks have judged."""
    total = JudgedCounts()
    for counts in judged:
        total.add(counts)
    read = total.good + total.bad + total.forgotten - total.expanded
    if not read:
        return profile
    return replace(
        profile,
        read=read,
        good=total.good,
        bad=total.bad,
        forgotten=total.forgotten,
        expanded=total.expanded,
        broken=total.broken,
        absent=frozenset(columns) - set(total.present),
        extra=frozenset(total.extra),
        readable=dict(total.readable),
        unreadable={name: UnreadableValues(*value) for name, value in total.unreadable.items()},
        mended=dict(total.mended),
        nulls={name: total.nulls.get(name, 0) for name in profile.nulls},
        # In the order of `profiles`.
        reasons=dict(sorted(total.reasons.items())),
        newest=_latest(None, [total.newest]),
        watermark=_latest(None, [total.watermark]),
    )


def spark_paths(files: Sequence[Location]) -> list[str]:
    """Return places of files as Spark is given them."""
    return [file.spark_path for file in files]


def typed_files(folder: Location, days: Sequence[str]) -> list[tuple[str, Location]]:
    """Return (day, file) for each day of which a Parquet file of typed rows may have some."""
    files = []
    for path in sorted(folder.entries(), key=lambda p: p.name):
        if path.suffix != ".parquet":
            continue
        metadata = footer(path)
        names = [metadata.schema.column(k).path for k in range(metadata.num_columns)]
        k = names.index("_ds")
        days_of_file: set[str] = set()
        for group in range(metadata.num_row_groups):
            stats = metadata.row_group(group).column(k).statistics
            has_range = stats is not None and stats.has_min_max
            days_of_file |= {ds for ds in days if not has_range or stats.min <= ds <= stats.max}
        files += [(ds, path) for ds in sorted(days_of_file)]
    return files


def _parts(
    spark: SparkSession | None, batch: LandingBatch, cores: int, folder: Location, unsplit: Collection[int]
) -> list[Part]:
    """Return parts of the batch's files, in their order, with the numbers of their first lines."""
    files = [file for _, file in batch.files]
    parts = _numbered(spark, split_files(batch, part_size([f.size for f in files], cores), unsplit))
    large = [i for i, f in enumerate(files) if f.size > LEAST_BYTES and i not in unsplit]
    bzip2 = {i: (files[i].path, files[i].size) for i in large if ending(files[i].name) == ".bz2"}
    plain = {
        i: [Part(i, lines.path, 0, lines.size, lines.first_line) for lines in unpacked]
        for i, unpacked in unpack(spark, bzip2, cores, folder).items()
    }
    return [part for packed in parts for part in plain.get(packed.file, [packed])]


def _numbered(spark: SparkSession | None, parts: list[Part]) -> list[Part]:
    """Return the parts with the numbers of their first lines."""
    counted = [p for p, after in pairwise(parts) if after.file == p.file]
    counts = {f["part"]: f["lines"] for f in run_tasks(spark, len(counted), CountTask(tuple(counted)))}
    lines = {(p.file, p.start): counts[k] for k, p in enumerate(counted)}
    numbered: list[Part] = []
    for part in parts:
        previous = numbered[-1] if numbered else None
        if previous is not None and previous.file == part.file:
            part = replace(part, first_line=previous.first_line + lines[part.file, previous.start])
        numbered.append(part)
    return numbered
