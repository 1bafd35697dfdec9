"""BigQuery as a warehouse of headrace: files go into the staging table by load jobs, with them or from a bucket; one
script replaces the day.

The checks of a spec import this module: it imports the vendor's client library when the warehouse is opened.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from headrace.config import Spec
from headrace.config.warehouse import Warehouse, WarehouseKind
from headrace.config.workspace import Workspace
from headrace.errors.databases import failures
from headrace.publish.opening import client_library, connecting
from headrace.publish.sql.client import SqlClient, TokenOvertaken, cleanup, literal, load_folder
from headrace.publish.sql.target import SqlTarget
from headrace.publish.target import Target, table_name
from headrace.stage import RunLock
from headrace.storage import Location, local, location_of


class BigQuery(WarehouseKind):
    """BigQuery."""

    opens = "headrace_bigquery:open_bigquery"
    stage_prefix = "gs://"
    own_arguments: ClassVar = {"project": "catalog"}

    @classmethod
    def dataset_name(cls, warehouse: Warehouse, label: str) -> tuple[str, str]:
        return "bigquery", f"{warehouse.catalog}.{label}" if warehouse.catalog else label


#: In the message of a script that ends because a token was overtaken.
_OVERTAKEN = "headrace: a later run has been at work"


class BigQueryClient(SqlClient):
    """A client of google-cloud-bigquery.

    Args:
        client: it.
        library: that module.
        project: of the tables.
        dataset: of the tables.
        stage: `gs://bucket/folder`, from which one job loads all files; None: each is sent with a job of its own.
    """

    types: ClassVar[Mapping[str, str]] = {
        "bigint": "INT64",
        "int": "INT64",
        "smallint": "INT64",
        "tinyint": "INT64",
        "string": "STRING",
        "float": "FLOAT64",
        "double": "FLOAT64",
        "boolean": "BOOL",
        "date": "DATE",
        "timestamp": "TIMESTAMP",
    }
    quotes, escape = "`", "\\"
    key_type, text_type, moment_type, count_type = "STRING", "STRING", "DATETIME", "INT64"
    has_keys = False

    def __init__(self, client: Any, library: Any, project: str, dataset: str, stage: str | None = None) -> None:
        self._client, self._library, self._project, self._dataset = client, library, project, dataset
        self._stage = stage
        self._script: list[tuple[str, Sequence[Any]]] | None = None

    @property
    def schema(self) -> tuple[str, ...]:
        return (self._project, self._dataset)

    def table_options(self, user: str) -> str:
        return f" PARTITION BY `ds` CLUSTER BY {self.quote(user)}"

    def run(self, statement: str, params: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        if self._script is not None:
            self._script.append((statement, params))
            return []
        kinds = {str: "STRING", int: "INT64"}
        parameters = [self._library.ScalarQueryParameter(None, kinds.get(type(v), "DATETIME"), v) for v in params]
        job = self._client.query(statement, job_config=self._library.QueryJobConfig(query_parameters=parameters))
        return [tuple(row.values()) for row in job.result()]

    @contextmanager
    def transaction(self) -> Iterator[None]:
        # A transaction lives in one script: its statements are collected, and what fails undoes all of them.
        self._script = []
        try:
            yield
            script = self._script
        finally:
            self._script = None
        statements = ["BEGIN TRANSACTION", *(s for s, _ in script), "COMMIT TRANSACTION"]
        try:
            self.run(";\n".join(statements), [value for _, values in script for value in values])
        except Exception as e:  # the library's own: the script's messages are in its text
            if _OVERTAKEN in str(e):
                raise TokenOvertaken from None
            raise

    def check_token(self, fences: str, condition: str, lease: str, token: int) -> None:
        if self._script is None:
            super().check_token(fences, condition, lease, token)
        else:
            # A script has no answers before its end: it ends itself.
            highest = f"SELECT max(`token`) FROM {fences} WHERE {condition}"
            self.run(f"ASSERT ({highest}) <= {token} AS '{_OVERTAKEN}'", [lease])

    def load(self, table: str, columns: Sequence[str], files: Sequence[Path]) -> None:
        config = self._library.LoadJobConfig(
            source_format=self._library.SourceFormat.PARQUET,
            write_disposition=self._library.WriteDisposition.WRITE_APPEND,
            create_disposition=self._library.CreateDisposition.CREATE_NEVER,
        )
        name = table.replace("`", "")
        if self._stage is not None:
            self._load_from(location_of(load_folder(self._stage), "publish.warehouse.stage"), name, files, config)
            return
        for file in files:
            with file.open("rb") as source:
                self._client.load_table_from_file(source, name, job_config=config).result()

    def _load_from(self, place: Location, table: str, files: Sequence[Path], config: Any) -> None:
        """Load the files by one job: all rows are in the table, or none."""
        sent = [place / file.name for file in files]
        with cleanup(place.remove, f"files may be left in {place}: remove them"):
            for file, copy in zip(files, sent, strict=True):
                copy.copy_from(local(file))
            if sent:
                self._client.load_table_from_uri([f.uri for f in sent], table, job_config=config).result()

    def columns(self, name: str) -> list[str]:
        rows = self.run(
            f"SELECT column_name FROM {self.quote(*self.schema)}.INFORMATION_SCHEMA.COLUMNS "
            f"WHERE table_name = ? ORDER BY ordinal_position",
            [name],
        )
        return [str(n) for (n,) in rows]

    def tables(self, prefix: str) -> list[str]:
        rows = self.run(
            f"SELECT table_name FROM {self.quote(*self.schema)}.INFORMATION_SCHEMA.TABLES "
            f"WHERE STARTS_WITH(table_name, ?)",
            [prefix],
        )
        return [str(n) for (n,) in rows]

    def rights(self, privilege: str, table: str, view: str) -> list[str]:
        viewer = "`roles/bigquery.dataViewer`"
        return [f"{viewer} ON TABLE {table}", f"{viewer} ON VIEW {view}"]

    def grantee(self, role: str) -> str:
        """Quote a role as a principal of IAM, such as `group:analysts@example.com`."""
        return literal(role)


@contextmanager
def open_bigquery(spec: Spec, ws: Workspace, lock: RunLock | None = None) -> Iterator[Target]:
    """See `headrace.publish.opening.open_target`. Credentials are the client library's own, the environment's; those
    for a bucket are headrace's for stores."""
    with client_library("bigquery", package="headrace-bigquery"):
        from google.api_core.exceptions import GoogleAPIError
        from google.auth.exceptions import GoogleAuthError
        from google.cloud import bigquery
    assert spec.publish is not None
    conf = spec.publish.warehouse

    @contextmanager
    def connect() -> Iterator[SqlClient]:
        with connecting(conf):
            client = bigquery.Client(project=conf.catalog, **conf.options)
        try:
            yield BigQueryClient(client, bigquery, client.project, conf.schema_name, conf.stage)
        finally:
            client.close()

    label = f"{conf.schema_name}.{table_name(spec)}"
    with failures((GoogleAPIError, GoogleAuthError), f"BigQuery for {spec.pipeline}", label):
        yield SqlTarget(spec, ws, "bigquery", label, conf.catalog or "bigquery", BigQueryClient, connect, lock)
