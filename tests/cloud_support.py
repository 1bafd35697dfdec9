"""Stand-ins for client libraries of warehouses that cannot be had here, and checks that all of them pass."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from headrace.config import load_spec
from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.logs import is_secret
from headrace.publish.opening import open_target
from headrace.publish.sql.client import SqlClient
from headrace.publish.sql.target import SqlTarget
from headrace.publish.target import Check
from headrace.stage import RunLock
from headrace.storage import LeaseLost
from tests.publish_support import DS, TYPES, good_rows, holding, staged

COLUMNS = [name for name, _ in TYPES]


class Recorded:
    """A connection, its cursors and jobs: notes what it is told, and knows the tables that it was told to make."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.rows: list[tuple[Any, ...]] = []
        self.created_tables: set[str] = set()
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
        self.rows, query_text = [], str(params) + statement
        if "GROUP BY" in statement:
            self.rows = [(DS, 3)]
        elif statement.startswith(("SELECT max(`token`)", 'SELECT max("token")')):
            self.rows = [(self.tokens.pop(0),)]
        elif statement.startswith("SELECT count(*)"):
            self.rows = [(12,)]
        elif "column_name" in statement or "FROM system.columns" in statement:
            known = next((name for name in self.created_tables if f"'{name}'" in query_text), None)
            self.rows = [(c,) for c in COLUMNS] if known else []
        elif creation := re.match(r"CREATE (?:OR REPLACE )?(?:TABLE|VIEW) (\S+)", statement):
            self.created_tables.add(re.split(r"[`\".]+", creation[1].strip('`"'))[-1])
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
    def LoadJobConfig(**settings: str) -> str:
        return ", ".join(settings.values())

    @staticmethod
    def QueryJobConfig(query_parameters: Any) -> Any:
        return query_parameters

    @staticmethod
    def ScalarQueryParameter(name: None, kind: str, value: Any) -> Any:
        assert kind == {str: "STRING", int: "INT64"}.get(type(value), "DATETIME")
        return value


class Refused(Exception):
    """Error that each client library of `client_libraries` raises."""


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
    """Have the libraries imported as stand-ins, whose call to connect is `connect`."""
    for path, names in _LIBRARIES.items():
        module = ModuleType(path)
        for name in names:
            known = connect if name in ("connect", "Client", "get_client") else getattr(Recorded, name, Refused)
            setattr(module, name, known)
        monkeypatch.setitem(sys.modules, path, module)
        above, _, name = path.rpartition(".")
        if above:
            setattr(sys.modules[above], name, module)


S = "headrace_staging_X"
SIX = '"ds", "user_id", "item_id", "rank", "score", "model_version"'
TICKED = SIX.replace('"', "`")
NAMES = "`ds`, `table_name`, `run_key`, `row_count`, `model`, `source`, `audit`, `published_at`"
#: Makes a client of a connection that notes what it is told.
MakeClient = Callable[[Recorded], SqlClient]


def target_of(path: Path, client: MakeClient, connection: Recorded, lock: RunLock | None = None) -> SqlTarget:
    """The table of the shipped pipeline `clicks` in a warehouse whose connection is `connection`."""

    @contextmanager
    def connect() -> Iterator[SqlClient]:
        yield client(connection)

    return SqlTarget(load_spec("clicks"), Workspace(path), "x", "x", "x", type(client(connection)), connect, lock)


def record(path: Path, client: MakeClient, connection: Recorded | None = None) -> tuple[list[str], list[str]]:
    """Return the calls that make a table, and those that publish a day of 12 rows, without the publications' text."""
    connection = connection or Recorded()
    target = target_of(path, client, connection)
    target.create(TYPES)
    creation_calls = [c for c in connection.calls if c.startswith(("CREATE", "ALTER"))]
    connection.calls.clear()
    target.swap(staged(path, good_rows(), "k"), "lake/clicks/scores@3", [Check("rows", 12, "1", True)])
    swapped = [
        c for c in connection.calls if "information_schema.tables" not in c.lower() and "table_name, %s" not in c
    ]
    return creation_calls, swapped


def fenced(path: Path, client: MakeClient, *tokens: int | None, connection: Recorded | None = None) -> list[str]:
    """Return the calls of a publication by the holder with token 7 that concern tokens, the day or its record."""
    connection = connection or Recorded()
    target = target_of(path, client, connection, holding(7))
    connection.tokens = [None]
    target.create(TYPES)
    assert "clicks_scores_fences" in connection.created_tables
    connection.calls.clear()
    connection.tokens = list(tokens)
    rows = staged(path, good_rows(), "k")
    if max(t or 0 for t in tokens) > 7:
        with pytest.raises(LeaseLost):
            target.swap(rows, "lake/clicks/scores@3", [])
    else:
        target.swap(rows, "lake/clicks/scores@3", [])
    return [
        c.partition(" WHERE")[0] for c in connection.calls if "token" in c or "REPLACE" in c or "headrace_publ" in c
    ]


def erased(names: str, mark: str, day: str, transaction: bool = True) -> list[str]:
    """The statements by which two users' 3 rows of 12 go: the record first, all or nothing where there is such."""
    q = names[0]
    record = f"UPDATE {names.format('headrace_publications')} SET {q}row_count{q} = 9 WHERE"
    record += f" {q}table_name{q} = 'clicks_scores' AND {q}ds{q} = {day}"
    rows = f"DELETE FROM {names.format('clicks_scores')} WHERE {q}user_id{q} IN ({mark}, {mark})"
    return ["BEGIN", record, rows, "COMMIT"] if transaction else [record, rows]


def check_erasure(path: Path, client: MakeClient, statements: list[str]) -> None:
    """Rows of persons are deleted from all days, by these statements."""
    connection = Recorded()
    target = target_of(path, client, connection)
    assert target.rows_with("user_id", [3, 4]) == {}  # there is no table yet
    target.create(TYPES)
    assert target.rows_with("item_tags", [3, 4]) == {}  # nor such a column
    connection.calls.clear()
    assert target.erase("user_id", [3, 4]) == ""
    assert [c for c in connection.calls if "column" not in c.lower() and not c.startswith("SELECT")] == statements


class Granting(Recorded):
    """Answers what rights are on record."""

    grants: tuple[tuple[str, str], ...] = ()

    def note(self, statement: str, params: Any = None) -> None:
        super().note(statement, params)
        if "headrace_grants" in statement and statement.startswith(("SELECT `priv", 'SELECT "priv')):
            self.rows, self.description = list(self.grants), True


def check_rights(path: Path, client: MakeClient, granted: list[str], revoked: list[str]) -> None:
    """Rights are given to the role `new`, and taken back from the role `old`, by these statements."""
    connection = Granting()
    target = target_of(path, client, connection)
    target.grant({})
    assert [c for c in connection.calls if "column" not in c] == []
    target.grant({"select": ["new"]})
    words = [c.split(" (")[0].split(" WHERE")[0] for c in connection.calls if "column" not in c]
    assert words[0].startswith("CREATE TABLE")
    assert words[1].startswith("SELECT")
    # What is given is on record before it is given.
    assert words[2].startswith("INSERT INTO")
    assert words[3:] == granted
    connection.calls.clear()
    connection.grants = (("select", "old"), ("select", "new"))
    target.grant({"select": ["new"]})
    words = [c.split(" (")[0].split(" WHERE")[0] for c in connection.calls if "column" not in c]
    assert words[0].startswith("SELECT")
    assert words[1:3] == revoked
    # And taken back before it is gone from the record.
    assert words[3].startswith("DELETE FROM")
    assert words[4:] == granted


def conf(kind: str, *more: str) -> list[str]:
    stage = [f"stage={_STAGES[kind]}"] if kind in _STAGES else []
    return [f"publish.warehouse.{text}" for text in (f"kind={kind}", *stage, *more)]


#: What some kinds need.
_STAGES = {"redshift": "s3://bucket/in", "databricks": "/Volumes/main/a/b"}


def client_arguments(kind: str, path: Path, monkeypatch: pytest.MonkeyPatch, *more: str) -> dict[str, Any]:
    """The arguments that a client library connects with."""
    received: dict[str, Any] = {}

    def connect(**arguments: Any) -> Connected:
        received.update(arguments)
        return Connected()

    client_libraries(monkeypatch, connect)
    monkeypatch.setenv("SCORES_PASSWORD", "hunter2")
    spec = load_spec("clicks", conf(kind, *more))
    with open_target(spec, Workspace(path).of(spec)) as target:
        assert target.days() == []
    return received


def check_options(kind: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each argument that the library is given without options is refused as one; what it does not know is told."""
    received = client_arguments(kind, path, monkeypatch, "password_env=SCORES_PASSWORD")
    for name in received:
        with pytest.raises(UserError) as refused:
            load_spec("clicks", conf(kind, f"options.{name}=7"))
        message = str(refused.value)
        if is_secret(f"options.{name}"):
            assert f"options.{name}: a secret does not belong in a pipeline's file: name password_env" in message
        else:
            assert f"options.{name}: headrace gives this to the client of {kind} itself: " in message

    def connect(**arguments: Any) -> Connected:
        if "colour" in arguments:
            raise TypeError("connect() got an unexpected keyword argument 'colour'")
        raise TypeError("a fault of the library's own")

    client_libraries(monkeypatch, connect)
    spec = load_spec("clicks", conf(kind, "options.colour=red"))
    with (
        pytest.raises(UserError, match=r"options \(colour\): .*unexpected keyword"),
        open_target(spec, Workspace(path)) as target,
    ):
        target.days()
    spec = load_spec("clicks", conf(kind))
    with pytest.raises(TypeError, match="own"), open_target(spec, Workspace(path)) as target:
        target.days()


def check_instead(kind: str, name: str, instead: str) -> None:
    """The key to set instead of an option is said."""
    message = rf"options\.{name}: headrace gives this to the client of {kind} itself: {instead}"
    with pytest.raises(UserError, match=message):
        load_spec("clicks", conf(kind, f"options.{name}=x"))


def check_missing_library(kind: str, package: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client library that is not installed is told with what to install."""
    for module in ("clickhouse_connect", "snowflake", "google", "redshift_connector", "boto3", "databricks"):
        monkeypatch.setitem(sys.modules, module, None)  # type: ignore[arg-type]
    spec = load_spec("clicks", conf(kind))
    with pytest.raises(UserError, match=f"needs its client library: pip install {package}$"):
        with open_target(spec, Workspace(path)):
            pass


class CleanUpFailed(Exception):
    """Error of a call that cleans up."""


class Failing:
    """A connection and its cursors, which fail at a call and at all that clean up after it."""

    description: Any = None

    def __init__(self, failing_call: str, error: Exception, cleaning: tuple[str, ...] = ()) -> None:
        self.failing_call, self.error, self.cleaning = failing_call, error, cleaning
        self.calls: list[str] = []

    def note(self, call: str) -> None:
        self.calls.append(call)
        if call.startswith(self.cleaning):
            raise CleanUpFailed("Gone")
        if call.startswith(self.failing_call):
            raise self.error

    @contextmanager
    def cursor(self) -> Iterator[Failing]:
        yield self

    def execute(self, statement: str, params: Any = None) -> None:
        self.note(statement)

    def fetchall(self) -> list[tuple[Any, ...]]:
        return []


FILES = [Path("/data/part-0.parquet"), Path("/data/part-1.parquet")]


def check_clean_up(client: Callable[[Any], SqlClient], connection: Failing, caplog: pytest.LogCaptureFixture) -> None:
    """A clean-up that fails is a warning, and hides nothing of what failed before it."""
    with (
        caplog.at_level(logging.WARNING, "headrace.publish"),
        pytest.raises(type(connection.error), match="no such column"),
    ):
        client(connection).load("t", [], FILES)
    assert [call for call in connection.calls if call.startswith(("delete_object", "REMOVE"))]
    warnings = [r.getMessage() for r in caplog.records]
    assert len(warnings) == bool(connection.cleaning)
    assert all("files may be left in" in text and "Gone" in text for text in warnings)
