"""A run that was paused until another one took its lease: what it then does in a warehouse is refused."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from psycopg import sql

from headrace.config import Spec, Warehouse, load_spec
from headrace.config.workspace import Workspace
from headrace.errors import BusyError, UserError
from headrace.publish.files import Record
from headrace.publish.opening import open_target
from headrace.publish.postgres import publication, tables
from headrace.publish.postgres import server as warehouse
from headrace.publish.postgres.target import PostgresTarget, erase_rows, set_grants
from headrace.publish.tables.delta import DeltaTarget
from headrace.publish.tables.parquet import MANIFEST, ParquetTarget
from headrace.stage import RunLock
from headrace.storage import Fence, LeaseLost
from tests.publish_support import DS, TABLE, day, fill, good_rows, holding, overtaken, publish, staged, staging_tables

NEXT = "2026-01-11"
OLD, NEW = Fence("l", 1), Fence("l", 2)
RECORD = Record("k", 12, "m1", "s", [])

# --- PostgreSQL ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[warehouse.Server]:
    with warehouse.serve(Warehouse(), Workspace(tmp_path_factory.mktemp("fencing") / "home")) as running:
        yield running


@pytest.fixture
def conn(server: warehouse.Server) -> Iterator[warehouse.Connection]:
    with server.connect() as connection:
        connection.execute("DROP SCHEMA public CASCADE; CREATE SCHEMA public")
        tables.create_tables(connection, TABLE, OLD)
        yield connection


def publications(conn: warehouse.Connection) -> list[tuple[Any, ...]]:
    return conn.execute("SELECT key, rows FROM headrace_publications ORDER BY ds").fetchall()


@pytest.mark.parametrize("later", ["has made the table", "has dropped a day", "of another lease"])
def test_a_run_that_is_paused_between_staging_and_the_swap(
    conn: warehouse.Connection, server: warehouse.Server, later: str
) -> None:
    publish(conn, good_rows(2, model="before"), "before")
    with server.connect() as other_connection:
        with publication.staging_table(conn, TABLE, DS, "old") as old_table:
            fill(conn, old_table, good_rows(5, model="old"))
            if later == "has made the table":
                tables.create_tables(other_connection, TABLE, NEW)
                with pytest.raises(BusyError, match="another process is publishing"):
                    publish(other_connection, good_rows(3, model="new"), "new")
            elif later == "has dropped a day":
                publication.drop_days(other_connection, ("public", "clicks_scores"), [NEXT], NEW)
            else:
                tables.create_tables(other_connection, TABLE, Fence("m", 9))
                publication.swap(conn, old_table, TABLE, "s", [], OLD)
                assert publications(conn) == [("old", 15)]
                return
            with pytest.raises(LeaseLost, match=r"public\.clicks_scores: a later run .* nothing of this one was pub"):
                publication.swap(conn, old_table, TABLE, "s", [], OLD)
        assert {r[5] for r in day(conn)} == {"before"}
        assert publications(conn) == [("before", 6)]
        assert staging_tables(conn) == []
        # The later one has the day for itself now, as often as it wants.
        for users in (3, 4):
            with publication.staging_table(other_connection, TABLE, DS, "new") as new_table:
                fill(other_connection, new_table, good_rows(users, model="new"))
                publication.swap(other_connection, new_table, TABLE, "s", [], NEW)
        assert publications(conn) == [("new", 12)]


CHANGES: dict[str, Callable[[warehouse.Connection], object]] = {
    "create": lambda conn: tables.create_tables(conn, TABLE, OLD),
    "drop days": lambda conn: publication.drop_days(conn, ("public", "clicks_scores"), [DS], OLD),
    "erase": lambda conn: erase_rows(conn, "public", "clicks_scores", "user_id", [0], OLD),
    "grant": lambda conn: set_grants(conn, TABLE, {"select": ["pg_monitor"]}, OLD),
}


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_changes_the_table_is_refused_after_a_later_run(conn: warehouse.Connection, change: str) -> None:
    publish(conn, good_rows(2), "k")
    CHANGES["create"](conn)
    with conn.transaction():
        tables.claim(conn, "public", "clicks_scores", NEW)
    with pytest.raises(LeaseLost):
        CHANGES[change](conn)
    assert publications(conn) == [("k", 6)]
    assert len(day(conn)) == 6
    assert conn.execute("SELECT has_table_privilege('pg_monitor', 'clicks_scores', 'SELECT')").fetchone() == (False,)
    assert conn.execute("SELECT token FROM headrace_fences").fetchall() == [(2,)]


def test_a_table_of_before_there_were_tokens(conn: warehouse.Connection) -> None:
    publish(conn, good_rows(2), "k")
    conn.execute("DROP TABLE headrace_fences")
    erase_rows(conn, "public", "clicks_scores", "user_id", [0], NEW)
    assert len(day(conn)) == 3
    with pytest.raises(LeaseLost):
        CHANGES["drop days"](conn)


def test_who_comes_while_a_later_run_commits_waits_and_is_refused(
    conn: warehouse.Connection, server: warehouse.Server
) -> None:
    errors: list[BaseException] = []

    def early() -> None:
        with server.connect() as early_connection:
            try:
                with early_connection.transaction():
                    tables.claim(early_connection, "public", "clicks_scores", OLD)
            except LeaseLost as e:
                errors.append(e)

    waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
    with server.connect() as look, conn.transaction():
        tables.claim(conn, "public", "clicks_scores", NEW)
        thread = threading.Thread(target=early)
        thread.start()
        while look.execute(waiting).fetchone() == (0,):
            assert thread.is_alive(), "it did not wait"
            time.sleep(0.002)
    thread.join()
    assert len(errors) == 1


@pytest.mark.parametrize("change", ["create", "erase", "grant"])
def test_who_waits_for_a_run_that_stands_still_gives_up_and_hinders_no_other_pipeline(
    conn: warehouse.Connection, server: warehouse.Server, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(conn, good_rows(2), "k")
    real = tables.claim

    def claims(conn: warehouse.Connection, *args: Any) -> None:
        conn.execute("SET LOCAL lock_timeout = '20 ms'")
        with server.connect() as third:
            locks = third.execute("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'").fetchone()
        assert locks == (0,), "it holds what other pipelines want"
        real(conn, *args)

    with server.connect() as frozen, frozen.transaction():
        tables.claim(frozen, "public", "clicks_scores", OLD)
        monkeypatch.setattr(tables, "claim", claims)
        with pytest.raises(BusyError, match=r"another run is changing public\.clicks_scores .* end its session"):
            CHANGES[change](conn)
    monkeypatch.undo()
    CHANGES[change](conn)
    assert conn.execute("SHOW lock_timeout").fetchone() == ("0",)


def test_a_claim_before_the_first_publication(server: warehouse.Server, conn: warehouse.Connection) -> None:
    score = load_spec("clicks").score
    assert score is not None
    conn.execute("DROP SCHEMA IF EXISTS fresh CASCADE")
    with server.connect() as other_connection:
        PostgresTarget(server, other_connection, "here", "fresh", "clicks_scores", score, NEW).claim()
    with pytest.raises(LeaseLost):
        tables.create_tables(conn, replace(TABLE, schema="fresh"), OLD)
    assert tables.columns_of(conn, "fresh", "clicks_scores") == {}
    tables.create_tables(conn, replace(TABLE, schema="fresh"), NEW)


class Boom(Exception):
    pass


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(1, 4), st.sampled_from(["l", "l", "m"]), st.booleans()), max_size=8))
def test_a_change_stands_unless_a_later_holder_of_its_lease_has_made_one(
    conn: warehouse.Connection, changes: list[tuple[int, str, bool]]
) -> None:
    """Changes that fail leave nothing: no change, and no token."""
    conn.execute("CREATE TABLE IF NOT EXISTS last (n int); TRUNCATE last; TRUNCATE headrace_fences")
    newest, expected = dict[str, int](), list[tuple[int]]()
    for n, (token, lease, fails) in enumerate(changes):

        def change(n: int = n, fails: bool = fails) -> None:
            conn.execute(sql.SQL("INSERT INTO last VALUES ({})").format(sql.Literal(n)))
            if fails:
                raise Boom

        try:
            publication.change_held(conn, "public", "clicks_scores", change, Fence(lease, token))
        except LeaseLost:
            assert token < newest[lease]
        except Boom:
            assert token >= newest.get(lease, 0)
        else:
            assert token >= newest.get(lease, 0)
            newest[lease] = token
            expected.append((n,))
    assert conn.execute("SELECT n FROM last ORDER BY n").fetchall() == expected


# --- tables of files -------------------------------------------------------------------------------------------------


def opened(kind: str, folder: Path, lock: RunLock | None) -> tuple[Spec, Any]:
    spec = load_spec("clicks", [f"publish.warehouse.kind={kind}"])
    return spec, open_target(spec, Workspace(folder / "home"), lock)


def test_a_folder_of_files_is_not_named_by_an_earlier_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock of the folder is lost, too, as on a file system that other hosts share."""
    monkeypatch.setattr("headrace.storage.lease.fcntl.flock", lambda fd, how: None)
    real = ParquetTarget._discard

    def paused(self: ParquetTarget, manifest: dict[str, Any]) -> None:
        monkeypatch.setattr(ParquetTarget, "_discard", real)
        with opened("parquet", tmp_path, holding(2))[1] as winning_target:
            winning_target.publish_files(staged(tmp_path, good_rows(3), "new"), RECORD)
        real(self, manifest)

    with opened("parquet", tmp_path, holding(1))[1] as early_target:
        monkeypatch.setattr(ParquetTarget, "_discard", paused)
        with pytest.raises(LeaseLost, match="written by a later run"):
            early_target.publish_files(staged(tmp_path, good_rows(5), "old", NEXT), RECORD)
        folder_record = json.loads((early_target.folder / MANIFEST).read_text())
        assert (list(folder_record["days"]), folder_record["fences"]) == ([DS], {"l": 2})
        with pytest.raises(LeaseLost):
            early_target.drop_days([DS])
    with opened("parquet", tmp_path, overtaken(3))[1] as overtaken_target, pytest.raises(LeaseLost):
        # What no manifest names may be a later run's by now.
        overtaken_target.publish_files(staged(tmp_path, good_rows(2), "told"), RECORD)
    with opened("parquet", tmp_path, holding(3))[1] as later:
        later.claim()
        later.drop_days([DS])
        assert later.days() == []
        with pytest.raises(LeaseLost):
            with opened("parquet", tmp_path, holding(2))[1] as later_target:
                later_target.claim()


def test_a_claim_of_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    with (
        opened("parquet", tmp_path, holding(2))[1] as later,
        opened("parquet", tmp_path, holding(1))[1] as early_target,
    ):
        later.claim()
        assert (later.days(), later.rows_with("user_id", [0]), later.leftovers("user_id", [0])) == ([], {}, 0)
        with pytest.raises(UserError, match="there is no table"):
            later.sample(DS, 1)
        with pytest.raises(LeaseLost):
            early_target.publish_files(staged(tmp_path, good_rows(3), "old"), RECORD)
        assert early_target.published(DS) is None
        later.publish_files(staged(tmp_path, good_rows(3), "new"), RECORD)
        assert later.published(DS).key == "k"


def test_a_record_beside_a_table_is_not_written_over(tmp_path: Path) -> None:
    with opened("delta", tmp_path, holding(2))[1] as new, opened("delta", tmp_path, holding(1))[1] as old:
        assert isinstance(new, DeltaTarget)
        new.records.save(DS, RECORD)
        with pytest.raises(LeaseLost):
            old.records.save(DS, Record("old", 1, "m", "s", []))
        with pytest.raises(LeaseLost):
            old.records.set_rows({DS: 1})
        assert new.published(DS).key == "k"
        new.records.set_rows({DS: 7})
        assert new.rows_by_day() == {DS: 7}
