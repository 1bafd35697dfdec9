"""What stands for the client libraries of warehouses that are not to be had here."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest

from tests.publish_support import DS, TYPES

COLUMNS = [name for name, _ in TYPES]


class Recorded:
    """A connection, its cursors and jobs: notes what it is told, and knows the tables that it was told to make."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.rows: list[tuple[Any, ...]] = []
        self.made: set[str] = set()
        #: The highest token of a lease, as one answer after the other says.
        self.tokens: list[int | None] = []
        self.description: Any = None

    def note(self, statement: str, params: Any = None) -> None:
        assert "\0" not in statement
        if isinstance(params, (list, tuple)) and "?" not in statement:
            statement % tuple(params)  # As the libraries do: they refuse a statement with more or fewer marks.
        text = re.sub(r"(headrace_staging_)[0-9a-f]{16}_[0-9a-f]{8}", r"\1X", statement)
        text = re.sub(r"headrace_[0-9a-f]{12}", "headrace_LOAD", text)
        text = re.sub(r"(?<![\w}])/[^ '`]*/part-", "/HERE/part-", text.replace("file:///", "file:/"))
        self.calls.append(text)
        self.rows, asked = [], str(params) + statement
        if "GROUP BY" in statement:
            self.rows = [(DS, 3)]
        elif statement.startswith(("SELECT max(`token`)", 'SELECT max("token")')):
            self.rows = [(self.tokens.pop(0),)]
        elif statement.startswith("SELECT count(*)"):
            self.rows = [(12,)]
        elif "column_name" in statement or "FROM system.columns" in statement:
            known = next((name for name in self.made if f"'{name}'" in asked), None)
            self.rows = [(c,) for c in COLUMNS] if known else []
        elif made := re.match(r"CREATE (?:OR REPLACE )?(?:TABLE|VIEW) (\S+)", statement):
            self.made.add(re.split(r"[`\".]+", made[1].strip('`"'))[-1])
        self.description = True if self.rows or statement.startswith("SELECT") else None

    # A DB-API connection and cursor.
    @contextmanager
    def cursor(self) -> Iterator[Recorded]:
        yield self

    def execute(self, statement: str, params: Any = None) -> None:
        self.note(statement, params)

    def fetchall(self) -> list[tuple[Any, ...]]:
        return self.rows

    # clickhouse-connect.
    def command(self, statement: str, parameters: Any = None) -> None:
        self.note(statement, parameters)

    def insert_arrow(self, table: str, rows: Any) -> None:
        self.note(f"insert_arrow({table}, {rows.num_rows} rows of {', '.join(rows.column_names)})")

    # boto3.
    def upload_file(self, path: str, bucket: str, key: str) -> None:
        self.note(f"upload_file({path}, {bucket}, {key})")

    def delete_object(self, Bucket: str, Key: str) -> None:
        self.note(f"delete_object({Bucket}, {Key})")

    @property
    def result_rows(self) -> list[tuple[Any, ...]]:
        return self.rows

    # BigQuery's client, its module, and a job.
    def query(self, statement: str, job_config: Any = None, parameters: Any = None) -> Recorded:
        self.note(statement, job_config or parameters)
        return self

    def result(self) -> list[dict[int, Any]]:
        return [dict(enumerate(row)) for row in self.rows]

    def load_table_from_file(self, source: Any, table: str, job_config: Any) -> Recorded:
        self.note(f"load_table_from_file({source.name}, {table}, {job_config})")
        return self

    class SourceFormat:
        PARQUET = "PARQUET"

    class WriteDisposition:
        WRITE_APPEND = "WRITE_APPEND"

    class CreateDisposition:
        CREATE_NEVER = "CREATE_NEVER"

    @staticmethod
    def LoadJobConfig(**given: str) -> str:
        return ", ".join(given.values())

    @staticmethod
    def QueryJobConfig(query_parameters: Any) -> Any:
        return query_parameters

    @staticmethod
    def ScalarQueryParameter(name: None, kind: str, value: Any) -> Any:
        assert kind == {str: "STRING", int: "INT64"}.get(type(value), "DATETIME")
        return value


class Refused(Exception):
    """What each client library that `client_libraries` stands for raises."""


#: Modules of client libraries -> what is imported from them: the call that connects, classes of errors, and
#: what `Recorded` has.
_LIBRARIES: dict[str, tuple[str, ...]] = {
    "snowflake": (),
    "snowflake.connector": ("connect", "Error"),
    "google": (),
    "google.api_core": (),
    "google.api_core.exceptions": ("GoogleAPIError",),
    "google.auth": (),
    "google.auth.exceptions": ("GoogleAuthError",),
    "google.cloud": (),
    "google.cloud.bigquery": (
        *("Client", "QueryJobConfig", "ScalarQueryParameter"),
        *("LoadJobConfig", "SourceFormat", "WriteDisposition", "CreateDisposition"),
    ),
    "clickhouse_connect": ("get_client",),
    "clickhouse_connect.driver": (),
    "clickhouse_connect.driver.exceptions": ("Error",),
    "redshift_connector": ("connect", "Error"),
    "boto3": (),
    "boto3.exceptions": ("S3UploadFailedError",),
    "botocore": (),
    "botocore.exceptions": ("BotoCoreError", "ClientError"),
    "databricks": (),
    "databricks.sql": ("connect", "Error"),
}
#: The kinds of warehouses that these are.
LIBRARY_KINDS = ("snowflake", "bigquery", "clickhouse", "redshift", "databricks")


class Connected(Recorded):
    """The same as what a library's call to connect returns: a context manager, or to be closed; a project."""

    project = "project"

    def __enter__(self) -> Connected:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def close(self) -> None:
        pass


def client_libraries(monkeypatch: pytest.MonkeyPatch, connect: Callable[..., Any]) -> None:
    """Have the libraries of LIBRARY_KINDS imported as stand-ins, whose call to connect is `connect`."""
    for path, names in _LIBRARIES.items():
        module = ModuleType(path)
        for name in names:
            known = connect if name in ("connect", "Client", "get_client") else getattr(Recorded, name, Refused)
            setattr(module, name, known)
        monkeypatch.setitem(sys.modules, path, module)
        above, _, name = path.rpartition(".")
        if above:
            setattr(sys.modules[above], name, module)
