"""`headrace generate`: days of a click log as landing files.

`write_file` writes any one file of a day, on a thread of this process or as a task of Spark: the bytes are equal. One
rename publishes the whole day.
"""

from __future__ import annotations

import functools
import logging
import operator
import os
import struct
import time
import uuid
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import date, timedelta
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from headrace.compute.counter_random import Ints, stream
from headrace.config import Spark, Spec, parse_ds
from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.lake.generate.click_model import ClickModel, events, purchases
from headrace.lake.generate.event_lines import (
    Format,
    duplicate_sources,
    header,
    lines,
    malformed_kind,
    malformed_lines,
    values,
)
from headrace.lake.generate.population import alive
from headrace.lake.generate.truth import EXACT_ROWS, DayTruth, GeneratedFile, Tally, summarise, tally
from headrace.stage import run_lock
from headrace.stage.manifest import fingerprint
from headrace.storage import Location

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger("headrace.generate")

#: Most rows of a file, which one task makes in memory (about 1 KB a row at the peak).
MAX_FILE_ROWS = 500_000
#: A fast level: level 6 takes four times as long as all other work, for files smaller by a fifth.
_GZIP_LEVEL = 1
_WBITS_GZIP = 31

#: NumPy, Arrow and zlib release Python's lock, so threads share the cores; more threads hold more files in memory.
_THREADS = 4
_POLL_SECONDS = 1.0
_LOG_SECONDS = 10.0
#: Increase it when the same parameters give other bytes: days of older code are then written again.
VERSION = 1
#: More rows a day than this are written by Spark unless the caller says otherwise.
SPARK_ROWS = 2_000_000
#: Approximate bytes of a compressed landing line, to refuse days that the disk cannot hold.
_BYTES_PER_LINE = 110


@dataclass(frozen=True)
class DayPlan:
    """Parameters of one day's files: small enough to send to every task."""

    model: ClickModel
    ds: str
    start: date
    #: Days since the first day.
    number: int

    @property
    def rows(self) -> int:
        return self.model.params.rows_per_day

    @property
    def files(self) -> int:
        return min(self.rows, max(self.model.params.files_per_day, -(-self.rows // MAX_FILE_ROWS)))

    @property
    def duplicates(self) -> int:
        return round(self.rows * self.model.params.duplicates)

    @property
    def malformed(self) -> int:
        return round(self.rows * self.model.params.malformed)

    def format(self, file: int) -> Format:
        formats = self.model.params.formats
        return formats[file % len(formats)]

    def file_name(self, file: int) -> str:
        return f"part-{file:04d}.{'json' if self.format(file) == 'jsonl' else 'csv'}.gz"


def write_file(day: DayPlan, file: int, folder: Location) -> Tally:
    """Write file number `file` of a day into `folder`.

    Its bytes depend on (day, file) alone, so a task that runs twice does no harm. Good rows, duplicates and malformed
    lines are each divided among the files in ranges, and are shuffled within a file.
    """
    model, fmt = day.model, day.format(file)
    row = _share(day.rows, file, day.files)
    twice = _share(day.duplicates, file, day.files)
    bad = _share(day.malformed, file, day.files)
    good = events(model, np.full(len(row), day.number), row)
    first_day, first_row = duplicate_sources(model, day.number, twice, day.rows)
    repeated = events(model, first_day, first_row)
    bought = purchases(model, good)
    columns = values(good, day.start, fmt, bought)
    all_lines = pa.concat_arrays(
        [
            lines(columns, fmt),
            lines(values(repeated, day.start, fmt, purchases(model, repeated)), fmt),
            malformed_lines(model, day.start, day.number, bad, fmt),
        ]
    )
    order = np.random.default_rng([stream(model.params.seed, "order"), day.number, file]).permutation(len(all_lines))
    written = write_gzip(folder / day.file_name(file), header(columns, fmt), all_lines.take(pa.array(order)))
    n_day_before = int((first_day < day.number).sum())
    return tally(
        good,
        bought,
        model.late_days,
        same_day=len(twice) - n_day_before,
        day_before=n_day_before,
        malformed_kinds=malformed_kind(model, day.number, bad),
        exact=day.rows <= EXACT_ROWS,
        file=written,
    )


def _share(total: int, part: int, parts: int) -> Ints:
    """Return the numbers of 0..total-1 that belong to one of the parts: int64."""
    return np.arange(total * part // parts, total * (part + 1) // parts)


def write_gzip(path: Location, first: str, all_lines: pa.StringArray) -> GeneratedFile:
    """Write one gzip member with no name and time 0 (RFC 1952), so that equal lines are equal bytes."""
    assert all_lines.offset == 0
    _, offsets, data = all_lines.buffers()
    end = int(np.frombuffer(offsets, dtype=np.int32)[len(all_lines)]) if len(all_lines) else 0
    body = memoryview(data)[:end] if end else b""
    packer = zlib.compressobj(_GZIP_LEVEL, zlib.DEFLATED, _WBITS_GZIP)
    with path.new_file() as partial, open(partial, "wb") as f:
        f.write(packer.compress(first.encode()))
        f.write(packer.compress(body))
        f.write(packer.flush())
        size = f.tell()
    return GeneratedFile(
        name=path.name, lines=len(all_lines), bytes=size, crc32=zlib.crc32(body, zlib.crc32(first.encode()))
    )


def truth_path(landing: Location, ds: str) -> Location:
    """Return the path of a day's truth, below the pipeline's landing folder."""
    return landing / "truth" / f"{ds}.json"


def publish_truth(landing: Location, truth: DayTruth) -> None:
    """Write the truth of a day, just before its folder appears.

    A run that is killed in between leaves a truth without its day, or with an older day. `stale_reason` notices that,
    and the next run writes the day again.
    """
    truth_path(landing, truth.ds).put_text(truth.model_dump_json(indent=1) + "\n")


def stale_reason(
    landing: Location, ds: str, key: str, parameters: dict[str, object]
) -> tuple[str | None, DayTruth | None]:
    """Return why a day must be written, None if these parameters have written it; and its truth file, if any."""
    folder = landing / ds
    truth = DayTruth.load(truth_path(landing, ds))
    if not folder.is_dir():
        return "does not exist yet", truth
    if truth is None:
        return "its truth file is missing or of another version", None
    if truth.key != key:
        return _changes(truth.parameters, parameters), truth
    names = {f.name for f in truth.files}
    for extra in (p.name for p in folder.entries() if p.name.endswith(".gz") and p.name not in names):
        return f"{folder / extra} does not belong to it", truth
    for file in truth.files:
        if not _intact(folder / file.name, file):
            return f"{folder / file.name} is gone or damaged", truth
    return None, truth


def _changes(old: dict[str, object], new: dict[str, object]) -> str:
    names = sorted(name for name in {*old, *new} if old.get(name) != new.get(name))
    changes = ", ".join(f"{name} {old.get(name)} -> {new.get(name)}" for name in names)
    return f"its parameters have changed ({changes})" if changes else "it was made by another version of the generator"


def _intact(path: Location, file: GeneratedFile) -> bool:
    """Return whether size and gzip's checksum match: a cheap check that tells any two generated files apart."""
    try:
        with path.open() as f:
            f.seek(-8, os.SEEK_END)
            (crc32,) = struct.unpack("<I", f.read(4))
        return path.size() == file.bytes and crc32 == file.crc32
    except OSError:
        return False


#: Function that writes all files of a day to a folder, reports how many exist, and returns the sum of their tallies.
Writer = Callable[[DayPlan, Location, Callable[[int], None]], Tally]


def write_locally(day: DayPlan, folder: Location, report: Callable[[int], None]) -> Tally:
    """Write a day's files on this process's threads (a `Writer`)."""
    tallies: dict[int, Tally] = {}
    last_logged = time.monotonic()
    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as pool:
        futures = {pool.submit(write_file, day, file, folder): file for file in range(day.files)}
        try:
            for future in as_completed(futures):
                tallies[futures[future]] = future.result()
                report(len(tallies))
                last_logged = _log_progress(day, len(tallies), last_logged)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return functools.reduce(operator.add, (tallies[file] for file in range(day.files)))


@contextmanager
def writer_on_spark(conf: Spark, ws: Workspace) -> Iterator[Writer]:
    """Yield a `Writer` with one Spark task per file; it uses an active session if there is one."""
    # Imported here, since a small day is written without Spark.
    from headrace.lake.spark.session import session

    with session(conf, ws, "headrace-generate") as spark:
        yield functools.partial(_write_on_spark, spark)


def _write_on_spark(spark: SparkSession, day: DayPlan, folder: Location, report: Callable[[int], None]) -> Tally:
    context, group = spark.sparkContext, f"generate-{uuid.uuid4().hex}"

    def job() -> Tally:
        # Set here, since a job group belongs to the thread that submits.
        context.setJobGroup(group, f"generate {day.ds}")
        files = context.parallelize(range(day.files), day.files)
        # By a tree, so that executors and not only the driver sum the histograms (2 MiB each).
        total: Tally = files.map(lambda file: write_file(day, file, folder)).treeReduce(operator.add)
        return total

    last_logged, seen = time.monotonic(), 0
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(job)
        try:
            while not future.done():
                time.sleep(_POLL_SECONDS)
                # Only finished files are listed.
                if (count := sum(1 for p in folder.entries() if p.name.startswith("part-"))) != seen:
                    seen = count
                    report(seen)
                last_logged = _log_progress(day, seen, last_logged)
        except BaseException:
            context.cancelJobGroup(group)
            raise
        return future.result()


def _log_progress(day: DayPlan, files: int, last_logged: float) -> float:
    """Log a line if the last one is long ago; return the time of the last one."""
    now = time.monotonic()
    if now - last_logged < _LOG_SECONDS:
        return last_logged
    log.info("%s: %d of %d files, %s rows", day.ds, files, day.files, f"{day.rows * files // day.files:,}")
    return now


@dataclass(frozen=True)
class GenerationProgress:
    """Progress of a call of `generate`, passed to its `progress` after each file and each day."""

    ds: str
    #: Number of finished days (written or existing), and of requested days.
    days_done: int
    days: int
    #: Files of this day.
    files_done: int
    files: int
    #: Good rows that this call has written.
    rows_done: int


def days_between(start: str, end: str) -> list[str]:
    """List all days from start to end, both included, as YYYY-MM-DD.

    Raises:
        UserError: one is not a date, or the end is before the start.
    """
    first, last = date.fromisoformat(parse_ds(start)), date.fromisoformat(parse_ds(end))
    if last < first:
        raise UserError(f"the last day {end} is before the first day {start}")
    return [(first + timedelta(days=d)).isoformat() for d in range((last - first).days + 1)]


def generate(
    spec: Spec,
    ws: Workspace,
    days: Sequence[str],
    *,
    force: bool = False,
    spark: bool | None = None,
    progress: Callable[[GenerationProgress], None] | None = None,
) -> list[DayTruth]:
    """Write the landing files and truth files of days, unless they exist with these parameters.

    A day's bytes depend only on seed, parameters and day: not on the requested days, their order, or the writer. About
    a quarter of a day's duplicates repeat events that landed the day before, by the same parameters.

    Args:
        spec: a pipeline with a `generate` section; `table.late_days` bounds how late events are.
        ws: writes `landing/<pipeline>/<ds>/part-NNNN.(json|csv).gz` and `landing/<pipeline>/truth/<ds>.json` below its
            home. With Spark on a cluster, every executor must see that folder.
        days: YYYY-MM-DD, none before `generate.start`.
        force: whether to write existing days again.
        spark: whether Spark's tasks write the files; None: above 2,000,000 rows a day.
        progress: called in this thread after each file and day.

    Returns:
        a truth for each of `days`, in their order.

    Raises:
        UserError: the pipeline has no `generate` section, a day is no date or before the first day, the disk cannot
            hold the days, or another process is generating for this pipeline.
    """
    if spec.generate is None:
        raise UserError(f"pipeline '{spec.pipeline}' has no 'generate' section, so there is nothing to generate")
    model = ClickModel(spec.generate, spec.table.late_days)
    plans = [_day(model, ds) for ds in dict.fromkeys(parse_ds(ds) for ds in days)]
    parameters = {**spec.generate.model_dump(mode="json", exclude={"site"}), "late_days": model.late_days}
    key = fingerprint({"generator": VERSION, **parameters})
    by_spark = model.params.rows_per_day > SPARK_ROWS if spark is None else spark
    landing = ws.landing(spec.pipeline)
    truths: dict[str, DayTruth] = {}
    # The stack opens Spark at the first day that must be written, and closes it before the lock is released.
    with run_lock(ws, f"{spec.pipeline}-generate"), ExitStack() as stack:
        write: Writer | None = None
        rows_done = 0
        for done, day in enumerate(plans):
            reason, truth = stale_reason(landing, day.ds, key, parameters)
            if reason is None and truth is not None and not force:
                log.info("%s: %s rows exist already; nothing to do", day.ds, f"{truth.rows:,}")
                truths[day.ds] = truth
            else:
                if write is None:
                    _check_disk(ws, [d for d in plans if d.ds not in truths])
                    write = stack.enter_context(writer_on_spark(spec.spark, ws)) if by_spark else write_locally
                log.info(
                    "%s: %s; writing %s rows to %d files%s",
                    day.ds,
                    reason or "exists, but is made again (force)",
                    f"{day.rows:,}",
                    day.files,
                    " with Spark" if by_spark else "",
                )

                def report(files: int, day: DayPlan = day, done: int = done, rows: int = rows_done) -> None:
                    if progress:
                        rows += day.rows * files // day.files
                        progress(GenerationProgress(day.ds, done, len(plans), files, day.files, rows))

                with (landing / day.ds).new_folder() as folder:
                    truth = summarise(
                        day.ds, write(day, folder, report), _population(day), model.params.seed, parameters, key
                    )
                    publish_truth(landing, truth)
                truths[day.ds] = truth
                rows_done += truth.rows
                log.info(
                    "%s: %s rows in %s lines, %.1f MiB; best AUC %s",
                    day.ds,
                    f"{truth.rows:,}",
                    f"{truth.lines:,}",
                    sum(f.bytes for f in truth.files) / 2**20,
                    "unknown (one class only)" if truth.auc_ceiling is None else f"{truth.auc_ceiling:.4f}",
                )
            if progress:
                progress(GenerationProgress(day.ds, done + 1, len(plans), day.files, day.files, rows_done))
    return [truths[parse_ds(ds)] for ds in days]


def _day(model: ClickModel, ds: str) -> DayPlan:
    start = date.fromisoformat(model.params.start)
    number = (date.fromisoformat(ds) - start).days
    if number < 0:
        raise UserError(
            f"{ds} is before the log's first day, {model.params.start} (generate.start): ask for later days, "
            f"or start the log earlier with --set generate.start={ds}"
        )
    return DayPlan(model, ds, start, number)


def _population(day: DayPlan) -> dict[str, int]:
    params = day.model.params
    counts: dict[str, int] = {}
    for name, first, growth in (("users", params.users, params.new_users), ("items", params.items, params.new_items)):
        now = alive(first, growth, day.number)
        counts[name] = now
        counts[f"new_{name}"] = now - alive(first, growth, day.number - 1) if day.number else now
    return counts


def _check_disk(ws: Workspace, days: Sequence[DayPlan]) -> None:
    """Refuse days that do not fit, before hours of work.

    Raises:
        UserError: the file system of the workspace has less room than the days take, roughly.
    """
    needed = sum((d.rows + d.duplicates + d.malformed) * _BYTES_PER_LINE for d in days)
    free = ws.lake.free()
    if free is not None and needed > free:
        raise UserError(
            f"{len(days)} days of {days[0].rows:,} rows need about {needed / 2**30:.1f} GiB below {ws.lake}, which has "
            f"{free / 2**30:.1f} GiB free: lower generate.rows_per_day, ask for fewer days, or choose another --home"
        )
