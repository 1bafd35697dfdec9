"""Snowflake by the calls that its client library is given.

No account is to be had here. What is asserted is what its documentation asks for, word for word: the way of the files
into the staging table, and the statements that replace a day and record it.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

from headrace.config import Warehouse, load_spec
from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.publish.sql.client import SqlClient
from headrace.publish.sql.target import SqlTarget
from headrace_snowflake import SnowflakeClient
from tests.cloud_support import (
    NAMES,
    SIX,
    Failing,
    Recorded,
    S,
    check_clean_up,
    check_erasure,
    check_instead,
    check_missing_library,
    check_options,
    check_rights,
    client_arguments,
    conf,
    erased,
    record,
)
from tests.identifier_support import HOSTILE, check_names, check_percent_signs
from tests.publish_support import DS, TYPES, good_rows, staged


class SnowflakeRefused(Exception):
    """Error that the connector raises."""


def test_snowflake(tmp_path: Path) -> None:
    created, swapped = record(tmp_path, lambda recorder: SnowflakeClient(recorder, "shop", "served", None))
    assert created[0].startswith(
        'CREATE TABLE "shop"."served"."clicks_scores" ("ds" DATE NOT NULL, "user_id" BIGINT NOT'
    )
    assert created[2] == (
        f'CREATE OR REPLACE VIEW "shop"."served"."clicks_scores_current" AS SELECT {SIX} FROM '
        f'"shop"."served"."clicks_scores" WHERE "ds" = (SELECT max("ds") FROM "shop"."served"."headrace_publications" '
        f"WHERE \"table_name\" = 'clicks_scores')"
    )
    stage = f'@"shop"."served".%"{S}"/headrace_LOAD'
    assert swapped == [
        f'CREATE TRANSIENT TABLE "shop"."served"."{S}" AS '
        f'SELECT {SIX} FROM "shop"."served"."clicks_scores" WHERE 1 = 0',
        f"PUT 'file:/HERE/part-0.parquet' '{stage}' AUTO_COMPRESS = FALSE OVERWRITE = TRUE",
        f"PUT 'file:/HERE/part-1.parquet' '{stage}' AUTO_COMPRESS = FALSE OVERWRITE = TRUE",
        f'COPY INTO "shop"."served"."{S}" FROM \'{stage}\' FILE_FORMAT = (TYPE = PARQUET) '
        f"MATCH_BY_COLUMN_NAME = CASE_SENSITIVE ON_ERROR = ABORT_STATEMENT PURGE = TRUE",
        f'SELECT count(*) FROM "shop"."served"."{S}"',
        "BEGIN",
        f'DELETE FROM "shop"."served"."clicks_scores" WHERE "ds" = DATE \'{DS}\'',
        f'INSERT INTO "shop"."served"."clicks_scores" ({SIX}) SELECT {SIX} FROM "shop"."served"."{S}"',
        f'DELETE FROM "shop"."served"."headrace_publications" WHERE "table_name" = \'clicks_scores\' '
        f"AND \"ds\" = DATE '{DS}'",
        f'INSERT INTO "shop"."served"."headrace_publications" ({NAMES.replace("`", chr(34))}) '
        f"VALUES (DATE '{DS}', %s, %s, %s, %s, %s, %s, %s)",
        "COMMIT",
        f'DROP TABLE IF EXISTS "shop"."served"."{S}"',
    ]


def test_snowflake_finds_files_whatever_their_path(tmp_path: Path) -> None:
    """The server reads the literal; the connector reads what follows `file://` as a pattern on this host."""
    file = tmp_path / "l'ét%C3 of 1[2]*\\n?" / "part-0.parquet"
    file.parent.mkdir()
    file.touch()
    recorder = Recorded()
    statements: list[str] = []
    recorder.note = lambda statement, params=None: statements.append(statement)  # type: ignore[method-assign]
    SnowflakeClient(recorder, "shop", "served", None).load("t", [], [file])
    put = re.match(r"PUT '((?:[^'\\]|\\.)*)' '", statements[0])
    assert put is not None
    source = re.sub(r"\\(.)", r"\1", put[1])
    assert source.startswith("file:///")
    assert glob.glob(source.removeprefix("file://")) == [str(file)]  # noqa: PTH207  (the connector's own call)


def test_rows_of_persons_are_deleted_from_all_days(tmp_path: Path) -> None:
    statements = erased('"d"."s"."{}"', "%s", f"DATE '{DS}'")
    check_erasure(tmp_path, lambda recorder: SnowflakeClient(recorder, "d", "s", None), statements)


def test_rights_are_given_and_taken_back(tmp_path: Path) -> None:
    names = ['TABLE "d"."s"."clicks_scores"', 'VIEW "d"."s"."clicks_scores_current"']
    check_rights(
        tmp_path,
        lambda recorder: SnowflakeClient(recorder, "d", "s", None),
        [f'GRANT SELECT ON {name} TO ROLE "new"' for name in names],
        [f'REVOKE SELECT ON {name} FROM ROLE "old"' for name in names],
    )


def test_the_library_and_its_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_options("snowflake", tmp_path, monkeypatch)


def test_a_library_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_missing_library("snowflake", "headrace-snowflake", tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("name", "instead"), [("schema", "set publish.warehouse.schema instead"), ("autocommit", "leave it out")]
)
def test_the_key_to_set_instead_of_an_option_is_said(name: str, instead: str) -> None:
    check_instead("snowflake", name, instead)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        (["role=loader"], "password"),
        (["authenticator=username_password_mfa"], "password"),
        (["private_key_file=/run/key.p8"], "private_key_file_pwd"),
        (["authenticator=snowflake_jwt", "private_key_file=/run/key.p8"], "private_key_file_pwd"),
        (["authenticator=OAuth"], "token"),
        (["authenticator=PROGRAMMATIC_ACCESS_TOKEN"], "token"),
        (["authenticator=workload_identity", "workload_identity_provider=OIDC"], "token"),
        (
            ["authenticator=oauth_client_credentials", "oauth_client_id=7", "oauth_token_request_url=https://id/token"],
            "oauth_client_secret",
        ),
    ],
)
@pytest.mark.parametrize("source", ["password_env=SCORES_PASSWORD", "password_file"])
def test_the_secret_of_snowflake_is_what_the_authenticator_takes(
    source: str, options: list[str], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if source == "password_file":
        (tmp_path / "secret").write_text("hunter2\n")
        source = f"password_file={tmp_path / 'secret'}"
    arguments = client_arguments("snowflake", tmp_path, monkeypatch, source, *[f"options.{text}" for text in options])
    assert [key for key, value in arguments.items() if value == "hunter2"] == [name]


@pytest.mark.parametrize("name", ["token", "oauth_client_secret", "password", "private_key_file_pwd"])
def test_a_secret_of_snowflakes_does_not_stand_in_a_spec(name: str) -> None:
    with pytest.raises(UserError, match=rf"options\.{name}: a secret does not belong in .* name password_env"):
        load_spec("clicks", conf("snowflake", "options.authenticator=oauth", f"options.{name}=hunter2"))


@pytest.mark.parametrize("cleaning", [("REMOVE",), ()])
def test_a_clean_up_that_fails_hides_no_cause(cleaning: tuple[str, ...], caplog: pytest.LogCaptureFixture) -> None:
    recorder = Failing("COPY", SnowflakeRefused("no such column"), cleaning)
    check_clean_up(lambda recorder: SnowflakeClient(recorder, "shop", "served", "@files"), recorder, caplog)


class Lost(SnowflakeClient):
    """A connection that is lost while files are sent: no later statement is answered."""

    lost = False

    def run(self, statement: str, params: Any = ()) -> list[tuple[Any, ...]]:
        if self.lost:
            raise SnowflakeRefused("ConnectionGone")
        return []

    def load(self, *_: Any) -> None:
        self.lost = True
        raise SnowflakeRefused("no such stage")


def test_a_staging_table_that_stays_hides_no_cause(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    @contextmanager
    def connect() -> Iterator[SqlClient]:
        yield Lost(None, "shop", "served", None)

    target = SqlTarget(load_spec("clicks"), Workspace(tmp_path), "x", "x", "x", Lost, connect)
    target.create(TYPES)
    with pytest.raises(SnowflakeRefused, match="no such stage"):
        target.swap(staged(tmp_path, good_rows(), "k"), "lake/clicks/scores@3", [])
    assert f"the next run of {DS} drops it" in caplog.text


def test_a_rollback_that_fails_hides_no_cause() -> None:
    client = Lost(None, "shop", "served", None)
    with pytest.raises(SnowflakeRefused, match="no such stage"), client.transaction():
        client.load()


@settings(max_examples=100, deadline=None)
@given(HOSTILE, HOSTILE)
def test_the_dialect_reads_names_back(name: str, table: str) -> None:
    check_names(SnowflakeClient, name, table)


def test_percent_signs_stand_beside_parameters() -> None:
    check_percent_signs(lambda library: SnowflakeClient(library, "d", "s", None))


def test_what_lineage_calls_the_table() -> None:
    warehouse = Warehouse(kind="snowflake", options={"account": "org-acc"})
    assert warehouse.known.dataset_name(warehouse, "D.P.S") == ("snowflake://org-acc", "D.P.S")
