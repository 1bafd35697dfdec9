"""A PostgreSQL table that is partitioned by day: swaps under faults, the current view, columns, retention, rights."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from psycopg import sql

from headrace.config import Warehouse
from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.publish.postgres import publication, tables
from headrace.publish.postgres import server as warehouse
from headrace.publish.postgres.target import GRANTS, count_rows_with, erase_rows, set_grants
from headrace.publish.target import Check, beyond_retention
from tests.publish_support import DS, TABLE, TYPES, day, fill, good_rows, publish, staging_tables

NEXT = "2026-01-11"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[warehouse.Server]:
    with warehouse.serve(Warehouse(), Workspace(tmp_path_factory.mktemp("partitions") / "home")) as running:
        yield running


@pytest.fixture
def conn(server: warehouse.Server) -> Iterator[warehouse.Connection]:
    with server.connect() as connection:
        connection.execute("DROP SCHEMA public CASCADE; CREATE SCHEMA public")
        tables.create_tables(connection, TABLE)
        yield connection


def parts(conn: warehouse.Connection) -> list[str]:
    rows = conn.execute(
        "SELECT pg_get_expr(c.relpartbound, c.oid) FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid "
        "WHERE i.inhparent = 'clicks_scores'::regclass ORDER BY 1"
    )
    return [str(bound).removeprefix("FOR VALUES IN ('").removesuffix("')") for (bound,) in rows]


def current(conn: warehouse.Connection) -> list[tuple[Any, ...]]:
    return conn.execute("SELECT * FROM clicks_scores_current ORDER BY user_id, rank").fetchall()


def test_a_day_is_a_partition_and_the_view_shows_the_newest(conn: warehouse.Connection) -> None:
    assert current(conn) == []
    publish(conn, good_rows(3, model="a"), "a")
    assert current(conn) == day(conn)
    publish(conn, good_rows(5, ds=NEXT), "b", NEXT)
    publish(conn, good_rows(4, model="c"), "c")
    assert parts(conn) == [DS, NEXT]
    assert current(conn) == day(conn, NEXT)
    assert {r[5] for r in day(conn)} == {"c"}
    assert len(day(conn)) == 12
    plan = conn.execute("EXPLAIN (ANALYZE, COSTS OFF, FORMAT JSON) SELECT * FROM clicks_scores_current").fetchone()
    assert plan is not None
    scanned = [p for p in plan[0][0]["Plan"]["Plans"] if "Relation Name" in p and p.get("Actual Loops")]
    assert len([p for p in scanned if "2026" in p["Relation Name"]]) == 1, "the view reads other days"


def test_attaching_looks_at_no_row(conn: warehouse.Connection) -> None:
    notices: list[str] = []
    conn.add_notice_handler(lambda notice: notices.append(notice.message_primary or ""))
    conn.execute("CREATE INDEX by_item ON clicks_scores (item_id) WHERE rank < 3")
    with publication.staging_table(conn, TABLE, DS, "k") as staged:
        fill(conn, staged, good_rows())
        conn.execute("SET client_min_messages = debug1")
        publication.swap(conn, staged, TABLE, "s", [])
        conn.execute("RESET client_min_messages")
    assert any("is implied by existing constraints" in text for text in notices), notices
    attached = notices[next(i for i, text in enumerate(notices) if "is implied" in text) :]
    assert not any("building index" in text or "verifying table" in text for text in attached), attached
    indexes = conn.execute(
        "SELECT count(*) FROM pg_index x JOIN pg_inherits i ON i.inhrelid = x.indrelid "
        "WHERE i.inhparent = 'clicks_scores'::regclass"
    ).fetchone()
    assert indexes == (2,)


class Cut(psycopg.Connection[tuple[Any, ...]]):
    """A connection that the server loses before, or right after, the statement of a number."""

    cut_at: float = float("inf")
    after: bool = False
    count: int = 0
    killer: warehouse.Connection

    def execute(self, *args: Any, **kwargs: Any) -> Any:
        self.count += 1
        if self.count == self.cut_at and not self.after:
            self._lose()
        result = super().execute(*args, **kwargs)
        if self.count == self.cut_at and self.after:
            self._lose()
        return result

    def _lose(self) -> None:
        pid = self.info.backend_pid
        self.killer.execute("SELECT pg_terminate_backend(%s)", [pid])
        # Its locks are free when it is gone.
        while self.killer.execute("SELECT 1 FROM pg_stat_activity WHERE pid = %s", [pid]).fetchone():
            time.sleep(0.002)


def cut(server: warehouse.Server, killer: warehouse.Connection, cut_at: float, after: bool) -> Cut:
    conn = Cut.connect(
        host=server.host,
        port=server.port,
        dbname=server.database,
        user=server.user,
        password=server.password,
        autocommit=True,
    )
    conn.killer, conn.cut_at, conn.after = killer, cut_at, after
    return conn


@pytest.mark.parametrize("after", [False, True])
def test_a_connection_lost_in_any_statement(conn: warehouse.Connection, server: warehouse.Server, after: bool) -> None:
    old, new = good_rows(6, model="old"), good_rows(4, model="new")
    publish(conn, good_rows(2, ds="2026-01-09"), "k0", "2026-01-09")
    publish(conn, old, "old")
    lost, outcomes = 0, set()
    for n in itertools.count(1):
        publish(conn, old, "old")
        dying = cut(server, conn, n, after)
        try:
            publish(dying, new, "new")
            finished = True
        except psycopg.OperationalError:
            finished = False
            lost += 1
        finally:
            dying.close()
        record = tables.published(conn, "public", "clicks_scores", DS)
        assert record is not None
        rows = day(conn)
        assert (record.key, record.rows, {r[5] for r in rows}, len(rows)) in (
            ("old", 18, {"old"}, 18),
            ("new", 12, {"new"}, 12),
        )
        assert current(conn) == rows
        outcomes.add(record.key)
        # What it left does not hinder the next run, which clears it away.
        publish(conn, new, "new")
        assert {r[5] for r in day(conn)} == {"new"}
        assert staging_tables(conn) == []
        assert parts(conn) == ["2026-01-09", DS]
        if finished and dying.count < n:
            break
    assert lost > 15
    assert outcomes == {"old", "new"}


def test_readers_see_whole_days_under_two_publishers_and_kills(
    conn: warehouse.Connection, server: warehouse.Server
) -> None:
    """Each version's rows all have its name, and as many as the name says; the views' day is there whenever asked."""
    publish(conn, good_rows(5, model="5"), "0")
    stop, faults, reads = threading.Event(), [], [0]

    def read() -> None:
        with server.connect() as reader:
            while not stop.is_set():
                for query in (
                    f"SELECT count(*), min(model_version), max(model_version) FROM clicks_scores WHERE ds = '{DS}'",
                    "SELECT count(*), min(model_version), max(model_version) FROM clicks_scores_current",
                ):
                    row = reader.execute(query).fetchone()
                    assert row is not None
                    rows, low, high = row
                    reads[0] += 1
                    if not (rows and low == high and rows == 3 * int(low)):
                        faults.append(row)

    def write(first: int) -> None:
        for i in range(12):
            users = first + i
            with cut(server, conn, 21 if i % 3 == 1 else float("inf"), bool(i % 2)) as writer:
                try:
                    publish(writer, good_rows(users, model=str(users), ds=DS), f"k{users}")
                    publish(writer, good_rows(users, model=str(users), ds=NEXT), f"k{users}", NEXT)
                except (psycopg.OperationalError, UserError):
                    continue

    readers = [threading.Thread(target=read) for _ in range(2)]
    writers = [threading.Thread(target=write, args=(first,)) for first in (10, 40)]
    for thread in [*readers, *writers]:
        thread.start()
    for thread in writers:
        thread.join()
    stop.set()
    for thread in readers:
        thread.join()
    assert faults == []
    assert reads[0] > 50


def test_a_swap_waits_for_a_reader_and_lets_others_in(
    conn: warehouse.Connection, server: warehouse.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(conn, good_rows(3, model="old"), "old")
    monkeypatch.setattr(publication, "_TURN_MILLISECONDS", 20)
    turns = threading.Semaphore(0)
    monkeypatch.setattr(publication.random, "uniform", lambda *_: turns.release() or 0.01)
    with server.connect() as slow, server.connect() as quick, server.connect() as writer:
        with slow.transaction():
            slow.execute("SELECT count(*) FROM clicks_scores")
            thread = threading.Thread(target=publish, args=(writer, good_rows(4, model="new"), "new"))
            thread.start()
            turns.acquire()
            assert {r[5] for r in day(quick)} == {"old"}
            turns.acquire()
            assert {r[5] for r in day(slow)} == {"old"}
        thread.join()
        assert {r[5] for r in day(quick)} == {"new"}
        monkeypatch.setattr(publication, "_PATIENCE_SECONDS", 0.0)
        with slow.transaction():
            slow.execute("SELECT count(*) FROM clicks_scores")
            with pytest.raises(UserError, match=r"queries have held public\.clicks_scores .* pg_stat_activity"):
                publish(writer, good_rows(2), "k")
    assert {r[5] for r in day(conn)} == {"new"}
    assert staging_tables(conn) == []


def test_a_table_of_an_earlier_version_is_partitioned(conn: warehouse.Connection) -> None:
    conn.execute(
        "DROP TABLE clicks_scores CASCADE; CREATE TABLE clicks_scores (ds date NOT NULL, user_id bigint NOT NULL, "
        "item_id text NOT NULL, rank integer NOT NULL, score real NOT NULL, model_version text NOT NULL, "
        "PRIMARY KEY (ds, user_id, rank)); CREATE INDEX mine ON clicks_scores (item_id); "
        "GRANT SELECT ON clicks_scores TO pg_monitor"
    )
    rows = [*good_rows(7), *good_rows(2, ds=NEXT)]
    with conn.cursor() as cursor:
        cursor.executemany("INSERT INTO clicks_scores VALUES (%s, %s, %s, %s, %s, %s)", rows)
    rows_before = [day(conn), day(conn, NEXT)]
    conn.execute("CREATE VIEW report AS SELECT * FROM clicks_scores")
    with pytest.raises(UserError, match=r"these hang on it: view report\. Drop them and make them again"):
        tables.create_tables(conn, TABLE)
    assert [day(conn), day(conn, NEXT)] == rows_before
    conn.execute("DROP VIEW report")
    tables.create_tables(conn, TABLE)
    assert [day(conn), day(conn, NEXT)] == rows_before
    assert parts(conn) == [DS, NEXT]
    assert tables.relation_kind(conn, "public", "clicks_scores") == "p"
    assert conn.execute("SELECT has_table_privilege('pg_monitor', 'clicks_scores', 'SELECT')").fetchone() == (True,)
    indexes = conn.execute("SELECT count(*) FROM pg_index WHERE indrelid = 'clicks_scores'::regclass").fetchone()
    assert indexes == (2,)
    publish(conn, good_rows(3, model="new"))
    assert {r[5] for r in day(conn)} == {"new"}
    assert day(conn, NEXT) == rows_before[1]
    left = conn.execute("SELECT relname FROM pg_class WHERE relkind IN ('r', 'p') AND relname LIKE 'clicks_scores%'")
    assert len(left.fetchall()) == 3, "the table and its two days"


def test_columns_are_added_and_those_left_out_stay(conn: warehouse.Connection) -> None:
    publish(conn, good_rows(2, ds="2026-01-09"), "k", "2026-01-09")
    wider = tables.scores_table(
        "public", "clicks_scores", "user_id", "item_id", [*TYPES, ("source", "string"), ("propensity", "double")]
    )
    tables.create_tables(conn, wider)
    publish(conn, [(*r, "popular", 0.25) for r in good_rows(3)], table=wider)
    assert {r[6:] for r in day(conn, "2026-01-09")} == {(None, None)}
    assert {r[6:] for r in current(conn)} == {("popular", 0.25)}
    # Scores without them again, and a column of the user's own.
    conn.execute("ALTER TABLE clicks_scores ADD COLUMN note text")
    tables.create_tables(conn, TABLE)
    publish(conn, [(*r, None, None, None) for r in good_rows(3, ds=NEXT)], "k", NEXT)
    assert {r[6:] for r in current(conn)} == {(None, None, None)}
    conn.execute(
        "ALTER TABLE clicks_scores DROP COLUMN propensity CASCADE; ALTER TABLE clicks_scores ADD propensity int"
    )
    with pytest.raises(UserError, match="'propensity' is integer, not double precision"):
        tables.create_tables(conn, wider)


def test_the_place_of_the_view_is_taken(conn: warehouse.Connection) -> None:
    conn.execute("DROP VIEW clicks_scores_current; CREATE TABLE clicks_scores_current (x int)")
    with pytest.raises(UserError, match=r"public\.clicks_scores_current is to be the view"):
        tables.create_tables(conn, TABLE)


def test_retention_drops_whole_days(conn: warehouse.Connection) -> None:
    days = [f"2026-01-{d:02d}" for d in (1, 2, 5, 6, 7)]
    for ds in days:
        publish(conn, good_rows(2, ds=ds), ds, ds)
    assert list(tables.published_days(conn, "public", "clicks_scores")) == days
    assert beyond_retention(days, None) == []
    assert beyond_retention(days, 7) == []
    old = beyond_retention(days, 3)
    assert old == ["2026-01-01", "2026-01-02"]
    publication.drop_days(conn, ("public", "clicks_scores"), old)
    assert parts(conn) == days[2:]
    assert list(tables.published_days(conn, "public", "clicks_scores")) == days[2:]
    assert len(current(conn)) == 6


def test_rights_reach_the_table_and_the_view_alone(conn: warehouse.Connection) -> None:
    publish(conn, good_rows(2))
    set_grants(conn, TABLE, {"select": ["pg_monitor"]})
    for name, right, is_granted in (
        ("clicks_scores", "SELECT", True),
        ("clicks_scores_current", "SELECT", True),
        ("clicks_scores", "INSERT", False),
        ("headrace_publications", "SELECT", False),
    ):
        granted = conn.execute("SELECT has_table_privilege('pg_monitor', %s, %s)", [name, right]).fetchone()
        assert granted == (is_granted,), (name, right)
    with pytest.raises(psycopg.errors.UndefinedObject, match='role "no; body" does not exist'):
        set_grants(conn, TABLE, {"select": ["no; body"]})


def test_rights_that_are_no_longer_named_are_taken_back(conn: warehouse.Connection) -> None:
    other_table = tables.scores_table("public", "other_scores", "user_id", "item_id", TYPES)
    tables.create_tables(conn, other_table)
    roles = first, second, by_hand = ("pg_monitor", "pg_signal_backend", "pg_checkpoint")
    conn.execute(f"GRANT USAGE ON SCHEMA public TO {by_hand}; GRANT SELECT ON clicks_scores TO {by_hand}")

    def having(test: str) -> set[str]:
        return {str(r) for (r,) in conn.execute(f"SELECT r FROM unnest(%s::text[]) r WHERE {test}", [[*roles]])}

    def readers(name: str) -> set[str]:
        return having(f"has_table_privilege(r, '{name}', 'SELECT')")

    def users_of_schema() -> set[str]:
        return having("has_schema_privilege(r, 'public', 'USAGE')")

    set_grants(conn, TABLE, {})
    assert not tables.columns_of(conn, "public", GRANTS)
    set_grants(conn, TABLE, {"select": [first, second]})
    set_grants(conn, other_table, {"select": [second]})
    assert readers("clicks_scores_current") == {first, second}
    assert users_of_schema() == {first, second, by_hand}
    set_grants(conn, TABLE, {"select": [first, by_hand]})
    set_grants(conn, TABLE, {"select": [first, by_hand]})
    assert readers("clicks_scores") == readers("clicks_scores_current") == {first, by_hand}
    assert readers("other_scores") == {second}
    assert users_of_schema() == {first, second, by_hand}, "the other table needs it"
    # A role of the record that the server does not have any more.
    conn.execute("INSERT INTO headrace_grants VALUES ('clicks_scores', 'select', 'nobody')")
    with pytest.raises(psycopg.errors.UndefinedObject):
        set_grants(conn, TABLE, {"select": ["no; body"]})
    assert readers("clicks_scores") == {first, by_hand}, "a change that failed"
    set_grants(conn, TABLE, {})
    set_grants(conn, other_table, {})
    assert readers("clicks_scores") | readers("clicks_scores_current") | readers("other_scores") == set()
    assert users_of_schema() == {by_hand}, "it had the use of the schema before"
    assert conn.execute("SELECT count(*) FROM headrace_grants").fetchone() == (0,)


def test_rows_that_failed_stay_for_a_look(conn: warehouse.Connection) -> None:
    with publication.staging_table(conn, TABLE, DS, "k") as staged:
        fill(conn, staged, good_rows(2))
        publication.keep(conn, staged)
    count = sql.SQL("SELECT count(*) FROM {}").format(staged.id)
    assert conn.execute(count).fetchone() == (6,)
    publish(conn, good_rows(2, ds=NEXT), "k", NEXT)
    assert conn.execute(count).fetchone() == (6,), "another day's run dropped it"
    publish(conn, good_rows(3))
    assert staging_tables(conn) == []
    with publication.staging_table(conn, TABLE, DS, "k") as staged:
        fill(conn, staged, good_rows(2))
        publication.keep(conn, staged)
    assert publication.drop_kept(conn, TABLE) == [staged.label]
    assert staging_tables(conn) == []
    assert len(day(conn)) == 9


def test_a_record_names_the_checks(conn: warehouse.Connection) -> None:
    with publication.staging_table(conn, TABLE, DS, "k") as staged:
        fill(conn, staged, good_rows(2))
        publication.swap(conn, staged, TABLE, "s", [Check("rows", 6, "at least 1", True)])
    recorded = tables.published(conn, "public", "clicks_scores", DS)
    assert recorded == tables.Publication(
        "k", 6, [{"name": "rows", "value": 6, "limit": "at least 1", "ok": True, "detail": ""}]
    )


def test_rows_of_some_users_go_from_all_days(conn: warehouse.Connection) -> None:
    days = {ds: good_rows(users=5, k=2, ds=ds) for ds in (DS, "2026-01-11")}
    for ds, rows in days.items():
        publish(conn, rows, "k", ds)
    assert count_rows_with(conn, "public", "clicks_scores", "user_id", [0, 4, 77]) == dict.fromkeys(days, 4)
    erase_rows(conn, "public", "clicks_scores", "user_id", [0, 4, 77])
    assert count_rows_with(conn, "public", "clicks_scores", "user_id", [0, 4, 77]) == {}
    for ds, rows in days.items():
        left = [r for r in rows if r[1] not in (0, 4)]
        found_rows = [(str(r[0]), *r[1:4]) for r in day(conn, ds)]
        assert found_rows == [r[:4] for r in left]
        recorded = tables.published(conn, "public", "clicks_scores", ds)
        assert recorded is not None
        assert recorded.rows == tables.count_day(conn, "public", "clicks_scores", ds) == len(left)
    # A text that looks like SQL is one value.
    odd = ["x'); DROP TABLE clicks_scores; --", days[DS][2][2]]
    assert count_rows_with(conn, "public", "clicks_scores", "item_id", odd) == dict.fromkeys(days, 1)
