"""Staging, audit and swap against a real server, without Spark; and the text of the sample against psql's own."""

from __future__ import annotations

import math
import shlex
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import psycopg
import pyarrow as pa
import pytest
from psycopg import sql

from headrace.cli.screen import psql_table
from headrace.config import Warehouse
from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.publish.audit import Limits, day_checks
from headrace.publish.postgres import publication, tables
from headrace.publish.postgres import server as warehouse
from headrace.publish.postgres.target import set_grants
from headrace.publish.target import Check
from tests.publish_support import DS, TABLE, TYPES, Row, day, fill, good_rows, publish, staging_tables


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[warehouse.Server, Workspace]]:
    ws = Workspace(tmp_path_factory.mktemp("audit") / "home")
    with warehouse.serve(Warehouse(), ws) as running:
        yield running, ws


@pytest.fixture
def conn(server: tuple[warehouse.Server, Workspace]) -> Iterator[warehouse.Connection]:
    with server[0].connect() as connection:
        connection.execute("DROP SCHEMA public CASCADE; CREATE SCHEMA public")
        tables.create_tables(connection, TABLE)
        yield connection


def failed(conn: warehouse.Connection, rows: Sequence[Row], **limits: Any) -> dict[str, Check]:
    with publication.staging_table(conn, TABLE, DS, "k") as staged:
        fill(conn, staged, rows)
        return {
            check.name: check for check in day_checks(staged, held(TABLE, len(rows), **limits), None) if not check.ok
        }


def held(table: tables.ScoresTable, rows: int, **limits: Any) -> Limits:
    required = tuple(c.name for c in table.columns)
    return Limits(
        **{
            "user": table.user,
            "item": table.item,
            "required": required,
            "expected_rows": rows,
            "min_rows": 1,
            "top_k": 3,
            "max_row_change": 0.5,
        }
        | limits
    )


def test_good_scores_pass(conn: warehouse.Connection) -> None:
    assert failed(conn, good_rows()) == {}
    assert staging_tables(conn) == []


@pytest.mark.parametrize(
    ("name", "row", "change", "detail"),
    [
        ("rows with a null", 4, {2: None}, "for example user 1 rank 2"),
        ("rows of another day", 4, {0: "2026-01-09"}, "for example 2026-01-09"),
        ("keys (user, rank) given twice", 4, {3: 1, 4: 0.5}, "for example user 1 rank 1"),
        ("items given twice to a user", 4, {2: 'item, "1" 1'}, 'for example user 1 item item, "1" 1'),
        ("users whose ranks are not 1, 2, ...", 5, {3: 9}, "for example user 1"),
        ("users whose ranks are not 1, 2, ...", 3, {3: 0}, "for example user 1"),
        ("scores outside [0, 1]", 5, {4: -0.25}, "for example -0.25"),
        ("scores outside [0, 1]", 3, {4: 1.25}, "for example 1.25"),
        ("scores outside [0, 1]", 3, {4: math.nan}, "for example nan"),
        ("scores outside [0, 1]", 3, {4: math.inf}, "for example inf"),
        ("scores above that of a better rank", 4, {4: 0.9}, "for example user 1 rank 2"),
    ],
)
def test_each_fault_is_found(
    conn: warehouse.Connection, name: str, row: int, change: dict[int, Any], detail: str
) -> None:
    rows: list[list[Any]] = [list(r) for r in good_rows()]
    for column, value in change.items():
        rows[row][column] = value
    failures = failed(conn, [tuple(r) for r in rows])
    assert name in failures
    assert failures[name].detail == detail
    assert failures[name].value == 1


def test_lists_by_rules_need_no_order_of_scores(conn: warehouse.Connection) -> None:
    rows: list[list[Any]] = [list(r) for r in good_rows()]
    rows[4][4] = 0.9
    assert set(failed(conn, [tuple(r) for r in rows])) == {"scores above that of a better rank"}
    assert failed(conn, [tuple(r) for r in rows], by_score=False) == {}


def test_faults_of_number(conn: warehouse.Connection) -> None:
    assert set(failed(conn, good_rows()[:-1], expected_rows=12)) == {"rows as the scores' manifest states"}
    assert set(failed(conn, good_rows(), min_rows=13)) == {"rows"}
    assert set(failed(conn, good_rows(k=4))) == {"users with more than 3 items"}
    assert set(failed(conn, [])) == {"rows"}


def test_the_number_of_rows_is_held_against_the_last_day_before(conn: warehouse.Connection) -> None:
    for ds, users in (("2026-01-07", 100), ("2026-01-08", 10), ("2026-01-11", 1)):
        publish(conn, [(ds, *r[1:]) for r in good_rows(users)], ds=ds)
    assert failed(conn, good_rows(15)) == {}
    failures = failed(conn, good_rows(16))
    assert set(failures) == {"change of the number of rows"}
    assert str(failures["change of the number of rows"]) == (
        "change of the number of rows: 0.6, must be at most 0.5 (30 rows on 2026-01-08)"
    )
    assert failed(conn, good_rows(16), max_row_change=None) == {}


def test_swap_replaces_the_day_and_only_the_day(conn: warehouse.Connection) -> None:
    other_day = [("2026-01-09", *r[1:]) for r in good_rows()]
    publish(conn, other_day, "k0", "2026-01-09")
    publish(conn, good_rows(6), "k1")
    publish(conn, good_rows(5, model="m2"), "k2")
    expected = good_rows(5, model="m2")
    assert [(*r[1:4], r[5]) for r in day(conn)] == [(*r[1:4], r[5]) for r in expected]
    assert [np.float32(r[4]) for r in day(conn)] == [np.float32(r[4]) for r in expected]
    assert len(day(conn, "2026-01-09")) == len(other_day)
    recorded = conn.execute("SELECT ds::text, key, rows, model, source FROM headrace_publications ORDER BY ds")
    assert recorded.fetchall() == [
        ("2026-01-09", "k0", 12, "m1", "lake/clicks/scores@3"),
        ("2026-01-10", "k2", 15, "m2", "lake/clicks/scores@3"),
    ]
    assert staging_tables(conn) == []


def test_a_failing_swap_changes_nothing(conn: warehouse.Connection) -> None:
    publish(conn, good_rows(), "k1")
    rows = day(conn)
    with pytest.raises(psycopg.errors.UniqueViolation):
        publish(conn, [*good_rows(2), good_rows(2)[0]], "k2")
    assert day(conn) == rows
    assert tables.published(conn, "public", "clicks_scores", DS) == tables.Publication(
        "k1", 12, [{"name": "rows", "value": 12, "limit": "at least 1", "ok": True, "detail": ""}]
    )
    assert staging_tables(conn) == []


def test_a_reader_sees_the_old_day_or_the_new_one(
    conn: warehouse.Connection, server: tuple[warehouse.Server, Workspace]
) -> None:
    sizes = {f"m{i}": 30 * (i + 1) for i in range(8)}
    publish(conn, good_rows(10, model="m0"), "m0")
    seen: set[tuple[int, int, str]] = set()
    finished = threading.Event()

    def read() -> None:
        with server[0].connect() as reader:
            while not finished.is_set():
                seen.update(
                    reader.execute(
                        "SELECT count(*), count(DISTINCT model_version), min(model_version) FROM clicks_scores"
                    ).fetchall()
                )

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for i in range(1, 8):
        publish(conn, good_rows(10 * (i + 1), model=f"m{i}"), f"m{i}")
    finished.set()
    for thread in threads:
        thread.join()
    assert seen <= {(n, 1, model) for model, n in sizes.items()}
    assert len(seen) > 1, "the readers saw one state only, so nothing was tested"


def test_what_a_killed_run_left_is_dropped_and_a_live_run_is_not_disturbed(
    conn: warehouse.Connection, server: tuple[warehouse.Server, Workspace]
) -> None:
    publish(conn, good_rows(), "k1")
    rows = day(conn)
    with (
        server[0].connect() as dying,
        server[0].connect() as living,
        publication.staging_table(living, TABLE, "2026-01-05", "k"),
    ):
        kill = publication.staging_table(dying, TABLE, DS, "k")
        staged = kill.__enter__()
        fill(dying, staged, good_rows(9))
        with pytest.raises(UserError, match=r"another process is publishing public\.clicks_scores for 2026-01-10"):
            publish(conn, good_rows(), "k2")
        assert set(staging_tables(conn)) == {TABLE.staging(DS), TABLE.staging("2026-01-05")}
        publish(conn, [("2026-01-06", *r[1:]) for r in good_rows()], "k3", "2026-01-06")
        assert set(staging_tables(conn)) == {TABLE.staging(DS), TABLE.staging("2026-01-05")}, "dropped a live run's"
        # The server loses its client as it does when that is killed: no clean-up of the client's runs.
        pid = dying.info.backend_pid
        with server[0].connect() as other_connection:
            other_connection.execute("SELECT pg_terminate_backend(%s, 10000)", [pid])
        with pytest.raises(psycopg.OperationalError):
            dying.execute("SELECT 1")
        assert set(staging_tables(conn)) == {TABLE.staging(DS), TABLE.staging("2026-01-05")}
        assert day(conn) == rows
        publish(conn, [("2026-01-04", *r[1:]) for r in good_rows()], "k4", "2026-01-04")
        assert staging_tables(conn) == [TABLE.staging("2026-01-05")]
    assert staging_tables(conn) == []
    publish(conn, good_rows(2), "k5")
    assert len(day(conn)) == 6


def test_a_table_of_other_columns_is_refused(conn: warehouse.Connection) -> None:
    text = tables.scores_table(
        "public", "clicks_scores", "user_id", "item_id", [(n, "string" if n == "user_id" else t) for n, t in TYPES]
    )
    with pytest.raises(UserError, match=r"table public.clicks_scores does not fit .* 'user_id' is bigint, not text"):
        tables.create_tables(conn, text)
    with pytest.raises(UserError, match="no column 'item_id'"):
        tables.scores_table("public", "t", "user_id", "item_id", [t for t in TYPES if t[0] != "item_id"])
    with pytest.raises(UserError, match="'item_id' has type array<int>"):
        tables.scores_table(
            "public", "t", "user_id", "item_id", [(n, "array<int>" if n == "item_id" else t) for n, t in TYPES]
        )


def test_names_are_quoted(conn: warehouse.Connection) -> None:
    bad = 'x"; DROP TABLE clicks_scores; --'
    odd = tables.scores_table(
        'odd "schema.v2',
        bad,
        'user "id',
        "item'id",
        [("ds", "string"), ('user "id', "string"), ("item'id", "bigint"), *TYPES[3:]],
    )
    tables.create_tables(conn, odd)
    with publication.staging_table(conn, odd, DS, "k") as staged:
        fill(conn, staged, [(DS, "u'1", 5, 1, 0.5, "m")])
        checks = day_checks(staged, held(odd, 1), None)
        assert [c for c in checks if not c.ok] == []
        publication.swap(conn, staged, odd, "s", checks)
    set_grants(conn, odd, {"select": ["pg_monitor"]})
    assert tables.count_day(conn, 'odd "schema.v2', bad, DS) == 1
    assert [row["rank"] for row in tables.sample(conn, 'odd "schema.v2', bad, DS)] == [1]
    assert tables.columns_of(conn, "public", "clicks_scores")
    conn.execute('DROP SCHEMA "odd ""schema.v2" CASCADE')


def test_two_attempts_at_a_partition_at_once_leave_its_rows_once(
    conn: warehouse.Connection, server: tuple[warehouse.Server, Workspace]
) -> None:
    """Spark's speculation does this: the second attempt begins while the first is in the middle of its COPY."""
    names = [c.name for c in TABLE.columns]
    rows = pa.RecordBatch.from_pylist([dict(zip(names, r, strict=True)) for r in good_rows(50)])
    begun, finished = threading.Event(), []

    with publication.staging_table(conn, TABLE, DS, "k") as staged:

        def second() -> None:
            def batches() -> Iterator[pa.RecordBatch]:
                begun.set()
                yield rows

            finished.append(publication.copy_partition(server[0], staged.id, staged.parts, names, 3, batches()))

        other_attempt = threading.Thread(target=second)

        def first() -> Iterator[pa.RecordBatch]:
            yield rows.slice(0, 60)
            other_attempt.start()
            # The other attempt either copies, too, or waits for this one's transaction.
            waiting = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
            while not begun.is_set() and conn.execute(waiting).fetchone() == (0,):
                time.sleep(0.01)
            if begun.is_set():
                other_attempt.join()
            yield rows.slice(60)

        assert publication.copy_partition(server[0], staged.id, staged.parts, names, 3, first()) == 150
        other_attempt.join()
        assert finished == [150]
        assert conn.execute(sql.SQL("SELECT count(*) FROM {}").format(staged.id)).fetchone() == (150,)


def test_arrow_to_copy_keeps_every_value(conn: warehouse.Connection) -> None:
    rng = np.random.default_rng(0)
    floats = rng.random(2_000, dtype=np.float32)
    floats[:4] = [np.float32(1e-38), np.float32(0.1), np.nextafter(np.float32(1), np.float32(0)), np.float32(1 / 3)]
    texts = ["", " ", ",", '"', "a\nb", "\\N", "\\.", "NULL", "é☃", "'", "\t", "\r\n", None]
    batch = pa.RecordBatch.from_pydict(
        {
            "t": [texts[i % len(texts)] for i in range(2_000)],
            "n": pa.array([-(2**63), 2**63 - 1, None, *range(1_997)], pa.int64()),
            "f": pa.array(floats),
        }
    )
    conn.execute("CREATE TABLE copied (t text, n bigint, f real)")
    with conn.cursor() as cursor, cursor.copy("COPY copied FROM STDIN (FORMAT csv)") as copy:
        copy.write(publication.as_csv(batch))
    rows = conn.execute("SELECT t, n, f FROM copied").fetchall()
    assert [r[0] for r in rows] == batch["t"].to_pylist()
    assert [r[1] for r in rows] == batch["n"].to_pylist()
    assert np.array_equal(np.array([r[2] for r in rows], np.float32), floats)


def test_the_sample_reads_as_psql_prints_it(
    conn: warehouse.Connection, server: tuple[warehouse.Server, Workspace]
) -> None:
    publish(conn, good_rows(20))
    query = f"SELECT * FROM clicks_scores WHERE ds = '{DS}' ORDER BY user_id, rank LIMIT"
    for n in (7, 1):
        command = f"{warehouse.psql_info(Warehouse(), server[1])} -X -c {shlex.quote(f'{query} {n}')}"
        printed = subprocess.run(command, shell=True, capture_output=True, text=True, check=True).stdout
        assert "item_id" in printed
        formatted = psql_table(tables.sample(conn, "public", "clicks_scores", DS, n))
        assert [line.rstrip() for line in printed.rstrip().splitlines()] == formatted.splitlines()
    assert psql_table([]) == "(0 rows)"
