"""Hostile names as identifiers: what each dialect reads back is the name, whole."""

from __future__ import annotations

import sqlite3
from typing import Any

import duckdb
from hypothesis import given, settings
from hypothesis import strategies as st
from psycopg import sql
from sqlalchemy import create_engine

from headrace.config import Table
from headrace.config.schema import quoted
from headrace.publish.sql.column_stores import ClickHouseClient, DuckDbClient
from headrace.publish.sql.sqlalchemy import client_of
from tests.identifier_support import HOSTILE, check_names, check_percent_signs, unquoted


@settings(max_examples=300, deadline=None)
@given(HOSTILE, HOSTILE)
def test_each_dialect_reads_the_name_back(name: str, table: str) -> None:
    for client in (ClickHouseClient, DuckDbClient):
        check_names(client, name, table)
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
        database = client_of(connection, None)
        database.run(f"CREATE TABLE t ({', '.join(f'{database.quote(name)} INTEGER' for name in names)})")
        assert database.columns("t") == names
        values: list[Any] = list(range(len(names)))
        marks = ", ".join([database.mark] * len(names))
        database.run(f"INSERT INTO t ({', '.join(map(database.quote, names))}) VALUES ({marks})", values)
        condition = f"{database.quote(names[-1])} = {database.mark}"
        assert database.run(f"SELECT * FROM t WHERE {condition}", values[-1:]) == [tuple(values)]
    with sqlite3.connect(":memory:") as lite:
        cursor = lite.execute(f"CREATE TABLE t ({', '.join(quoted(name, chr(34)) for name in names)})")
        cursor = lite.execute("SELECT * FROM t")
        assert [c[0] for c in cursor.description] == names


@settings(max_examples=100, deadline=None)
@given(
    st.lists(HOSTILE.filter(lambda n: n[0] != "_" and n.lower() != "ds"), min_size=1, max_size=3, unique_by=str.lower)
)
def test_a_declaration_as_ddl(names: list[str]) -> None:
    table = Table.model_validate({"columns": [{"name": n, "type": "int"} for n in names]})
    assert table.spark_schema == ", ".join(f"{quoted(n)} int" for n in names)


def test_percent_signs_stand_beside_parameters() -> None:
    """ClickHouse's library puts values in by Python's `%`."""
    check_percent_signs(lambda library: ClickHouseClient(library, "d"))
