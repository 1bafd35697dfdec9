"""An Iceberg table of a catalog of `spark.properties` as the warehouse: a day is one snapshot that replaces it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from headrace.config import Spec
from headrace.errors import UserError
from headrace.lake.session import session
from headrace.publish.tables.iceberg_erasure import IcebergErasure
from headrace.publish.tables.spark_sql import quoted
from headrace.publish.tables.spark_table import SparkTableTarget
from headrace.publish.target import Key, Target, table_name
from headrace.stage import RunLock
from headrace.workspace import Workspace

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


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

    def create_table(self) -> None:
        with self._spark() as spark:
            spark.sql(f"CREATE NAMESPACE IF NOT EXISTS {self.schema}")
            kinds = {c: "date" if c == "ds" else self.types[t] for c, t in self.columns}
            defined = ", ".join(f"{quoted(c)} {t}" for c, t in kinds.items())
            spark.sql(f"CREATE TABLE IF NOT EXISTS {self.table} ({defined}) USING iceberg PARTITIONED BY (ds)")
            found = spark.table(self.table).columns
            if missing := [c for c, _ in self.columns[:6] if c not in found]:
                raise UserError(f"the Iceberg table {self.label} does not fit the scores: no {', '.join(missing)}")
            for column, kind in kinds.items():
                if column not in found:
                    spark.sql(f"ALTER TABLE {self.table} ADD COLUMNS ({quoted(column)} {kind})")

    def write_day(self, rows: DataFrame, ds: str, key: str) -> None:
        from pyspark.sql import functions as F

        columns = rows.sparkSession.table(self.table).schema
        absent = [F.lit(None).cast(f.dataType).alias(f.name) for f in columns if f.name not in rows.columns]
        whole = rows.select("*", *absent).select(*[quoted(c) for c in columns.names])
        day = F.col("ds") == F.to_date(F.lit(ds))
        self.check_lease()
        whole.writeTo(self.table).option("snapshot-property.headrace-key", key).overwrite(day)

    def write_current(self, rows: DataFrame, key: str) -> None:
        self.check_lease()
        rows.writeTo(self.current).using("iceberg").option("snapshot-property.headrace-key", key).createOrReplace()

    def count(self, ds: str) -> int:
        """The day's rows; where no Spark session is open, as many as were published: one is not opened to count."""
        from pyspark.sql import SparkSession

        spark = SparkSession.getActiveSession()
        if spark is None:
            return self.rows_by_day()[ds]
        return spark.table(self.table).where(f"ds = DATE '{ds}'").count()

    def sample(self, ds: str, rows: int) -> list[dict[str, Any]]:
        with self._spark() as spark:
            if not spark.catalog.tableExists(self.table):
                raise UserError(f"there is no table {self.label} yet")
            day = spark.table(self.table).where(f"ds = DATE '{ds}'").orderBy(quoted(self.user), "rank")
            return [row.asDict() for row in day.limit(rows).collect()]

    def rows_with(self, column: str, keys: Sequence[Key]) -> dict[str, int]:
        from pyspark.sql import functions as F

        with self._spark() as spark:
            if not spark.catalog.tableExists(self.table):
                return {}
            rows = spark.table(self.table).where(F.col(quoted(column)).isin(list(keys))).groupBy("ds").count()
            return {str(row["ds"]): int(row["count"]) for row in rows.collect()}

    def leftovers(self, column: str, keys: Sequence[Key]) -> int:
        with self._spark() as spark:
            return sum(one.files() for one in self._erasures(spark, column, keys))

    def erase(self, column: str, keys: Sequence[Key]) -> str:
        found = self.rows_with(column, keys)
        with self._spark() as spark:
            # The records first: a rerun comes to the same numbers.
            self.records.set_rows({ds: self.count(ds) - rows for ds, rows in found.items()})
            left = [text for one in self._erasures(spark, column, keys) if (text := one.run())]
        if not left and (files := self.leftovers(column, keys)):
            left.append(
                f"snapshots of {self.label} or {self.label}_current that branches or tags keep have {files} files with "
                f"the rows: drop these, and run the same command again"
            )
        return "; ".join(left)

    def _erasures(self, spark: SparkSession, column: str, keys: Sequence[Key]) -> Iterator[IcebergErasure]:
        for table, name in self._tables(spark):
            yield IcebergErasure(spark, table, column, keys, self.expired / f"{name}.json")

    def _tables(self, spark: SparkSession) -> list[tuple[str, str]]:
        """Those that are there, and their names: the newest day's first, whose rows the other one has, too."""
        both = ((self.current, "current"), (self.table, "table"))
        return [(table, name) for table, name in both if spark.catalog.tableExists(table)]

    def drop_days(self, days: Sequence[str]) -> None:
        if days:
            with self._spark() as spark:
                listed = ", ".join(f"DATE '{ds}'" for ds in days)
                self.check_lease()
                spark.sql(f"DELETE FROM {self.table} WHERE ds IN ({listed})")
            self.records.forget(days)

    @contextmanager
    def _spark(self) -> Iterator[SparkSession]:
        """The stage's session, or one of our own."""
        from pyspark.sql import SparkSession

        active = SparkSession.getActiveSession()
        if active is not None:
            yield active
        else:
            with session(self.spec.spark, self.ws, "headrace warehouse") as spark:
                yield spark


@contextmanager
def open_iceberg(spec: Spec, ws: Workspace, lock: RunLock | None = None) -> Iterator[Target]:
    """See `headrace.publish.warehouses.open_target`."""
    assert spec.publish is not None
    conf = spec.publish.warehouse
    assert conf.catalog is not None, "config refuses the kind without it"
    if f"spark.sql.catalog.{conf.catalog}" not in spec.spark.properties:
        raise UserError(
            f"publish.warehouse.catalog: spark.properties define no catalog '{conf.catalog}' "
            f"(spark.sql.catalog.{conf.catalog}: org.apache.iceberg.spark.SparkCatalog, and its type and warehouse)"
        )
    yield IcebergTarget(spec, ws, conf.catalog, conf.schema_name, lock)
