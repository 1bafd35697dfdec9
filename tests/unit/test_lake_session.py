"""Properties of a session."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from headrace.config import Spark
from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.lake.spark import requirements as object_stores
from headrace.lake.spark import session as spark_session
from headrace.lake.spark.session import properties
from headrace.storage import location_of
from headrace.storage.objects import copies
from tests.source_table_support import COLUMNS, make_spec
from tests.storage_support import memory_home

ZONE = "spark.sql.session.timeZone"


def test_sessions_are_in_utc(ws: Workspace) -> None:
    assert properties(Spark(), ws)[ZONE] == "UTC"
    with pytest.raises(UserError, match=r"spark\.sql\.session\.timeZone is 'Europe/Berlin'.*is source\.timezone"):
        properties(Spark(properties={ZONE: "Europe/Berlin"}), ws)


@pytest.mark.parametrize("key", ["spark.sql.files.ignoreCorruptFiles", "spark.sql.files.ignoreMissingFiles"])
def test_a_file_that_cannot_be_read_is_never_passed_over(ws: Workspace, key: str) -> None:
    assert properties(Spark(), ws)[key] == "false"
    assert properties(Spark(properties={key: "false"}), ws)[key] == "false"
    with pytest.raises(UserError, match=rf"^spark\.properties: {re.escape(key)} is 'true'.*: leave it out$"):
        properties(Spark(properties={key: "true"}), ws)


def test_a_path_is_a_file_whatever_hadoop_calls_its_default(tmp_path: Path) -> None:
    """core-site.xml of a cluster says that paths without a scheme are in HDFS; the user's own word counts more."""
    default = "spark.hadoop.fs.defaultFS"
    ws = Workspace(tmp_path, store_uri="hdfs://namenode:8020/store")
    settings = properties(Spark(), ws)
    assert settings[default] == "file:///"
    assert settings["spark.yarn.stagingDir"] == "hdfs://namenode:8020/store/.spark-staging"
    assert "spark.yarn.stagingDir" not in properties(Spark(), Workspace(tmp_path))
    assert properties(Spark(properties={default: "hdfs://namenode:8020"}), ws)[default] == "hdfs://namenode:8020"


def test_tables_of_others_are_reached_by_their_stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pipeline's own lake and store are on a disk."""
    monkeypatch.delenv("HEADRACE_CACHE", raising=False)
    monkeypatch.setattr(copies, "_workspace_folder", [])
    environ = dict(os.environ)
    monkeypatch.setattr(object_stores, "s3_dir", lambda: tmp_path)
    monkeypatch.setattr(spark_session, "class_archive", lambda *, with_s3: tmp_path / f"{with_s3}.jsa")
    for with_s3 in (False, True):
        (tmp_path / f"{with_s3}.jsa").touch()
    local = make_spec({"format": "delta", "path": "/lake/events"})
    assert Workspace(tmp_path).of(local).is_local
    assert "HEADRACE_CACHE" not in "".join(properties(Spark(), Workspace(tmp_path).of(local)))
    users = {"source": {"format": "parquet", "path": "s3a://bucket/users"}, "table": {"columns": COLUMNS}}
    in_s3 = make_spec({"format": "delta", "path": "hdfs://name:8020/events"}, sources={"users": users})
    ws = Workspace(tmp_path).of(in_s3)
    assert not ws.is_local
    assert ws.schemes == {"file", "hdfs", "s3"}
    # Copies of data files are in scratch.
    assert copies.folder() == tmp_path / "cache"
    assert os.environ == environ
    with pytest.raises(UserError, match=r"^what the pipeline reads is in S3, .* run `make s3`$"):
        properties(Spark(), ws)
    (tmp_path / "hadoop-aws-1.jar").touch()
    settings = properties(Spark(), ws)
    assert settings["spark.kerberos.access.hadoopFileSystems"] == "hdfs://name:8020"
    assert settings["spark.hadoop.fs.s3.impl"] == "org.apache.hadoop.fs.s3a.S3AFileSystem"
    assert settings["spark.delta.logStore.s3.impl"].endswith("S3ConditionalLogStore")
    # Spark's tasks on this host share the driver's copies; those of other hosts have their own.
    assert settings["spark.executorEnv.HEADRACE_CACHE"] == str(tmp_path / "cache")
    assert "spark.executorEnv.HEADRACE_CACHE" not in properties(Spark(master="spark://head:7077"), ws)
    assert "hadoop-aws-1.jar" in settings["spark.driver.extraClassPath"]
    plain = properties(Spark(), Workspace(tmp_path))
    assert "hadoop-aws-1.jar" not in plain["spark.driver.extraClassPath"]
    # A JVM maps the archive that was made with its class path.
    assert f"{tmp_path}/True.jsa" in settings["spark.driver.defaultJavaOptions"]
    assert f"{tmp_path}/False.jsa" in plain["spark.driver.defaultJavaOptions"]


def test_tables_of_a_catalog_may_be_in_s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The catalog alone knows where they are: S3's jars are taken if they are installed, unless others are given."""
    monkeypatch.setattr(object_stores, "s3_dir", lambda: tmp_path)
    hive = {"spark.sql.catalogImplementation": "hive"}
    s3 = "spark.hadoop.fs.s3.impl"
    assert s3 not in properties(Spark(properties=hive), Workspace(tmp_path))
    (tmp_path / "hadoop-aws-1.jar").touch()
    assert s3 in properties(Spark(properties=hive), Workspace(tmp_path))
    named = {"spark.sql.catalog.unity": "io.unitycatalog.spark.UCSingleCatalog"}
    assert s3 in properties(Spark(properties=named), Workspace(tmp_path))
    catalog_properties = {**hive, "spark.jars.packages": "org.apache.hadoop:hadoop-aws:3.4.2"}
    assert s3 not in properties(Spark(properties=catalog_properties), Workspace(tmp_path))
    assert s3 not in properties(Spark(), Workspace(tmp_path))


@pytest.mark.parametrize(
    ("store", "staging"),
    [
        ("s3://bucket/store", "s3a://bucket/store/.spark-staging"),
        ("gs://bucket/store", "gs://bucket/store/.spark-staging"),
        ("abfss://box@account.dfs.core.windows.net/s", "abfss://box@account.dfs.core.windows.net/s/.spark-staging"),
    ],
)
def test_what_yarn_brings_to_its_containers_is_where_all_hosts_see_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: str, staging: str
) -> None:
    """The files are not in the folder that `spark.hadoop.fs.defaultFS` would give; the user's own setting wins."""
    key = "spark.yarn.stagingDir"
    monkeypatch.setattr(object_stores, "s3_dir", lambda: s3_jars(tmp_path / "s3"))
    ws = Workspace(tmp_path / "home", store_uri=store)
    assert properties(Spark(master="yarn"), ws)[key] == staging
    assert (
        properties(Spark(master="yarn", properties={key: "hdfs://namenode:8020/tmp"}), ws)[key]
        == "hdfs://namenode:8020/tmp"
    )


@pytest.mark.parametrize("master", ["local[2]", "spark://head:7077", "yarn"])
def test_executors_get_the_file_system_for_s3_from_the_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, master: str
) -> None:
    """Executors need not have the folder of this host that holds the file system's jar."""
    monkeypatch.setattr(object_stores, "s3_dir", lambda: s3_jars(tmp_path / "s3"))
    jar = str(tmp_path / "s3" / "hadoop-aws.jar")
    settings = properties(Spark(master=master), Workspace(tmp_path / "home", lake_uri="s3://bucket/lake"))
    assert jar in settings["spark.jars"].split(",")
    assert jar in settings["spark.driver.extraClassPath"].split(":")
    assert "spark.executor.extraClassPath" not in settings
    assert jar not in properties(Spark(master=master), Workspace(tmp_path / "home"))["spark.jars"]
    # The user's own, such as the connector of another store, come besides.
    custom = Spark(master=master, properties={"spark.jars": "/gcs-connector.jar"})
    combined = properties(custom, Workspace(tmp_path / "home", lake_uri="s3://bucket/lake"))
    assert combined["spark.jars"] == f"{settings['spark.jars']},/gcs-connector.jar"


def s3_jars(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "hadoop-aws.jar").touch()
    return folder


def test_spark_gets_kerberos_tokens_for_the_lake_and_the_store(tmp_path: Path) -> None:
    """The store alone is known to it as YARN's staging folder, and the default file system is no HDFS."""
    key = "spark.kerberos.access.hadoopFileSystems"
    lake, store = "hdfs://namenode:8020/lake", "hdfs://cluster/store"
    assert key not in properties(Spark(), Workspace(tmp_path))
    of_lake = Workspace(tmp_path, lake_uri=lake)
    assert properties(Spark(), of_lake)[key] == "hdfs://namenode:8020"
    assert properties(Spark(), Workspace(tmp_path, lake_uri=lake, store_uri=store))[key] == (
        "hdfs://namenode:8020,hdfs://cluster"
    )
    assert properties(Spark(), Workspace(tmp_path, lake_uri=lake, store_uri=f"{lake}/store"))[key] == (
        "hdfs://namenode:8020"
    )
    other_systems = Spark(properties={key: "hdfs://other,hdfs://namenode:8020"})
    assert properties(other_systems, of_lake)[key] == "hdfs://namenode:8020,hdfs://other"


def test_an_archive_in_s3_is_fetched_by_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Executors have no file system for S3 when they fetch it; YARN's nodes, and hosts that have S3A, fetch it."""
    key, ws = "spark.archives", Workspace(tmp_path / "home")
    memory_home(monkeypatch, tmp_path / "cache", ("s3",))
    location_of("s3://bucket/envs/environment.tar.gz").put_text("packed")
    other_archives = "/data/more.zip#more,s3a://bucket/b.tgz"
    user_properties = {key: f"s3://bucket/envs/environment.tar.gz#environment, {other_archives}"}
    first, _, rest = properties(Spark(master="spark://head:7077", properties=user_properties), ws)[key].partition(",")
    file, _, folder = first.partition("#")
    assert (Path(file).name, Path(file).read_text(), folder) == ("environment.tar.gz", "packed", "environment")
    assert rest == other_archives
    assert properties(Spark(master="yarn", properties=user_properties), ws)[key] == user_properties[key]
    away = Spark(master="spark://head:7077", properties={key: "s3://bucket/away.tar.gz#environment"})
    with pytest.raises(
        UserError, match=r"^spark\.properties: spark\.archives: there is no s3://bucket/away\.tar\.gz: "
    ):
        properties(away, ws)
