"""Databricks SQL as a warehouse of headrace: files go to a volume by PUT, into the staging table by COPY INTO; one
statement replaces the day.

The checks of a spec import this module: it imports the vendor's client library when the warehouse is opened.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from headrace.config import Spec
from headrace.config.warehouse import Warehouse, WarehouseKind
from headrace.config.workspace import Workspace
from headrace.errors.databases import failures
from headrace.publish.files import files_folder
from headrace.publish.opening import client_library, connecting, password_of
from headrace.publish.sql.client import SqlClient, cleanup, literal, load_folder
from headrace.publish.sql.target import SqlTarget
from headrace.publish.target import Target, table_name
from headrace.stage import RunLock


class Databricks(WarehouseKind):
    """Databricks."""

    opens = "headrace_databricks:open_databricks"
    needs = ("stage",)
    own_arguments: ClassVar = {"server_hostname": "host", "staging_allowed_local_path": None}

    @classmethod
    def dataset_name(cls, warehouse: Warehouse, label: str) -> tuple[str, str]:
        return f"databricks://{warehouse.host}", label


class DatabricksClient(SqlClient):
    """A connection of databricks-sql-connector.

    There is no transaction over two tables: the day first, in one commit, then its record. A run that is killed
    between them left new rows with the record before, and the same command publishes them again.
    """

    types: ClassVar[Mapping[str, str]] = {
        "bigint": "BIGINT",
        "int": "INT",
        "smallint": "SMALLINT",
        "tinyint": "TINYINT",
        "string": "STRING",
        "float": "FLOAT",
        "double": "DOUBLE",
        "boolean": "BOOLEAN",
        "date": "DATE",
        "timestamp": "TIMESTAMP",
    }
    quotes = "`"
    key_type, text_type = "STRING", "STRING"
    has_keys = False
    transactions = False

    def __init__(self, connection: Any, catalog: str | None, schema: str, stage: str) -> None:
        self._connection, self._catalog, self._schema, self._stage = connection, catalog, schema, stage

    @property
    def schema(self) -> tuple[str, ...]:
        return (self._catalog, self._schema) if self._catalog else (self._schema,)

    def table_options(self, user: str) -> str:
        return " USING DELTA PARTITIONED BY (`ds`)"

    def run(self, statement: str, params: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        with self._connection.cursor() as cursor:
            cursor.execute(statement, list(params) or None)
            return [tuple(row) for row in cursor.fetchall()] if cursor.description else []

    @contextmanager
    def transaction(self) -> Iterator[None]:
        yield

    def load(self, table: str, columns: Sequence[str], files: Sequence[Path]) -> None:
        place = load_folder(self._stage)
        names = [f"{place}/{file.name}" for file in files]
        sent: list[str] = []

        def remove() -> None:
            for name in sent:
                self.run(f"REMOVE {literal(name)}")

        with cleanup(remove, f"files may be left in {place}: remove them"):
            for file, name in zip(files, names, strict=True):
                sent.append(name)
                self.run(f"PUT {literal(str(file))} INTO {literal(name)} OVERWRITE")
            if files:
                self.run(f"COPY INTO {table} FROM {literal(place)} FILEFORMAT = PARQUET")

    def create_staging(self, staging: str, table: str, columns: Sequence[str]) -> list[str]:
        # With all columns of the table in its order: REPLACE WHERE takes no list of them.
        return [f"CREATE TABLE {staging} AS SELECT * FROM {table} WHERE 1 = 0"]

    def replace_day(self, table: str, staging: str, columns: Sequence[str], ds: str) -> list[str]:
        return [f"INSERT INTO {table} REPLACE WHERE {self.quote('ds')} = {self.day(ds)} SELECT * FROM {staging}"]

    def replace_record(self, publications: str, names: str, values: str, condition: str) -> list[str]:
        columns = [name.strip() for name in names.split(",")]
        row = ", ".join(f"{v.strip()} AS {n}" for v, n in zip(values.split(","), columns, strict=True))
        on = " AND ".join(f"p.{self.quote(n)} = r.{self.quote(n)}" for n in ("table_name", "ds"))
        return [
            f"MERGE INTO {publications} AS p USING (SELECT {row}) AS r ON {on} "
            f"WHEN MATCHED THEN UPDATE SET * WHEN NOT MATCHED THEN INSERT *"
        ]

    @property
    def _information_schema(self) -> str:
        return f"{self.quote(self._catalog)}.information_schema" if self._catalog else "information_schema"

    def columns(self, name: str) -> list[str]:
        rows = self.run(
            f"SELECT column_name FROM {self._information_schema}.columns WHERE table_schema = ? AND table_name = ? "
            f"ORDER BY ordinal_position",
            [self._schema, name],
        )
        return [str(n) for (n,) in rows]

    def tables(self, prefix: str) -> list[str]:
        rows = self.run(
            f"SELECT table_name FROM {self._information_schema}.tables WHERE table_schema = ? "
            f"AND startswith(table_name, ?)",
            [self._schema, prefix],
        )
        return [str(n) for (n,) in rows]

    def rights(self, privilege: str, table: str, view: str) -> list[str]:
        return [f"{privilege.upper()} ON TABLE {name}" for name in (table, view)]


@contextmanager
def open_databricks(spec: Spec, ws: Workspace, lock: RunLock | None = None) -> Iterator[Target]:
    """See `headrace.publish.opening.open_target`."""
    with client_library("databricks", package="headrace-databricks"):
        from databricks import sql
    assert spec.publish is not None
    conf = spec.publish.warehouse
    assert conf.stage is not None, "config refuses the kind without it"
    stage = conf.stage

    @contextmanager
    def connect() -> Iterator[SqlClient]:
        with connecting(conf):
            opened = sql.connect(
                server_hostname=conf.host,
                access_token=password_of(conf),
                # PUT reads no other file of this host, whatever a statement says.
                staging_allowed_local_path=str(files_folder(ws.staging(spec.pipeline))),
                **conf.options,
            )
        with opened as connection:
            yield DatabricksClient(connection, conf.catalog, conf.schema_name, stage)

    label = ".".join([*([conf.catalog] if conf.catalog else []), conf.schema_name, table_name(spec)])
    with failures(sql.Error, f"Databricks at {conf.host} for {spec.pipeline}", label, transactions=False):
        yield SqlTarget(spec, ws, "databricks", label, conf.host, DatabricksClient, connect, lock)
