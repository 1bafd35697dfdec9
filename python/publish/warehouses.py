"""The warehouses by `publish.warehouse.kind`. One that is added is a `Target` of its own, and a line here."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from headrace.config import Spec
from headrace.publish.postgres.target import open_postgres
from headrace.publish.sql.bigquery import open_bigquery
from headrace.publish.sql.clickhouse import open_clickhouse
from headrace.publish.sql.databricks import open_databricks
from headrace.publish.sql.duckdb import open_duckdb
from headrace.publish.sql.redshift import open_redshift
from headrace.publish.sql.snowflake import open_snowflake
from headrace.publish.sql.sqlalchemy import open_sqlalchemy
from headrace.publish.tables.delta import open_delta
from headrace.publish.tables.iceberg import open_iceberg
from headrace.publish.tables.parquet import open_parquet
from headrace.publish.target import Target
from headrace.stage import RunLock
from headrace.workspace import Workspace

_OPEN: dict[str, Callable[[Spec, Workspace, RunLock | None], AbstractContextManager[Target]]] = {
    "embedded": open_postgres,
    "postgres": open_postgres,
    "duckdb": open_duckdb,
    "sqlalchemy": open_sqlalchemy,
    "clickhouse": open_clickhouse,
    "snowflake": open_snowflake,
    "bigquery": open_bigquery,
    "redshift": open_redshift,
    "databricks": open_databricks,
    "delta": open_delta,
    "iceberg": open_iceberg,
    "parquet": open_parquet,
}


def open_target(spec: Spec, ws: Workspace, lock: RunLock | None = None) -> AbstractContextManager[Target]:
    """The warehouse of a pipeline that publishes, for a `with` block.

    Args:
        spec: the pipeline.
        ws: the workspace.
        lock: that this process is at work on the pipeline; None: the block changes nothing.

    Raises:
        UserError: it cannot be reached, or fails in the block: the day's rows are as they were.
    """
    assert spec.publish is not None, "asked for pipelines that publish"
    return _OPEN[spec.publish.warehouse.kind](spec, ws, lock)
