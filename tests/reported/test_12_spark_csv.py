"""CSV by Spark's own writer: a quote within a quoted field has a backslash before it."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from headrace.config import Spec
from headrace.config.workspace import Workspace
from tests.reported.support import ingest, pipeline, read_table, write

DS = "2026-01-08"
COLUMNS = [
    {"name": "event_id", "type": "bigint", "required": True},
    {"name": "title"},
    {"name": "price", "type": "double"},
    {"name": "clicked", "type": "int"},
]
TITLES = [
    'TV 55" OLED',
    "plain name",
    'say "hi", twice',
    "path C:\\dir\\",
    '24" monitor, "curved"',
    "no, quotes",
    'a "b\\" c, \\',
    "both, \\\\ of them",
]
ROWS = [(n, TITLES[n % len(TITLES)], n / 4, n % 2) for n in range(160)]


def spec(ending: str, **source: object) -> Spec:
    return pipeline({"format": "csv", "path": f"in/{{ds}}/*.csv{ending}", **source}, COLUMNS)


@pytest.fixture(scope="module")
def home(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two files of the same lines; one is compressed."""
    home = tmp_path_factory.mktemp("spark-csv")
    frame = spark.createDataFrame(ROWS, "event_id bigint, title string, price double, clicked int").coalesce(1)
    frame.write.option("header", True).csv(str(home / "written"))
    (part,) = (home / "written").glob("part-*.csv")
    body = part.read_bytes()
    write(home / "in" / DS, {"a.csv": body, "a.csv.zst": pa.compress(body, "zstd", asbytes=True)})
    return home


@pytest.mark.parametrize("ending", ["", ".zst"])
@pytest.mark.parametrize("multiline", [False, True])
def test_an_escape_reads_what_spark_wrote(
    spark: SparkSession, home: Path, tmp_path: Path, ending: str, multiline: bool
) -> None:
    (tmp_path / "in").symlink_to(home / "in")
    ws = Workspace(tmp_path)
    manifest = ingest(spec(ending, escape="\\", multiline=multiline), ws, DS).manifest
    assert (manifest.rows["read"], manifest.rows["quarantined"]) == (len(ROWS), 0)
    actual = read_table(spark, ws)
    assert dict(zip(actual.event_id, actual.title, strict=True)) == {n: title for n, title, _, _ in ROWS}


@pytest.mark.parametrize("ending", ["", ".zst"])
@pytest.mark.parametrize("multiline", [False, True])
def test_text_behind_a_closing_quote_is_no_field(
    spark: SparkSession, home: Path, tmp_path: Path, ending: str, multiline: bool
) -> None:
    (tmp_path / "in").symlink_to(home / "in")
    ws = Workspace(tmp_path)
    manifest = ingest(spec(ending, multiline=multiline), ws, DS).manifest
    actual, bad = read_table(spark, ws), read_table(spark, ws, "quarantine")
    # Each title with a quote within; in the others' fields a backslash is text.
    quoted = {n for n, title, _, _ in ROWS if '"' in title}
    assert set(actual.event_id) == {n for n, _, _, _ in ROWS} - quoted
    assert not actual.title.str.contains('"').any()
    assert manifest.rows["quarantined"] == len(bad) == len(quoted)
    assert bad._raw.str.contains("TV 55", regex=False).sum() == 20
    assert manifest.facts["reasons"]["text behind a closing quote"] >= 40
