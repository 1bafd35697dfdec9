"""Redshift as a warehouse of headrace: files go to S3, into the staging table by COPY, and a day is replaced in a
transaction.

The checks of a spec import this module: it imports the vendor's client library when the warehouse is opened.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar

from headrace.config import Spec
from headrace.config.warehouse import Warehouse, WarehouseKind
from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.errors.databases import failures
from headrace.logs import redact
from headrace.publish.opening import client_library, connecting, password_of
from headrace.publish.sql.client import SqlClient, cleanup, literal, load_folder
from headrace.publish.sql.target import SqlTarget
from headrace.publish.target import KeyLimits, Target, table_name
from headrace.stage import RunLock
from headrace.storage import StoreAway


class Redshift(WarehouseKind):
    """Redshift."""

    opens = "headrace_redshift:open_redshift"
    needs = ("stage",)
    stage_prefix = "s3://"
    own_arguments: ClassVar = {"host": "host", "port": "port", "database": "database", "user": "user"}

    @classmethod
    def dataset_name(cls, warehouse: Warehouse, label: str) -> tuple[str, str]:
        # CLUSTER.ACCOUNT.REGION.redshift.amazonaws.com
        parts = warehouse.host.split(".")
        is_aws = warehouse.host.endswith(".redshift.amazonaws.com")
        cluster = f"{parts[0]}.{parts[2]}" if is_aws else warehouse.host
        return f"redshift://{cluster}:{warehouse.port or 5439}", f"{warehouse.database}.{label}"


#: Answers that say "later", as headrace.storage has them: these, and 5xx but those that say "never".
_LATER, _NEVER = {408, 429}, {501, 505}


def s3_fault(error: Exception, place: str) -> UserError | StoreAway:
    """Return the error to raise in place of one of boto3 (`S3UploadFailedError`) or botocore.

    Args:
        error: as it was caught.
        place: the URI of what was to be written.

    Returns:
        StoreAway where there was no answer, or one that says to come later; else a UserError.
    """
    from botocore.exceptions import ConnectionError, HTTPClientError, ProxyConnectionError, SSLError

    # `upload_file` tells what the store has answered in a text alone; the answer is the error before its own.
    answered = error if hasattr(error, "response") else error.__context__
    cause = answered if isinstance(answered, Exception) and hasattr(answered, "response") else error
    status = 0
    with suppress(AttributeError, KeyError, TypeError, ValueError):  # not answered at all
        status = int(getattr(cause, "response")["ResponseMetadata"]["HTTPStatusCode"])  # noqa: B009  (not of the type)
    detail = redact((str(cause).splitlines() or [type(cause).__name__])[0]).rstrip(".")
    is_silent = isinstance(cause, HTTPClientError | ConnectionError)
    is_never = isinstance(cause, SSLError | ProxyConnectionError)
    if (is_silent and not is_never) or status in _LATER or (status >= 500 and status not in _NEVER):
        return StoreAway(
            f"{place}: the store is away ({detail}). Run this again later; or that is not its address: see "
            f"publish.warehouse.stage, AWS_REGION and AWS_ENDPOINT_URL"
        )
    return UserError(
        f"cannot write to {place}, below publish.warehouse.stage: {detail}. The credentials are those that boto3 finds "
        f"on this host (the environment, a profile, the machine's role); they must allow to write and delete there"
    )


#: What of `publish.warehouse.options` is COPY's, not the connection's.
_ROLE = "iam_role"


class RedshiftClient(SqlClient):
    """A connection of redshift-connector.

    Args:
        connection: it, open.
        s3: makes a client of boto3, which that library brings.
        schema: of the tables.
        stage: `s3://bucket/folder`.
        role: COPY's, or `default`.
        s3_errors: what `s3` and its client raise.
    """

    types: ClassVar[Mapping[str, str]] = {
        "bigint": "BIGINT",
        "int": "INTEGER",
        "smallint": "SMALLINT",
        "tinyint": "SMALLINT",
        "string": "VARCHAR(65535)",
        "float": "REAL",
        "double": "DOUBLE PRECISION",
        "boolean": "BOOLEAN",
        "date": "DATE",
        "timestamp": "TIMESTAMPTZ",
    }
    mark = "%s"
    text_type = "VARCHAR(65535)"
    has_keys = False

    def key_limits(self, is_user_key: bool) -> KeyLimits:
        # VARCHAR counts bytes there.
        return KeyLimits(max_bytes=255 if is_user_key else 65_535, nul=False)

    def __init__(
        self,
        connection: Any,
        s3: Callable[[], Any],
        schema: str,
        stage: str,
        role: str,
        s3_errors: tuple[type[Exception], ...] = (),
    ) -> None:
        self._connection, self._s3, self._schema, self._stage, self._role = connection, s3, schema, stage, role
        self._s3_errors = s3_errors

    @property
    def schema(self) -> tuple[str, ...]:
        return (self._schema,)

    def run(self, statement: str, params: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        with self._connection.cursor() as cursor:
            cursor.execute(statement, tuple(params))
            return [tuple(row) for row in cursor.fetchall()] if cursor.description else []

    def load(self, table: str, columns: Sequence[str], files: Sequence[Path]) -> None:
        # COPY takes the columns of Parquet files in their order, which is the staging table's.
        place = load_folder(self._stage)
        bucket, _, folder = place.removeprefix("s3://").partition("/")
        keys = [f"{folder}/{file.name}" for file in files]
        role = "default" if self._role == "default" else literal(self._role)
        sent: list[str] = []
        try:
            s3 = self._s3()

            def remove() -> None:
                for key in sent:
                    s3.delete_object(Bucket=bucket, Key=key)

            with cleanup(remove, f"files may be left in {place}: remove them"):
                for file, key in zip(files, keys, strict=True):
                    sent.append(key)
                    s3.upload_file(str(file), bucket, key)
                self.run(f"COPY {table} FROM {literal(f'{place}/')} IAM_ROLE {role} FORMAT AS PARQUET")
        except self._s3_errors as e:
            raise s3_fault(e, place) from None

    def columns(self, name: str) -> list[str]:
        rows = self.run(
            "SELECT column_name FROM svv_columns WHERE table_schema = %s AND table_name = %s ORDER BY ordinal_position",
            [self._schema, name],
        )
        return [str(n) for (n,) in rows]

    def tables(self, prefix: str) -> list[str]:
        rows = self.run(
            "SELECT table_name FROM svv_tables WHERE table_schema = %s AND left(table_name, %s) = %s",
            [self._schema, len(prefix), prefix],
        )
        return [str(n) for (n,) in rows]

    def has_role(self, role: str) -> bool | None:
        # Without a word before it, what stands behind TO is a user.
        return bool(self.run("SELECT 1 FROM pg_user WHERE usename = %s", [role]))


@contextmanager
def open_redshift(spec: Spec, ws: Workspace, lock: RunLock | None = None) -> Iterator[Target]:
    """See `headrace.publish.opening.open_target`."""
    with client_library("redshift", package="headrace-redshift"):
        import boto3
        import redshift_connector
        from boto3.exceptions import S3UploadFailedError
        from botocore.exceptions import BotoCoreError, ClientError
    assert spec.publish is not None
    conf = spec.publish.warehouse
    assert conf.stage is not None, "config refuses the kind without it"
    stage = conf.stage

    @contextmanager
    def connect() -> Iterator[SqlClient]:
        options = {k: v for k, v in conf.options.items() if k != _ROLE}
        with connecting(conf):
            connection = redshift_connector.connect(
                host=conf.host,
                port=conf.port or 5439,
                database=conf.database,
                user=conf.user,
                password=password_of(conf),
                **options,
            )
        connection.autocommit = True
        with connection:
            role = conf.options.get(_ROLE, "default")
            errors = BotoCoreError, ClientError, S3UploadFailedError
            yield RedshiftClient(connection, lambda: boto3.client("s3"), conf.schema_name, stage, role, errors)

    label, address = f"{conf.schema_name}.{table_name(spec)}", f"{conf.user}@{conf.host}"
    with failures(redshift_connector.Error, f"Redshift at {conf.host} for {spec.pipeline}", label):
        yield SqlTarget(spec, ws, "redshift", label, address, RedshiftClient, connect, lock)
