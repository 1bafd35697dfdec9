"""ClickHouse by the calls that its client library is given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.publish.sql.clickhouse import ClickHouseClient
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
from tests.publish_support import DS


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
