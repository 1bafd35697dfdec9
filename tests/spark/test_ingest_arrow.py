"""Arrow's reading of landing files against the judge of lines.

What Arrow takes, the judge would have taken with the same values to the bit; what it leaves is all the rest.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession

from headrace.config import LandingSource, Table
from headrace.config.workspace import Workspace
from headrace.lake.faults import GOOD
from headrace.lake.landing.arrow_rows import arrow_plan, read_by_arrow
from headrace.lake.landing.expectations import empty_profiles
from headrace.lake.landing.files import find_files
from headrace.lake.landing.formats import LandingBatch
from headrace_datasets.readers import CRITEO
from tests.ingest_lines import COLUMNS, INTEGERS, NAMES, TABLE, WORDS, csv_lines, json_lines, source

DAY = "2026-03-01"
EXAMPLES = settings(
    max_examples=25,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
    derandomize=True,
    phases=[Phase.generate],
)

# --- both readings ---------------------------------------------------------------------------------------------------


def batch_of(spark: SparkSession, ws: Workspace, source: LandingSource, table: Table, name: str, body: bytes) -> Any:
    path = Path(ws.home) / "in" / DAY / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(body) if name.endswith(".gz") else body)
    return LandingBatch(spark, source, table, (find_files(source, ws, DAY),))


def bits(table: pa.Table) -> list[dict[str, Any]]:
    """Rows with floats as their bits."""
    columns = {}
    for name in table.column_names:
        column = table.column(name)
        if pa.types.is_floating(column.type):
            columns[name] = [None if v is None else float(v).hex() for v in column.to_pylist()]
        else:
            columns[name] = column.to_pylist()
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def normal(profile: Any) -> str:
    """A profile as text."""
    return json.dumps(
        asdict(profile), sort_keys=True, default=lambda v: sorted(v) if isinstance(v, frozenset) else str(v)
    )


def compare(spark: SparkSession, ws: Workspace, batch: LandingBatch, scratch: Any) -> tuple[int, int]:
    """Read a batch both ways; (rows that Arrow took, rows that are good)."""
    plan = arrow_plan(batch, [])
    read = read_by_arrow(batch, plan, scratch / "table", scratch / "arrow", "snappy")
    judged = read_by_arrow(batch, replace(plan, judges_all=True), scratch / "none", scratch / "judged", "snappy")
    assert not judged.data
    every = pa.concat_tables([pq.read_table(f.local_path(), partitioning=None) for f in judged.judged_paths])
    names = [c.name for c in batch.table.columns]
    rows_by_arrow = 0
    if read.data:
        (data,) = read.data
        rows = pq.read_table((read.table / data.file.path).local_path(), partitioning=None)
        rows_by_arrow = rows.num_rows
        lines = rows.column("_source_line")
        same_lines = every.filter(pc.is_in(every.column("_line"), lines.combine_chunks())).sort_by("_line")
        refused = same_lines.filter(pc.not_equal(same_lines.column("_state"), GOOD))
        assert refused.select(["_line", "_raw", "_reason"]).to_pylist() == []
        assert bits(rows.select(names)) == bits(same_lines.select(names))
        stats = json.loads(data.file.add["stats"])
        assert stats["numRecords"] == rows_by_arrow
        assert stats["nullCount"] == {n: rows.column(n).null_count for n in stats["nullCount"]}
        for name in stats["minValues"]:
            values = [v for v in rows.column(name).to_pylist() if v is not None]
            if isinstance(values[0], int | float):
                assert (stats["minValues"][name], stats["maxValues"][name]) == (min(values), max(values))
    (counts,), (judged_counts,) = read.counts[0], judged.counts[0]
    assert counts.lines == judged_counts.lines
    # What Arrow skips, the judge skips: the rest of them is among those that are left.
    assert counts.skipped <= judged_counts.skipped + judged_counts.judged.skipped
    # The profile of both parts is that of the whole.
    (empty,) = empty_profiles(batch.table, batch)
    assert normal(read.profile(0, empty)) == normal(judged.profile(0, empty))
    return rows_by_arrow, int(pc.sum(pc.equal(every.column("_state"), GOOD)).as_py() or 0)


def joined(lines: Sequence[str]) -> bytes:
    return "\n".join(lines).encode()


@pytest.mark.parametrize("form", ["csv", "csv of Berlin, nulls, no header", "jsonl", "criteo"])
def test_arrow_takes_what_the_judge_would(spark: SparkSession, tmp_path: Path, form: str) -> None:
    runs: list[tuple[int, int]] = []
    numbers = count()
    table = Table.model_validate(TABLE)

    def check(body: bytes, chosen: LandingSource, declared: Table, name: str) -> None:
        ws = Workspace(tmp_path / str(next(numbers)))
        batch = batch_of(spark, ws, chosen, declared, name, body)
        runs.append(compare(spark, ws, batch, ws.spark_local / "x"))

    plain = "e1,2026-03-01T05:06:07Z,1772323200000,3,-4,1.5,0.1,true,2026-03-01,a|b,1|2,0.5"

    if form == "jsonl":
        complete_line = (
            '{"id": "e1", "ts": "2026-03-01T05:06:07Z", "at": 1772323200000, "i": 3, "b": -4, "f": 1.5, "d": 0.1, '
            '"ok": true, "day": "2026-03-01", "tags": ["a", null], "sizes": [1], "weights": [0.5]}'
        )

        # Lists are read by Arrow alone; undeclared, they are passed over.
        scalars = [c for c in COLUMNS if not str(c["type"]).startswith("array")]
        scalar_table = Table.model_validate(TABLE | {"columns": scalars, "expectations": {"null_rate": {"f": 1}}})

        @EXAMPLES
        @given(
            st.lists(st.one_of(st.just(complete_line), json_lines()), min_size=40, max_size=120),
            st.booleans(),
            st.booleans(),
        )
        def run(lines: list[str], bom: bool, lists: bool) -> None:
            body = (b"\xef\xbb\xbf" if bom else b"") + joined(lines) + b'\n{"id": "\xff"}'
            check(body, source(format="jsonl"), table if lists else scalar_table, "a.jsonl.gz")

        def clean() -> None:
            check(joined([complete_line] * 50), source(format="jsonl"), scalar_table, "a.jsonl")
            check(joined([complete_line] * 50), source(format="jsonl"), table, "a.jsonl")

    elif form == "criteo":
        columns = [{"name": c, "type": "string" if c[0] == "C" else "int"} for c in CRITEO]
        fields = st.tuples(*[st.one_of(st.just(""), INTEGERS if c[0] != "C" else WORDS) for c in CRITEO])
        good = "\t".join(["1", *map(str, range(13)), *["0a1b"] * 26])

        @EXAMPLES
        @given(st.lists(st.one_of(st.just(good), fields.map("\t".join)), min_size=5, max_size=40))
        def run(lines: list[str]) -> None:
            declared = Table.model_validate({"columns": columns, "expectations": {"null_rate": {"I1": 1}}})
            check(joined([*lines, "", " ", good + "\r"]), source(format="criteo", timestamps={}), declared, "a.txt")

        def clean() -> None:
            declared = Table.model_validate({"columns": columns, "expectations": {"null_rate": {"I1": 1}}})
            check(joined([good] * 50), source(format="criteo", timestamps={}), declared, "a.txt")

    else:
        plainly = form == "csv"
        more = {} if plainly else {"timezone": "Europe/Berlin", "null_value": "NA", "header": False}

        @EXAMPLES
        @given(st.lists(st.one_of(st.just(plain), csv_lines()), min_size=40, max_size=120), st.booleans())
        def run(lines: list[str], crlf: bool) -> None:
            names = [*NAMES[1:], "z"] if plainly and crlf else NAMES
            end = "\r\n" if crlf else "\n"
            body = end.join([",".join(names), *lines] if plainly else lines).encode() + (b"" if plainly else b"\n\xff,")
            check(body, source(format="csv", **more), table, "a.csv")

        def clean() -> None:
            check(joined([",".join(NAMES), *[plain] * 50][not plainly :]), source(format="csv", **more), table, "a.csv")

    run()
    assert sum(row_count for row_count, _ in runs) > 0
    # All that are written as people write them are Arrow's.
    clean()
    assert runs[-1] == (50, 50)
