"""A CSV of a spreadsheet in Europe: semicolons, a decimal comma, a BOM, CRLF; and dots between thousands."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from headrace.config.workspace import Workspace
from tests.reported.support import ingest, pipeline, read_table, write

DS = "2026-01-08"
COLUMNS = [
    {"name": "event_id", "type": "bigint"},
    {"name": "price", "type": "double"},
    {"name": "exact", "type": "decimal(12,2)"},
    {"name": "sizes", "type": "array<double>"},
    {"name": "clicked", "type": "int"},
]


@pytest.mark.parametrize("columns", [COLUMNS, [*COLUMNS[:2], *COLUMNS[3:]]], ids=["spark", "arrow"])
@pytest.mark.parametrize("thousands", [None, "."])
def test_numbers_of_europe(
    spark: SparkSession, tmp_path: Path, columns: list[dict[str, object]], thousands: str | None
) -> None:
    cents = [7 * n * n * 1_001 - 50_000 for n in range(120)]

    def text(value: int) -> str:
        integer_part = f"{abs(value) // 100:,}".replace(",", thousands or "")
        return f"{'-' if value < 0 else ''}{integer_part},{abs(value) % 100:02d}"

    lines = ["event_id;price;exact;sizes;clicked"]
    lines += [f"{n};{text(c)};{text(c)};{text(c)}|{n},5;{n % 2}" for n, c in enumerate(cents)]
    lines += ["900;2.81;1,00;1,5;0", "901;x;1,00;1,5;0", "902;1.23.456,5;1,00;1,5;0", "903;1,5;1,00;1.5;0"]
    body = b"\xef\xbb\xbf" + "".join(f"{line}\r\n" for line in lines).encode()
    write(tmp_path, {f"in/{DS}.csv": body})
    source = {"format": "csv", "path": "in/{ds}.csv", "separator": ";", "decimal": ",", "thousands": thousands}
    ws = Workspace(tmp_path)
    manifest = ingest(pipeline(source, columns), ws, DS).manifest
    assert (manifest.rows["kept"], manifest.rows["quarantined"]) == (len(cents), 4)
    actual = read_table(spark, ws)
    assert actual.price.tolist() == [c / 100 for c in cents]
    assert [list(v) for v in actual.sizes] == [[c / 100, n + 0.5] for n, c in enumerate(cents)]
    if columns is COLUMNS:
        assert [int(v * 100) for v in actual.exact] == cents
    assert read_table(spark, ws, "quarantine")._reason.tolist() == [
        "price: '2.81' is not a double",
        "price: 'x' is not a double",
        "price: '1.23.456,5' is not a double",
        "sizes: '1.5' is not an array<double>",
    ]
