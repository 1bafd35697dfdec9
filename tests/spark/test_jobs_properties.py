"""The properties file as Java reads it."""

from __future__ import annotations

from pathlib import Path

from pyspark.sql import SparkSession

from headrace.config import load_spec
from headrace.config.workspace import Workspace
from headrace.jobs.submit import write_properties
from headrace.lake.spark.session import properties
from headrace.storage import local


def test_java_reads_back_what_was_written(spark: SparkSession, tmp_path: Path) -> None:
    hard = {
        "spark.a.backslash": "C:\\dir\\new",
        "spark.b.spaces": "  leading and  inner",
        "spark.c.signs": "a=b:c #d !e 'f' \"g\"",
        "spark.d.lines": "one\ntwo\tthree",
        "spark.e.unicode": "Größe ✓",
    }
    spec = load_spec("clicks")
    spec = spec.model_copy(update={"spark": spec.spark.model_copy(update={"properties": hard})})
    ws = Workspace(tmp_path / "a folder, with signs")
    write_properties(spec, ws, local(tmp_path / "x.properties"))
    jvm = spark._jvm
    assert jvm is not None
    read = jvm.java.util.Properties()
    stream = jvm.java.io.FileInputStream(str(tmp_path / "x.properties"))
    # As org.apache.spark.util.Utils.getPropertiesFromFile does: UTF-8.
    reader = jvm.java.io.InputStreamReader(stream, "UTF-8")
    read.load(reader)
    reader.close()
    read_back = {str(k): str(read.getProperty(k)) for k in read.stringPropertyNames()}
    assert read_back == properties(spec.spark, ws)
    assert {k: read_back[k] for k in hard} == hard
