"""An Iceberg table of a catalog of `spark.properties` as the warehouse: a day is one snapshot that replaces it.

Erased are rows of the newest snapshot, of live files with hidden rows, and of files of older snapshots. Snapshots
expire with the files that they alone have; killed anywhere, the next call completes it. Iceberg's own action commits
that snapshots are gone and deletes their files afterwards. Killed in between, it leaves files that no metadata name. So
their paths are recorded before, and this record is removed last. Iceberg's classes do this, because its SQL procedures
need an extension of Spark that a pipeline may be without.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, reduce
from operator import or_
from typing import TYPE_CHECKING, Any, NamedTuple

from py4j.java_gateway import is_instance_of
from py4j.protocol import Py4JJavaError

from headrace.config import Spec
from headrace.config.schema import quoted
from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.errors.translate import store_away
from headrace.lake.spark.session import session, spark_settings
from headrace.logs import redact
from headrace.publish.tables import iceberg_fencing
from headrace.publish.tables.iceberg_fencing import load_table
from headrace.publish.tables.spark_table import CLAIMED, SparkTableTarget
from headrace.publish.target import SCORES, Key, Target, table_name
from headrace.stage import RunLock
from headrace.storage import Location

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.types import DataType


#: Paths that are handed to the JVM at once.
_BATCH = 1000
_BULK = "org.apache.iceberg.io.SupportsBulkOperations"


class SnapshotExpiry:
    """All snapshots of a table but the newest, and those that branches or tags keep."""

    def __init__(self, spark: SparkSession, name: str, record: Location) -> None:
        """
        Args:
            spark: a session with the table's catalog.
            name: the table's, quoted.
            record: a file for the paths of what is to be deleted; there is one only until that is done.
        """
        self._spark, self._name, self._record = spark, name, record

    def pending(self) -> list[str]:
        """Files of snapshots that went, which a process that was killed may have left."""
        recorded = self._recorded()
        return sorted(recorded - self._reachable()) if recorded else []

    def run(self) -> str:
        """Let them go.

        Returns:
            what is left to be done by hand, if anything.
        """
        table = load_table(self._spark, self._name)
        newest = table.currentSnapshot()
        if newest is not None:
            if str(table.properties().get("gc.enabled")).lower() == "false":
                return (
                    f"{self._name} keeps its old snapshots, whose files other tables may share (its property "
                    f"gc.enabled is false): set it to true where they do not, and run the same command again"
                )
            old = self._reachable() - self._reachable(table)
            self._record.put_text(json.dumps(sorted(self._recorded() | old)) + "\n")
            self._expire(table, newest.timestampMillis() + 1)
        try:
            self._delete(table.io(), self.pending())
        except Py4JJavaError as e:
            if store_away(e) is not None:
                raise
            reason = redact(str(e.java_exception.getMessage()).split("\n", 1)[0])
            return (
                f"files of old snapshots of {self._name} cannot be deleted ({reason}): see that this host may delete "
                f"them, and run the same command again"
            )
        self._record.remove()
        return ""

    def _expire(self, table: Any, before_ms: int) -> None:
        expiry = table.expireSnapshots().expireOlderThan(before_ms).retainLast(1)
        expiry.cleanExpiredFiles(False).commit()

    def _delete(self, io: Any, paths: Sequence[str]) -> None:
        """Files that are gone already count as deleted."""
        for start in range(0, len(paths), _BATCH):
            some = list(paths[start : start + _BATCH])
            if is_instance_of(self._spark.sparkContext._gateway, io, _BULK):
                io.deleteFiles(some)
                continue
            for path in some:
                if io.newInputFile(path).exists():
                    io.deleteFile(path)

    def _recorded(self) -> set[str]:
        return set(json.loads(self._record.read_text())) if self._record.is_file() else set()

    def _reachable(self, of_newest: Any = None) -> set[str]:
        """Paths of all files that the table's snapshots have, or (given the table) its newest alone: data files,
        delete files, manifests, their lists, statistics.
        """
        table = load_table(self._spark, self._name) if of_newest is None else of_newest
        newest = None if of_newest is None else of_newest.currentSnapshot().snapshotId()
        every = "all_" if newest is None else ""
        condition = "" if newest is None else f" WHERE snapshot_id = {newest}"
        query = (
            f"SELECT file_path FROM {self._name}.{every}files "
            f"UNION ALL SELECT path FROM {self._name}.{every}manifests "
            f"UNION ALL SELECT manifest_list FROM {self._name}.snapshots{condition}"
        )
        paths = {str(row[0]) for row in self._spark.sql(query).collect()}
        for file in (*table.statisticsFiles(), *table.partitionStatisticsFiles()):
            if newest is None or file.snapshotId() == newest:
                paths.add(str(file.path()))
        return paths


def literal(value: Key) -> str:
    """Return a key as a literal."""
    if isinstance(value, int):
        return str(value)
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"


#: By path: the format of a file.
_Files = dict[str, str]
#: Contents of files: rows; values of rows that are deleted. (Others: positions of such.)
_DATA, _EQUALITY = 0, 2
#: Of a rewrite of all data files, after which delete files have nothing to hide and go.
_REWRITE = {"rewrite-all": "true", "use-starting-sequence-number": "false", "remove-dangling-deletes": "true"}
#: Of Spark, which finds columns of Parquet files by their ids then, and fails where a file has none.
_BY_ID = {"spark.sql.parquet.fieldId.read.enabled": "true", "spark.sql.parquet.fieldId.read.ignoreMissing": "false"}
_NO_IDS = "doesn't contain any field Ids"
#: Commits within which Iceberg drops delete files that hide nothing, and then the manifests that say so.
_EMPTY_COMMITS = 3


class _Entry(NamedTuple):
    path: str
    format: str
    content: int
    #: Whether the newest snapshot has it.
    is_live: bool


class IcebergErasure:
    """Rows with some values of a column."""

    def __init__(
        self,
        spark: SparkSession,
        name: str,
        column: str,
        keys: Sequence[Key],
        record: Location,
        change: Callable[[Callable[[str], None]], None],
    ) -> None:
        """
        Args:
            spark: a session with the table's catalog.
            name: the table's, quoted.
            column: of the values.
            keys: the values.
            record: see `SnapshotExpiry`.
            change: of the table, as `headrace.publish.tables.iceberg_fencing.change` makes it of what is written.
        """
        self._spark, self._name, self._column, self._keys, self._change = spark, name, column, keys, change
        self._expiry = SnapshotExpiry(spark, name, record)

    def files(self) -> int:
        """Files that have such rows where no reader of the table sees them, or that are to be deleted."""
        return self._having(self._unseen(of_newest=False)) + len(self._expiry.pending())

    def run(self) -> str:
        """Remove the rows, and what has them; may be killed, and done again.

        Returns:
            what is left to be done by hand, if anything.

        Raises:
            LeaseLost: a later holder has changed the table; the rows are as they were.
        """
        values = ", ".join(map(literal, self._keys))

        def delete(branch: str) -> None:
            self._spark.sql(f"DELETE FROM {branch} WHERE {quoted(self._column)} IN ({values})")

        self._change(delete)
        # From here on no row goes or comes: files are written again, and those that were read have to be there still.
        if self._having(self._unseen(of_newest=True)):
            self._rewrite()
        self._write_manifests()
        return self._expiry.run()

    def _unseen(self, of_newest: bool) -> _Files:
        """Files in which there can be rows that no reader of the table sees, or values of such.

        Those of older snapshots; and, where delete files hide rows of the newest one (merge-on-read), or a column of
        this name was dropped, all of its data files, and the delete files that have values.
        """
        selection = "SELECT file_path, file_format, content"
        query = f"{selection}, true FROM {self._name}.files"
        if not of_newest:
            query += f" UNION ALL {selection}, false FROM {self._name}.all_files"
        entries = {_Entry(*row) for row in self._spark.sql(query).collect()}
        live = {f.path for f in entries if f.is_live}
        hides = any(f.is_live and f.content != _DATA for f in entries) or len(self._columns()) > 1
        read = (f for f in entries if f.content in (_DATA, _EQUALITY))
        return {f.path: f.format for f in read if f.path not in live or hides}

    def _having(self, files: _Files) -> int:
        """Count the files that have such rows, deleted or not."""
        parquet = [path for path, kind in files.items() if kind == "PARQUET"]
        # Of another format than this table is made with nobody looks into: it may have some.
        return len(files) - len(parquet) + (self._parquet_having(parquet) if parquet else 0)

    def _parquet_having(self, paths: Sequence[str]) -> int:
        """Return the same of Parquet files.

        Where some have no field ids, as others wrote them, any of them may have some.
        """
        from py4j.protocol import Py4JJavaError
        from pyspark.errors import PySparkException
        from pyspark.sql import functions as F
        from pyspark.sql.types import StructField, StructType

        columns = self._columns()
        fields = [StructField(f"c{i}", t, True, {"parquet.field.id": i}) for i, t in columns.items()]
        texts = [str(key) for key in self._keys]
        # The column's own is compared as it is: Parquet's statistics tell which row groups have none.
        current, *dropped = (F.col(field.name) for field in fields)
        has = reduce(or_, (c.cast("string").isin(texts) for c in dropped), current.isin(list(self._keys)))
        with spark_settings(self._spark, _BY_ID):
            rows = self._spark.read.schema(StructType(fields)).parquet(*paths).where(has)
            try:
                return rows.select(F.input_file_name()).distinct().count()
            except (PySparkException, Py4JJavaError) as e:
                if _NO_IDS not in str(e):
                    raise
        return len(paths)

    def _columns(self) -> dict[int, DataType]:
        """Return the column's id and type; behind it, those of columns of this name that were dropped.

        Files know columns by their ids. Names there are others where they have special characters, or where the column
        was renamed since.
        """
        from pyspark.sql.types import StructType

        jvm = self._spark._jvm
        assert jvm is not None, "a session has one"
        table = load_table(self._spark, self._name)
        now = {column.fieldId() for column in table.schema().columns()}
        columns_by_id: dict[int, DataType] = {}
        for schema in (table.schema(), *table.schemas().values()):
            spark_schema = jvm.org.apache.iceberg.spark.SparkSchemaUtil.convert(schema)
            types = StructType.fromJson(json.loads(spark_schema.json()))
            for column in schema.columns():
                if column.name() == self._column and (not columns_by_id or column.fieldId() not in now):
                    columns_by_id.setdefault(int(column.fieldId()), types[self._column].dataType)
        return columns_by_id

    def _rewrite(self) -> None:
        jvm = self._spark._jvm
        assert jvm is not None, "a session has one"
        action = jvm.org.apache.iceberg.spark.actions.SparkActions.get(self._spark._jsparkSession)
        action = action.rewriteDataFiles(load_table(self._spark, self._name))
        for name, value in _REWRITE.items():
            action = action.option(name, value)
        action.execute()

    def _write_manifests(self) -> None:
        """Manifests name removed files with their smallest and largest values until they are written again."""
        table = load_table(self._spark, self._name)
        if table.currentSnapshot() is None:
            return
        for _ in range(_EMPTY_COMMITS):
            if not table.currentSnapshot().deleteManifests(table.io()):
                break
            table.newAppend().commit()
            table.refresh()
        jvm = self._spark._jvm
        assert jvm is not None, "a session has one"
        # All of them: Iceberg's action for Spark leaves one alone where there is but one.
        together = jvm.com.google.common.base.Functions.constant("all")
        table.rewriteManifests().clusterBy(together).commit()


class IcebergTarget(SparkTableTarget):
    """A table partitioned by `ds`."""

    def __init__(self, spec: Spec, ws: Workspace, catalog: str, schema: str, lock: RunLock | None = None) -> None:
        name = table_name(spec)
        label = f"{catalog}.{schema}.{name}"
        records = ws.store / "publications" / label
        super().__init__(spec, ws, "iceberg", label, f"catalog {catalog}", records, lock)
        #: Of erasures that have not ended: what snapshots that went have left. No file of a day (`Records`).
        self.expired = records / "expired"
        self.schema = f"{quoted(catalog)}.{quoted(schema)}"
        self.table, self.current = f"{self.schema}.{quoted(name)}", f"{self.schema}.{quoted(f'{name}_current')}"

    def claim(self) -> None:
        if self.fence is None:
            return
        with self._spark() as spark:
            for table in (self.current, self.table):
                # Where there is none yet, too: what stands still may be its first publication.
                self._make(spark, table, {"ds": "date"})
                iceberg_fencing.claim(spark, table, self.label, self.fence, self.check_lease)

    def create_table(self) -> None:
        kinds = {c: "date" if c == "ds" else self.types[t] for c, t in self.columns}
        with self._spark() as spark:
            self._make(spark, self.table, kinds)
            existing = spark.table(self.table).columns
            if existing != CLAIMED and (missing := [c for c, _ in self.columns[:SCORES] if c not in existing]):
                raise UserError(f"the Iceberg table {self.label} does not fit the scores: no {', '.join(missing)}")
            self._add_columns(spark, self.table, kinds)
            of_table = {f.name: f.dataType.simpleString() for f in spark.table(self.table).schema}
            self._make(spark, self.current, of_table)
            self._add_columns(spark, self.current, of_table)

    def _make(self, spark: SparkSession, table: str, kinds: Mapping[str, str]) -> None:
        spark.sql(f"CREATE NAMESPACE IF NOT EXISTS {self.schema}")
        defined = ", ".join(f"{quoted(c)} {t}" for c, t in kinds.items())
        days = " PARTITIONED BY (ds)" if table == self.table else ""
        spark.sql(f"CREATE TABLE IF NOT EXISTS {table} ({defined}) USING iceberg{days}")

    @staticmethod
    def _add_columns(spark: SparkSession, table: str, kinds: Mapping[str, str]) -> None:
        existing = spark.table(table).columns
        if added := [f"{quoted(c)} {t}" for c, t in kinds.items() if c not in existing]:
            spark.sql(f"ALTER TABLE {table} ADD COLUMNS ({', '.join(added)})")

    def write_day(self, rows: DataFrame, ds: str, key: str) -> None:
        from pyspark.sql import functions as F

        self._replace(self.table, rows, key, F.col("ds") == F.to_date(F.lit(ds)))

    def write_current(self, rows: DataFrame, key: str) -> None:
        from pyspark.sql import functions as F

        self._replace(self.current, rows, key, F.lit(True))

    def _replace(self, table: str, rows: DataFrame, key: str, condition: Column) -> None:
        """Put rows in the place of those of a table for which a condition is true."""
        from pyspark.sql import functions as F

        spark = rows.sparkSession
        columns = spark.table(table).schema
        absent = [F.lit(None).cast(f.dataType).alias(f.name) for f in columns if f.name not in rows.columns]
        complete_rows = rows.select("*", *absent).select(*[quoted(c) for c in columns.names])

        def write(branch: str) -> None:
            complete_rows.writeTo(branch).option("snapshot-property.headrace-key", key).overwrite(condition)

        self.check_lease()
        iceberg_fencing.change(spark, table, self.label, self.fence, write, self.check_lease)

    def count(self, ds: str) -> int:
        """Return the day's rows; without an open Spark session, as many as were published: none is opened to count."""
        from pyspark.sql import SparkSession

        spark = SparkSession.getActiveSession()
        if spark is None:
            return self.rows_by_day()[ds]
        return spark.table(self.table).where(f"ds = DATE '{ds}'").count()

    def sample(self, ds: str, rows: int) -> list[dict[str, Any]]:
        with self._spark() as spark:
            if self.user not in self._columns(spark, self.table):
                raise UserError(f"there is no table {self.label} yet")
            day = spark.table(self.table).where(f"ds = DATE '{ds}'").orderBy(quoted(self.user), "rank")
            return [row.asDict() for row in day.limit(rows).collect()]

    def rows_with(self, column: str, keys: Sequence[Key]) -> dict[str, int]:
        from pyspark.sql import functions as F

        with self._spark() as spark:
            if column not in self._columns(spark, self.table):
                return {}
            rows = spark.table(self.table).where(F.col(quoted(column)).isin(list(keys))).groupBy("ds").count()
            return {str(row["ds"]): int(row["count"]) for row in rows.collect()}

    def leftovers(self, column: str, keys: Sequence[Key]) -> int:
        with self._spark() as spark:
            return sum(erasure.files() for erasure in self._erasures(spark, column, keys)) + len(
                self.records.changing()
            )

    def erase(self, column: str, keys: Sequence[Key]) -> str:
        with self._spark() as spark, self.erasing(column, keys):
            left = [text for erasure in self._erasures(spark, column, keys) if (text := erasure.run())]
        if not left and (files := self.leftovers(column, keys)):
            left.append(
                f"snapshots of {self.label} or {self.label}_current that branches or tags keep have {files} files with "
                f"the rows: drop these, and run the same command again"
            )
        return "; ".join(left)

    def _erasures(self, spark: SparkSession, column: str, keys: Sequence[Key]) -> Iterator[IcebergErasure]:
        for table, name in self._tables(spark):
            table_arguments = (spark, table, self.label, self.fence)
            change = partial(iceberg_fencing.change, *table_arguments, check_lease=self.check_lease)
            yield IcebergErasure(spark, table, column, keys, self.expired / f"{name}.json", change)

    def _tables(self, spark: SparkSession) -> list[tuple[str, str]]:
        """Return the tables that have rows, with short names; the newest day's copy is first."""
        both = ((self.current, "current"), (self.table, "table"))
        return [(table, name) for table, name in both if self._columns(spark, table) not in ([], CLAIMED)]

    @staticmethod
    def _columns(spark: SparkSession, table: str) -> list[str]:
        """Return the columns of a table; empty where there is no table."""
        return list(spark.table(table).columns) if spark.catalog.tableExists(table) else []

    def drop_days(self, days: Sequence[str]) -> None:
        if days:
            with self._spark() as spark:
                listed = ", ".join(f"DATE '{ds}'" for ds in days)

                def delete(branch: str) -> None:
                    spark.sql(f"DELETE FROM {branch} WHERE ds IN ({listed})")

                self.check_lease()
                iceberg_fencing.change(spark, self.table, self.label, self.fence, delete, self.check_lease)
            self.records.forget(days)

    @contextmanager
    def _spark(self) -> Iterator[SparkSession]:
        """Give the stage's session, or one of our own."""
        from pyspark.sql import SparkSession

        active = SparkSession.getActiveSession()
        if active is not None:
            yield active
        else:
            with session(self.spec.spark, self.ws, "headrace warehouse") as spark:
                yield spark


@contextmanager
def open_iceberg(spec: Spec, ws: Workspace, lock: RunLock | None = None) -> Iterator[Target]:
    """See `headrace.publish.opening.open_target`."""
    assert spec.publish is not None
    conf = spec.publish.warehouse
    assert conf.catalog is not None, "config refuses the kind without it"
    yield IcebergTarget(spec, ws, conf.catalog, conf.schema_name, lock)
