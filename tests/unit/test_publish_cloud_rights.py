"""Rights on published tables: what the client libraries of warehouses are given when roles gain and lose them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from headrace.config import load_spec
from headrace.publish.sql.bigquery import BigQueryClient
from headrace.publish.sql.clickhouse import ClickHouseClient
from headrace.publish.sql.client import SqlClient
from headrace.publish.sql.databricks import DatabricksClient
from headrace.publish.sql.snowflake import SnowflakeClient
from headrace.publish.sql.target import SqlTarget
from headrace.workspace import Workspace
from tests.cloud_support import Recorded


class Granting(Recorded):
    """Answers what rights are on record."""

    ours: tuple[tuple[str, str], ...] = ()

    def note(self, statement: str, params: Any = None) -> None:
        super().note(statement, params)
        if "headrace_grants" in statement and statement.startswith(("SELECT `priv", 'SELECT "priv')):
            self.rows, self.description = list(self.ours), True


@pytest.mark.parametrize(
    ("client", "given", "taken"),
    [
        (
            lambda told: SnowflakeClient(told, "d", "s", None),
            [
                'GRANT SELECT ON TABLE "d"."s"."clicks_scores" TO ROLE "new"',
                'GRANT SELECT ON VIEW "d"."s"."clicks_scores_current" TO ROLE "new"',
            ],
            [
                'REVOKE SELECT ON TABLE "d"."s"."clicks_scores" FROM ROLE "old"',
                'REVOKE SELECT ON VIEW "d"."s"."clicks_scores_current" FROM ROLE "old"',
            ],
        ),
        (
            lambda told: BigQueryClient(told, told, "p", "s"),
            [
                "GRANT `roles/bigquery.dataViewer` ON TABLE `p`.`s`.`clicks_scores` TO 'new'",
                "GRANT `roles/bigquery.dataViewer` ON VIEW `p`.`s`.`clicks_scores_current` TO 'new'",
            ],
            [
                "REVOKE `roles/bigquery.dataViewer` ON TABLE `p`.`s`.`clicks_scores` FROM 'old'",
                "REVOKE `roles/bigquery.dataViewer` ON VIEW `p`.`s`.`clicks_scores_current` FROM 'old'",
            ],
        ),
        (
            lambda told: DatabricksClient(told, "c", "s", "/Volumes/c/s/v"),
            [
                "GRANT SELECT ON TABLE `c`.`s`.`clicks_scores` TO `new`",
                "GRANT SELECT ON TABLE `c`.`s`.`clicks_scores_current` TO `new`",
            ],
            [
                "REVOKE SELECT ON TABLE `c`.`s`.`clicks_scores` FROM `old`",
                "REVOKE SELECT ON TABLE `c`.`s`.`clicks_scores_current` FROM `old`",
            ],
        ),
        (
            lambda told: ClickHouseClient(told, "s"),
            ["GRANT SELECT ON `s`.`clicks_scores` TO `new`", "GRANT SELECT ON `s`.`clicks_scores_current` TO `new`"],
            [
                "REVOKE SELECT ON `s`.`clicks_scores` FROM `old`",
                "REVOKE SELECT ON `s`.`clicks_scores_current` FROM `old`",
            ],
        ),
    ],
)
def test_rights_are_given_and_taken_back(
    client: Callable[[Recorded], SqlClient], given: list[str], taken: list[str], tmp_path: Path
) -> None:
    told = Granting()

    @contextmanager
    def connect() -> Iterator[SqlClient]:
        yield client(told)

    target = SqlTarget(load_spec("clicks"), Workspace(tmp_path), "x", "x", "x", type(client(told)), connect)
    target.grant({})
    assert [c for c in told.calls if "column" not in c] == []
    target.grant({"select": ["new"]})
    words = [c.split(" (")[0].split(" WHERE")[0] for c in told.calls if "column" not in c]
    assert words[0].startswith("CREATE TABLE")
    assert words[1].startswith("SELECT")
    # What is given is on record before it is given.
    assert words[2].startswith("INSERT INTO")
    assert words[3:] == given
    told.calls.clear()
    told.ours = (("select", "old"), ("select", "new"))
    target.grant({"select": ["new"]})
    words = [c.split(" (")[0].split(" WHERE")[0] for c in told.calls if "column" not in c]
    assert words[0].startswith("SELECT")
    assert words[1:3] == taken
    # And taken back before it is gone from the record.
    assert words[3].startswith("DELETE FROM")
    assert words[4:] == given


class Refusing(Granting):
    """Takes nothing back."""

    def note(self, statement: str, params: Any = None) -> None:
        super().note(statement, params)
        if statement.startswith("REVOKE"):
            raise RuntimeError("there is no role `old`")


def test_a_right_that_cannot_be_taken_back_is_told_and_stays_on_record(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    told = Refusing()
    told.ours = (("select", "old"),)

    @contextmanager
    def connect() -> Iterator[SqlClient]:
        yield ClickHouseClient(told, "s")

    target = SqlTarget(load_spec("clicks"), Workspace(tmp_path), "x", "x", "x", ClickHouseClient, connect)
    target.grant({"select": ["new"]})
    assert sum(c.startswith("REVOKE") for c in told.calls) == 2
    assert not [c for c in told.calls if c.startswith("DELETE")]
    assert sum(c.startswith("GRANT") and "`new`" in c for c in told.calls) == 2
    assert "FROM `old` failed: there is no role `old`" in caplog.text
    assert "delete its rows from headrace_grants" in caplog.text
