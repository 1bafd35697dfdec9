"""Hostile names as identifiers: what each dialect reads back is the name, whole."""

from __future__ import annotations

import sqlite3
from typing import Any

import duckdb
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from psycopg import sql
from sqlalchemy import create_engine

from headrace.config import Table
from headrace.identifiers import quoted
from headrace.publish.sql.bigquery import BigQueryClient
from headrace.publish.sql.clickhouse import ClickHouseClient
from headrace.publish.sql.databricks import DatabricksClient
from headrace.publish.sql.duckdb import DuckDbClient
from headrace.publish.sql.redshift import RedshiftClient
from headrace.publish.sql.snowflake import SnowflakeClient
from headrace.publish.sql.sqlalchemy_dialects import client_of

#: Names that people's tables have, and parts of them.
HOSTILE = st.one_of(
    st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=30),
    st.lists(
        st.sampled_from(
            ["a.b", "-", " ", '"', "`", "'", "%", "%s", "ü", "select", "\\", "$1", ":p", "?", "[", "\n", "{x}"]
        ),
        min_size=1,
        max_size=8,
    ).map("".join),
    st.sampled_from(["order", "user", "Group", "x" * 200, "größe;cm", "--", "/*", "a`.`b", '"".""']),
)
CLIENTS = [BigQueryClient, ClickHouseClient, DatabricksClient, DuckDbClient, RedshiftClient, SnowflakeClient]


def unquoted(text: str, quote: str, escape: str) -> str:
    """The name that a dialect's reader makes of an identifier: one, and nothing behind it."""
    assert text[0] == quote
    name, i = "", 1
    while i < len(text):
        if escape and text[i] == escape:
            name, i = name + text[i + 1], i + 2
        elif text[i] == quote and text[i : i + 2] == quote * 2:
            name, i = name + quote, i + 2
        elif text[i] == quote:
            break
        else:
            name, i = name + text[i], i + 1
    assert i == len(text) - 1, f"{text!r} ends at {i}"
    return name


@settings(max_examples=300, deadline=None)
@given(HOSTILE, HOSTILE)
def test_each_dialect_reads_the_name_back(name: str, table: str) -> None:
    for client in CLIENTS:
        of = client.__new__(client)
        assert unquoted(of.quote(name), client.quotes, client.escape) == name
        # Several parts are told apart.
        assert of.quote(table, name) == f"{of.quote(table)}.{of.quote(name)}"
    assert unquoted(quoted(name), "`", "") == name
    assert unquoted(sql.Identifier(name).as_string(), '"', "") == name


@settings(max_examples=60, deadline=None)
@given(st.lists(HOSTILE, min_size=1, max_size=4, unique_by=str.lower))
def test_databases_have_columns_of_these_names(names: list[str]) -> None:
    """Real ones: DuckDB by its client, SQLite by SQLAlchemy's, SQLite by the standard's rule."""
    with duckdb.connect() as db:
        client = DuckDbClient(db, "main")
        defined = ", ".join(f"{client.quote(name)} INTEGER" for name in names)
        client.run(f"CREATE TABLE {client.quote('main', 't')} ({defined})")
        assert client.columns("t") == names
        client.run(f"SELECT {', '.join(map(client.quote, names))} FROM t")
    with create_engine("sqlite://", isolation_level="AUTOCOMMIT").connect() as connection:
        other = client_of(connection, None)
        other.run(f"CREATE TABLE t ({', '.join(f'{other.quote(name)} INTEGER' for name in names)})")
        assert other.columns("t") == names
        values: list[Any] = list(range(len(names)))
        marks = ", ".join([other.mark] * len(names))
        other.run(f"INSERT INTO t ({', '.join(map(other.quote, names))}) VALUES ({marks})", values)
        where = f"{other.quote(names[-1])} = {other.mark}"
        assert other.run(f"SELECT * FROM t WHERE {where}", values[-1:]) == [tuple(values)]
    with sqlite3.connect(":memory:") as lite:
        found = lite.execute(f"CREATE TABLE t ({', '.join(quoted(name, chr(34)) for name in names)})")
        found = lite.execute("SELECT * FROM t")
        assert [c[0] for c in found.description] == names


@settings(max_examples=100, deadline=None)
@given(
    st.lists(HOSTILE.filter(lambda n: n[0] != "_" and n.lower() != "ds"), min_size=1, max_size=3, unique_by=str.lower)
)
def test_a_declaration_as_ddl(names: list[str]) -> None:
    table = Table.model_validate({"columns": [{"name": n, "type": "int"} for n in names]})
    assert table.spark_schema == ", ".join(f"{quoted(n)} int" for n in names)


@pytest.mark.parametrize("mark", ["snowflake", "clickhouse"])
def test_percent_signs_stand_beside_parameters(mark: str) -> None:
    """Their libraries put values in by Python's `%`."""
    asked: list[Any] = []

    class Library:
        def cursor(self) -> Any:
            return self

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: object) -> None:
            return None

        description = None

        def execute(self, statement: str, params: Any) -> None:
            asked.append(statement % params if params else statement)

        def command(self, statement: str, parameters: Any) -> None:
            asked.append(statement % tuple(parameters) if parameters else statement)

    client: Any = (
        SnowflakeClient(Library(), "d", "s", None) if mark == "snowflake" else ClickHouseClient(Library(), "d")
    )
    name = client.quote("100% %s")
    client.run(f"DELETE FROM t WHERE {name} IN ({client.mark}, {client.mark})", ["7", "8"])
    client.run(f"DROP TABLE {name}")
    assert asked == [f"DELETE FROM t WHERE {name} IN (7, 8)", f"DROP TABLE {name}"]
