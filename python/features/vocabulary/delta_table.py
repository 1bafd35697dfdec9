"""Vocabularies that only grow: a Delta table of (name, value) -> code, in which no code ever changes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from headrace.compute import pc
from headrace.dataset.layout import column_bytes
from headrace.errors import UserError
from headrace.features.vocabulary import lookup
from headrace.features.vocabulary.codes import VocabularyRule, assign_codes
from headrace.features.vocabulary.keyed_tables import Pieces, VocabularyWriter, write_table
from headrace.features.vocabulary.lookup import FileLookup, Lookup
from headrace.features.vocabulary.restoration import SavedCopies, damage_of, lost_rows, restore_rows
from headrace.lake.delta.data_files import data_file
from headrace.lake.delta.log import DataFile, DeltaLog, check_files
from headrace.lake.delta.transaction import TransactionOvertaken
from headrace.lake.delta.with_spark import append
from headrace.lake.spark.exchange import streamed
from headrace.lake.spark.session import driver_python_bytes
from headrace.storage import Fence, Location
from headrace.udfs.arrow import xxhash64_strings

_LOG = logging.getLogger("headrace.features")

#: Schema of the Delta table.
_ROWS = pa.schema(
    [
        ("name", pa.string()),
        ("value", pa.string()),
        ("code", pa.int64()),
        ("count", pa.int64()),
        ("added_ds", pa.string()),
    ]
)
#: Most rows of a data file, and most bytes of their values.
_FILE_ROWS, _FILE_BYTES = 2_000_000, 64 << 20
#: Vocabularies whose codes are assigned at the same time.
_THREADS = 4
#: Memory of this process for each value, known or counted, while codes are assigned: a fixed number of bytes, and so
#: many times the bytes of its text.
_VALUE_BYTES, _TEXTS = 80, 6
#: Most bytes of text that this process assigns codes to; a column of Arrow holds 2 GiB.
MOST_TEXT_IN_DRIVER = 3 << 29
#: Commits of other runs after which a run gives up.
_ATTEMPTS = 5
#: Name of the application in the table's log, with which Delta records the last version that it wrote.
_APPLICATION = "headrace-vocabulary"

T = TypeVar("T")


class CodesOvertaken(UserError):
    """Another run committed codes between this run's read and its commit. Nothing was committed: fit again."""


def retry_if_overtaken(work: Callable[[], T]) -> T:
    """Return the result of work that assigns codes; repeat it where another run has committed codes meanwhile.

    Raises:
        CodesOvertaken: other runs committed codes during every attempt.
    """
    for _ in range(_ATTEMPTS - 1):
        try:
            return work()
        except CodesOvertaken as e:
            _LOG.warning("%s: fitting again", e)
    return work()


class VocabularyTable:
    """All vocabularies of a pipeline in one append-only Delta table (name, value, code, count, added_ds).

    Codes start at 2 (or after the out-of-vocabulary buckets, if there are several) and have no gaps. New codes follow
    the highest, in order of first day, count (descending) and value. One fit is one commit. A fit that is repeated adds
    nothing, since its values are present; so a run that was killed after its commit needs no repair. The commit is
    refused if another run, on a machine that does not see this lock, has added codes since the table was read. Codes
    are then assigned again.

    A fit of day `ds` sees the values that fits up to `ds` have added and those that it counted itself, none of later
    days. To fit a day again with the same result, read the version that its manifest names: an older day may have been
    fitted since, and have added values of its own.
    """

    def __init__(
        self,
        spark: SparkSession,
        path: Location,
        ds: str,
        version: int | None = None,
        scratch: Location | None = None,
        fence: Fence | None = None,
        copies: SavedCopies | None = None,
    ) -> None:
        """Open the table.

        Args:
            spark: the session.
            path: the table's folder.
            ds: the day that is fitted.
            version: the version after a finished fit of the same rows; then nothing is added. None: the newest.
            scratch: a local folder for vocabularies that are too large for this process, as long as the table is used.
                None: a temporary folder.
            fence: the fencing token of the lease under which the table is written.
            copies: copies of the codes, from which damaged rows are restored; None: damage is refused.
        """
        self._copies = copies
        self._scratch = scratch
        #: Folder of the counted values, where they came as a table and Spark assigns the codes.
        self._counts: TemporaryDirectory[str] | None = None
        self._spark, self._path, self._ds, self._pinned, self._fence = spark, path, ds, version, fence
        #: The last version that `_APPLICATION` had written when the table was read.
        self._written = -1
        #: The version that the last `update` read or committed.
        self.version: int | None = None
        #: Number of values that fits of this day have added, by vocabulary.
        self.added: dict[str, int] = {}
        self._pool: ThreadPoolExecutor | None = None
        self._pending: Future[None] | None = None

    def update(
        self, counts: DataFrame | pa.Table, rules: Mapping[str, VocabularyRule]
    ) -> Mapping[str, pa.Table | Lookup]:
        """See `headrace.features.vocabulary.codes.Vocabularies.update`.

        Arrow assigns the codes in this process. Spark assigns them where a frame and the table have more values than
        this process may hold (`spark.driver_python_mib`), or more text than an Arrow column; this process then streams
        them to files.

        Raises:
            UserError: the table holds a code or a value twice, a vocabulary began with another number of buckets, the
                pinned version is missing, or the table is damaged and nothing else has its codes.
            CodesOvertaken: other runs committed codes during every attempt; in the background, during the first one
                (see `wait`).
        """
        if self._copies is not None:
            self._restore(self._copies, counts, rules)
        rows, size = self._known_size()
        if isinstance(counts, pa.Table):
            # The caller holds the table, so this process has the memory for its values.
            if counts.column("value").nbytes + size <= MOST_TEXT_IN_DRIVER:
                return self._retried(lambda: self._update(counts, rules))
            frame = self._frame_of(counts)
        else:
            frame = counts
            counted = counts.agg(F.count("value"), F.sum(F.octet_length("value"))).first()
            assert counted is not None
            rows, size = rows + counted[0], size + (counted[1] or 0)
            taken = rows * _VALUE_BYTES + size * _TEXTS
            if taken <= driver_python_bytes(self._spark) and size <= MOST_TEXT_IN_DRIVER:
                values = counts.toArrow()
                return self._retried(lambda: self._update(values, rules))
        return self._retried(lambda: self._update_by_spark(frame, rules))

    def _retried(self, work: Callable[[], T]) -> T:
        return retry_if_overtaken(work) if self._pool is None else work()

    def _restore(self, copies: SavedCopies, counts: DataFrame | pa.Table, rules: Mapping[str, VocabularyRule]) -> None:
        """Restore rows that a power cut or a bad disk has damaged. The counts of other days' values are null."""
        named = max((v for v in (copies.version, self._pinned) if v is not None), default=None)
        damage = damage_of(self._path, self._pinned, named)
        if damage is None:
            return
        rows = lost_rows(damage, copies, {name: rule.first_code for name, rule in rules.items()})
        is_complete = damage.rows == rows.num_rows
        _LOG.warning(
            "%s: %s codes are put back into %s from datasets and models%s",
            damage.reason,
            f"{rows.num_rows:,}",
            self._path,
            "" if is_complete else "; what none of them has is given again",
        )
        if not is_complete:
            self._pinned = None
        if damage.adds:
            restore_rows(damage, _with_counts(rows, counts, self._spark, self._ds), self._fence)
        elif rows.num_rows:
            self._open()
            self._append(_with_counts(rows, counts, self._spark, self._ds))

    def _update(self, counted: pa.Table, rules: Mapping[str, VocabularyRule]) -> dict[str, pa.Table]:
        stored = self._read()

        def assign(name: str) -> tuple[pa.Table, pa.Table, int]:
            """Return the rows to append, (value, code) of all values of this day, and how many this day has added."""
            counted_values, known = _rows_of(counted, name), _rows_of(stored, name)
            _check_unique(name, known, str(self._path))
            new = assign_codes(name, counted_values, known, rules[name])
            if self._pinned is not None:
                # A value without a code in the pinned version gets none now.
                new = new.slice(0, 0)
            # Known before this day, or counted now (a later day may have given the code).
            seen = known.filter(
                pc.or_(
                    pc.less_equal(known.column("added_ds"), self._ds),
                    pc.is_in(known.column("value"), counted_values.column("value")),
                )
            )
            parts = [t.select(["value", "code"]).cast(lookup.SCHEMA) for t in (seen, new)]
            # Values that an earlier run of this day has added count as this day's.
            earlier_count = int(pc.sum(pc.equal(known.column("added_ds"), self._ds)).as_py() or 0)
            # New codes go on after the known ones, and are in order.
            vocabulary = pa.concat_tables([parts[0].sort_by("code"), parts[1]]).combine_chunks()
            return _table_rows(name, new, self._ds), vocabulary, earlier_count + new.num_rows

        pinned, appended = {}, []
        # Ordering a million texts takes a second; Arrow does it without Python's lock.
        with ThreadPoolExecutor(_THREADS) as pool:
            for name, (new, vocabulary, added) in zip(rules, pool.map(assign, rules), strict=True):
                appended.append(new)
                pinned[name], self.added[name] = vocabulary, added
                _LOG.info("vocabulary %s: %s values, %s new", name, f"{vocabulary.num_rows:,}", f"{added:,}")
        rows = pa.concat_tables(appended)
        if self._pinned is not None:
            return pinned
        if self._pool is None:
            self._append(rows)
        else:
            self._pending = self._pool.submit(self._append, rows)
        return pinned

    def _update_by_spark(self, counted: DataFrame, rules: Mapping[str, VocabularyRule]) -> Mapping[str, Lookup]:
        """Update by Spark, for more values than one process holds: the same codes, rows and data files as `_update`."""
        known = self._known_frame().where(F.col("name").isin(list(rules)))
        self._check_unique_frame(known)
        scratch, pinned = self._new_folder(), self._pinned is not None
        folder = Path(scratch.name)
        from headrace.features.vocabulary.frame_codes import codes_of

        with codes_of(counted, known, rules, self._ds, pinned=pinned) as codes:
            written = VocabularyWriter(folder, list(rules), self._data_file, _FILE_ROWS, _FILE_BYTES)
            for batch in streamed(codes.rows):
                written.add(batch)
            files, adds = written.finish()
        # Each lookup refers to the folder, which is removed with the last of them.
        lookups = {name: FileLookup(path, scratch) for name, path in files.items()}
        for name in rules:
            self.added[name] = codes.earlier.get(name, 0) + written.new.get(name, 0)
            _LOG.info("vocabulary %s: %s values, %s new", name, f"{len(lookups[name]):,}", f"{self.added[name]:,}")
        if pinned:
            return lookups
        if self._pool is None:
            self._append_files(adds)
        else:
            self._pending = self._pool.submit(self._append_files, adds)
        return lookups

    def _new_folder(self) -> TemporaryDirectory[str]:
        if self._scratch is not None:
            self._scratch.make_dir()
        scratch = None if self._scratch is None else str(self._scratch.local_path())
        return TemporaryDirectory(prefix="vocabulary-", dir=scratch)

    def _frame_of(self, counts: pa.Table) -> DataFrame:
        """Return counted values as a frame that reads a file, so that the JVM does not hold them."""
        self._counts = self._new_folder()
        path = Path(self._counts.name) / "counts.parquet"
        # A row group of long values has few rows: Spark reads up to 4,096 rows at once, into 2 GiB at most.
        write_table(counts, path, "value")
        return self._spark.read.parquet(str(path))

    def _data_file(self, rows: pa.Table) -> dict[str, Any]:
        """Return new values (name, value, code, count) as a data file of the table, not committed yet."""
        return data_file(self._path, rows.append_column("added_ds", pa.repeat(self._ds, rows.num_rows)).cast(_ROWS))

    def _known_size(self) -> tuple[int, int]:
        """Return the number of rows in the version that is read, and the bytes of their values."""
        files = self._open()
        if files is None:
            totals = self._delta_frame().agg(F.count("value"), F.sum(F.octet_length("value"))).first()
            assert totals is not None
            return totals[0], totals[1] or 0
        footers = [pq.read_metadata(f.path) for f in files]
        return sum(f.num_rows for f in footers), sum(sum(column_bytes(f, "value")) for f in footers)

    def _known_frame(self) -> DataFrame:
        """Return all rows of the version that is read."""
        files = self._open()
        if files == []:
            return self._spark.createDataFrame(_ROWS.empty_table())
        if files is not None:
            return self._spark.read.parquet(*(f.path.spark_path for f in files)).select(_ROWS.names)
        return self._delta_frame()

    def _delta_frame(self) -> DataFrame:
        """Return all rows of `version` by Delta's reader, which leaves out rows that were deleted from its files."""
        table = self._spark.read.format("delta").option("versionAsOf", self.version).load(str(self._path))
        return table.select(_ROWS.names)

    def _check_unique_frame(self, known: DataFrame) -> None:
        for column in ("code", "value"):
            twice = known.groupBy("name", column).count().where(F.col("count") > 1).limit(1).collect()
            for row in twice:
                duplicates = known.where((F.col("name") == row["name"]) & (F.col(column) == row[column]))
                _check_unique(row["name"], duplicates.toArrow(), str(self._path))

    @contextmanager
    def in_background(self) -> Iterator[None]:
        """Let `update` commit in the background while its caller goes on.

        Call `wait` before anything that holds the codes becomes visible; leaving waits too.
        """
        with ThreadPoolExecutor(1) as pool:
            self._pool = pool
            try:
                yield
                self.wait()
            finally:
                self._pool = None

    def wait(self) -> None:
        """Wait until the rows of `update` are committed and `version` is that commit. Raises the commit's error.

        Raises:
            CodesOvertaken: another run has committed codes, so those that `update` returned are void; update again.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _read(self) -> pa.Table:
        files = self._open()
        if files is not None:
            # Read without a Spark job, which would take longer than a small day's fit.
            tables = [pq.ParquetFile(f.path).read(_ROWS.names).cast(_ROWS) for f in files]
            return pa.concat_tables(tables) if tables else _ROWS.empty_table()
        return self._delta_frame().toArrow().cast(_ROWS)

    def _open(self) -> list[DataFile] | None:
        """Set `version` to the version that is read, and return its data files; None: only Delta's reader can."""
        log = DeltaLog(self._path)
        self.version = log.version if self._pinned is None else self._pinned
        if self.version is None:
            return []
        written = log.application_version(_APPLICATION, self.version)
        self._written = -1 if written is None else written
        files = log.plain_files(self.version)
        if files is None and self._pinned is not None and log.files(self._pinned) is None:
            raise UserError(
                f"{self._path}: version {self._pinned}, with which the dataset of {self._ds} was made, is no longer "
                f"there, so the same dataset cannot be made again. Delete the day's features manifest to make another "
                f"from the vocabularies as they are"
            )
        check_files(self._path, (log.files(self.version) or ()) if files is None else files)
        return files

    def _append(self, rows: pa.Table) -> None:
        if self.version is None or rows.num_rows:
            self._commit(lambda: [data_file(self._path, piece) for piece in _pieces(rows)])

    def _append_files(self, adds: list[dict[str, Any]]) -> None:
        if self.version is None or adds:
            self._commit(lambda: adds)

    def _commit(self, files: Callable[[], list[dict[str, Any]]]) -> None:
        """Commit data files.

        Raises:
            CodesOvertaken: another run has added codes since `version`.
        """
        # A plain append conflicts with nothing. With an application's version it is refused if another such commit, or
        # a removal of rows, came after the version that was read.
        application, message = (_APPLICATION, self._written), f"headrace vocabulary of {self._ds}"
        try:
            self.version = append(
                self._spark, self._path, _ROWS, files, self.version, application, message, self._fence
            )
        except TransactionOvertaken as e:
            raise CodesOvertaken(
                f"another run added to the vocabularies {self._path} while those of {self._ds} were counted"
            ) from e


def _pieces(rows: pa.Table) -> Iterator[pa.Table]:
    """Yield new values by data file, as VocabularyWriter writes them."""
    pieces = Pieces(rows.schema, "value", _FILE_ROWS, _FILE_BYTES)
    yield from pieces.add(rows)
    if (rest := pieces.rest()).num_rows:
        yield rest


def _with_counts(lost: pa.Table, counts: DataFrame | pa.Table, spark: SparkSession, ds: str) -> pa.Table:
    """Return lost rows (name, value, code, added_ds) as rows of the table, those of day `ds` with today's counts."""
    keys = ["name", "value"]
    if not isinstance(counts, pa.Table):
        counts = counts.join(F.broadcast(spark.createDataFrame(lost.select(keys))), keys).toArrow()
    counted = counts.select([*keys, "count"]).cast(pa.schema([_ROWS.field(n) for n in (*keys, "count")]))
    rows = lost.join(counted, keys, join_type="left outer").sort_by([("name", "ascending"), ("code", "ascending")])
    of_day = pc.equal(rows.column("added_ds"), ds)
    count = pc.if_else(of_day, rows.column("count"), pa.scalar(None, pa.int64()))
    return rows.set_column(rows.schema.get_field_index("count"), "count", count).select(_ROWS.names).cast(_ROWS)


def _rows_of(table: pa.Table, name: str) -> pa.Table:
    return table.filter(pc.equal(table.column("name"), name))


def _check_unique(name: str, known: pa.Table, path: str) -> None:
    """Raise UserError where a vocabulary's table has a code or a value twice."""
    # Compare hashes first: a set of a million texts takes a second.
    hashes = {
        "code": known.column("code").to_numpy(),
        "value": xxhash64_strings(known.column("value").combine_chunks()),
    }
    for column, other_column in (("code", "value"), ("value", "code")):
        if len(np.unique(hashes[column])) == known.num_rows:
            continue
        counts = known.column(column).value_counts()
        twice = next((c["values"].as_py() for c in counts if c["counts"].as_py() > 1), None)
        if twice is None:
            continue
        rows = known.filter(pc.equal(known.column(column), twice)).select([other_column, "added_ds"]).to_pylist()
        places = " and ".join(f"{other_column} {r[other_column]!r} (added by the run of {r['added_ds']})" for r in rows)
        raise UserError(
            f"vocabulary '{name}' of {path} has {column} {twice!r} for {places}: two runs gave codes at once. Restore "
            f"the table to the version before the second of them (RESTORE TABLE ... TO VERSION AS OF ...), delete the "
            f"features manifests of the days after that, and run these days again"
        )


def _table_rows(name: str, new: pa.Table, ds: str) -> pa.Table:
    """Return new values as rows of the Delta table."""
    n = new.num_rows
    columns = {
        "name": pa.repeat(name, n),
        "value": new.column("value"),
        "code": new.column("code"),
        "count": new.column("count"),
        "added_ds": pa.repeat(ds, n),
    }
    return pa.table(columns).cast(_ROWS)
