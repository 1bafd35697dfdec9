"""Headers, or an object's fields, that are written in another case from one day on: Price in place of price."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from headrace.config.workspace import Workspace
from headrace.errors import UserError
from tests.reported.support import ingest, pipeline, read_table, write

D1, D2 = "2026-01-07", "2026-01-08"
COLUMNS = [
    {"name": "event_id", "type": "bigint", "required": True},
    {"name": "price", "type": "double"},
    {"name": "clicked", "type": "int"},
    {"name": "country"},
]
NESTED = [*COLUMNS[:3], {"name": "country", "path": "geo.country"}]


def rows(first: int) -> list[tuple[int, float, int, str]]:
    return [(n, n / 4, n % 2, f"c{n % 3}") for n in range(first, first + 40)]


def csv_text(names: str, values: list[tuple[Any, ...]]) -> bytes:
    return "\n".join([names, *(",".join(map(str, row)) for row in values), ""]).encode()


def json_text(names: str, values: list[tuple[Any, ...]], geo: str = "") -> bytes:
    event_id, price, clicked, country = names.split(",")
    lines = []
    for row in values:
        line = dict(zip((event_id, price, clicked), row, strict=False))
        lines.append(line | ({geo: {country: row[3]}} if geo else {country: row[3]}))
    return "".join(f"{json.dumps(line)}\n" for line in lines).encode()


@pytest.mark.parametrize("ending", ["", ".zst"])
@pytest.mark.parametrize("form", ["csv", "jsonl", "nested"])
def test_values_are_read_under_either_name(spark: SparkSession, tmp_path: Path, form: str, ending: str) -> None:
    names = {D1: "event_id,price,clicked,country", D2: "EVENT_ID,Price,clicked,Country"}
    files = {}
    for k, (ds, header) in enumerate(names.items()):
        records = rows(100 * k)
        nested = json_text(header, records, "geo" if ds == D1 else "Geo")
        body = {"csv": csv_text(header, records), "jsonl": json_text(header, records), "nested": nested}[form]
        files[f"in/{ds}.{form}{ending}"] = pa.compress(body, "zstd", asbytes=True) if ending else body
    ws = Workspace(tmp_path)
    write(tmp_path, files)
    source = {"format": "csv" if form == "csv" else "jsonl", "path": f"in/{{ds}}.{form}{ending}"}
    spec = pipeline(source, NESTED if form == "nested" else COLUMNS)
    manifest = ingest(spec, ws, D2).manifest
    assert manifest.facts["drift"] == []
    actual = read_table(spark, ws)[["event_id", "price", "clicked", "country"]]
    assert [tuple(row) for row in actual.itertuples(index=False)] == rows(0) + rows(100)


def test_fields_of_one_object_that_differ_in_case_alone(spark: SparkSession, tmp_path: Path) -> None:
    lines = [
        '{"event_id": 1, "price": 1, "Price": 2, "clicked": 1}',  # the very name
        '{"event_id": 2, "Price": 2, "clicked": 1}',
        '{"event_id": 3, "Price": 2, "PRICE": 3, "clicked": 1}',  # neither is
        '{"event_id": 4, "price": 4, "clicked": 0, "geo": {"Country": "a", "COUNTRY": "b"}}',
        '{"event_id": 5, "PRICE": 5, "clicked": 0, "Geo": {"COUNTRY": "b"}}',
    ]
    ws = Workspace(tmp_path)
    write(tmp_path, {f"in/{D1}.jsonl": "".join(f"{line}\n" for line in lines).encode()})
    for columns in (COLUMNS, NESTED):
        spec = pipeline({"format": "jsonl", "path": "in/{ds}.jsonl"}, columns)
        ingest(spec, ws, D1)
        actual = read_table(spark, ws)
        bad = read_table(spark, ws, "quarantine")
        nested = columns is NESTED
        prices = {1: 1.0, 2: 2.0, 5: 5.0} if nested else {1: 1.0, 2: 2.0, 4: 4.0, 5: 5.0}
        assert dict(zip(actual.event_id, actual.price, strict=True)) == prices
        assert actual.country.dropna().tolist() == (["b"] if nested else [])
        several = ": several fields have this name or differ from it in case alone; name one exactly, by path"
        assert bad._reason.tolist() == [f"price{several}", *([f"country{several}"] if nested else [])]
        assert bad._source_line.tolist() == ([3, 4] if nested else [3])


def test_two_names_of_a_header_that_differ_in_case_alone(spark: SparkSession, tmp_path: Path) -> None:
    del spark
    body = csv_text("event_id,Price,PRICE,clicked,country", [(1, 2.0, 3.0, 1, "a")])
    write(tmp_path, {f"in/{D1}.csv": body})
    spec = pipeline({"format": "csv", "path": "in/{ds}.csv"}, COLUMNS)
    with pytest.raises(UserError, match=r"in/2026-01-07\.csv: its header names 'Price' and 'PRICE'"):
        ingest(spec, Workspace(tmp_path), D1)


def test_a_declared_column_that_no_file_has(
    spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    del spark
    body = csv_text("event_id,cost,clicked,country", rows(0))
    write(tmp_path, {f"in/{D1}.csv": body})
    source = {"format": "csv", "path": "in/{ds}.csv"}
    manifest = ingest(pipeline(source, COLUMNS), Workspace(tmp_path), D1).manifest
    assert "column 'price' is missing: in no file of the day" in caplog.text
    assert [(d["column"], d["change"]) for d in manifest.facts["drift"]] == [("cost", "new"), ("price", "missing")]
    spec = pipeline(source, COLUMNS, table={"expectations": {"columns": "present"}})
    with pytest.raises(UserError, match="columns: 1 of the declared ones are in no file of the day"):
        ingest(spec, Workspace(tmp_path / "other", lake_uri=str(tmp_path)), D1)
