"""Dialects and options of SQL warehouses."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.dialects.mssql.pyodbc import MSDialect_pyodbc
from sqlalchemy.dialects.mysql.pymysql import MySQLDialect_pymysql
from sqlalchemy.dialects.oracle import VARCHAR2
from sqlalchemy.dialects.oracle.oracledb import OracleDialect_oracledb
from sqlalchemy.dialects.postgresql.psycopg import PGDialect_psycopg
from sqlalchemy.engine.default import DefaultDialect
from sqlalchemy.schema import CreateTable

from headrace.config import load_spec
from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.publish.files import files_folder
from headrace.publish.opening import open_target
from headrace.publish.sql.sqlalchemy import SqlAlchemyClient, client_of
from headrace.publish.sql.target import SqlTarget
from headrace.publish.target import Check
from headrace.storage import Location, local
from headrace.storage.objects import calls, copies
from tests.cloud_support import conf
from tests.publish_support import DS, TYPES, good_rows, staged

COLUMNS = [name for name, _ in TYPES]
#: By name: the dialect as it is once it is connected.
DIALECTS: dict[str, Any] = {
    "mysql": MySQLDialect_pymysql(paramstyle="format"),
    "mssql": MSDialect_pyodbc(paramstyle="qmark", deprecate_large_types=True),  # SQL Server 2012 and later
    "oracle": OracleDialect_oracledb(paramstyle="named"),
    "postgresql": PGDialect_psycopg(paramstyle="pyformat"),
}
#: A day as a literal, and a parameter's mark.
DAY = {"mssql": f"CAST('{DS}' AS DATE)"}
MARK = {"mysql": "%s", "postgresql": "%s", "mssql": "?", "oracle": ":p{}"}
STAGED = "headrace_staging_X"


class Answer:
    """The answer to a statement."""

    def __init__(self, rows: list[tuple[Any, ...]] | None) -> None:
        self.returns_rows, self._rows = rows is not None, rows or []

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        return iter(self._rows)


class Connection:
    """Notes what the driver would be told, and knows the tables that it was told to make."""

    def __init__(self, dialect: Any) -> None:
        self.dialect = dialect
        self.statements: list[str] = []
        self.params: list[Any] = []
        self.tables: dict[str, list[str]] = {}

    def exec_driver_sql(self, statement: str, params: Any = None) -> Answer:
        self.statements.append(re.sub(r"(headrace_staging_)[0-9a-f]{16}_[0-9a-f]{8}", r"\1X", statement))
        self.params.append(params)
        if creation := re.match(r"CREATE (?:OR \w+ )?(?:TABLE|VIEW) (\S+)", statement):
            self.tables[creation[1].strip('"`[]')] = COLUMNS
        return Answer([(12,)] if statement.startswith("SELECT count(*)") else None)

    def commit(self) -> None:
        self.statements.append("commit")

    def rollback(self) -> None:
        self.statements.append("rollback")


def target_of(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[SqlTarget, Connection]:
    """Return a target and its connection; only the catalog's answers stand for the server."""
    connection = Connection(DIALECTS[name])
    monkeypatch.setattr(SqlAlchemyClient, "columns", lambda self, name: connection.tables.get(name, []))
    monkeypatch.setattr(SqlAlchemyClient, "tables", lambda self, prefix: [])

    @contextmanager
    def connect() -> Iterator[SqlAlchemyClient]:
        yield client_of(connection, None)

    spec, ws = load_spec("clicks"), Workspace(folder / "home")
    return SqlTarget(spec, ws, "sqlalchemy", "x", "x", SqlAlchemyClient, connect), connection


def in_dialect(statement: Any, name: str) -> str:
    """A statement as SQLAlchemy compiles it, on one line; constants are written out."""
    dialect = type(DIALECTS[name])(**({"deprecate_large_types": True} if name == "mssql" else {}))
    dialect._supports_offset_fetch = True
    dialect.identifier_preparer._requires_quotes = lambda value: True
    text = str(statement.compile(dialect=dialect, compile_kwargs={"literal_binds": True}))
    return " ".join(text.split()).replace("( ", "(").replace(" )", ")")


def table_of(name: str, *more: sa.Column[Any]) -> sa.Table:
    """The scores' table, as SQLAlchemy is told of one. Keys that are numbers count nothing up."""
    text = VARCHAR2(4000) if name == "oracle" else sa.UnicodeText()
    kinds = [sa.Date(), sa.BigInteger(), text, sa.Integer(), sa.Float(), text]
    keys = ("ds", "user_id", "rank")
    columns = [
        sa.Column(c, kind, nullable=False, primary_key=c in keys, autoincrement=False)
        for c, kind in zip(COLUMNS, kinds, strict=True)
    ]
    return sa.Table("clicks_scores", sa.MetaData(), *columns, *more)


@pytest.mark.parametrize("name", DIALECTS)
def test_tables_are_made_as_the_dialect_makes_them(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, connection = target_of(name, tmp_path, monkeypatch)
    target.create(TYPES)
    scores, commit, records, *_ = connection.statements
    assert scores == in_dialect(CreateTable(table_of(name)), name)
    assert commit == "commit"
    text, moment = sa.UnicodeText(), {"mysql": "DATETIME(6)", "mssql": "DATETIME2", "oracle": "TIMESTAMP"}
    kinds = {"table_name": sa.Unicode(255), "ds": sa.Date(), "run_key": text, "row_count": sa.BigInteger()}
    kinds |= dict.fromkeys(("model", "source", "audit"), text)
    for column, kind in kinds.items():
        quoted = DIALECTS[name].identifier_preparer.quote_identifier(column)
        assert f"{quoted} {kind.compile(dialect=DIALECTS[name])}" in records
    key = ", ".join(quoted_names(name, "table_name", "ds"))
    assert records.endswith(f" {moment.get(name, 'TIMESTAMP WITHOUT TIME ZONE')}, PRIMARY KEY ({key}))")
    # A column that the scores have gained.
    connection.statements.clear()
    target.create([*TYPES, ("source", "string")])
    quoted = DIALECTS[name].identifier_preparer.quote_identifier
    kind = "VARCHAR2(4000 CHAR)" if name == "oracle" else str(text.compile(dialect=DIALECTS[name]))
    word = "ADD" if name in ("mssql", "oracle") else "ADD COLUMN"
    assert connection.statements[0] == f"ALTER TABLE {quoted('clicks_scores')} {word} {quoted('source')} {kind}"


def quoted_names(name: str, *names: str) -> list[str]:
    return [DIALECTS[name].identifier_preparer.quote_identifier(n) for n in names]


@pytest.mark.parametrize("name", DIALECTS)
def test_a_day_is_replaced_in_one_transaction(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, connection = target_of(name, tmp_path, monkeypatch)
    target.create(TYPES)
    view = connection.statements[-2]
    connection.statements.clear()
    connection.params.clear()
    target.swap(staged(tmp_path, good_rows(), "k"), "lake/clicks/scores@3", [Check("rows", 12, "1", True)])
    table, staging, records = quoted_names(name, "clicks_scores", STAGED, "headrace_publications")
    listed, day = ", ".join(quoted_names(name, *COLUMNS)), DAY.get(name, f"DATE '{DS}'")
    names = ["ds", "table_name", "run_key", "row_count", "model", "source", "audit", "published_at"]
    marks = [MARK[name].format(n) for n in range(1, 8)]
    created = f"CREATE TABLE {staging} AS SELECT {listed} FROM {table} WHERE 1 = 0"
    of_table = f"{quoted_names(name, 'table_name')[0]} = 'clicks_scores'"
    of_day = f"{quoted_names(name, 'ds')[0]} = {day}"
    drop = f"DROP TABLE IF EXISTS {staging}"
    if name == "oracle":
        drop = (
            f"BEGIN EXECUTE IMMEDIATE 'DROP TABLE {staging}'; "
            f"EXCEPTION WHEN OTHERS THEN IF SQLCODE != -942 THEN RAISE; END IF; END;"
        )
    sent = f"INSERT INTO {staging} ({listed}) VALUES ({', '.join(MARK[name].format(n) for n in range(1, 7))})"
    assert connection.statements == [
        f"SELECT {listed} INTO {staging} FROM {table} WHERE 1 = 0" if name == "mssql" else created,
        "commit",
        sent,
        sent,
        "commit",
        f"SELECT count(*) FROM {staging}",
        "commit",
        f"DELETE FROM {table} WHERE {of_day}",
        f"INSERT INTO {table} ({listed}) SELECT {listed} FROM {staging}",
        f"DELETE FROM {records} WHERE {of_table} AND {of_day}",
        f"INSERT INTO {records} ({', '.join(quoted_names(name, *names))}) VALUES ({', '.join([day, *marks])})",
        "commit",
        drop,
        "commit",
    ]
    # SQLAlchemy's own way to say the same.
    scores, staged_table = table_of(name), sa.table(STAGED, *map(sa.column, COLUMNS))
    copied = scores.insert().from_select(COLUMNS, sa.select(staged_table))
    unqualified = in_dialect(copied, name).replace(f"{staging}.", "")
    assert unqualified == connection.statements[8]
    newest = f"SELECT max({quoted_names(name, 'ds')[0]}) FROM {records} WHERE {of_table}"
    (view_name,) = quoted_names(name, "clicks_scores_current")
    replaced = "CREATE OR ALTER VIEW" if name == "mssql" else "CREATE OR REPLACE VIEW"
    assert view == f"{replaced} {view_name} AS SELECT {listed} FROM {table} WHERE {of_day.split(' = ')[0]} = ({newest})"
    # What the driver is given beside the statements.
    rows = [tuple(r.values()) if isinstance(r, dict) else r for part in connection.params[1:3] for r in part]
    assert [(*r[:4], pytest.approx(r[4], rel=1e-6), *r[5:]) for r in rows] == [
        (date.fromisoformat(ds), *row) for ds, *row in good_rows()
    ]
    if name == "oracle":
        assert set(connection.params[1][0]) == {f"p{n}" for n in range(1, 7)}
    recorded = connection.params[-2]
    assert list(recorded.values() if isinstance(recorded, dict) else recorded)[:3] == ["clicks_scores", "k", 12]


@pytest.mark.parametrize("name", DIALECTS)
def test_a_sample_is_asked_for_in_the_dialect(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, connection = target_of(name, tmp_path, monkeypatch)
    target.create(TYPES)
    connection.statements.clear()
    target.sample(DS, 4)
    ordering = connection.statements[0].split(" ORDER BY ")[1]
    scores = sa.table("clicks_scores", *map(sa.column, COLUMNS))
    query = sa.select(scores).order_by(scores.c.user_id, scores.c.rank)
    # Without an offset the compiler writes TOP for SQL Server.
    expected = (
        in_dialect(query.offset(1).limit(4), name).replace("OFFSET 1", "OFFSET 0")
        if name == "mssql"
        else in_dialect(query.limit(4), name)
    )
    assert ordering == expected.split(" ORDER BY ")[1].replace(f"{quoted_names(name, 'clicks_scores')[0]}.", "")


def test_a_failure_in_the_transaction_rolls_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, connection = target_of("oracle", tmp_path, monkeypatch)
    target.create(TYPES)
    connection.statements.clear()
    real = Connection.exec_driver_sql

    def refused(self: Connection, statement: str, params: Any = None) -> Answer:
        result = real(self, statement, params)
        if statement.startswith("INSERT") and "publications" in statement:
            raise RuntimeError("ORA-00001")
        return result

    monkeypatch.setattr(Connection, "exec_driver_sql", refused)
    with pytest.raises(RuntimeError, match="ORA-00001"):
        target.swap(staged(tmp_path, good_rows(), "k"), "s", [])
    assert connection.statements[-3:] == ["rollback", connection.statements[-2], "commit"]
    assert connection.statements[-2].startswith("BEGIN EXECUTE IMMEDIATE 'DROP TABLE")


def test_names_are_asked_for_as_they_were_quoted() -> None:
    """Oracle's catalog has names of statements without quotes in capitals; ours are quoted and in small letters."""
    oracle = DIALECTS["oracle"]
    assert oracle.denormalize_name("clicks_scores") == "CLICKS_SCORES"
    assert oracle.denormalize_name(sa.quoted_name("clicks_scores", quote=True)) == "clicks_scores"


def test_other_dialects_and_styles_of_parameters() -> None:
    class Numbered(DefaultDialect):
        name, driver, default_paramstyle = "newdb", "newdriver", "numeric"

    connection = Connection(Numbered())
    client = client_of(connection, "served")
    client.run(f"SELECT 1 WHERE a = {client.mark} AND b = {client.mark}", ["x", 2])
    assert (connection.statements[0], connection.params) == ("SELECT 1 WHERE a = :1 AND b = :2", [("x", 2)])
    assert client.schema == ("served",)
    assert client.has_role("analyst") is None
    connection.dialect.paramstyle = "unheard"
    with pytest.raises(UserError, match="parameters of the style unheard"):
        client_of(connection, None)


def test_an_option_repeats_nothing_of_a_url(tmp_path: Path) -> None:
    url = f"url=sqlite:///{tmp_path / 'scores.db'}?timeout=5"
    spec = load_spec("clicks", conf("sqlalchemy", url, "options.timeout='6'"))
    with (
        pytest.raises(UserError, match=r"options\.timeout: the driver is given this by publish\.warehouse\.url"),
        open_target(spec, Workspace(tmp_path)),
    ):
        pass


def test_an_option_that_a_driver_does_not_know_is_the_users_to_mend(tmp_path: Path) -> None:
    spec = load_spec("clicks", conf("sqlalchemy", f"url=sqlite:///{tmp_path / 'scores.db'}", "options.tiemout='6'"))
    with (
        pytest.raises(
            UserError, match=r"options \(tiemout\): the client library of sqlalchemy does not take them: .*tiem"
        ),
        open_target(spec, Workspace(tmp_path)) as target,
    ):
        target.days()


def test_a_url_has_no_password() -> None:
    for url in (
        "mysql+pymysql://me:secret@h/db",
        "mysql+pymysql://me:sec/ret@h/db",
        "mysql+pymysql://h/db?password=secret",
        "mssql+pyodbc:///?odbc_connect=DRIVER%3DX%3BUID%3Dme%3BPWD%3Dsecret",
        "mssql+pyodbc:///?odbc_connect=DRIVER%3DX%3B+Password+%3Dsecret",
    ):
        with pytest.raises(UserError, match="url has a password in it"):
            load_spec("clicks", ["publish.warehouse.kind=sqlalchemy", f"publish.warehouse.url={url}"])
    for url in ("sqlite:////data/a:b@c.db", "mssql+pyodbc://me@h:1433/db?driver=X", "postgresql://me@h:5432/db"):
        load_spec("clicks", ["publish.warehouse.kind=sqlalchemy", f"publish.warehouse.url={url}"])


def test_files_of_a_lake_in_a_store_are_among_its_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from obstore.store import MemoryStore

    monkeypatch.setenv(copies.VARIABLE, str(tmp_path / "cache"))
    bucket = MemoryStore()
    calls.put(bucket, "lake/staging/clicks/d/part-0.parquet", b"rows")
    stored = calls.head(bucket, "lake/staging/clicks/d/part-0.parquet")
    assert stored is not None
    folder = files_folder(Location(PurePosixPath("/bucket/lake/staging/clicks"), "s3"))
    assert copies.file(bucket, "s3://bucket", stored).is_relative_to(folder)
    assert files_folder(local(tmp_path)) == tmp_path
