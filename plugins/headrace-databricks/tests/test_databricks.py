"""Databricks by the calls that its client library is given.

No account is to be had here. What is asserted is what its documentation asks for, word for word: the way of the files
into the staging table, and the statements that replace a day and record it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings

from headrace.config import Warehouse, load_spec
from headrace.config.workspace import Workspace
from headrace.publish.opening import open_target
from headrace_databricks import DatabricksClient
from tests.cloud_support import (
    FILES,
    NAMES,
    Failing,
    S,
    check_clean_up,
    check_erasure,
    check_instead,
    check_missing_library,
    check_options,
    check_rights,
    erased,
    record,
)
from tests.identifier_support import HOSTILE, check_names
from tests.publish_support import DS


class DatabricksRefused(Exception):
    """Error that the connector raises."""


def test_databricks(tmp_path: Path) -> None:
    created, swapped = record(
        tmp_path, lambda recorder: DatabricksClient(recorder, "main", "served", "/Volumes/main/a/b")
    )
    assert created[0].endswith("`model_version` STRING NOT NULL) USING DELTA PARTITIONED BY (`ds`)")
    values = ", ".join(f"? AS {name}" for name in NAMES.split(", ")[1:])
    assert swapped == [
        f"CREATE TABLE `main`.`served`.`{S}` AS SELECT * FROM `main`.`served`.`clicks_scores` WHERE 1 = 0",
        "PUT '/HERE/part-0.parquet' INTO '/HERE/part-0.parquet' OVERWRITE",
        "PUT '/HERE/part-1.parquet' INTO '/HERE/part-1.parquet' OVERWRITE",
        f"COPY INTO `main`.`served`.`{S}` FROM '/Volumes/main/a/b/headrace_LOAD' FILEFORMAT = PARQUET",
        "REMOVE '/HERE/part-0.parquet'",
        "REMOVE '/HERE/part-1.parquet'",
        f"SELECT count(*) FROM `main`.`served`.`{S}`",
        f"INSERT INTO `main`.`served`.`clicks_scores` REPLACE WHERE `ds` = DATE '{DS}' "
        f"SELECT * FROM `main`.`served`.`{S}`",
        f"MERGE INTO `main`.`served`.`headrace_publications` AS p USING (SELECT DATE '{DS}' AS `ds`, {values}) AS r "
        "ON p.`table_name` = r.`table_name` AND p.`ds` = r.`ds` "
        "WHEN MATCHED THEN UPDATE SET * WHEN NOT MATCHED THEN INSERT *",
        f"DROP TABLE IF EXISTS `main`.`served`.`{S}`",
    ]


def test_rows_of_persons_are_deleted_from_all_days(tmp_path: Path) -> None:
    statements = erased("`c`.`s`.`{}`", "?", f"DATE '{DS}'", False)
    check_erasure(tmp_path, lambda recorder: DatabricksClient(recorder, "c", "s", "/Volumes/c/s/v"), statements)


def test_rights_are_given_and_taken_back(tmp_path: Path) -> None:
    names = ["TABLE `c`.`s`.`clicks_scores`", "TABLE `c`.`s`.`clicks_scores_current`"]
    check_rights(
        tmp_path,
        lambda recorder: DatabricksClient(recorder, "c", "s", "/Volumes/c/s/v"),
        [f"GRANT SELECT ON {name} TO `new`" for name in names],
        [f"REVOKE SELECT ON {name} FROM `old`" for name in names],
    )


def test_the_library_and_its_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_options("databricks", tmp_path, monkeypatch)


def test_a_library_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_missing_library("databricks", "headrace-databricks", tmp_path, monkeypatch)


def test_the_key_to_set_instead_of_an_option_is_said() -> None:
    check_instead("databricks", "server_hostname", "set publish.warehouse.host instead")


@pytest.mark.parametrize("cleaning", [("REMOVE",), ()])
def test_a_clean_up_that_fails_hides_no_cause(cleaning: tuple[str, ...], caplog: pytest.LogCaptureFixture) -> None:
    recorder = Failing("COPY", DatabricksRefused("no such column"), cleaning)
    check_clean_up(lambda recorder: DatabricksClient(recorder, None, "served", "/Volumes/main/a/b"), recorder, caplog)


def test_what_was_loaded_is_published_where_the_stage_is_not_cleaned(caplog: pytest.LogCaptureFixture) -> None:
    recorder = Failing("nothing", DatabricksRefused(), ("REMOVE",))
    DatabricksClient(recorder, None, "served", "/Volumes/main/a/b").load("t", [], FILES)
    assert [call.split()[0] for call in recorder.calls] == ["PUT", "PUT", "COPY", "REMOVE"]
    assert "files may be left in /Volumes/main/a/b/headrace_" in caplog.text


def test_databricks_may_send_the_files_and_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connector sends what is below the folder that it was given when it connected."""
    connect_options: dict[str, Any] = {}
    sql = ModuleType("databricks.sql")
    sql.Error = DatabricksRefused  # type: ignore[attr-defined]

    @contextmanager
    def connect(**options: Any) -> Iterator[Failing]:
        connect_options.update(options)
        yield Failing("nothing", DatabricksRefused())

    sql.connect = connect  # type: ignore[attr-defined]
    library = ModuleType("databricks")
    library.sql = sql  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "databricks", library)
    monkeypatch.setitem(sys.modules, "databricks.sql", sql)
    conf = [f"lake={tmp_path / 'lake'}", "publish.warehouse.kind=databricks", "publish.warehouse.stage=/Volumes/a/b/c"]
    spec = load_spec("clicks", conf)
    ws = Workspace(tmp_path / "home").of(spec)
    with open_target(spec, ws) as target:
        assert target.days() == []
    allowed = Path(connect_options["staging_allowed_local_path"])
    assert (ws.staging("clicks") / f"{DS}_x" / "part-0.parquet").local_path().is_relative_to(allowed)
    assert allowed.is_relative_to(tmp_path / "lake")


@settings(max_examples=100, deadline=None)
@given(HOSTILE, HOSTILE)
def test_the_dialect_reads_names_back(name: str, table: str) -> None:
    check_names(DatabricksClient, name, table)


def test_what_lineage_calls_the_table() -> None:
    warehouse = Warehouse(kind="databricks", host="adb.net", stage="/Volumes/a/b/c")
    assert warehouse.known.dataset_name(warehouse, "main.served.s") == ("databricks://adb.net", "main.served.s")
