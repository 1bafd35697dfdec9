"""An Iceberg table of a catalog of `spark.properties` as the warehouse: a day is one snapshot that replaces it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from headrace.config import Spec
from headrace.errors import UserError
from headrace.lake.session import session
from headrace.publish.tables.spark_table import SparkTableTarget
from headrace.publish.target import Key, Target, table_name
from headrace.workspace import Workspace

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


class IcebergTarget(SparkTableTarget):
    """A table partitioned by `ds`."""

    def __init__(self, spec: Spec, ws: Workspace, catalog: str, schema: str) -> None:
        name = table_name(spec)
        label = f"{catalog}.{schema}.{name}"
        super().__init__(spec, ws, "iceberg", label, f"catalog {catalog}", ws.store / "publications" / label)
        self.schema = f"{_quote(catalog)}.{_quote(schema)}"
        self.table, self.current = f"{self.schema}.{_quote(name)}", f"{self.schema}.{_quote(f'{name}_current')}"

    def create_table(self) -> None:
        with self._spark() as spark:
            spark.sql(f"CREATE NAMESPACE IF NOT EXISTS {self.schema}")
            kinds = {c: "date" if c == "ds" else self.types[t] for c, t in self.columns}
            defined = ", ".join(f"{_quote(c)} {t}" for c, t in kinds.items())
            spark.sql(f"CREATE TABLE IF NOT EXISTS {self.table} ({defined}) USING iceberg PARTITIONED BY (ds)")
            found = spark.table(self.table).columns
            if missing := [c for c, _ in self.columns[:6] if c not in found]:
                raise UserError(f"the Iceberg table {self.label} does not fit the scores: no {', '.join(missing)}")
            for column, kind in kinds.items():
                if column not in found:
                    spark.sql(f"ALTER TABLE {self.table} ADD COLUMNS ({_quote(column)} {kind})")

    def write_day(self, rows: DataFrame, ds: str, key: str) -> None:
        from pyspark.sql import functions as F

        columns = rows.sparkSession.table(self.table).schema
        absent = [F.lit(None).cast(f.dataType).alias(f.name) for f in columns if f.name not in rows.columns]
        whole = rows.select("*", *absent).select(*[_quote(c) for c in columns.names])
        day = F.col("ds") == F.to_date(F.lit(ds))
        whole.writeTo(self.table).option("snapshot-property.headrace-key", key).overwrite(day)

    def write_current(self, rows: DataFrame, key: str) -> None:
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
            day = spark.table(self.table).where(f"ds = DATE '{ds}'").orderBy(_quote(self.user), "rank")
            return [row.asDict() for row in day.limit(rows).collect()]

    def rows_with(self, column: str, keys: Sequence[Key]) -> dict[str, int]:
        from pyspark.sql import functions as F

        with self._spark() as spark:
            if not spark.catalog.tableExists(self.table):
                return {}
            rows = spark.table(self.table).where(F.col(_quote(column)).isin(list(keys))).groupBy("ds").count()
            return {str(row["ds"]): int(row["count"]) for row in rows.collect()}

    def leftovers(self, column: str, keys: Sequence[Key]) -> int:
        from pyspark.sql import functions as F

        found = 0
        with self._spark() as spark:
            for table in self._tables(spark):
                files = spark.sql(f"SELECT DISTINCT file_path, file_format FROM {table}.all_data_files")
                live = {row[0] for row in spark.sql(f"SELECT file_path FROM {table}.files").collect()}
                old = [(path, kind) for path, kind in files.collect() if path not in live]
                # Of another format than this table is made with nobody looks into: it may have some.
                parquet = [path for path, kind in old if kind == "PARQUET"]
                found += len(old) - len(parquet)
                if parquet:
                    rows = spark.read.parquet(*parquet).where(F.col(_quote(column)).isin(list(keys)))
                    found += rows.select(F.input_file_name()).distinct().count()
        return found

    def erase(self, column: str, keys: Sequence[Key]) -> str:
        found = self.rows_with(column, keys)
        with self._spark() as spark:
            # The records first: a rerun comes to the same numbers.
            self.records.set_rows({ds: self.count(ds) - rows for ds, rows in found.items()})
            values = ", ".join(str(k) if isinstance(k, int) else _text(k) for k in keys)
            for table in self._tables(spark):
                spark.sql(f"DELETE FROM {table} WHERE {_quote(column)} IN ({values})")
                _expire(spark, table)
        if files := self.leftovers(column, keys):
            return (
                f"snapshots of {self.label} or {self.label}_current that branches or tags keep have {files} files with "
                f"the rows: drop these, and run the same command again"
            )
        return ""

    def _tables(self, spark: SparkSession) -> list[str]:
        """Those that are there: the newest day's first, whose rows the other one has, too."""
        return [table for table in (self.current, self.table) if spark.catalog.tableExists(table)]

    def drop_days(self, days: Sequence[str]) -> None:
        if days:
            with self._spark() as spark:
                listed = ", ".join(f"DATE '{ds}'" for ds in days)
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


def _expire(spark: SparkSession, name: str) -> None:
    """Let go of all of a table's snapshots but the newest, with the files that they alone have.

    By Iceberg's own classes: its SQL procedures need an extension of Spark that a pipeline may be without.
    """
    jvm: Any = spark._jvm
    session = spark._jsparkSession
    actions = jvm.org.apache.iceberg.spark.actions.SparkActions.get(session)
    table = jvm.org.apache.iceberg.spark.Spark3Util.loadIcebergTable(session, name)
    # Manifests name removed files with their smallest and largest values until they are written again.
    actions.rewriteManifests(table).execute()
    table.refresh()
    newest = table.currentSnapshot()
    if newest is not None:
        actions.expireSnapshots(table).expireOlderThan(newest.timestampMillis() + 1).retainLast(1).execute()


def _text(value: str) -> str:
    """A literal of Spark's SQL."""
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _quote(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


@contextmanager
def open_iceberg(spec: Spec, ws: Workspace) -> Iterator[Target]:
    """See `headrace.publish.warehouses.open_target`."""
    assert spec.publish is not None
    conf = spec.publish.warehouse
    assert conf.catalog is not None, "config refuses the kind without it"
    if f"spark.sql.catalog.{conf.catalog}" not in spec.spark.properties:
        raise UserError(
            f"publish.warehouse.catalog: spark.properties define no catalog '{conf.catalog}' "
            f"(spark.sql.catalog.{conf.catalog}: org.apache.iceberg.spark.SparkCatalog, and its type and warehouse)"
        )
    yield IcebergTarget(spec, ws, conf.catalog, conf.schema_name)
