"""An Iceberg table of a catalog of `spark.properties` as the warehouse: a day is one snapshot that replaces it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from headrace.config import Spec
from headrace.errors import UserError
from headrace.lake.spark.session import session
from headrace.publish.tables import iceberg_fencing
from headrace.publish.tables.iceberg_erasure import IcebergErasure
from headrace.publish.tables.spark_table import CLAIMED, SparkTableTarget
from headrace.publish.target import SCORES, Key, Target, table_name
from headrace.schema import quoted
from headrace.stage import RunLock
from headrace.workspace import Workspace

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession


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
    if f"spark.sql.catalog.{conf.catalog}" not in spec.spark.properties:
        raise UserError(
            f"publish.warehouse.catalog: spark.properties define no catalog '{conf.catalog}' "
            f"(spark.sql.catalog.{conf.catalog}: org.apache.iceberg.spark.SparkCatalog, and its type and warehouse)"
        )
    yield IcebergTarget(spec, ws, conf.catalog, conf.schema_name, lock)
