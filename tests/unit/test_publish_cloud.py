"""Snowflake, Redshift, BigQuery, Databricks and ClickHouse by the calls that their client libraries are given.

No account of these is to be had here. What is asserted is what their documentation asks for, word for word: the way of
the files into the staging table, and the statements that replace a day and record it.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from headrace.config import load_spec
from headrace.errors import UserError
from headrace.publish.sql.bigquery import BigQueryClient
from headrace.publish.sql.clickhouse import ClickHouseClient
from headrace.publish.sql.client import SqlClient
from headrace.publish.sql.databricks import DatabricksClient
from headrace.publish.sql.redshift import RedshiftClient
from headrace.publish.sql.snowflake import SnowflakeClient
from headrace.publish.sql.target import SqlTarget
from headrace.publish.target import Check
from headrace.publish.warehouses import open_target
from headrace.storage import LeaseLost, location_of
from headrace.workspace import Workspace
from tests.cloud_support import COLUMNS, Recorded
from tests.fence_support import holding
from tests.publish_support import DS, TYPES, good_rows, staged
from tests.storage_homes import memory_home


def record(path: Path, client: Callable[[Recorded], SqlClient]) -> tuple[list[str], list[str], Recorded]:
    """What is told when a table is made, and when a day of 12 rows is published. The publications' text is left out."""
    told = Recorded()

    @contextmanager
    def connect() -> Iterator[SqlClient]:
        yield client(told)

    kind = type(client(told))
    target = SqlTarget(load_spec("clicks"), Workspace(path), "x", "x", "x", kind, connect)
    target.create(TYPES)
    made = [c for c in told.calls if c.startswith(("CREATE", "ALTER"))]
    told.calls.clear()
    target.swap(staged(path, good_rows(), "k"), "lake/clicks/scores@3", [Check("rows", 12, "1", True)])
    told_swap = [c for c in told.calls if "information_schema.tables" not in c.lower() and "table_name, %s" not in c]
    return made, told_swap, told


S = "headrace_staging_X"
SIX = '"ds", "user_id", "item_id", "rank", "score", "model_version"'
TICKED = SIX.replace('"', "`")
NAMES = "`ds`, `table_name`, `run_key`, `row_count`, `model`, `source`, `audit`, `published_at`"


def test_snowflake(tmp_path: Path) -> None:
    made, swapped, _ = record(tmp_path, lambda told: SnowflakeClient(told, "shop", "served", None))
    assert made[0].startswith('CREATE TABLE "shop"."served"."clicks_scores" ("ds" DATE NOT NULL, "user_id" BIGINT NOT')
    assert made[2] == (
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
    """As its connector does: the literal is read by the server, what follows `file://` is a pattern on this host."""
    file = tmp_path / "l'ét%C3 of 1[2]*\\n?" / "part-0.parquet"
    file.parent.mkdir()
    file.touch()
    told = Recorded()
    statements: list[str] = []
    told.note = lambda statement, params=None: statements.append(statement)  # type: ignore[method-assign]
    SnowflakeClient(told, "shop", "served", None).load("t", [], [file])
    put = re.match(r"PUT '((?:[^'\\]|\\.)*)' '", statements[0])
    assert put is not None
    source = re.sub(r"\\(.)", r"\1", put[1])
    assert source.startswith("file:///")
    assert glob.glob(source.removeprefix("file://")) == [str(file)]  # noqa: PTH207  (the connector's own call)


def test_redshift(tmp_path: Path) -> None:
    _, swapped, _ = record(
        tmp_path, lambda told: RedshiftClient(told, lambda: told, "served", "s3://bucket/in/", "arn:aws:iam::1:role/x")
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


def test_bigquery(tmp_path: Path) -> None:
    made, swapped, _ = record(tmp_path, lambda told: BigQueryClient(told, told, "project", "served"))
    assert made[0].endswith("`model_version` STRING NOT NULL) PARTITION BY `ds` CLUSTER BY `user_id`")
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
    """By one job; what was sent is removed, and what cannot be loaded, too."""
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

    monkeypatch.setitem(globals(), "Recorded", Loading)

    def client(told: Recorded) -> SqlClient:
        return BigQueryClient(told, told, "project", "d", "gs://bucket/in/")

    _, swapped, _ = record(tmp_path, client)
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
        record(tmp_path, client)
    assert len(loads) == 2
    assert list(folder.files()) == []


def test_databricks(tmp_path: Path) -> None:
    made, swapped, _ = record(tmp_path, lambda told: DatabricksClient(told, "main", "served", "/Volumes/main/a/b"))
    assert made[0].endswith("`model_version` STRING NOT NULL) USING DELTA PARTITIONED BY (`ds`)")
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


def test_clickhouse(tmp_path: Path) -> None:
    made, swapped, _ = record(tmp_path, lambda told: ClickHouseClient(told, "shop"))
    assert made[0].endswith(" ENGINE = MergeTree PARTITION BY `ds` ORDER BY (`user_id`, `rank`)")
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


def fenced(path: Path, client: Callable[[Recorded], SqlClient], *tokens: int | None) -> list[str]:
    """What of publishing a day by the holder with token 7 has to do with tokens, the day and its record."""
    told = Recorded()

    @contextmanager
    def connect() -> Iterator[SqlClient]:
        yield client(told)

    target = SqlTarget(load_spec("clicks"), Workspace(path), "x", "x", "x", type(client(told)), connect, holding(7))
    told.tokens = [None]
    target.create(TYPES)
    assert "clicks_scores_fences" in told.made
    told.calls.clear()
    told.tokens = list(tokens)
    rows = staged(path, good_rows(), "k")
    if max(t or 0 for t in tokens) > 7:
        with pytest.raises(LeaseLost):
            target.swap(rows, "lake/clicks/scores@3", [])
    else:
        target.swap(rows, "lake/clicks/scores@3", [])
    return [c.partition(" WHERE")[0] for c in told.calls if "token" in c or "REPLACE" in c or "headrace_publ" in c]


def test_tokens_where_a_day_is_no_transaction(tmp_path: Path) -> None:
    """ClickHouse: looked at before the partition, after it, and after the record, which a later run's may have been."""
    asks = "SELECT max(`token`) FROM `shop`.`clicks_scores_fences`"
    replaces = f"ALTER TABLE `shop`.`clicks_scores` REPLACE PARTITION '{DS}' FROM `shop`.`{S}`"
    # Twice before: when it begins, and after the load.
    done = fenced(tmp_path, lambda told: ClickHouseClient(told, "shop"), 7, 7, 7, 7, 7)
    assert [c for c in done if "INSERT" not in c] == [asks, asks, asks, replaces, asks, asks]
    assert done[-2].startswith("INSERT INTO `shop`.`headrace_publications`")
    raised = fenced(tmp_path, lambda told: ClickHouseClient(told, "shop"), 6, 7, 7, 7, 7)
    assert raised[1] == "ALTER TABLE `shop`.`clicks_scores_fences` UPDATE `token` = 7"
    assert fenced(tmp_path, lambda told: ClickHouseClient(told, "shop"), 7, 7, 8) == [asks, asks, asks]
    late = fenced(tmp_path, lambda told: ClickHouseClient(told, "shop"), 7, 7, 7, 8)
    deletes = "ALTER TABLE `shop`.`headrace_publications` DELETE"
    assert late == [asks, asks, asks, replaces, asks, deletes]
    later = fenced(tmp_path, lambda told: ClickHouseClient(told, "shop"), 7, 7, 7, 7, 8)
    assert later[-3].startswith("INSERT INTO `shop`.`headrace_publications`")
    assert later[-2:] == [asks, deletes]


def test_tokens_in_a_script_of_bigquery(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (*_, script) = fenced(tmp_path, lambda told: BigQueryClient(told, told, "project", "served"), 7, 7)
    assert script.startswith("BEGIN TRANSACTION;\nUPDATE `project`.`served`.`clicks_scores_fences` SET `token` = 7")

    class Ended(Recorded):
        def note(self, statement: str, params: Any = None) -> None:
            super().note(statement, params)
            if "ASSERT" in statement:
                assert re.search(r"ASSERT \(SELECT max\(`token`\) .* `lease` = \?\) <= 7 AS '(.*)'", statement)
                raise RuntimeError("400 headrace: a later run has been at work at [3:1]")

    monkeypatch.setitem(globals(), "Recorded", Ended)
    with pytest.raises(LeaseLost, match="a later run of the pipeline has been at work there"):
        fenced(tmp_path, lambda told: BigQueryClient(told, told, "project", "served"), 7, 7)


def erased(names: str, mark: str, day: str, transaction: bool = True) -> list[str]:
    """The statements by which two users' 3 rows of 12 go: the record first, all or nothing where there is such."""
    q = names[0]
    record = f"UPDATE {names.format('headrace_publications')} SET {q}row_count{q} = 9 WHERE"
    record += f" {q}table_name{q} = 'clicks_scores' AND {q}ds{q} = {day}"
    rows = f"DELETE FROM {names.format('clicks_scores')} WHERE {q}user_id{q} IN ({mark}, {mark})"
    return ["BEGIN", record, rows, "COMMIT"] if transaction else [record, rows]


@pytest.mark.parametrize(
    ("client", "statements"),
    [
        (lambda told: SnowflakeClient(told, "d", "s", None), erased('"d"."s"."{}"', "%s", f"DATE '{DS}'")),
        (
            lambda told: RedshiftClient(told, lambda: told, "s", "s3://b/in/", "arn"),
            erased('"s"."{}"', "%s", f"DATE '{DS}'"),
        ),
        (
            lambda told: BigQueryClient(told, told, "p", "s"),
            [
                ";\n".join(
                    ["BEGIN TRANSACTION", *erased("`p`.`s`.`{}`", "?", f"DATE '{DS}'", False), "COMMIT TRANSACTION"]
                )
            ],
        ),
        (
            lambda told: DatabricksClient(told, "c", "s", "/Volumes/c/s/v"),
            erased("`c`.`s`.`{}`", "?", f"DATE '{DS}'", False),
        ),
        (
            lambda told: ClickHouseClient(told, "s"),
            [
                f"ALTER TABLE `s`.`headrace_publications` UPDATE `row_count` = 9 WHERE `table_name` = 'clicks_scores' "
                f"AND `ds` = toDate('{DS}') SETTINGS mutations_sync = 2",
                "ALTER TABLE `s`.`clicks_scores` DELETE WHERE `user_id` IN (%s, %s) SETTINGS mutations_sync = 2",
            ],
        ),
    ],
    ids=["snowflake", "redshift", "bigquery", "databricks", "clickhouse"],
)
def test_rows_of_persons_are_deleted_from_all_days(
    client: Callable[[Recorded], SqlClient], statements: list[str], tmp_path: Path
) -> None:
    told = Recorded()

    @contextmanager
    def connect() -> Iterator[SqlClient]:
        yield client(told)

    target = SqlTarget(load_spec("clicks"), Workspace(tmp_path), "x", "x", "x", type(client(told)), connect)
    assert target.rows_with("user_id", [3, 4]) == {}  # there is no table yet
    target.create(TYPES)
    assert target.rows_with("item_tags", [3, 4]) == {}  # nor such a column
    told.calls.clear()
    assert target.erase("user_id", [3, 4]) == ""
    mine = [c for c in told.calls if "column" not in c.lower() and not c.startswith("SELECT")]
    assert mine == statements


@pytest.mark.parametrize("kind", ["clickhouse", "snowflake", "bigquery", "redshift", "databricks"])
def test_a_client_library_that_is_not_installed(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("clickhouse_connect", "snowflake", "google", "redshift_connector", "boto3", "databricks"):
        monkeypatch.setitem(__import__("sys").modules, module, None)
    stage = ["publish.warehouse.stage=s3://b/c"] if kind in ("redshift", "databricks") else []
    spec = load_spec("clicks", [f"publish.warehouse.kind={kind}", *stage])
    with pytest.raises(UserError, match=rf"pip install 'headrace\[{kind}\]'"):
        with open_target(spec, Workspace(tmp_path)):
            pass


def test_a_spec_names_its_place_and_no_password() -> None:
    with pytest.raises(UserError, match="kind redshift needs the key 'stage'"):
        load_spec("clicks", ["publish.warehouse.kind=redshift"])
    for kind, stage, begin in (("redshift", "s3a://b/c", "s3://"), ("bigquery", "b/c", "gs://")):
        with pytest.raises(UserError, match=f"kind {kind} loads files from {begin}BUCKET/FOLDER, not from '{stage}'"):
            load_spec("clicks", [f"publish.warehouse.kind={kind}", f"publish.warehouse.stage={stage}"])
    for url in (
        "mysql+pymysql://me:secret@h/db",
        "mysql+pymysql://me:sec/ret@h/db",
        "mysql+pymysql://h/db?password=secret",
        "mssql+pyodbc:///?odbc_connect=DRIVER%3DX%3BUID%3Dme%3BPWD%3Dsecret",
        "mssql+pyodbc:///?odbc_connect=DRIVER%3DX%3B+Password+%3Dsecret",
    ):
        with pytest.raises(UserError, match="url has a password in it"):
            load_spec("clicks", ["publish.warehouse.kind=sqlalchemy", f"publish.warehouse.url={url}"])
    for url in ("sqlite:////data/a:b@c.db", "mssql+pyodbc://me@h:1433/db?driver=X", "postgresql://me@h:5432/db"):
        load_spec("clicks", ["publish.warehouse.kind=sqlalchemy", f"publish.warehouse.url={url}"])
