"""CSV by Spark's own writer: a quote within a quoted field has a backslash before it."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from headrace.workspace import Workspace
from tests.reported.support import ingest, pipeline, read_table

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


def spec(ending: str, **source: object) -> object:
    return pipeline({"format": "csv", "path": f"in/{{ds}}/*.csv{ending}", **source}, COLUMNS)


@pytest.fixture(scope="module")
def home(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two files of the same lines; Spark alone judges the lines of the one that ends in .zst."""
    home = tmp_path_factory.mktemp("spark-csv")
    frame = spark.createDataFrame(ROWS, "event_id bigint, title string, price double, clicked int").coalesce(1)
    for codec in ("none", "zstd"):
        frame.write.mode("append").option("header", True).option("compression", codec).csv(str(home / "in" / DS))
    return home


@pytest.mark.parametrize("ending", ["", ".zst"])
@pytest.mark.parametrize("multiline", [False, True])
def test_an_escape_reads_what_spark_wrote(
    spark: SparkSession, home: Path, tmp_path: Path, ending: str, multiline: bool
) -> None:
    ws = Workspace(tmp_path, lake_uri=str(home / f"{ending}{multiline}"))
    (home / f"{ending}{multiline}").mkdir(exist_ok=True)
    (home / f"{ending}{multiline}" / "in").symlink_to(home / "in")
    manifest = ingest(spec(ending, escape="\\", multiline=multiline), ws, DS).manifest  # type: ignore[arg-type]
    assert (manifest.rows["read"], manifest.rows["quarantined"]) == (len(ROWS), 0)
    found = read_table(spark, ws)
    assert dict(zip(found.event_id, found.title, strict=True)) == {n: title for n, title, _, _ in ROWS}


@pytest.mark.parametrize("ending", ["", ".zst"])
@pytest.mark.parametrize("multiline", [False, True])
def test_text_behind_a_closing_quote_is_no_field(
    spark: SparkSession, home: Path, tmp_path: Path, ending: str, multiline: bool
) -> None:
    ws = Workspace(tmp_path, lake_uri=str(tmp_path))
    (tmp_path / "in").symlink_to(home / "in")
    manifest = ingest(spec(ending, multiline=multiline), ws, DS).manifest  # type: ignore[arg-type]
    kept = {title for title in TITLES if '"' not in title and not title.endswith("\\\\")}
    found = read_table(spark, ws)
    assert {title for title in found.title if '"' in title} == set()
    assert set(found.title) >= {"plain name", "no, quotes", "path C:\\dir\\"} & kept
    reasons = manifest.facts["reasons"]
    assert reasons["text behind a closing quote"] >= 60
    assert sum(reasons.values()) == manifest.rows["quarantined"]
    bad = read_table(spark, ws, "quarantine")
    assert bad._raw.str.contains('TV 55\\\\" OLED', regex=False).sum() == 0
    assert bad._raw.str.contains("TV 55", regex=False).sum() == 20
