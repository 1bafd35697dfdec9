"""The bench of ingest: its parts, their order, and text that is what its columns say."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest

from bench.bench_ingest import COLUMNS, FORMS, floor, in_order, part_named, write_text
from headrace.errors import UserError


def test_parts() -> None:
    assert [part_named(p) for p in ("csv-4", "jsonl-0.50", "criteo-16")] == ["csv-4", "jsonl-0.5", "criteo-16"]
    for wrong in ("csv", "csv-", "csv-0", "xml-4", "4", "csv-many"):
        with pytest.raises(UserError, match=f"'{wrong}' is no part: give a form"):
            part_named(wrong)
    assert in_order(["csv-16", "csv-4", "criteo-4", "jsonl-4"]) == ["jsonl-4", "csv-4", "criteo-4", "csv-16"]


@pytest.mark.parametrize("form", FORMS)
def test_the_text_has_the_rows_that_the_floor_reads(form: str, tmp_path: Path) -> None:
    paths = write_text(form, tmp_path / "in", 1_000)
    seconds, rows = floor(form, paths, tmp_path / "floor.parquet")
    assert (rows, seconds > 0) == (1_000, True)
    floor_rows = pd.read_parquet(tmp_path / "floor.parquet")
    if form in ("jsonl", "renamed"):
        expected = pd.DataFrame([json.loads(line) for path in paths for line in path.read_text().splitlines()])
        assert ("visitor" in expected) == (form == "renamed")
        expected = expected.reindex(columns=list(COLUMNS[form]))
    else:
        names = None if form == "csv" else list(COLUMNS[form])
        parts = [pd.read_csv(p, sep="," if form == "csv" else "\t", names=names, dtype=str) for p in paths]
        expected = pd.concat(parts, ignore_index=True)
    text = [c for c, type_ in COLUMNS[form].items() if type_ == "string"]
    assert list(floor_rows.columns) == list(COLUMNS[form])
    assert floor_rows[text].astype(str).equals(expected[text].astype(str))
    numbers = [c for c, type_ in COLUMNS[form].items() if type_ in ("int", "bigint", "double")]
    pd.testing.assert_frame_equal(
        floor_rows[numbers].astype(float), expected[numbers].apply(pd.to_numeric).astype(float), check_exact=True
    )
