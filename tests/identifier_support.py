"""Hostile names of columns, and what each dialect of a warehouse must make of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from headrace.publish.sql.client import SqlClient

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


def check_names(client: type[SqlClient], name: str, table: str) -> None:
    """The dialect reads a name back, and tells several parts apart."""
    dialect = client.__new__(client)
    assert unquoted(dialect.quote(name), client.quotes, client.escape) == name
    assert dialect.quote(table, name) == f"{dialect.quote(table)}.{dialect.quote(name)}"


def check_percent_signs(client: Callable[[Any], SqlClient]) -> None:
    """Percent signs in a name stand beside parameters that a library puts in by Python's `%`."""
    statements: list[Any] = []

    class Library:
        def cursor(self) -> Any:
            return self

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: object) -> None:
            return None

        description = None

        def execute(self, statement: str, params: Any) -> None:
            statements.append(statement % params if params else statement)

        def command(self, statement: str, parameters: Any) -> None:
            statements.append(statement % tuple(parameters) if parameters else statement)

    opened = client(Library())
    name = opened.quote("100% %s")
    opened.run(f"DELETE FROM t WHERE {name} IN ({opened.mark}, {opened.mark})", ["7", "8"])
    opened.run(f"DROP TABLE {name}")
    assert statements == [f"DELETE FROM t WHERE {name} IN (7, 8)", f"DROP TABLE {name}"]
