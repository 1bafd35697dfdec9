"""What Arrow has read of a batch of landing files: counts, data files of good rows, and the lines it left."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pyarrow as pa
from pyspark.sql import SparkSession

from headrace.lake.blocks.lines import COMPRESSIONS, Part
from headrace.lake.delta.data_files import WrittenFile, data_schema, footer, remove_files
from headrace.lake.forgotten import ForgottenValues
from headrace.lake.ingest.arrow_plan import COMPRESSED_TO, ArrowPlan, grouped_by_day, part_size, split_files
from headrace.lake.ingest.hash_files import save_array
from headrace.lake.ingest.profile import FileProfile
from headrace.lake.ingest.read_lines import CountTask, PartCounts, ReadTask
from headrace.lake.ingest.repeats import REPEATED, HashTask, KeyedFile, RepeatTask, SuspectTask
from headrace.lake.ingest.unpack import LEAST_BYTES, unpack
from headrace.lake.ingest.write_rows import Dropped, RewriteTask
from headrace.lake.sources.frame import quoted
from headrace.lake.sources.lines import LandingBatch
from headrace.lake.spark.tasks import cores_of, run_tasks
from headrace.storage import Location

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
    #: Those with the lines for Spark's rules.
    left_files: tuple[Location, ...]

    @property
    def left(self) -> Mapping[int, int]:
        """By file: lines for Spark's rules."""
        found = {i: sum(p.left for p in parts) for i, parts in self.counts.items()}
        return {i: n for i, n in found.items() if n}

    @property
    def written(self) -> list[WrittenFile]:
        """The data files."""
        return [d.file for d in self.data]

    @property
    def numbers(self) -> Mapping[tuple[str, str], int]:
        """By day and name, a file's number."""
        return {(f.ds, f.name): i for i, f in self.plan.files.items()}

    def profile(self, i: int, others: FileProfile) -> FileProfile:
        """The profile of a file, `others` being that of the lines left."""
        parts = self.counts.get(i, ())
        columns = [c.name for c in self.plan.declaration.columns]
        found = replace(others)
        good = sum(p.good for p in parts)
        found.forgotten = others.forgotten + sum(p.forgotten for p in parts)
        found.read = others.read + good + sum(p.forgotten for p in parts)
        found.good = others.good + good
        readable = [sum(p.readable[k] for p in parts) for k in range(len(columns))]
        found.readable = {name: n + others.readable.get(name, 0) for name, n in zip(columns, readable, strict=True)}
        place = {name: k for k, name in enumerate(columns)}
        found.nulls = {name: n + good - readable[place[name]] for name, n in others.nulls.items()}
        found.extra = others.extra | {name for p in parts for name in p.extra}
        present = {name for p in parts for name in p.present}
        if others.read:
            present |= set(columns) - others.absent
        found.absent = frozenset(columns) - present if found.read else frozenset()
        micros = [p.newest for p in parts if p.newest is not None]
        if micros:
            newest = FileProfile.moment(max(micros))
            found.newest = newest if others.newest is None else max(newest, others.newest)
        return found

    def suspects(
        self, typed: Sequence[Location], loaded: Sequence[tuple[str, Location]]
    ) -> tuple[tuple[Location, ...], tuple[Location, ...]] | None:
        """Rows whose key may be there twice.

        Args:
            typed: Parquet files of rows that Spark has typed.
            loaded: (day, data file) of the rows of the table that they are compared with.

        Returns:
            (keys, `_ds`, `_file` and `_line` of rows here; keys and `ds` of rows in the table), as Parquet files, none
            where there are no rows; None where no hash is there twice.
        """
        here = [KeyedFile(self.table / d.file.path, d.file.ds, hashes=d.hashes) for d in self.data]
        there = [KeyedFile(path, ds) for ds, path in loaded]
        others = [KeyedFile(path, is_typed=True) for path in typed]
        hashed = (*there, *others)
        rows = sum(d.file.rows for d in self.data)
        rows += sum(footer(f.path).num_rows for f in hashed)
        spark = None if rows <= _DRIVER_ROWS else self.spark
        found = run_tasks(spark, len(hashed), HashTask(hashed, self.keys, self.folder))
        names = {f["file"]: f["hashes"] for f in found}
        there = [replace(f, hashes=names[k]) for k, f in enumerate(there)]
        mine = [*(f.hashes for f in here), *(names[len(there) + k] for k in range(len(others)))]
        shares = max(1, -(-rows // _HASHES_AT_ONCE))
        task = RepeatTask(tuple(mine), tuple(f.hashes for f in there), self.folder, shares)
        found = run_tasks(spark if shares > _DRIVER_SORTS else None, shares, task)
        # In ascending order, as the shares are.
        hashes = np.concatenate([np.load((self.folder / f["path"]).local_path()) for f in found])
        if not len(hashes):
            return None
        save_array(self.folder / REPEATED, hashes)
        made: list[tuple[Location, ...]] = []
        for files, numbers in ((here, self.numbers), (there, None)):
            copy = SuspectTask(tuple(files), self.keys, numbers, self.folder, self.schema)
            made.append(tuple(self.folder / f["path"] for f in run_tasks(spark, len(files), copy)))
        return made[0], made[1]

    def without(self, dropped: Dropped) -> ArrowRows:
        """The same with data files that lack some rows."""
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
        made = {affected[f["old"]]: f["new"] for f in run_tasks(self.spark, len(files), task)}
        data = []
        for k, d in enumerate(self.data):
            if k not in made:
                data.append(d)
            elif made[k] is not None:
                data.append(replace(d, file=WrittenFile(**made[k])))
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
) -> ArrowRows | str:
    """Read a batch and write its data files, which no commit names yet; or why it could not be read."""
    size = sum(f.size * (COMPRESSED_TO if f.path.suffix in COMPRESSIONS else 1) for _, f in batch.files)
    spark = batch.spark if size > DRIVER_BYTES else None
    cores = cores_of(batch.spark)
    tasks = grouped_by_day(batch, _parts(spark, batch, cores, folder), cores)
    keys = batch.table.keys
    extra = (f"{name} string" for name in quoted(plan.declaration.extra))
    schema = data_schema(", ".join([batch.table.spark_schema, *extra]))
    work = ReadTask(
        tuple(tasks), plan.files, plan.declaration, plan.accept, keys, table, schema, folder, codec, forgotten
    )
    data: list[_Data] = []
    left: list[Location] = []
    counts: dict[int, list[PartCounts]] = {}
    unreadable = None
    for task, found in zip(tasks, run_tasks(spark, len(tasks), work), strict=True):
        if "unreadable" in found:
            unreadable = str(found["unreadable"])
            continue
        mine = [PartCounts(**p) for p in found["parts"]]
        for part in mine:
            counts.setdefault(part.file, []).append(part)
        if found["left"] is not None:
            left.append(folder / found["left"])
        if found["data"] is not None:
            lines = tuple(
                (part.file, part.first_line, part.first_line + one.lines) for part, one in zip(task, mine, strict=True)
            )
            data.append(_Data(WrittenFile(**found["data"]), lines, found["hashes"] or ""))
    by_file = {i: tuple(p) for i, p in counts.items()}
    rows = ArrowRows(spark, plan, table, schema, folder, codec, tuple(data), by_file, keys, tuple(left))
    if unreadable is not None:
        remove_files(table, rows.written)
        return unreadable
    for i, of in rows.counts.items():
        if any(p.lines != p.skipped + p.good + p.forgotten + p.left for p in of):
            raise RuntimeError(f"lines of landing file {plan.files[i].name} were lost: {of}")
    return rows


def typed_files(folder: Location, days: Sequence[str]) -> list[tuple[str, Location]]:
    """(day, file) for each day of which a Parquet file of typed rows may have some."""
    found = []
    for path in sorted(folder.entries(), key=lambda p: p.name):
        if path.suffix != ".parquet":
            continue
        metadata = footer(path)
        names = [metadata.schema.column(k).path for k in range(metadata.num_columns)]
        k = names.index("_ds")
        mine: set[str] = set()
        for group in range(metadata.num_row_groups):
            stats = metadata.row_group(group).column(k).statistics
            there = stats is not None and stats.has_min_max
            mine |= {ds for ds in days if not there or stats.min <= ds <= stats.max}
        found += [(ds, path) for ds in sorted(mine)]
    return found


def _parts(spark: SparkSession | None, batch: LandingBatch, cores: int, folder: Location) -> list[Part]:
    """Parts of the batch's files, in their order, with the numbers of their first lines."""
    files = [file for _, file in batch.files]
    parts = _numbered(spark, split_files(batch, part_size([f.size for f in files], cores)))
    bzip2 = {i: (f.path, f.size) for i, f in enumerate(files) if f.path.suffix == ".bz2" and f.size > LEAST_BYTES}
    plain = unpack(spark, bzip2, cores, folder)
    return [part for whole in parts for part in plain.get(whole.file, [whole])]


def _numbered(spark: SparkSession | None, parts: list[Part]) -> list[Part]:
    """The parts with the numbers of their first lines."""
    counted = [p for p, after in pairwise(parts) if after.file == p.file]
    found = {f["part"]: f["lines"] for f in run_tasks(spark, len(counted), CountTask(tuple(counted)))}
    lines = {(p.file, p.start): found[k] for k, p in enumerate(counted)}
    numbered: list[Part] = []
    for part in parts:
        before = numbered[-1] if numbered else None
        if before is not None and before.file == part.file:
            part = replace(part, first_line=before.first_line + lines[part.file, before.start])
        numbered.append(part)
    return numbered
