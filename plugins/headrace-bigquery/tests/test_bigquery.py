"""BigQuery by the calls that its client library is given.

No account is to be had here. What is asserted is what its documentation asks for, word for word: the way of the files
into the staging table, and the statements that replace a day and record it.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings

from headrace.config import Warehouse, load_spec
from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.publish.opening import open_target
from headrace.publish.sql.client import SqlClient
from headrace.publish.sql.target import SqlTarget
from headrace.storage import LeaseLost, location_of
from headrace_bigquery import BigQueryClient
from tests.cloud_support import (
    NAMES,
    TICKED,
    Connected,
    Recorded,
    S,
    check_erasure,
    check_instead,
    check_missing_library,
    check_options,
    check_rights,
    client_libraries,
    conf,
    erased,
    fenced,
    record,
)
from tests.identifier_support import HOSTILE, check_names
from tests.publish_support import DS, good_rows, staged
from tests.storage_support import memory_home


def test_bigquery(tmp_path: Path) -> None:
    created, swapped = record(tmp_path, lambda recorder: BigQueryClient(recorder, recorder, "project", "served"))
    assert created[0].endswith("`model_version` STRING NOT NULL) PARTITION BY `ds` CLUSTER BY `user_id`")
    assert swapped == [
        f"CREATE TABLE `project`.`served`.`{S}` AS SELECT {TICKED} FROM `project`.`served`.`clicks_scores` WHERE 1 = 0",
        f"load_table_from_file(/HERE/part-0.parquet, project.served.{S}, PARQUET, WRITE_APPEND, CREATE_NEVER)",
        f"load_table_from_file(/HERE/part-1.parquet, project.served.{S}, PARQUET, WRITE_APPEND, CREATE_NEVER)",
        f"SELECT count(*) FROM `project`.`served`.`{S}`",
        "BEGIN TRANSACTION;\n"
        f"DELETE FROM `project`.`served`.`clicks_scores` WHERE `ds` = DATE '{DS}';\n"
        f"INSERT INTO `project`.`served`.`clicks_scores` ({TICKED}) SELECT {TICKED} FROM `project`.`served`.`{S}`;\n"
        f"DELETE FROM `project`.`served`.`headrace_publications` WHERE `table_name` = 'clicks_scores' "
        f"AND `ds` = DATE '{DS}';\n"
        f"INSERT INTO `project`.`served`.`headrace_publications` ({NAMES}) VALUES (DATE '{DS}', ?, ?, ?, ?, ?, ?, ?);\n"
        "COMMIT TRANSACTION",
        f"DROP TABLE IF EXISTS `project`.`served`.`{S}`",
    ]


def test_bigquery_loads_from_a_bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One job loads all files; what was sent is removed, and what cannot be loaded, too."""
    memory_home(monkeypatch, tmp_path / "cache", readers=("gs",))
    folder = location_of("gs://bucket/in")
    loads: list[tuple[list[str], list[bytes], str, Any]] = []

    class Loading(Recorded):
        fails = False

        def load_table_from_uri(self, uris: list[str], table: str, job_config: Any) -> Recorded:
            loads.append((uris, [location_of(uri).read_bytes() for uri in uris], table, job_config))
            if self.fails:
                raise RuntimeError("no such column")
            return self

    def client(recorder: Recorded) -> SqlClient:
        return BigQueryClient(recorder, recorder, "project", "d", "gs://bucket/in/")

    _, swapped = record(tmp_path, client, Loading())
    assert not any(c.startswith("load") for c in swapped)
    ((uris, sent, table, config),) = loads
    assert [re.sub("[0-9a-f]{12}", "LOAD", uri) for uri in uris] == [
        f"gs://bucket/in/headrace_LOAD/part-{i}.parquet" for i in range(2)
    ]
    assert sent == [file.read_bytes() for file in staged(tmp_path, good_rows(), "k").files]
    assert table.startswith("project.d.headrace_staging_")
    assert config == "PARQUET, WRITE_APPEND, CREATE_NEVER"
    assert list(folder.files()) == []
    Loading.fails = True
    with pytest.raises(RuntimeError, match="no such column"):
        record(tmp_path, client, Loading())
    assert len(loads) == 2
    assert list(folder.files()) == []


def test_tokens_in_a_script_of_bigquery(tmp_path: Path) -> None:
    (*_, script) = fenced(tmp_path, lambda recorder: BigQueryClient(recorder, recorder, "project", "served"), 7, 7)
    assert script.startswith("BEGIN TRANSACTION;\nUPDATE `project`.`served`.`clicks_scores_fences` SET `token` = 7")

    class Overtaken(Recorded):
        def note(self, statement: str, params: Any = None) -> None:
            super().note(statement, params)
            if "ASSERT" in statement:
                assert re.search(r"ASSERT \(SELECT max\(`token`\) .* `lease` = \?\) <= 7 AS '(.*)'", statement)
                raise RuntimeError("400 headrace: a later run has been at work at [3:1]")

    with pytest.raises(LeaseLost, match="a later run of the pipeline has been at work there"):
        fenced(
            tmp_path,
            lambda recorder: BigQueryClient(recorder, recorder, "project", "served"),
            7,
            7,
            connection=Overtaken(),
        )


def test_rows_of_persons_are_deleted_from_all_days(tmp_path: Path) -> None:
    statements = erased("`p`.`s`.`{}`", "?", f"DATE '{DS}'", False)
    script = ";\n".join(["BEGIN TRANSACTION", *statements, "COMMIT TRANSACTION"])
    check_erasure(tmp_path, lambda recorder: BigQueryClient(recorder, recorder, "p", "s"), [script])


def test_rights_are_given_and_taken_back(tmp_path: Path) -> None:
    names = ["TABLE `p`.`s`.`clicks_scores`", "VIEW `p`.`s`.`clicks_scores_current`"]
    check_rights(
        tmp_path,
        lambda recorder: BigQueryClient(recorder, recorder, "p", "s"),
        [f"GRANT `roles/bigquery.dataViewer` ON {name} TO 'new'" for name in names],
        [f"REVOKE `roles/bigquery.dataViewer` ON {name} FROM 'old'" for name in names],
    )


def test_the_library_and_its_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_options("bigquery", tmp_path, monkeypatch)


def test_a_library_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_missing_library("bigquery", "headrace-bigquery", tmp_path, monkeypatch)


def test_the_key_to_set_instead_of_an_option_is_said() -> None:
    check_instead("bigquery", "project", "set publish.warehouse.catalog instead")


def test_a_spec_names_the_folder_of_its_files() -> None:
    with pytest.raises(UserError, match="kind bigquery loads files from gs://BUCKET/FOLDER, not from 'b/c'"):
        load_spec("clicks", ["publish.warehouse.kind=bigquery", "publish.warehouse.stage=b/c"])


def test_bigquery_is_given_the_stage_of_the_spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loads = list[list[str]]()

    class Loading(Connected):
        def load_table_from_uri(self, uris: list[str], table: str, job_config: Any) -> Connected:
            loads.append(uris)
            return self

    client_libraries(monkeypatch, lambda **_: Loading())
    memory_home(monkeypatch, tmp_path / "cache", readers=("gs",))
    (tmp_path / "part-0.parquet").touch()
    spec = load_spec("clicks", conf("bigquery", "stage=gs://bucket/in"))
    with open_target(spec, Workspace(tmp_path)) as target:
        assert isinstance(target, SqlTarget)
        with target._connect() as client:
            client.load("t", [], [tmp_path / "part-0.parquet"])
    assert [uri.partition("/headrace_")[0] for (uri,) in loads] == ["gs://bucket/in"]


def test_bigquery_without_credentials_is_the_users_to_mend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library finds them when its client is made, and has errors of their own for it."""

    class DefaultCredentialsError(RuntimeError):
        """A `GoogleAuthError`, which is no `GoogleAPIError`."""

    def no_client(**_: Any) -> Any:
        raise DefaultCredentialsError("Your default credentials were not found")

    api, auth, bigquery = ModuleType("api"), ModuleType("auth"), ModuleType("bigquery")
    api.GoogleAPIError = KeyError  # type: ignore[attr-defined]
    auth.GoogleAuthError = RuntimeError  # type: ignore[attr-defined]
    bigquery.Client = no_client  # type: ignore[attr-defined]
    cloud = ModuleType("google.cloud")
    cloud.bigquery = bigquery  # type: ignore[attr-defined]
    for name, module in {
        "google.api_core": ModuleType("google.api_core"),
        "google.api_core.exceptions": api,
        "google.auth": ModuleType("google.auth"),
        "google.auth.exceptions": auth,
        "google.cloud": cloud,
    }.items():
        monkeypatch.setitem(sys.modules, name, module)
    spec = load_spec("clicks", ["publish.warehouse.kind=bigquery"])
    with (
        pytest.raises(UserError, match="BigQuery for clicks failed: Your default credentials were not found"),
        open_target(spec, Workspace(tmp_path)) as target,
    ):
        target.days()


@settings(max_examples=100, deadline=None)
@given(HOSTILE, HOSTILE)
def test_the_dialect_reads_names_back(name: str, table: str) -> None:
    check_names(BigQueryClient, name, table)


def test_what_lineage_calls_the_table() -> None:
    warehouse = Warehouse(kind="bigquery", catalog="project")
    assert warehouse.known.dataset_name(warehouse, "set.s") == ("bigquery", "project.set.s")
