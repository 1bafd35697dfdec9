"""The warehouse `acme_ledger`: a file of SQLite.

A day is staged in a table of its own. One transaction replaces the day's rows and records the publication.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from headrace.config import Spec
from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.publish.target import (
    Check,
    Key,
    Publication,
    PublishedDay,
    StagedDay,
    Target,
    lease_lost,
    published_columns,
    table_name,
)
from headrace.stage import RunLock

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

#: Spark's types -> SQLite's.
_TYPES = {"string": "TEXT", "bigint": "INTEGER", "int": "INTEGER", "float": "REAL", "double": "REAL"}


@dataclass
class LedgerDay:
    """A staged day; see `headrace.publish.target.StagedDay`."""

    db: sqlite3.Connection
    table: str
    ds: str
    key: str
    rows: int
    previous: PublishedDay | None

    @property
    def label(self) -> str:
        return self.table

    @property
    def relation(self) -> str:
        return self.quote(self.table)

    @property
    def day(self) -> str:
        return f"'{self.ds}'"

    def quote(self, name: str) -> str:
        return _quoted(name)

    def query(self, sql: str) -> list[tuple[Any, ...]]:
        return self.db.execute(sql).fetchall()


class LedgerTarget(Target):
    """One pipeline's table in the file."""

    kind = "acme_ledger"

    def __init__(self, spec: Spec, db: sqlite3.Connection, address: str, lock: RunLock | None) -> None:
        assert spec.score is not None, "a pipeline that publishes has scores"
        self.label, self.address = table_name(spec), address
        self._db, self._lock = db, lock
        self._user, self._item = spec.score.user.key, spec.score.item.key
        self._columns: list[str] = []
        self._retained_days: set[str] = set()
        columns = "ds TEXT PRIMARY KEY, key TEXT, rows INTEGER, source TEXT, audit TEXT"
        db.execute(f"CREATE TABLE IF NOT EXISTS days ({columns})")
        db.execute("CREATE TABLE IF NOT EXISTS tokens (lease TEXT PRIMARY KEY, token INTEGER)")

    def claim(self) -> None:
        if self._lock is not None:
            with self._db:
                self._check_token()

    def create(self, spark_types: Sequence[tuple[str, str]]) -> None:
        columns = published_columns(self._user, self._item, spark_types, _TYPES)
        self._columns = [name for name, _ in columns]
        self.claim()
        existing = self._columns_of(self.label)
        if not existing:
            defined = ", ".join(f"{_quoted(name)} {_TYPES[kind]}" for name, kind in columns)
            self._db.execute(f"CREATE TABLE {_quoted(self.label)} ({defined})")
        elif missing := [name for name in self._columns[:6] if name not in existing]:
            raise UserError(f"table {self.label} has no column {', '.join(missing)}: publish to another table")
        for name, kind in columns:
            if existing and name not in existing:
                self._db.execute(f"ALTER TABLE {_quoted(self.label)} ADD COLUMN {_quoted(name)} {_TYPES[kind]}")
        self._db.execute(f"DROP VIEW IF EXISTS {_quoted(self.label + '_current')}")
        self._db.execute(
            f"CREATE VIEW {_quoted(self.label + '_current')} AS SELECT * FROM {_quoted(self.label)} "
            f"WHERE ds = (SELECT max(ds) FROM days)"
        )

    @contextmanager
    def stage(self, df: DataFrame, ds: str, key: str) -> Iterator[StagedDay]:
        table = self._staging(ds)
        self._db.execute(f"DROP TABLE IF EXISTS {_quoted(table)}")
        self._db.execute(f"CREATE TABLE {_quoted(table)} AS SELECT * FROM {_quoted(self.label)} WHERE 0")
        listed = ", ".join(map(_quoted, self._columns))
        marks = ", ".join("?" * len(self._columns))
        rows = (tuple(row[name] for name in self._columns) for row in df.toLocalIterator())
        try:
            with self._db:
                self._db.executemany(f"INSERT INTO {_quoted(table)} ({listed}) VALUES ({marks})", rows)
            yield LedgerDay(self._db, table, ds, key, self._count(table), self._previous_day(ds))
        finally:
            if ds not in self._retained_days:
                self._db.execute(f"DROP TABLE IF EXISTS {_quoted(table)}")

    def swap(self, staged: StagedDay, source: str, checks: Sequence[Check]) -> None:
        listed = ", ".join(map(_quoted, self._columns))
        audit = json.dumps([asdict(check) for check in checks])
        with self._db:
            self._check_token()
            self._db.execute(f"DELETE FROM {_quoted(self.label)} WHERE ds = ?", [staged.ds])
            self._db.execute(f"INSERT INTO {_quoted(self.label)} ({listed}) SELECT {listed} FROM {staged.relation}")
            record = [staged.ds, staged.key, staged.rows, source, audit]
            self._db.execute("INSERT OR REPLACE INTO days VALUES (?, ?, ?, ?, ?)", record)

    def keep(self, staged: StagedDay) -> None:
        self._retained_days.add(staged.ds)

    def kept_labels(self, days: Sequence[str] | None = None) -> list[str]:
        begin = self._staging("")
        rows = self._db.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name")
        tables = [name for (name,) in rows if name.startswith(begin)]
        return [name for name in tables if days is None or name.removeprefix(begin) in days]

    def drop_kept(self, days: Sequence[str] | None = None) -> list[str]:
        dropped = self.kept_labels(days)
        for name in dropped:
            self._db.execute(f"DROP TABLE {_quoted(name)}")
        return dropped

    def published(self, ds: str) -> Publication | None:
        row = self._db.execute("SELECT key, rows, audit FROM days WHERE ds = ?", [ds]).fetchone()
        return None if row is None else Publication(row[0], row[1], json.loads(row[2]))

    def days(self) -> list[str]:
        return [ds for (ds,) in self._db.execute("SELECT ds FROM days ORDER BY ds")]

    def count(self, ds: str) -> int:
        return self._count(self.label, ds)

    def sample(self, ds: str, rows: int) -> list[dict[str, Any]]:
        columns = self._columns_of(self.label)
        if not columns:
            raise UserError(f"there is no table {self.label} yet")
        order = f"ORDER BY {_quoted(self._user)}, rank LIMIT ?"
        cursor = self._db.execute(f"SELECT * FROM {_quoted(self.label)} WHERE ds = ? {order}", [ds, rows])
        return [dict(zip(columns, row, strict=True)) for row in cursor]

    def drop_days(self, days: Sequence[str]) -> None:
        with self._db:
            self._check_token()
            for ds in days:
                self._db.execute(f"DELETE FROM {_quoted(self.label)} WHERE ds = ?", [ds])
                self._db.execute("DELETE FROM days WHERE ds = ?", [ds])

    def rows_with(self, column: str, keys: Sequence[Key]) -> dict[str, int]:
        if column not in self._columns_of(self.label):
            return {}
        condition = f"{_quoted(column)} IN ({', '.join('?' * len(keys))})"
        counts = f"SELECT ds, count(*) FROM {_quoted(self.label)} WHERE {condition} GROUP BY ds"
        return dict(self._db.execute(counts, list(keys)))

    def erase(self, column: str, keys: Sequence[Key]) -> str:
        removed = self.rows_with(column, keys)
        with self._db:
            self._check_token()
            for ds, rows in removed.items():
                self._db.execute("UPDATE days SET rows = rows - ? WHERE ds = ?", [rows, ds])
            condition = f"{_quoted(column)} IN ({', '.join('?' * len(keys))})"
            self._db.execute(f"DELETE FROM {_quoted(self.label)} WHERE {condition}", list(keys))
        self._db.execute("VACUUM")
        return ""

    def grant(self, grants: Mapping[str, Sequence[str]]) -> None:
        if grants:
            raise UserError("publish.grants: a file of SQLite has no roles: give them to its folder")

    def _check_token(self) -> None:
        """Refuse a run whose lease was taken over, and note the token of this one; within a transaction."""
        if self._lock is None:
            return
        fence = self._lock.fence
        highest = self._db.execute("SELECT token FROM tokens WHERE lease = ?", [fence.lease]).fetchone()
        if highest is not None and highest[0] > fence.token:
            raise lease_lost(self.label)
        self._db.execute("INSERT OR REPLACE INTO tokens VALUES (?, ?)", [fence.lease, fence.token])

    def _previous_day(self, ds: str) -> PublishedDay | None:
        newest = self._db.execute("SELECT max(ds) FROM days WHERE ds < ?", [ds]).fetchone()[0]
        if newest is None:
            return None
        relation = f"(SELECT * FROM {_quoted(self.label)} WHERE ds = '{newest}') AS p"
        return PublishedDay(newest, self.count(newest), relation)

    def _staging(self, ds: str) -> str:
        return f"{self.label}_staging_{ds}"

    def _columns_of(self, table: str) -> list[str]:
        return [name for (name,) in self._db.execute("SELECT name FROM pragma_table_info(?)", [table])]

    def _count(self, table: str, ds: str | None = None) -> int:
        condition, values = ("", []) if ds is None else (" WHERE ds = ?", [ds])
        return int(self._db.execute(f"SELECT count(*) FROM {_quoted(table)}{condition}", values).fetchone()[0])


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


@contextmanager
def open_ledger(spec: Spec, ws: Workspace, lock: RunLock | None = None) -> Iterator[Target]:
    """Open the warehouse of a pipeline; see `headrace.publish.opening.open_target`."""
    assert spec.publish is not None, "asked for pipelines that publish"
    path = spec.publish.warehouse.path
    try:
        with closing(sqlite3.connect(str(path))) as db:
            yield LedgerTarget(spec, db, str(path), lock)
    except sqlite3.Error as e:
        raise UserError(f"{path} failed: {e}; the table holds what it held before. Run the same command again") from e
