"""Several texts that mean nothing in one file: \\N of a dump, NA of R, and nothing at all."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from headrace.config.workspace import Workspace
from tests.reported.support import ingest, pipeline, read_table, write

DS = "2026-01-08"
COLUMNS = [
    {"name": "event_id", "type": "bigint"},
    {"name": "age", "type": "int"},
    {"name": "price", "type": "double"},
    {"name": "city"},
    {"name": "clicked", "type": "int"},
]
NULLS = ["", "\\N", "NA", '"NA"']


@pytest.mark.parametrize("ending", ["", ".zst"])
def test_texts_that_mean_null(spark: SparkSession, tmp_path: Path, ending: str) -> None:
    lines, expected = ["event_id,age,price,city,clicked"], []
    for n in range(200):
        none = NULLS[n % len(NULLS)]
        age, price, city = (None if (n + k) % 3 == 0 else v for k, v in enumerate((n % 70, n / 4, f"NA{n}")))
        lines.append(",".join(none if v is None else str(v) for v in (n, age, price, city, n % 2)))
        expected.append((n, age, price, city))
    body = ("\n".join(lines) + "\n").encode()
    write(tmp_path, {f"in/{DS}.csv{ending}": pa.compress(body, "zstd", asbytes=True) if ending else body})
    source = {"format": "csv", "path": f"in/{{ds}}.csv{ending}", "null_values": ["\\N", "NA"]}
    ws = Workspace(tmp_path)
    table = {"expectations": {"max_bad_rate": 0, "null_rate": {"age": 1, "price": 1}}}
    manifest = ingest(pipeline(source, COLUMNS, table=table), ws, DS).manifest
    rates = {c["name"]: c["value"] for c in manifest.facts["expectations"] if c["name"].startswith("null_rate")}
    for k, name in ((1, "age"), (2, "price")):
        assert rates[f"null_rate.{name}"] == round(sum(row[k] is None for row in expected) / len(expected), 6)
    actual = read_table(spark, ws)[["event_id", "age", "price", "city"]].astype(object)
    actual = actual.where(actual.notna(), None)
    assert [tuple(row) for row in actual.itertuples(index=False)] == expected
