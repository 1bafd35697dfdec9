"""The spec: accepted settings, and faults with their place and the nearest valid name."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from headrace.config import (
    LandingSource,
    Spark,
    Spec,
    TableSource,
    Warehouse,
    build_spec,
    load_overlay,
    load_spec,
    parse_ds,
    spark_profile,
)
from headrace.config.features import OpSpec
from headrace.config.installation import checkout, pipeline_file
from headrace.errors import UserError
from tests.source_table_support import make_spec

SHIPPED = sorted(p.stem for p in (checkout() / "conf" / "pipelines").glob("*.yaml"))


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_pipelines_are_valid(name: str) -> None:
    assert load_spec(name).pipeline == name


def test_there_are_shipped_pipelines() -> None:
    assert "clicks" in SHIPPED


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.epoch=2", "unknown key 'train.epoch'; did you mean 'epochs'?"),
        ("train.ranks=3", "train: ranks (3) must divide streams (4)"),
        ("train.ranks=two", "train.ranks: Input should be a valid integer"),
        ("score.user.key=user_ids", "column 'user_ids' is not declared in table.columns; did you mean 'user_id'?"),
        ("table.keys=[event]", "column 'event' is used but not declared"),
        ("table={columns: [{name: a, type: int}, {name: A, type: int}]}", "column 'A' is declared twice"),
        ("features.label=click", "did you mean 'clicked'?"),
        ('publish.table="x; drop table y"', "table name 'x; drop table y' must match"),
        ("publish.warehouse.password=hunter2", "unknown key 'publish.warehouse.password'"),
        ("source.timezone=Europe/Berln", "'Europe/Berln' is no IANA time zone such as Europe/Berlin; did you mean"),
        ("source.timezone=../etc/passwd", "is no IANA time zone"),
        ("source.timestamps={t: epoch_seconds}", "source.timestamps: column 't' is not declared in table.columns"),
        ("source.timestamps={hour: epoch_seconds}", "column 'hour' is int; declare it timestamp"),
        (
            "source.timestamps={ts: seconds}",
            "source.timestamps.ts: 'seconds' is no spelling of times: one of epoch_seconds, epoch_milli",
        ),
        ("source.format=dleta", "source.format: 'dleta' is no format; did you mean 'delta'?"),
        ("source={format: delta}", "source: give path and format, or table"),
        ("source={format: delta, path: t, tabel: x}", "unknown key 'source.tabel'; did you mean 'table'?"),
        ("source={path: t}", "key 'source.format' is missing"),
        ("source={table: a.b, path: t}", "source: give path and format, or table"),
        ("source={table: 'a.b; drop'}", "source.table: 'a.b; drop' is no name such as catalog.database.events"),
        ("source={table: a.b, day: {partition: d, time: t}}", "source.day: name one of partition"),
        ("source={table: a.b, day: {partiton: d}}", "'source.day.partiton'; did you mean 'partition'?"),
        ("source={table: a.b, as_of: 2026-01-31T00:00}", "is no time with an offset"),
        ("source={format: parquet, path: t, version: 3}", "format parquet has no versions"),
        ("source={format: iceberg, path: t, day: {changes: true}}", "day.changes is of Delta tables"),
        ("source={format: delta, path: 't/{ds}'}", "say what its days are by day"),
        ("table.clock_skew_seconds=-1", "table.clock_skew_seconds: Input should be greater than or equal to 0"),
        ("nonsense=1", "unknown key 'nonsense'"),
        ("pipeline=Clicks!", "'Clicks!' must match"),
        ('pipeline="clicks\\n"', "must match"),
        ('publish.table="scores\\n"', "must match"),
        ('ds="2026-01-03\\n"', "is not a date"),
        ("sources={events: {source: {format: csv, path: x}, table: {columns: []}}}", "is the name of another table"),
        ("sources={a_quarantine: {source: {format: csv, path: x}, table: {columns: []}}}", "is the name of another"),
        ("sources={A: {source: {format: csv, path: x}, table: {columns: []}}}", "sources: 'A' must match"),
        ("sources.users.source={format: csv, pth: x}", "key 'sources.users.source.pth'; did you mean 'path'?"),
        (
            "sources.users={source: {format: csv, path: x, timestamps: {t: epoch_seconds}}, table: {columns: []}}",
            "sources.users.source.timestamps: column 't' is not declared in sources.users.table.columns",
        ),
        ("features.split.column=clicked", "`column` is needed with `by: column`"),
        ("table.event_time=null", "features.split.by is 'time'"),
        ("ds='2026-02-30'", "'2026-02-30' is not a date"),
        ("ds=2026-02-30", "the value is not YAML: day is out of range"),
    ],
)
def test_faults_are_named(override: str, message: str) -> None:
    with pytest.raises(UserError) as raised:
        load_spec("clicks", [override])
    assert message in str(raised.value)


def test_the_rest_of_a_path_below_a_mapping_of_plain_values_is_one_key() -> None:
    spec = load_spec(
        "clicks",
        [
            "spark.properties.spark.executor.memory=4g",
            "spark.properties.spark.task.cpus=2",
            "spark.properties.spark.speculation=false",
            "drift.columns.item_price.max_psi=0.5",
        ],
    )
    assert spec.spark.properties == {
        "spark.executor.memory": "4g",
        "spark.task.cpus": "2",
        "spark.speculation": "false",
    }
    assert spec.drift is not None
    assert spec.drift.columns["item_price"].max_psi == 0.5


@pytest.mark.parametrize(
    "key",
    [
        "spark.hadoop.fs.s3a.secret.key",
        "spark.hadoop.fs.s3a.access.key",
        "spark.hadoop.fs.s3a.session.token",
        "spark.hadoop.fs.azure.account.key.lake.dfs.core.windows.net",
        "spark.hadoop.fs.azure.account.oauth2.client.secret.lake.dfs.core.windows.net",
        "spark.hadoop.fs.azure.sas.raw.lake.blob.core.windows.net",
        "spark.hadoop.fs.gs.auth.service.account.private.key",
        "spark.authenticate.secret",
        "spark.ssl.keyStorePassword",
        "spark.kubernetes.authenticate.submission.oauthToken",
        "spark.executorEnv.AWS_SECRET_ACCESS_KEY",
        "spark.executorEnv.AZURE_STORAGE_KEY",
        "spark.sql.catalog.rest.credential",
    ],
)
def test_a_secret_is_refused_and_not_repeated(key: str) -> None:
    for override in (f"spark.properties.{key}=hunter2", f"spark.properties={{{key}: hunter2}}"):
        with pytest.raises(UserError, match="does not belong") as e:
            load_spec("clicks", [override])
        assert key in str(e.value)
        assert "hunter2" not in str(e.value)


@pytest.mark.parametrize(
    "key",
    [
        "spark.hadoop.hadoop.security.credential.provider.path",
        "spark.hadoop.fs.s3a.aws.credentials.provider",
        "spark.hadoop.fs.azure.account.keyprovider.lake.dfs.core.windows.net",
        "spark.hadoop.fs.azure.account.oauth2.client.endpoint",
        "spark.io.encryption.keySizeBits",
        "spark.authenticate.secret.file",
        "spark.kubernetes.driver.secretKeyRef.PASSWORD",
        "spark.kubernetes.executor.secrets.lake",
        "spark.executorEnv.GOOGLE_APPLICATION_CREDENTIALS",
        "spark.sql.catalog.rest.token-refresh-enabled",
        "spark.executor.memory",
    ],
)
def test_what_only_points_to_a_secret_passes(key: str) -> None:
    assert load_spec("clicks", [f"spark.properties.{key}=x"]).spark.properties == {key: "x"}


@pytest.mark.parametrize(
    ("key", "value", "secret"),
    [
        ("spark.executorEnv.DB", "postgresql://u:hunter2@h/d", True),
        ("spark.driver.extraJavaOptions", "-Dx=1 -Djavax.net.ssl.trustStorePassword=hunter2", True),
        ("spark.sql.catalog.rest.header.Authorization", "Bearer hunter2hunter2", True),
        ("spark.x", "https://a.blob.core.windows.net/c?sv=2024&sig=hunter2%3D", True),
        ("spark.x", '{"private_key": "hunter2"}', True),
        # A name of a variable is one to Iceberg's catalogs alone.
        ("spark.hadoop.fs.s3a.secret.key", "env:hunter2", True),
        ("spark.sql.catalog.rest.credential", "env:CATALOG_CREDENTIAL", False),
        ("spark.sql.catalog.rest.uri", "http://catalog:8181", False),
        ("spark.jars.packages", "org.example:token-exchange:1.0", False),
        ("spark.kubernetes.driver.secretKeyRef.DB", "db-password:password=", False),
        ("spark.x", "s3://bucket/a@b", False),
    ],
)
def test_values_of_properties_hold_no_secret(key: str, value: str, secret: bool) -> None:
    if not secret:
        assert Spark(properties={key: value}).properties == {key: value}
        return
    with pytest.raises(ValidationError, match="does not belong") as e:
        Spark(properties={key: value})
    (fault,) = e.value.errors()
    assert key in fault["msg"]
    assert "hunter2" not in fault["msg"]
    assert ("`env:VARIABLE`" in fault["msg"]) == key.startswith("spark.sql.catalog.")


@pytest.mark.parametrize(
    "setting",
    [
        {"options": {"private_key_passphrase": "hunter2"}},
        {"options": {"private_key_file_pwd": "hunter2"}},
        {"options": {"pwd": "hunter2"}},
        {"options": {"proxy": "http://me:hunter2@proxy:80"}},
        {"stage": "s3://me:hunter2@bucket/in"},
    ],
)
def test_no_secret_of_a_warehouse_is_in_a_spec(setting: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="password_env or password_file") as e:
        Warehouse(kind="clickhouse", **setting)
    (fault,) = e.value.errors()
    assert "hunter2" not in fault["msg"]


@pytest.mark.parametrize(
    "key",
    [
        "spark.kerberos.renewal.credentials",
        "spark.security.credentials.renewalRatio",
        "spark.security.credentials.retryWait",
        "spark.security.credentials.hive.enabled",
        "spark.hadoop.hadoop.security.credential.clear-text-fallback",
        "spark.hadoop.hadoop.security.credential.provider.path",
        "spark.hadoop.fs.azure.sas.token.provider.type.account.dfs.core.windows.net",
        "spark.hadoop.fs.azure.account.oauth.provider.type.account.dfs.core.windows.net",
        "spark.hadoop.fs.s3a.aws.credentials.provider",
    ],
)
def test_properties_about_credentials_that_are_none_pass(key: str) -> None:
    assert Spark(properties={key: "x"}).properties == {key: "x"}


def test_options_that_name_files_pass() -> None:
    options = {"account": "a", "private_key_file": "/run/key.p8", "token_file_path": "/run/token", "role": "loader"}
    assert Warehouse(kind="clickhouse", options=options, stage="@files/in").options == options


@pytest.mark.parametrize("override", ["train.epochs.a=hunter2", "pipeline.x=hunter2", "a.b={hunter2"])
def test_a_message_about_an_override_does_not_repeat_its_value(override: str) -> None:
    with pytest.raises(UserError) as e:
        load_spec("clicks", [override])
    assert "hunter2" not in str(e.value)


def test_every_fault_is_listed_at_once(tmp_path: Path) -> None:
    data = yaml.safe_load((checkout() / "conf/pipelines/clicks.yaml").read_text())
    data["train"]["rankz"] = 2
    data["source"]["fromat"] = data["source"].pop("format")
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(data))
    with pytest.raises(UserError) as raised:
        load_spec(path)
    lines = str(raised.value).splitlines()
    assert len(lines) == 3
    assert all(line.startswith(str(path)) for line in lines)


@pytest.mark.parametrize("override", ["train.epochs", "=3", "train.epochs.x=3", "train.epochs=[1"])
def test_malformed_overrides(override: str) -> None:
    with pytest.raises(UserError, match="--set"):
        load_spec("clicks", [override])


def test_an_override_below_an_alias_is_of_that_place_alone(tmp_path: Path) -> None:
    shipped = yaml.safe_load(pipeline_file("attribution").read_text())
    shipped["sources"]["installs"]["source"] = shipped["source"]
    path = tmp_path / "x.yaml"
    path.write_text(yaml.safe_dump(shipped))
    assert "*id001" in path.read_text()
    spec = load_spec(path, ["sources.installs.source.path=in/{ds}/*.csv"])
    assert spec.sources["installs"].source.path == "in/{ds}/*.csv"
    assert spec.source == load_spec("attribution").source


def test_an_alias_within_what_it_repeats_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text("pipeline: x\ntable: &t {columns: [*t]}\n")
    with pytest.raises(UserError, match="alias"):
        load_spec(tmp_path / "x.yaml")


def test_overrides_make_missing_sections() -> None:
    assert load_spec("clicks", ["train.negatives.column=item_id"]).train.negatives is not None


def test_the_first_landing_day_of_an_event() -> None:
    """West of Greenwich, or with clocks that are ahead, an event may land on the day before its UTC day."""
    assert load_spec("clicks").first_landing_day("2026-03-01") == "2026-03-01"
    for override in ("source.timezone=America/New_York", "table.clock_skew_seconds=1"):
        assert load_spec("clicks", [override]).first_landing_day("2026-03-01") == "2026-02-28"


def test_a_source_is_files_or_a_table() -> None:
    files = load_spec("clicks").source
    assert isinstance(files, LandingSource)
    assert files.daily
    table = load_spec("clicks", ["source={table: lake.db.events}", "source.day.time=ts"]).source
    assert isinstance(table, TableSource)
    assert table.daily
    assert not load_spec("clicks", ["source={format: iceberg, path: /lake/events, version: 7}"]).source.daily


@pytest.mark.parametrize(
    "path",
    [
        *(
            "events",
            "/lake/events",
            "file:///lake/events",
            "s3://bucket/events",
            "s3a://bucket/events",
            "gs://b/events",
        ),
        *("abfss://box@account.dfs.core.windows.net/events", "hdfs://name:8020/events"),
    ],
)
def test_a_table_is_a_path_or_a_uri(path: str) -> None:
    spec = make_spec({"format": "delta", "path": path})
    assert spec.source == TableSource(format="delta", path=path)
    assert spec.reads == ((path,) if ":" in path else ())


@pytest.mark.parametrize("path", ["https://host/x", "dbfs:/x", 7, None])
def test_paths_of_operators_that_name_no_store_are_theirs(path: object) -> None:
    spec = load_spec("clicks")
    features = spec.features.model_copy(update={"prepare": (OpSpec(op="of_a_plugin", params={"path": path}),)})
    assert spec.model_copy(update={"features": features}).reads == ()


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("ftp://host/events", "source.path: headrace knows no store of ftp:"),
        ("s3://key:word@bucket/events", "source.path: a secret does not belong in a URI"),
        ("abfss://me:word@account.dfs.core.windows.net/events", "source.path: a secret does not belong in a URI"),
        ("abfss://me@box@account.dfs.core.windows.net/events", "source.path: a secret does not belong in a URI"),
        ("s3://", "source.path: write s3://BUCKET/FOLDER"),
    ],
)
def test_uris_of_tables_that_are_refused(path: str, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)) as refused:
        make_spec({"format": "delta", "path": path})
    assert "word" not in str(refused.value)


@pytest.mark.parametrize(("text", "message"), [("a: [", "is not YAML"), ("- 1", "a pipeline is a mapping")])
def test_not_a_spec(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        load_spec(path)


def test_missing_file_and_unknown_name() -> None:
    with pytest.raises(UserError, match="no such pipeline file"):
        load_spec("/nowhere/x.yaml")
    with pytest.raises(UserError, match="did you mean 'clicks'"):
        load_spec("click")
    with pytest.raises(UserError, match="no Spark profile 'gpus'"):
        spark_profile("gpus")


def test_operators_may_be_written_short() -> None:
    spec = load_spec("clicks")
    chain = next(c for c in spec.features.workflow if "item_price" in c.columns)
    assert [(o.op, dict(o.params)) for o in chain.ops][:2] == [("fill_missing", {}), ("clip", {"min": 0, "max": 10000})]


def test_a_spec_is_immutable_and_round_trips() -> None:
    spec = load_spec("clicks")
    with pytest.raises(ValidationError):
        spec.pipeline = "other"  # type: ignore[misc]
    assert build_spec(spec.model_dump(by_alias=True)) == spec
    assert Spec.model_validate_json(spec.model_dump_json(by_alias=True)) == spec


@pytest.mark.parametrize("text", ["2026-1-1", "20260101", "yesterday", "2026-13-01", ""])
def test_dates(text: str) -> None:
    with pytest.raises(UserError):
        parse_ds(text)


def test_the_shipped_overlay_makes_raw_ids() -> None:
    spec = load_spec("clicks", load_overlay(checkout() / "conf" / "overlays" / "raw_ids.yaml"))
    raw = {c for f in spec.features.workflow for c in f.columns if any("raw_id" in str(op) for op in f.ops)}
    assert raw == spec.train.embeddings.dynamic.keys() == {"user_id", "item_tags"}


def test_an_overlays_keys_over_train_are_nested(tmp_path: Path) -> None:
    """A pipeline's own file nests them, and so does one flow mapping."""
    overlay = tmp_path / "warm.yaml"
    overlay.write_text(
        """
retrain: {warm: {epochs: 1, dense: {learning_rate: 0.0005}}}
challenger: {train: {dense: {learning_rate: 0.002, schedule: {kind: linear}}}}
"""
    )
    spec = load_spec("clicks", load_overlay(overlay))
    assert spec.train_of_warm_start().dense.learning_rate == 0.0005
    assert spec.of_challenger().train.dense.schedule.kind == "linear"
    expected = load_spec(
        "clicks",
        [
            "retrain.warm={epochs: 1, dense: {learning_rate: 0.0005}}",
            "challenger.train={dense: {learning_rate: 0.002, schedule: {kind: linear}}}",
        ],
    )
    assert spec == expected


def test_settings_of_embeddings_are_imported_without_the_other_sections() -> None:
    code = "import sys; from headrace.config import Sharding; print([m for m in sys.modules if 'headrace.config' in m])"
    modules = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert "headrace.config.embeddings" in modules
    assert "headrace.config.spec" not in modules


@pytest.mark.parametrize("package", ["config", "embeddings", "stage", "storage"])
def test_names_that_type_checkers_see_are_found_at_run_time(package: str) -> None:
    tree = ast.parse((checkout() / "python" / package / "__init__.py").read_text())
    (checked,) = (n for n in tree.body if isinstance(n, ast.If))
    imports = {
        alias.asname: (node.module, alias.name)
        for node in checked.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    (call,) = (n.value for n in tree.body if isinstance(n, ast.Assign) and isinstance(n.value, ast.Call))
    names_by_module = ast.literal_eval(call.args[1])
    assert sorted(map(str, imports)) == sorted(name for names in names_by_module.values() for name in names)
    module = import_module(f"headrace.{package}")
    for name, (origin, original) in imports.items():
        assert getattr(module, str(name)) is getattr(import_module(str(origin)), original)
