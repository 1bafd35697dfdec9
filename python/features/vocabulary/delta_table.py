"""Vocabularies that only grow: a Delta table of (name, value) -> code, codes given once and never changed."""

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
from headrace.features.vocabulary.codes import VocabularyRule, give_codes
from headrace.features.vocabulary.keyed_tables import Pieces, VocabularyWriter, write_table
from headrace.features.vocabulary.lookup import FileLookup, Lookup
from headrace.features.vocabulary.restoration import SavedCopies, damage_of, lost_rows, put_back
from headrace.lake.delta.data_files import data_file
from headrace.lake.delta.log import DataFile, DeltaLog, check_files
from headrace.lake.delta.transaction import TransactionOvertaken
from headrace.lake.delta.with_spark import append
from headrace.lake.spark.exchange import streamed
from headrace.lake.spark.session import driver_python_bytes
from headrace.storage import Fence, Location
from headrace.udfs.arrow import xxhash64_strings

_LOG = logging.getLogger("headrace.features")

#: The Delta table.
_ROWS = pa.schema(
    [
        ("name", pa.string()),
        ("value", pa.string()),
        ("code", pa.int64()),
        ("count", pa.int64()),
        ("added_ds", pa.string()),
    ]
)
#: Of a data file at most: rows, and bytes of their values.
_ROWS_A_FILE, _BYTES_A_FILE = 2_000_000, 64 << 20
#: Vocabularies that are given codes at once.
_THREADS = 4
#: What giving a code takes of this process, of each value, known or counted: bytes beside its text, and how many times
#: its text.
_VALUE_BYTES, _TEXTS = 80, 6
#: Bytes of all texts, of which Arrow's columns have 2 GiB at most.
MOST_TEXT_IN_DRIVER = 3 << 29
#: Commits that may come in between before a run gives up.
_ATTEMPTS = 5
#: In the table's log, Delta keeps the last version that an application wrote by its name.
_APPLICATION = "headrace-vocabulary"

T = TypeVar("T")


class CodesOvertaken(UserError):
    """Another run gave codes between this one's read and its commit, so nothing was committed: fit again."""


def again_if_overtaken(work: Callable[[], T]) -> T:
    """Work that gives codes, done again where another run came in between.

    Raises:
        CodesOvertaken: it did so every time.
    """
    for _ in range(_ATTEMPTS - 1):
        try:
            return work()
        except CodesOvertaken as e:
            _LOG.warning("%s: fitting again", e)
    return work()


class VocabularyTable:
    """All vocabularies of a pipeline in one append-only Delta table (name, value, code, count, added_ds).

    Codes start at 2 (behind the out-of-vocabulary buckets, if there are more than one) and have no gaps in the table;
    new ones go on where the highest ended, in order of (first day seen, count, most first, value). All that one fit
    adds is one commit. Repeating a fit adds nothing, since its values are there: a run that was killed after the commit
    heals by itself. The commit is refused where the table has got codes since it was read, by a run on another machine
    that does not see this one's lock; then codes are given anew.

    What a fit of day `ds` sees is the values added by fits up to `ds`, and those it counted itself: it learns nothing
    from the days after it. A day that is made again sees what it saw if it is read at the version that it left, which
    its manifest names: an older day may have been made since, and have added values of its own.
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
        """Open it.

        Args:
            spark: the session.
            path: of the table.
            ds: the day that is fitted.
            version: that a finished fit of the same rows left; then nothing is added. None: the newest.
            scratch: a local folder for vocabularies that are too large for this process, as long as the table is used.
                None: one for temporary files.
            fence: of the holder of the lease under which the table is written.
            copies: where rows that are damaged or gone can be read; None: damage is refused.
        """
        self._copies = copies
        self._scratch = scratch
        #: Of counted values that were given as a table, for Spark.
        self._counts: TemporaryDirectory[str] | None = None
        self._spark, self._path, self._ds, self._pinned, self._fence = spark, path, ds, version, fence
        #: The last version that `_APPLICATION` had written when the table was read.
        self._written = -1
        #: The table's version that the last `update` read, or made.
        self.version: int | None = None
        #: Values in each vocabulary that were added by this day's fits.
        self.added: dict[str, int] = {}
        self._pool: ThreadPoolExecutor | None = None
        self._pending: Future[None] | None = None

    def update(
        self, counts: DataFrame | pa.Table, rules: Mapping[str, VocabularyRule]
    ) -> Mapping[str, pa.Table | Lookup]:
        """See `headrace.features.vocabulary.codes.Vocabularies.update`.

        Codes are given out here, in Arrow; where a frame and the table have more values than this process may hold
        (`spark.driver_python_mib`), or more text than Arrow, by Spark, and this process sees them go by on their way to
        files.

        Raises:
            UserError: the table holds a code or a value twice, a vocabulary began with other buckets, the pinned
                version is gone, or the table is damaged and nothing else has its codes.
            CodesOvertaken: other runs came in between every time; in the background, the first time (see `wait`).
        """
        if self._copies is not None:
            self._restore(self._copies, counts, rules)
        rows, size = self._known_size()
        if isinstance(counts, pa.Table):
            # Who gives a table has the memory for its values.
            if counts.column("value").nbytes + size <= MOST_TEXT_IN_DRIVER:
                return self._updated(lambda: self._update(counts, rules))
            frame = self._frame_of(counts)
        else:
            frame = counts
            counted = counts.agg(F.count("value"), F.sum(F.octet_length("value"))).first()
            assert counted is not None
            rows, size = rows + counted[0], size + (counted[1] or 0)
            taken = rows * _VALUE_BYTES + size * _TEXTS
            if taken <= driver_python_bytes(self._spark) and size <= MOST_TEXT_IN_DRIVER:
                values = counts.toArrow()
                return self._updated(lambda: self._update(values, rules))
        return self._updated(lambda: self._update_by_spark(frame, rules))

    def _updated(self, work: Callable[[], T]) -> T:
        return again_if_overtaken(work) if self._pool is None else work()

    def _restore(self, copies: SavedCopies, counts: DataFrame | pa.Table, rules: Mapping[str, VocabularyRule]) -> None:
        """Make again what a power cut or a bad disk took of the table. The counts of other days' values are null."""
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
            put_back(damage, _with_counts(rows, counts, self._spark, self._ds), self._fence)
        elif rows.num_rows:
            self._open()
            self._append(_with_counts(rows, counts, self._spark, self._ds))

    def _update(self, counted: pa.Table, rules: Mapping[str, VocabularyRule]) -> dict[str, pa.Table]:
        stored = self._read()

        def assign(name: str) -> tuple[pa.Table, pa.Table, int]:
            """(rows to append, value and code of all that this day sees, how many of them are this day's)."""
            counted_values, known = _named(counted, name), _named(stored, name)
            _check_unique(name, known, str(self._path))
            new = give_codes(name, counted_values, known, rules[name])
            if self._pinned is not None:
                # A value that got no code then gets none now.
                new = new.slice(0, 0)
            # Known before this day, or counted now (a later day may have given the code).
            seen = known.filter(
                pc.or_(
                    pc.less_equal(known.column("added_ds"), self._ds),
                    pc.is_in(known.column("value"), counted_values.column("value")),
                )
            )
            parts = [t.select(["value", "code"]).cast(lookup.SCHEMA) for t in (seen, new)]
            # A rerun finds its own values there; they are this day's all the same.
            earlier_count = int(pc.sum(pc.equal(known.column("added_ds"), self._ds)).as_py() or 0)
            # New codes go on after the known ones, and are in order.
            vocabulary = pa.concat_tables([parts[0].sort_by("code"), parts[1]]).combine_chunks()
            return _rows(name, new, self._ds), vocabulary, earlier_count + new.num_rows

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
        """`_update` where no process holds all values: the same codes, the same rows, the same files of them."""
        known = self._known_frame().where(F.col("name").isin(list(rules)))
        self._check_unique_frame(known)
        scratch, pinned = self._new_folder(), self._pinned is not None
        folder = Path(scratch.name)
        from headrace.features.vocabulary.frame_codes import codes_of

        with codes_of(counted, known, rules, self._ds, pinned=pinned) as codes:
            written = VocabularyWriter(folder, list(rules), self._data_file, _ROWS_A_FILE, _BYTES_A_FILE)
            for batch in streamed(codes.rows):
                written.add(batch)
            files, adds = written.finish()
        # They live as long as who looks into them.
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
        """Return counted values as a frame: of a file, for which the JVM needs no memory."""
        self._counts = self._new_folder()
        path = Path(self._counts.name) / "counts.parquet"
        # Of long values a row group has few rows: Spark holds up to 4,096 of them at once, in 2 GiB at most.
        write_table(counts, path, "value")
        return self._spark.read.parquet(str(path))

    def _data_file(self, rows: pa.Table) -> dict[str, Any]:
        """Return new values (name, value, code, count) as a data file of the table, not committed yet."""
        return data_file(self._path, rows.append_column("added_ds", pa.repeat(self._ds, rows.num_rows)).cast(_ROWS))

    def _known_size(self) -> tuple[int, int]:
        """(rows, bytes of their values) of the version that is read."""
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
        """Return all rows of `version` as Delta reads them: where not every row of the files is there any more."""
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
        """Until what `update` added is committed and `version` is its version. Raises what went wrong there.

        Raises:
            CodesOvertaken: the codes that `update` returned are not those of the table; give them again.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _read(self) -> pa.Table:
        files = self._open()
        if files is not None:
            # Without a Spark job: a day's fit is short.
            tables = [pq.ParquetFile(f.path).read(_ROWS.names).cast(_ROWS) for f in files]
            return pa.concat_tables(tables) if tables else _ROWS.empty_table()
        return self._delta_frame().toArrow().cast(_ROWS)

    def _open(self) -> list[DataFile] | None:
        """Return the data files of the version that is read, which is `version` then; None: Spark must read it."""
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
        """One commit of data files. (There is none where there is nothing to add to a table that is there.)

        Raises:
            CodesOvertaken: the table has got codes since `version`.
        """
        # An append alone conflicts with nothing. One that is a version of an application does: it is refused where
        # another one's commit, or a removal of rows, came after the version that was read.
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
    pieces = Pieces(rows.schema, "value", _ROWS_A_FILE, _BYTES_A_FILE)
    yield from pieces.add(rows)
    if (rest := pieces.rest()).num_rows:
        yield rest


def _with_counts(lost: pa.Table, counts: DataFrame | pa.Table, spark: SparkSession, ds: str) -> pa.Table:
    """Return lost rows (name, value, code, added_ds) as rows of the table; of day `ds` with what was counted now."""
    keys = ["name", "value"]
    if not isinstance(counts, pa.Table):
        counts = counts.join(F.broadcast(spark.createDataFrame(lost.select(keys))), keys).toArrow()
    counted = counts.select([*keys, "count"]).cast(pa.schema([_ROWS.field(n) for n in (*keys, "count")]))
    rows = lost.join(counted, keys, join_type="left outer").sort_by([("name", "ascending"), ("code", "ascending")])
    of_day = pc.equal(rows.column("added_ds"), ds)
    count = pc.if_else(of_day, rows.column("count"), pa.scalar(None, pa.int64()))
    return rows.set_column(rows.schema.get_field_index("count"), "count", count).select(_ROWS.names).cast(_ROWS)


def _named(table: pa.Table, name: str) -> pa.Table:
    return table.filter(pc.equal(table.column("name"), name))


def _check_unique(name: str, known: pa.Table, path: str) -> None:
    """Raise UserError where a vocabulary's table has a code or a value twice."""
    # A set of texts takes a second a million, so their hashes are looked at first.
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


def _rows(name: str, new: pa.Table, ds: str) -> pa.Table:
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
