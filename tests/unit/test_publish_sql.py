"""DuckDB, SQLite and (by SQLAlchemy) PostgreSQL as warehouses, real ones, read back by their own libraries."""

from __future__ import annotations

import itertools
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import duckdb
import pytest

from headrace.config import Spec, Warehouse, load_spec
from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.publish.files import FilesTarget
from headrace.publish.opening import open_target
from headrace.publish.postgres.server import Server, serve
from headrace.publish.sql.client import SqlClient
from headrace.publish.sql.column_stores import DuckDbClient
from headrace.publish.sql.sqlalchemy import SqlAlchemyClient
from headrace.publish.sql.target import STAGING_PREFIX, SqlTarget
from headrace.publish.target import Check
from headrace.stage import RunLock
from headrace.storage import LeaseLost
from tests.publish_support import DS, TYPES, Row, good_rows, holding, staged

NEXT = "2026-01-11"


class Place:
    """A kind of warehouse: its spec, and a look at it by another library than ours."""

    def __init__(self, kind: str, folder: Path, server: Server) -> None:
        self.kind, self.folder, self.server = kind, folder, server
        self.file = folder / "scores.db"
        self.ws = Workspace(folder / "home")
        overrides = {"duckdb": [f"path={self.file}"], "sqlite": [f"url=sqlite:///{self.file}"]}.get(kind)
        if overrides is None:
            secret = folder / "password"
            secret.write_text(server.password or "")
            url = f"postgresql+psycopg://{server.user}@{server.host}:{server.port}/{server.database}"
            overrides = [f"url={url}", f"password_file={secret}"]
            with server.connect() as conn:
                conn.execute("DROP SCHEMA public CASCADE; CREATE SCHEMA public")
        overrides.append(f"kind={'duckdb' if kind == 'duckdb' else 'sqlalchemy'}")
        self.spec: Spec = load_spec(
            "clicks", [*(f"publish.warehouse.{key}" for key in overrides), "publish.table=top_items"]
        )
        self.client: type[SqlClient] = DuckDbClient if kind == "duckdb" else SqlAlchemyClient

    @contextmanager
    def open(self, more: Sequence[tuple[str, str]] = (), lock: RunLock | None = None) -> Iterator[FilesTarget]:
        with open_target(self.spec, self.ws, lock) as target:
            assert isinstance(target, FilesTarget)
            target.create([*TYPES, *more])
            yield target

    def publish(self, rows: Sequence[Row], key: str, ds: str = DS, more: Sequence[tuple[str, str]] = ()) -> None:
        with self.open(more) as target:
            target.swap(staged(self.folder, rows, key, ds, more), "lake/clicks/scores@3", [Check("rows", 1, "1", True)])

    def read(self, query: str) -> list[Row]:
        """The rows of a statement, if it has any."""
        if self.kind == "postgresql":
            with self.server.connect() as conn:
                cursor = conn.execute(query.encode())
                return cursor.fetchall() if cursor.description else []
        with duckdb.connect(str(self.file)) if self.kind == "duckdb" else sqlite3.connect(self.file, timeout=60) as db:
            return [tuple(row) for row in db.execute(query).fetchall()]

    def day(self, ds: str = DS, relation: str = "top_items") -> list[Row]:
        condition = f"WHERE CAST(ds AS VARCHAR) = '{ds}'" if relation == "top_items" else ""
        rows = self.read(f"SELECT * FROM {relation} {condition} ORDER BY user_id, rank")
        return [(str(r[0]), *r[1:]) for r in rows]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serve(Warehouse(), Workspace(tmp_path_factory.mktemp("sql") / "home")) as running:
        yield running


@pytest.fixture(params=["duckdb", "sqlite", "postgresql"])
def place(request: pytest.FixtureRequest, tmp_path: Path, server: Server) -> Place:
    return Place(request.param, tmp_path, server)


def close(rows: Sequence[Row]) -> list[Row]:
    return [(*r[:4], pytest.approx(r[4], rel=1e-6), *r[5:]) for r in rows]


def test_days_are_replaced_read_dropped_and_the_view_shows_the_newest(place: Place) -> None:
    place.publish(good_rows(5), "a")
    assert place.day() == close(good_rows(5))
    place.publish(good_rows(3, ds=NEXT), "b", NEXT)
    place.publish(good_rows(4, model="m2"), "c")
    assert place.day() == close(good_rows(4, model="m2"))
    assert place.day(NEXT) == close(good_rows(3, ds=NEXT))
    assert place.day(relation="top_items_current") == close(good_rows(3, ds=NEXT))
    with place.open() as target:
        assert target.days() == [DS, NEXT]
        assert target.missing(DS, "c") is None
        assert target.missing(DS, "a") == f"{target.label} holds another run's rows for {DS}"
        publication = target.published(DS)
        assert publication is not None
        assert (publication.key, publication.rows, publication.audit[0]["name"]) == ("c", 12, "rows")
        assert [r["rank"] for r in target.sample(DS, 4)] == [1, 2, 3, 1]
        target.drop_days([DS])
        assert target.days() == [NEXT]
        assert target.missing(DS, "c") == f"{target.label} has no publication for {DS}"
        target.grant({})
        if place.kind != "postgresql":
            with pytest.raises(UserError, match="has no roles"):
                target.grant({"select": ["analyst"]})
    assert place.day() == []
    assert place.day(relation="top_items_current") == close(good_rows(3, ds=NEXT))
    tables = {
        "sqlite": "SELECT name FROM sqlite_master",
        "duckdb": "SELECT table_name FROM duckdb_tables()",
        "postgresql": "SELECT tablename FROM pg_tables",
    }
    assert not [n for (n,) in place.read(tables[place.kind]) if n.startswith(STAGING_PREFIX)]


def test_rights_are_given_and_taken_back(place: Place) -> None:
    if place.kind != "postgresql":
        pytest.skip("files have no roles")
    place.publish(good_rows(2), "a")

    def readers() -> set[str]:
        return {
            role
            for role in ("pg_monitor", "pg_checkpoint")
            for name in ("top_items", "top_items_current")
            if place.read(f"SELECT has_table_privilege('{role}', '{name}', 'SELECT')") == [(True,)]
        }

    for roles in (["pg_monitor"], ["pg_monitor", "pg_checkpoint"], ["pg_checkpoint"], []):
        with place.open() as target:
            target.grant({"select": roles})
            target.grant({"select": roles})
        assert readers() == set(roles)


def test_a_role_that_is_gone_keeps_nobody_from_publishing(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    if place.kind != "postgresql":
        pytest.skip("files have no roles")
    place.publish(good_rows(2), "a")
    with place.open() as target:
        target.grant({"select": ["pg_monitor"]})
        place.read("INSERT INTO headrace_grants VALUES ('top_items', 'select', 'analyst_gone')")
        target.grant({"select": ["pg_monitor"]})
        assert "the role analyst_gone is gone" in caplog.text
        assert place.read("SELECT role FROM headrace_grants") == [("pg_monitor",)]
        target.grant({})
    assert place.read("SELECT role FROM headrace_grants") == []


def test_rows_deleted_by_hand_are_missed(place: Place) -> None:
    place.publish(good_rows(5), "a")
    place.read("DELETE FROM top_items WHERE user_id = 3")
    with place.open() as target:
        assert target.missing(DS, "a") == f"{target.label} has 12 rows for {DS}, and 15 were published"


def test_columns_are_added(place: Place) -> None:
    place.publish(good_rows(2), "a")
    place.publish([(*r, "popular") for r in good_rows(3, ds=NEXT)], "b", NEXT, [("source", "string")])
    assert {r[6:] for r in place.day()} == {(None,)}
    assert {r[6:] for r in place.day(relation="top_items_current")} == {("popular",)}
    place.publish(good_rows(3, ds=NEXT), "c", NEXT)
    assert {r[6:] for r in place.day(relation="top_items_current")} == {(None,)}
    with pytest.raises(UserError, match=r"'item_id' has type array<int>"):
        with open_target(place.spec, place.ws) as target:
            target.create([*TYPES[:2], ("item_id", "array<int>"), *TYPES[3:]])


class Lost(BaseException):
    """Stands for a killed process: no handler may mend it."""


def cut(run: Callable[..., Any], cut_at: int, after: bool) -> Callable[..., Any]:
    count = itertools.count(1)

    def runs(client: Any, statement: str, params: Sequence[Any] = ()) -> Any:
        n = next(count)
        if n > cut_at or (n == cut_at and not after):
            raise Lost
        result = run(client, statement, params)
        if n == cut_at:
            raise Lost
        return result

    return runs


@pytest.mark.parametrize("after", [False, True])
def test_killed_at_any_statement(place: Place, monkeypatch: pytest.MonkeyPatch, after: bool) -> None:
    """The killed connection executes no statement any more, not even a roll-back: it ends as a process does."""
    place.publish(good_rows(6, model="old"), "old")
    outcomes = []
    # A DuckDB file takes a tenth of a second to open: a third of its statements.
    for cut_at in itertools.count(1 + after, 3 if place.kind == "duckdb" else 1):
        run = place.client.run
        monkeypatch.setattr(place.client, "run", cut(run, cut_at, after))
        try:
            place.publish(good_rows(4, model="new"), "new")
            finished = True
        except Lost:
            finished = False
        finally:
            monkeypatch.setattr(place.client, "run", run)
        with place.open() as target:
            publication = target.published(DS)
        assert publication is not None
        rows = place.day(relation="top_items_current")
        assert (publication.key, len(rows), {r[5] for r in rows}) in (("old", 18, {"old"}), ("new", 12, {"new"}))
        outcomes.append(publication.key)
        if finished:
            break
        if publication.key == "new":
            place.publish(good_rows(6, model="old"), "old")
    assert len(outcomes) > 5
    assert set(outcomes) == {"old", "new"}


def test_readers_see_whole_days_and_publishers_wait_for_each_other(place: Place) -> None:
    if place.kind == "duckdb":
        pytest.skip("one process at a time has the file open")
    place.publish(good_rows(5, model="5"), "5")
    stop, faults, reads, failed = threading.Event(), [], [0], []

    def read() -> None:
        while not stop.is_set():
            ((rows, low, high),) = place.read(
                "SELECT count(*), min(model_version), max(model_version) FROM top_items_current"
            )
            reads[0] += 1
            if not (low == high and rows == 3 * int(low)):
                faults.append((rows, low, high))

    def write(first: int) -> None:
        for users in range(first, first + 5):
            seen, until = reads[0], time.monotonic() + 60
            try:
                place.publish(good_rows(users, model=str(users)), f"k{users}")
            except UserError as e:  # the other publisher dropped our staging table, or began first
                failed.append(str(e))
            # Two publishers may keep a file's reader out for as long as both have something to write.
            while reads[0] == seen and time.monotonic() < until:
                time.sleep(0.01)

    threads = [threading.Thread(target=read), *(threading.Thread(target=write, args=(n,)) for n in (10, 40))]
    for thread in threads:
        thread.start()
    for thread in threads[1:]:
        thread.join()
    stop.set()
    threads[0].join()
    assert faults == []
    assert reads[0] > 3
    assert len(failed) < 10, failed


def test_a_run_that_is_paused_before_it_replaces_the_day(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one publishes a day meanwhile, or no more than makes the table; then the paused one is refused."""
    place.publish(good_rows(2, model="before"), "before")
    real = place.client.load

    def paused(client: SqlClient, table: str, columns: Sequence[str], files: Sequence[Path]) -> None:
        monkeypatch.setattr(place.client, "load", real)
        real(client, table, columns, files)
        with place.open(lock=holding(2)) as later_target:
            later_target.swap(staged(place.folder, good_rows(3, ds=NEXT), "new", NEXT), "s", [])

    with place.open(lock=holding(1)) as early_target:
        monkeypatch.setattr(place.client, "load", paused)
        with pytest.raises(LeaseLost, match="a later run of the pipeline has been at work there"):
            early_target.swap(staged(place.folder, good_rows(5, model="old"), "old"), "s", [])
        for change in (
            lambda: early_target.drop_days([DS]),
            lambda: early_target.erase("user_id", [0]),
            lambda: early_target.grant({}),
        ):
            with pytest.raises(LeaseLost):
                change()
    with pytest.raises(LeaseLost), place.open(lock=holding(1)):
        pass
    assert {r[5] for r in place.day()} == {"before"}
    assert place.day(NEXT) == close(good_rows(3, ds=NEXT))
    with place.open() as target:
        assert [target.missing(*day_and_key) for day_and_key in ((DS, "before"), (NEXT, "new"))] == [None, None]
    assert place.read("SELECT token FROM top_items_fences") == [(2,)]
    # One lease says nothing of another.
    with place.open(lock=holding(1, "m")) as other_target:
        other_target.swap(staged(place.folder, good_rows(4, model="other"), "other"), "s", [])
        other_target.claim()
    assert {r[5] for r in place.day()} == {"other"}


def test_a_claim_before_the_first_publication(place: Place) -> None:
    with open_target(place.spec, place.ws, holding(2)) as later:
        later.claim()
        assert later.days() == []
    with pytest.raises(LeaseLost), place.open(lock=holding(1)):
        pass
    with place.open(lock=holding(2)) as later:
        later.swap(staged(place.folder, good_rows(2), "k"), "s", [])
        assert later.missing(DS, "k") is None


def test_a_table_of_other_columns_is_refused(place: Place) -> None:
    place.read("CREATE TABLE top_items (ds DATE, other INT)")
    with pytest.raises(UserError, match="it has no column user_id, item_id, rank, score, model_version"):
        with place.open():
            pass


def test_rows_that_do_not_arrive_stop_the_publication(place: Place) -> None:
    place.publish(good_rows(5), "a")
    short = staged(place.folder, good_rows(3), "b")
    short.rows += 1
    with pytest.raises(UserError, match="10 rows were sent and 9 arrived"):
        with place.open() as target:
            target.swap(short, "s", [])
    assert place.day() == close(good_rows(5))


def test_rows_of_some_users_go_from_all_days(place: Place) -> None:
    rows, later = good_rows(users=4, k=3), good_rows(users=4, k=2, ds=NEXT)
    place.publish(rows, "k1")
    place.publish(later, "k2", NEXT)
    rows_before = {ds: place.day(ds) for ds in (DS, NEXT)}
    with place.open() as target:
        assert target.rows_with("user_id", [1, 3, 99]) == {DS: 6, NEXT: 4}
        assert target.erase("user_id", [1, 3, 99]) == ""
        assert target.rows_with("user_id", [1, 3, 99]) == {}
        assert [target.missing(*day_and_key) for day_and_key in ((DS, "k1"), (NEXT, "k2"))] == [None, None]
        target.erase("user_id", [1])
    for ds, all_rows in rows_before.items():
        assert place.day(ds) == [r for r in all_rows if r[1] not in (1, 3)]
    assert place.day(NEXT, "top_items_current") == place.day(NEXT)
    counted = place.read("SELECT row_count FROM headrace_publications ORDER BY ds")
    assert [int(n) for (n,) in counted] == [6, 4]


def test_tokens_of_an_earlier_version_of_headrace(place: Place) -> None:
    """Earlier versions kept all tokens in one table: none is lost, and no run with an older one goes on."""
    place.publish(good_rows(2, model="before"), "before")
    make = "CREATE TABLE headrace_fences (table_name VARCHAR(255), lease VARCHAR(255), token BIGINT)"
    rows = "INSERT INTO headrace_fences VALUES ('top_items', 'l', 5), ('others', 'l', 9), ('top_items', 'm', 1)"
    for statement in (make, rows):
        place.read(statement)
    shared = "SELECT * FROM headrace_fences ORDER BY table_name, lease"
    with pytest.raises(LeaseLost), place.open(lock=holding(4)):
        pass
    assert place.read("SELECT max(token) FROM headrace_fences") == [(9,)]
    with place.open(lock=holding(6)) as target:
        target.swap(staged(place.folder, good_rows(3, model="new"), "new"), "s", [])
    assert place.read("SELECT table_name, lease, token FROM top_items_fences") == [("top_items", "l", 6)]
    assert place.read(shared) == [("others", "l", 9), ("top_items", "l", 6), ("top_items", "m", 1)]
    with pytest.raises(LeaseLost), place.open(lock=holding(5)):
        pass
    # A pipeline that had none there gets none.
    with place.open(lock=holding(1, "n")) as target:
        target.claim()
    assert len(place.read(shared)) == 3


def test_a_run_of_an_earlier_version_that_comes_in_between(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of an earlier version raises its token in the table that it shares with all, and in no other."""
    place.publish(good_rows(2, model="before"), "before")
    place.read("CREATE TABLE headrace_fences (table_name VARCHAR(255), lease VARCHAR(255), token BIGINT)")
    place.read("INSERT INTO headrace_fences VALUES ('top_items', 'l', 4)")
    with place.open(lock=holding(5)) as paused:
        claim, claims = SqlTarget._claim, list[int]()

        def claimed(self: SqlTarget, client: SqlClient) -> None:
            claim(self, client)
            claims.append(1)
            if len(claims) == 2:  # right before the transaction
                place.read("UPDATE headrace_fences SET token = 6 WHERE table_name = 'top_items'")

        monkeypatch.setattr(SqlTarget, "_claim", claimed)
        with pytest.raises(LeaseLost, match="a later run of the pipeline has been at work"):
            paused.swap(staged(place.folder, good_rows(3, model="old"), "old"), "s", [])
        assert len(claims) == 2
        # It looks again each time.
        with pytest.raises(LeaseLost):
            paused.drop_days([DS])
        assert len(claims) == 2
    assert {row[5] for row in place.day()} == {"before"}
