"""`publish.warehouse.options`: what the client libraries are given, what they must not be given, and secrets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.config import load_spec
from headrace.errors import UserError
from headrace.publish.sql.target import SqlTarget
from headrace.publish.warehouses import open_target
from headrace.redaction import is_secret
from headrace.workspace import Workspace
from tests.cloud_support import LIBRARY_KINDS, Connected, client_libraries
from tests.storage_homes import memory_home

#: What some kinds need.
STAGES = {"redshift": "s3://bucket/in", "databricks": "/Volumes/main/a/b"}


def conf(kind: str, *more: str) -> list[str]:
    stage = [f"stage={STAGES[kind]}"] if kind in STAGES else []
    return [f"publish.warehouse.{text}" for text in (f"kind={kind}", *stage, *more)]


def given(kind: str, path: Path, monkeypatch: pytest.MonkeyPatch, *more: str) -> dict[str, Any]:
    """The arguments that a client library connects with."""
    told: dict[str, Any] = {}

    def connect(**arguments: Any) -> Connected:
        told.update(arguments)
        return Connected()

    client_libraries(monkeypatch, connect)
    monkeypatch.setenv("SCORES_PASSWORD", "hunter2")
    spec = load_spec("clicks", conf(kind, *more))
    with open_target(spec, Workspace(path).of(spec)) as target:
        assert target.days() == []
    return told


@pytest.mark.parametrize("kind", LIBRARY_KINDS)
def test_an_option_repeats_no_argument_of_headraces(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each argument that the library is given without options is refused as one, with the key that says it."""
    told = given(kind, tmp_path, monkeypatch, "password_env=SCORES_PASSWORD")
    for name in told:
        with pytest.raises(UserError) as refused:
            load_spec("clicks", conf(kind, f"options.{name}=7"))
        said = str(refused.value)
        if is_secret(f"options.{name}"):
            assert f"options.{name}: a secret does not belong in a pipeline's file: name password_env" in said
        else:
            assert f"options.{name}: headrace gives this to the client of {kind} itself: " in said


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
    told = given("snowflake", tmp_path, monkeypatch, source, *[f"options.{text}" for text in options])
    assert [key for key, value in told.items() if value == "hunter2"] == [name]


@pytest.mark.parametrize("name", ["token", "oauth_client_secret", "password", "private_key_file_pwd"])
def test_a_secret_of_snowflakes_does_not_stand_in_a_spec(name: str) -> None:
    with pytest.raises(UserError, match=rf"options\.{name}: a secret does not belong in .* name password_env"):
        load_spec("clicks", conf("snowflake", "options.authenticator=oauth", f"options.{name}=hunter2"))


@pytest.mark.parametrize(
    ("kind", "name", "instead"),
    [
        ("snowflake", "schema", "set publish.warehouse.schema instead"),
        ("snowflake", "autocommit", "leave it out"),
        ("bigquery", "project", "set publish.warehouse.catalog instead"),
        ("clickhouse", "user", "set publish.warehouse.user instead"),
        ("redshift", "port", "set publish.warehouse.port instead"),
        ("databricks", "server_hostname", "set publish.warehouse.host instead"),
    ],
)
def test_the_key_to_set_instead_of_an_option_is_said(kind: str, name: str, instead: str) -> None:
    with pytest.raises(
        UserError, match=rf"options\.{name}: headrace gives this to the client of {kind} itself: {instead}"
    ):
        load_spec("clicks", conf(kind, f"options.{name}=x"))


def test_an_option_repeats_nothing_of_a_url(tmp_path: Path) -> None:
    url = f"url=sqlite:///{tmp_path / 'scores.db'}?timeout=5"
    spec = load_spec("clicks", conf("sqlalchemy", url, "options.timeout='6'"))
    with (
        pytest.raises(UserError, match=r"options\.timeout: the driver is given this by publish\.warehouse\.url"),
        open_target(spec, Workspace(tmp_path)),
    ):
        pass


def test_an_option_that_a_driver_does_not_know_is_the_users_to_mend(tmp_path: Path) -> None:
    spec = load_spec("clicks", conf("sqlalchemy", f"url=sqlite:///{tmp_path / 'scores.db'}", "options.tiemout='6'"))
    with (
        pytest.raises(
            UserError, match=r"options \(tiemout\): the client library of sqlalchemy does not take them: .*tiem"
        ),
        open_target(spec, Workspace(tmp_path)) as target,
    ):
        target.days()


@pytest.mark.parametrize("kind", LIBRARY_KINDS)
def test_a_library_that_refuses_an_option_is_told_as_that(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def connect(**arguments: Any) -> Connected:
        if "colour" in arguments:
            raise TypeError("connect() got an unexpected keyword argument 'colour'")
        raise TypeError("a fault of the library's own")

    client_libraries(monkeypatch, connect)
    spec = load_spec("clicks", conf(kind, "options.colour=red"))
    with (
        pytest.raises(UserError, match=r"options \(colour\): .*unexpected keyword"),
        open_target(spec, Workspace(tmp_path)) as t,
    ):
        t.days()
    spec = load_spec("clicks", conf(kind))
    with pytest.raises(TypeError, match="own"), open_target(spec, Workspace(tmp_path)) as t:
        t.days()
