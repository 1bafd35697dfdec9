"""Redshift by the calls that its client library is given.

No account is to be had here. What is asserted is what its documentation asks for, word for word: the way of the files
into the staging table, and the statements that replace a day and record it.
"""

from __future__ import annotations

import sys
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings

from headrace.config import Warehouse, load_spec
from headrace.errors import UserError
from headrace.storage import StoreAway
from headrace_redshift import RedshiftClient
from tests.cloud_support import (
    FILES,
    Failing,
    S,
    check_clean_up,
    check_erasure,
    check_instead,
    check_missing_library,
    check_options,
    erased,
    record,
)
from tests.identifier_support import HOSTILE, check_names
from tests.publish_support import DS


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


class FailingS3(Failing):
    """The same of boto3's client."""

    def upload_file(self, path: str, bucket: str, key: str) -> None:
        try:
            self.note(f"upload_file({Path(path).name})")
        except ClientError as e:
            # As boto3 does: what the store has answered is the error before this one.
            raise S3UploadFailedError(f"Failed to upload {path} to {bucket}/{key}: {e}")  # noqa: B904

    def delete_object(self, Bucket: str, Key: str) -> None:
        self.note(f"delete_object({PurePosixPath(Key).name})")


def test_redshift(tmp_path: Path) -> None:
    _, swapped = record(
        tmp_path,
        lambda recorder: RedshiftClient(
            recorder, lambda: recorder, "served", "s3://bucket/in/", "arn:aws:iam::1:role/x"
        ),
    )
    assert swapped[1:7] == [
        "upload_file(/HERE/part-0.parquet, bucket, in/headrace_LOAD/part-0.parquet)",
        "upload_file(/HERE/part-1.parquet, bucket, in/headrace_LOAD/part-1.parquet)",
        f'COPY "served"."{S}" FROM \'s3://bucket/in/headrace_LOAD/\' '
        "IAM_ROLE 'arn:aws:iam::1:role/x' FORMAT AS PARQUET",
        "delete_object(bucket, in/headrace_LOAD/part-0.parquet)",
        "delete_object(bucket, in/headrace_LOAD/part-1.parquet)",
        f'SELECT count(*) FROM "served"."{S}"',
    ]
    assert [c.split(" (")[0].split(" WHERE")[0] for c in swapped[7:13]] == [
        "BEGIN",
        'DELETE FROM "served"."clicks_scores"',
        'INSERT INTO "served"."clicks_scores"',
        'DELETE FROM "served"."headrace_publications"',
        'INSERT INTO "served"."headrace_publications"',
        "COMMIT",
    ]


def test_rows_of_persons_are_deleted_from_all_days(tmp_path: Path) -> None:
    statements = erased('"s"."{}"', "%s", f"DATE '{DS}'")
    check_erasure(
        tmp_path, lambda recorder: RedshiftClient(recorder, lambda: recorder, "s", "s3://b/in/", "arn"), statements
    )


def test_the_library_and_its_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_options("redshift", tmp_path, monkeypatch)


def test_a_library_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_missing_library("redshift", "headrace-redshift", tmp_path, monkeypatch)


def test_the_key_to_set_instead_of_an_option_is_said() -> None:
    check_instead("redshift", "port", "set publish.warehouse.port instead")


def test_a_spec_names_the_folder_of_its_files() -> None:
    with pytest.raises(UserError, match="kind redshift needs the key 'stage'"):
        load_spec("clicks", ["publish.warehouse.kind=redshift"])
    with pytest.raises(UserError, match="kind redshift loads files from s3://BUCKET/FOLDER, not from 's3a://b/c'"):
        load_spec("clicks", ["publish.warehouse.kind=redshift", "publish.warehouse.stage=s3a://b/c"])


@pytest.mark.parametrize(
    ("error", "expected", "message"),
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
def test_redshift_tells_what_s3_refuses(error: Exception, expected: type[Exception], message: str) -> None:
    away = FailingS3("upload_file(part-1", error)
    client = RedshiftClient(away, lambda: away, "served", "s3://bucket/in", "default", BOTO)
    with pytest.raises(expected, match=message):
        client.load("t", [], FILES)
    assert away.calls[-2:] == ["delete_object(part-0.parquet)", "delete_object(part-1.parquet)"]

    def no_client() -> Any:
        raise error

    with pytest.raises(expected, match=message):
        RedshiftClient(away, no_client, "served", "s3://bucket/in", "default", BOTO).load("t", [], FILES)


@pytest.mark.parametrize("cleaning", [("delete_object",), ()])
def test_a_clean_up_that_fails_hides_no_cause(cleaning: tuple[str, ...], caplog: pytest.LogCaptureFixture) -> None:
    recorder = FailingS3("COPY", RuntimeError("no such column"), cleaning)
    client = RedshiftClient(recorder, lambda: recorder, "served", "s3://bucket/in", "default", BOTO)
    check_clean_up(lambda _: client, recorder, caplog)


@settings(max_examples=100, deadline=None)
@given(HOSTILE, HOSTILE)
def test_the_dialect_reads_names_back(name: str, table: str) -> None:
    check_names(RedshiftClient, name, table)


def test_what_lineage_calls_the_table() -> None:
    warehouse = Warehouse(kind="redshift", host="c.1.eu.redshift.amazonaws.com", stage="s3://b/c", database="shop")
    assert warehouse.known.dataset_name(warehouse, "served.s") == ("redshift://c.eu:5439", "shop.served.s")
