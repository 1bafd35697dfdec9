"""Properties of a session."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from headrace.config import Spark
from headrace.errors import UserError
from headrace.lake.session import properties
from headrace.workspace import Workspace

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
    found = properties(Spark(), ws)
    assert found[default] == "file:///"
    assert found["spark.yarn.stagingDir"] == "hdfs://namenode:8020/store/.spark-staging"
    assert "spark.yarn.stagingDir" not in properties(Spark(), Workspace(tmp_path))
    assert properties(Spark(properties={default: "hdfs://namenode:8020"}), ws)[default] == "hdfs://namenode:8020"


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
    others = Spark(properties={key: "hdfs://other,hdfs://namenode:8020"})
    assert properties(others, of_lake)[key] == "hdfs://namenode:8020,hdfs://other"
