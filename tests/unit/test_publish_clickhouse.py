"""ClickHouse as a warehouse: on a server, and call by call."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from headrace.config import load_spec
from headrace.config.workspace import Workspace
from headrace.publish.files import Record
from headrace.publish.sql.client import SqlClient
from headrace.publish.sql.column_stores import ClickHouseClient
from headrace.publish.sql.target import SqlTarget
from headrace.publish.target import Check
from headrace.storage import LeaseLost
from tests.cloud_support import (
    COLUMNS,
    NAMES,
    Granting,
    S,
    check_erasure,
    check_instead,
    check_missing_library,
    check_options,
    check_rights,
    fenced,
    record,
    target_of,
)
from tests.publish_support import DS, TYPES, good_rows, holding, staged

NEXT = "2026-01-11"


class InProcess(ClickHouseClient):
    """ClickHouse in this process, by chdb: the same statements, the parameters written into them."""

    def run(self, statement: str, params: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        literals = [
            str(p) if isinstance(p, int) else "'" + str(p).replace("\\", "\\\\").replace("'", "\\'") + "'"
            for p in params
        ]
        query = self.formatted(statement, params) % tuple(literals) if params else statement
        text = str(self._client.query(query, "JSONCompactEachRow"))
        return [tuple(json.loads(line)) for line in text.splitlines()]

    def load(self, table: str, columns: Sequence[str], files: Sequence[Path]) -> None:
        listed = ", ".join(map(self.quote, columns))
        for file in files:
            self.run(f"INSERT INTO {table} ({listed}) SELECT {listed} FROM file('{file}', Parquet)")


@pytest.mark.extra
@pytest.mark.skipif(importlib.util.find_spec("chdb") is None, reason="chdb is not installed: run `make clickhouse`")
def test_days_in_clickhouse_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from chdb import session

    opened = session.Session(str(tmp_path / "chdb"))
    opened.query("CREATE DATABASE shop")

    @contextmanager
    def connect() -> Iterator[SqlClient]:
        yield InProcess(opened, "shop")

    spec, ws = load_spec("clicks"), Workspace(tmp_path / "home")
    target = SqlTarget(spec, ws, "clickhouse", "shop.clicks_scores", "here", ClickHouseClient, connect)

    def rows(relation: str, ds: str) -> list[tuple[Any, ...]]:
        text = f"SELECT * FROM shop.{relation} WHERE ds = '{ds}' ORDER BY user_id, rank"
        return InProcess(opened, "shop").run(text)

    def close(expected: Sequence[tuple[Any, ...]]) -> list[Any]:
        return [(*r[:4], pytest.approx(r[4], rel=1e-6), *r[5:]) for r in expected]

    target.create(TYPES)
    target.create(TYPES)
    for key, ds, published_rows in (
        ("a", DS, good_rows(5)),
        ("b", NEXT, good_rows(3, ds=NEXT)),
        ("c", DS, good_rows(4)),
    ):
        target.swap(staged(tmp_path, published_rows, key, ds), "s", [Check("rows", 1, "it's \\1", True)])
        assert rows("clicks_scores", ds) == close(published_rows)
        assert target.missing(ds, key) is None
    assert rows("clicks_scores_current", NEXT) == close(good_rows(3, ds=NEXT))
    assert rows("clicks_scores_current", DS) == []
    publication = target.published(DS)
    assert publication is not None
    assert publication.audit[0]["limit"] == "it's \\1"
    more = [("source", "string")]
    target.create([*TYPES, *more])
    target.swap(staged(tmp_path, [(*r, "new") for r in good_rows(2)], "d", DS, more), "s", [])
    assert {r[6] for r in rows("clicks_scores", DS)} == {"new"}
    assert {r[6] for r in rows("clicks_scores_current", NEXT)} == {None}
    rows_before = {ds: rows("clicks_scores", ds) for ds in (DS, NEXT)}
    assert target.rows_with("user_id", [1, 99]) == {DS: 3, NEXT: 3}
    for _ in range(2):
        assert target.erase("user_id", [1, 99]) == ""
        assert target.rows_with("user_id", [1, 99]) == {}
    assert [target.missing(*day_and_key) for day_and_key in ((DS, "d"), (NEXT, "b"))] == [None, None]
    for ds, all_rows in rows_before.items():
        assert rows("clicks_scores", ds) == [r for r in all_rows if r[1] != 1]
    # The parts on the disk are without them, too: they are not only marked.
    active = "SELECT sum(rows) FROM system.parts WHERE active AND table = 'clicks_scores'"
    assert InProcess(opened, "shop").run(active) == [(len(rows_before[DS]) + len(rows_before[NEXT]) - 6,)]
    # A run that was paused until another one has taken its lease.
    old, new = (
        SqlTarget(spec, ws, "clickhouse", "shop.clicks_scores", "here", ClickHouseClient, connect, holding(token))
        for token in (1, 2)
    )
    old.create([*TYPES, *more])
    real = SqlTarget._record

    def paused(self: SqlTarget, client: SqlClient, ds: str, record: Record) -> None:
        """The later one replaces the day and records it between the earlier one's partition and its record."""
        monkeypatch.setattr(SqlTarget, "_record", real)
        new.create([*TYPES, *more])
        new.swap(staged(tmp_path, [(*r, "later") for r in good_rows(3)], "later", DS, more), "s", [])
        real(self, client, ds, record)

    monkeypatch.setattr(SqlTarget, "_record", paused)
    with pytest.raises(LeaseLost, match=f"--ds {DS} --from publish"):
        old.swap(staged(tmp_path, [(*r, "early") for r in good_rows(2)], "early", DS, more), "s", [])
    # Published again, rather than held for the earlier one's.
    assert new.published(DS) is None
    new.swap(staged(tmp_path, [(*r, "later") for r in good_rows(3)], "later", DS, more), "s", [])
    assert new.missing(DS, "later") is None
    for change in (lambda: old.drop_days([DS]), lambda: old.erase("user_id", [0]), lambda: old.create(TYPES)):
        with pytest.raises(LeaseLost):
            change()
    assert InProcess(opened, "shop").run("SELECT lease, token FROM shop.clicks_scores_fences") == [("l", 2)]
    new.drop_days([DS])
    assert target.days() == [NEXT]
    assert InProcess(opened, "shop").tables("headrace_staging_") == []
    opened.close()


def test_clickhouse(tmp_path: Path) -> None:
    statements, swapped = record(tmp_path, lambda connection: ClickHouseClient(connection, "shop"))
    assert statements[0].endswith(" ENGINE = MergeTree PARTITION BY `ds` ORDER BY (`user_id`, `rank`)")
    listed = ", ".join(COLUMNS)
    assert [c for c in swapped if "system.tables" not in c] == [
        f"CREATE TABLE `shop`.`{S}` AS `shop`.`clicks_scores`",
        f"insert_arrow(`shop`.`{S}`, 6 rows of {listed})",
        f"insert_arrow(`shop`.`{S}`, 6 rows of {listed})",
        f"SELECT count(*) FROM `shop`.`{S}`",
        f"ALTER TABLE `shop`.`clicks_scores` REPLACE PARTITION '{DS}' FROM `shop`.`{S}`",
        f"INSERT INTO `shop`.`headrace_publications` ({NAMES}) VALUES (toDate('{DS}'), %s, %s, %s, %s, %s, %s, %s)",
        f"DROP TABLE IF EXISTS `shop`.`{S}`",
    ]


def test_tokens_where_a_day_is_no_transaction(tmp_path: Path) -> None:
    """ClickHouse: looked at before the partition, after it, and after the record, which a later run's may have been."""
    asks = "SELECT max(`token`) FROM `shop`.`clicks_scores_fences`"
    replaces = f"ALTER TABLE `shop`.`clicks_scores` REPLACE PARTITION '{DS}' FROM `shop`.`{S}`"
    # Twice before: when it begins, and after the load.
    calls = fenced(tmp_path, lambda connection: ClickHouseClient(connection, "shop"), 7, 7, 7, 7, 7)
    assert [c for c in calls if "INSERT" not in c] == [asks, asks, asks, replaces, asks, asks]
    assert calls[-2].startswith("INSERT INTO `shop`.`headrace_publications`")
    raised = fenced(tmp_path, lambda connection: ClickHouseClient(connection, "shop"), 6, 7, 7, 7, 7)
    assert raised[1] == "ALTER TABLE `shop`.`clicks_scores_fences` UPDATE `token` = 7"
    assert fenced(tmp_path, lambda connection: ClickHouseClient(connection, "shop"), 7, 7, 8) == [asks, asks, asks]
    late = fenced(tmp_path, lambda connection: ClickHouseClient(connection, "shop"), 7, 7, 7, 8)
    deletes = "ALTER TABLE `shop`.`headrace_publications` DELETE"
    assert late == [asks, asks, asks, replaces, asks, deletes]
    later = fenced(tmp_path, lambda connection: ClickHouseClient(connection, "shop"), 7, 7, 7, 7, 8)
    assert later[-3].startswith("INSERT INTO `shop`.`headrace_publications`")
    assert later[-2:] == [asks, deletes]


def test_rows_of_persons_are_deleted_from_all_days(tmp_path: Path) -> None:
    statements = [
        f"ALTER TABLE `s`.`headrace_publications` UPDATE `row_count` = 9 WHERE `table_name` = 'clicks_scores' "
        f"AND `ds` = toDate('{DS}') SETTINGS mutations_sync = 2",
        "ALTER TABLE `s`.`clicks_scores` DELETE WHERE `user_id` IN (%s, %s) SETTINGS mutations_sync = 2",
    ]
    check_erasure(tmp_path, lambda connection: ClickHouseClient(connection, "s"), statements)


def test_rights_are_given_and_taken_back(tmp_path: Path) -> None:
    names = ["`s`.`clicks_scores`", "`s`.`clicks_scores_current`"]
    check_rights(
        tmp_path,
        lambda connection: ClickHouseClient(connection, "s"),
        [f"GRANT SELECT ON {name} TO `new`" for name in names],
        [f"REVOKE SELECT ON {name} FROM `old`" for name in names],
    )


class Refusing(Granting):
    """Takes nothing back."""

    def note(self, statement: str, params: Any = None) -> None:
        super().note(statement, params)
        if statement.startswith("REVOKE"):
            raise RuntimeError("there is no role `old`")


def test_a_right_that_cannot_be_taken_back_is_told_and_stays_on_record(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Refusing()
    recorder.grants = (("select", "old"),)
    target = target_of(tmp_path, lambda connection: ClickHouseClient(connection, "s"), recorder)
    target.grant({"select": ["new"]})
    assert sum(c.startswith("REVOKE") for c in recorder.calls) == 2
    assert not [c for c in recorder.calls if c.startswith("DELETE")]
    assert sum(c.startswith("GRANT") and "`new`" in c for c in recorder.calls) == 2
    assert "FROM `old` failed: there is no role `old`" in caplog.text
    assert "delete its rows from headrace_grants" in caplog.text


def test_the_library_and_its_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_options("clickhouse", tmp_path, monkeypatch)


def test_a_library_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_missing_library("clickhouse", "'headrace\\[clickhouse\\]'", tmp_path, monkeypatch)


def test_the_key_to_set_instead_of_an_option_is_said() -> None:
    check_instead("clickhouse", "user", "set publish.warehouse.user instead")
