"""What the client libraries of cloud warehouses raise while files are sent: told as errors, and never by the clean-up.

boto3, the connectors and accounts are not to be had here: their classes of errors stand here by name and parentage.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import Any

import pytest

from headrace.config import load_spec
from headrace.errors import UserError
from headrace.publish.files.staging import files_folder
from headrace.publish.sql.client import SqlClient
from headrace.publish.sql.databricks import DatabricksClient
from headrace.publish.sql.redshift import RedshiftClient
from headrace.publish.sql.snowflake import SnowflakeClient
from headrace.publish.sql.target import SqlTarget
from headrace.publish.warehouses import open_target
from headrace.storage import Location, StoreAway, local
from headrace.storage.objects import calls, copies
from headrace.workspace import Workspace
from tests.publish_support import DS, TYPES, good_rows, staged


class BotoCoreError(Exception):
    pass


class HTTPClientError(BotoCoreError):
    pass


class BotoConnectionError(BotoCoreError):
    pass


class SSLError(BotoConnectionError):
    pass


class ProxyConnectionError(BotoConnectionError):
    pass


class EndpointConnectionError(BotoConnectionError):
    pass


class ClientError(Exception):
    def __init__(self, code: str, status: int) -> None:
        super().__init__(f"An error occurred ({code}) when calling the PutObject operation: no")
        self.response = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}


class S3UploadFailedError(Exception):
    pass


BOTO = (BotoCoreError, ClientError, S3UploadFailedError)


@pytest.fixture
def botocore(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("botocore.exceptions")
    for kind in (BotoCoreError, HTTPClientError, SSLError, ProxyConnectionError, EndpointConnectionError, ClientError):
        setattr(module, kind.__name__, kind)
    module.ConnectionError = BotoConnectionError  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "botocore", ModuleType("botocore"))
    monkeypatch.setitem(sys.modules, "botocore.exceptions", module)


class Failing:
    """A connection, its cursors and boto3's client, which fail at a call and at all that clean up after it."""

    description: Any = None

    def __init__(self, at: str, error: Exception, cleaning: tuple[str, ...] = ()) -> None:
        self.at, self.error, self.cleaning = at, error, cleaning
        self.calls: list[str] = []

    def note(self, call: str) -> None:
        self.calls.append(call)
        if call.startswith(self.cleaning):
            raise ClientError("Gone", 403)
        if call.startswith(self.at):
            raise self.error

    @contextmanager
    def cursor(self) -> Iterator[Failing]:
        yield self

    def execute(self, statement: str, params: Any = None) -> None:
        self.note(statement)

    def fetchall(self) -> list[tuple[Any, ...]]:
        return []

    def upload_file(self, path: str, bucket: str, key: str) -> None:
        try:
            self.note(f"upload_file({Path(path).name})")
        except ClientError as e:
            # As boto3 does: what the store has answered is the error before this one.
            raise S3UploadFailedError(f"Failed to upload {path} to {bucket}/{key}: {e}")  # noqa: B904

    def delete_object(self, Bucket: str, Key: str) -> None:
        self.note(f"delete_object({PurePosixPath(Key).name})")


FILES = [Path("/data/part-0.parquet"), Path("/data/part-1.parquet")]


@pytest.mark.parametrize(
    ("error", "told", "message"),
    [
        (BotoCoreError("Unable to locate credentials"), UserError, "stage: Unable to locate credentials. The cred"),
        (ClientError("AccessDenied", 403), UserError, r"cannot write to s3://bucket/in/headrace_.*\(AccessDenied\)"),
        (ClientError("NoSuchBucket", 404), UserError, "NoSuchBucket"),
        (SSLError("certificate verify failed"), UserError, "certificate verify failed"),
        (ClientError("SlowDown", 503), StoreAway, "the store is away .*SlowDown.*Run this again later"),
        (ClientError("TooManyRequests", 429), StoreAway, "later"),
        (EndpointConnectionError("Could not connect"), StoreAway, "AWS_ENDPOINT_URL"),
        (HTTPClientError("Read timeout"), StoreAway, "later"),
    ],
)
@pytest.mark.usefixtures("botocore")
def test_redshift_tells_what_s3_refuses(error: Exception, told: type[Exception], message: str) -> None:
    away = Failing("upload_file(part-1", error)
    client = RedshiftClient(away, lambda: away, "served", "s3://bucket/in", "default", BOTO)
    with pytest.raises(told, match=message):
        client.load("t", [], FILES)
    assert away.calls[-2:] == ["delete_object(part-0.parquet)", "delete_object(part-1.parquet)"]

    def no_client() -> Any:
        raise error

    with pytest.raises(told, match=message):
        RedshiftClient(away, no_client, "served", "s3://bucket/in", "default", BOTO).load("t", [], FILES)


class Refused(Exception):
    """Of a connector."""


@pytest.mark.parametrize("cleaning", [("delete_object", "REMOVE"), ()])
@pytest.mark.parametrize("kind", ["redshift", "databricks", "snowflake"])
def test_a_clean_up_that_fails_hides_no_cause(
    kind: str, cleaning: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    told = Failing("COPY", Refused("no such column"), cleaning)
    client: SqlClient
    if kind == "redshift":
        client = RedshiftClient(told, lambda: told, "served", "s3://bucket/in", "default", BOTO)
    elif kind == "databricks":
        client = DatabricksClient(told, None, "served", "/Volumes/main/a/b")
    else:
        client = SnowflakeClient(told, "shop", "served", "@files")
    with caplog.at_level(logging.WARNING, "headrace.publish"), pytest.raises(Refused, match="no such column"):
        client.load("t", [], FILES)
    removes = [call for call in told.calls if call.startswith(("delete_object", "REMOVE"))]
    assert removes
    left = [r.getMessage() for r in caplog.records]
    assert len(left) == bool(cleaning)
    assert all("files may be left in" in text and "Gone" in text for text in left)


def test_what_was_loaded_is_published_where_the_stage_is_not_cleaned(caplog: pytest.LogCaptureFixture) -> None:
    told = Failing("nothing", Refused(), ("REMOVE",))
    DatabricksClient(told, None, "served", "/Volumes/main/a/b").load("t", [], FILES)
    assert [call.split()[0] for call in told.calls] == ["PUT", "PUT", "COPY", "REMOVE"]
    assert "files may be left in /Volumes/main/a/b/headrace_" in caplog.text


class Lost(SnowflakeClient):
    """A connection that is lost while files are sent: no later statement is answered."""

    lost = False

    def run(self, statement: str, params: Any = ()) -> list[tuple[Any, ...]]:
        if self.lost:
            raise ClientError("ConnectionGone", 0)
        return []

    def load(self, *_: Any) -> None:
        self.lost = True
        raise Refused("no such stage")


def test_a_staging_table_that_stays_hides_no_cause(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    @contextmanager
    def connect() -> Iterator[SqlClient]:
        yield Lost(None, "shop", "served", None)

    target = SqlTarget(load_spec("clicks"), Workspace(tmp_path), "x", "x", "x", Lost, connect)
    target.create(TYPES)
    with pytest.raises(Refused, match="no such stage"):
        target.swap(staged(tmp_path, good_rows(), "k"), "lake/clicks/scores@3", [])
    assert f"the next run of {DS} drops it" in caplog.text


def test_a_rollback_that_fails_hides_no_cause() -> None:
    client = Lost(None, "shop", "served", None)
    with pytest.raises(Refused, match="no such stage"), client.transaction():
        client.load()


def test_databricks_may_send_the_files_and_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connector sends what is below the folder that it was given when it connected."""
    given: dict[str, Any] = {}
    sql = ModuleType("databricks.sql")
    sql.Error = Refused  # type: ignore[attr-defined]

    @contextmanager
    def connect(**options: Any) -> Iterator[Failing]:
        given.update(options)
        yield Failing("nothing", Refused())

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
    allowed = Path(given["staging_allowed_local_path"])
    assert (ws.staging("clicks") / f"{DS}_x" / "part-0.parquet").local_path().is_relative_to(allowed)
    assert allowed.is_relative_to(tmp_path / "lake")


def test_bigquery_without_credentials_is_the_users_to_mend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library finds them when its client is made, and has errors of their own for it."""

    class DefaultCredentialsError(Refused):
        """A `GoogleAuthError`, which is no `GoogleAPIError`."""

    def no_client(**_: Any) -> Any:
        raise DefaultCredentialsError("Your default credentials were not found")

    api, auth, bigquery = ModuleType("api"), ModuleType("auth"), ModuleType("bigquery")
    api.GoogleAPIError = ClientError  # type: ignore[attr-defined]
    auth.GoogleAuthError = Refused  # type: ignore[attr-defined]
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


def test_files_of_a_lake_in_a_store_are_among_its_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from obstore.store import MemoryStore

    monkeypatch.setenv(copies.VARIABLE, str(tmp_path / "cache"))
    bucket = MemoryStore()
    calls.put(bucket, "lake/staging/clicks/d/part-0.parquet", b"rows")
    stored = calls.head(bucket, "lake/staging/clicks/d/part-0.parquet")
    assert stored is not None
    folder = files_folder(Location(PurePosixPath("/bucket/lake/staging/clicks"), "s3"))
    assert copies.file(bucket, "s3://bucket", stored).is_relative_to(folder)
    assert files_folder(local(tmp_path)) == tmp_path
