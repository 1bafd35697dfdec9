"""Arrow's reading of landing files against Spark's rules over the same lines: what Arrow takes, Spark would have taken
with the same values to the bit; what it leaves is all the rest.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
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
from headrace.lake import landing
from headrace.lake.ingest.arrow_plan import arrow_plan, why_spark
from headrace.lake.ingest.arrow_rows import ArrowRows, read_by_arrow
from headrace.lake.ingest.batch_rows import rows_by_spark, source_format_of
from headrace.lake.ingest.profile import profiles
from headrace.lake.ingest.read_lines import LEFT_FOLDER
from headrace.lake.sources.criteo import CRITEO
from headrace.lake.sources.frame import GOOD, SKIPPED
from headrace.lake.sources.lines import LandingBatch
from headrace.workspace import Workspace

DAY = "2026-03-01"
COLUMNS = [
    {"name": "id", "type": "string", "required": True},
    {"name": "ts", "type": "timestamp"},
    {"name": "at", "type": "timestamp"},
    {"name": "i", "type": "int"},
    {"name": "b", "type": "bigint"},
    {"name": "f", "type": "float"},
    {"name": "d", "type": "double"},
    {"name": "ok", "type": "boolean"},
    {"name": "day", "type": "date"},
    {"name": "tags", "type": "array<string>"},
    {"name": "sizes", "type": "array<int>"},
    {"name": "weights", "type": "array<float>"},
]
NAMES = [str(c["name"]) for c in COLUMNS]
TABLE = {
    "columns": COLUMNS,
    "keys": ["id"],
    "event_time": "ts",
    "late_days": 2,
    "expectations": {"ranges": {"i": [-1000, 2000], "d": [None, 1e300]}, "null_rate": {"f": 1, "tags": 1}},
}
EXAMPLES = settings(
    max_examples=8,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
    derandomize=True,
    # Each example is a run of Spark.
    phases=[Phase.generate],
)

# --- values as people write them -------------------------------------------------------------------------------------

INTEGERS = st.one_of(
    st.integers(-50, 50).map(str),
    st.integers(-(2**64), 2**64).map(str),
    st.sampled_from(
        [
            "+5",
            "007",
            "-0",
            "0x10",
            "1.0",
            "1e3",
            "2147483648",
            "-2147483648",
            "9223372036854775807",
            "١٢",
            "1_000",
            "5L",
        ]
    ),
    st.sampled_from([" 7", "7 ", "\t7", "--1", "-"]),
)
NUMBERS = st.one_of(
    st.integers(-50, 50).map(str),
    st.floats(allow_nan=False, allow_infinity=False).map(repr),
    st.floats(width=32, allow_nan=False, allow_infinity=False).map(repr),
    st.decimals(-1000, 1000, places=20, allow_nan=False).map(str),
    st.sampled_from(
        [
            "1e999",
            "-1e999",
            "1e-400",
            "NaN",
            "nan",
            "inf",
            "-Infinity",
            "12d",
            "1f",
            "0x1p3",
            "1.",
            ".5",
            "+.5",
            "1e5",
            "1E+5",
            "1e",
            "-0",
            "-0.0",
            "1,5",
        ]
    ),
    # Halfway between two floats, which a double is exactly.
    st.integers(2**24, 2**25).map(lambda n: repr((n + 0.5) / 2**30)),
    st.integers(2**53, 2**62).map(str),
)
TIMES = st.one_of(
    st.datetimes().map(lambda t: t.isoformat()),
    st.builds(
        "2026-0{}-{:02d}{}{:02d}:{:02d}{}{}".format,
        st.integers(2, 3),
        st.integers(0, 32),
        st.sampled_from("T T T t_"),
        st.integers(0, 25),
        st.integers(0, 61),
        st.sampled_from(["", ":07", ":07.5", ":59.123456", ":60", ":07.1234567", ":7"]),
        st.sampled_from(["", "Z", "+05:30", "-0330", "+01", " Z", "+19:00", "z", " UTC"]),
    ),
    st.sampled_from(
        ["2026-03-01", "2026-02-29", "2026", "12:30", "0000-01-01", "2026-03-01 05", "2026-03-29T02:30:00"]
    ),
)
EPOCHS = st.one_of(
    st.integers(1_772_300_000_000, 1_772_400_000_000).map(str),
    st.floats(1e12, 2e12).map(repr),
    st.decimals(10**12, 2 * 10**12, places=3).map(str),
    st.sampled_from(["1.7723e12", "-62135596800001", "253402300800000", "1e30", "12:30", "+5"]),
)
WORDS = st.one_of(
    st.text(st.characters(codec="utf-8", exclude_characters="\n\r"), max_size=8),
    st.sampled_from(["", " ", "NA", "null", 'say "hi"', "a,b", "é", "\ufeffx", "a|b", "\\", "{}", "'", "😀", "a\tb"]),
)
BOOLEANS = st.sampled_from(["true", "false", "T", "f", "YES", "no", "y", "N", "1", "0", "2", "tru", "on"])
DATES = st.one_of(st.dates().map(str), st.sampled_from(["2026-02-30", "2026-3-1", "0001-01-01", "20260301"]))
SCALARS = {"id": WORDS, "ts": TIMES, "at": EPOCHS, "i": INTEGERS, "b": INTEGERS, "f": NUMBERS, "d": NUMBERS}
SCALARS |= {"ok": BOOLEANS, "day": DATES}


def source(**changes: Any) -> LandingSource:
    given_ = {"path": "in/{ds}/*", "timestamps": {"at": "epoch_milliseconds"}, **changes}
    return LandingSource.model_validate(given_)


@st.composite
def csv_lines(draw: Any, quote: bool = True) -> str:
    """A line of NAMES by commas: most are in order, some are not."""
    fields = []
    for name in NAMES:
        if name in SCALARS:
            text = draw(st.one_of(st.just(""), SCALARS[name]))
        else:
            elements = {"tags": WORDS, "sizes": INTEGERS, "weights": NUMBERS}[name]
            text = "|".join(draw(st.lists(elements, max_size=3)))
        if any(c in text for c in ',"') or draw(st.integers(0, 9)) == 0:
            text = text if draw(st.integers(0, 9)) == 0 else '"' + text.replace('"', '""') + '"'
        fields.append(text)
    line = ",".join(fields)
    odd = draw(st.integers(0, 29))
    return {0: line + ",", 1: line[:-3], 2: "", 3: "  ", 4: line + "\r", 5: '"' + line, 6: line + "\x00"}.get(odd, line)


def raw(text: str) -> str:
    """A text as a JSON string."""
    return json.dumps(text)


@st.composite
def json_values(draw: Any, name: str) -> str:
    kind = draw(st.integers(0, 19))
    if kind == 0:
        return str(
            draw(st.sampled_from(["null", "true", "{}", "[]", '{"k": [1]}', "[[1]]", '"x"', "1.50", "Inf", "-"]))
        )
    if name in ("id", "ts", "day"):
        return raw(draw(SCALARS[name]))
    if name == "ok":
        return str(draw(st.sampled_from(["true", "false", "null", '"yes"'])))
    elements = {"tags": WORDS.map(raw), "sizes": INTEGERS, "weights": NUMBERS}
    if name in elements:
        return "[" + ", ".join(draw(st.lists(st.one_of(st.just("null"), elements[name]), max_size=3))) + "]"
    return str(draw(SCALARS[name]))


@st.composite
def json_lines(draw: Any) -> str:
    """An object, most of them whole."""
    parts = [f'"{name}": {draw(json_values(name))}' for name in NAMES if draw(st.integers(0, 9))]
    if draw(st.integers(0, 9)) == 0:
        parts.append(draw(st.sampled_from(['"z": 1', '"z": "a"', '"z": null', '"i": 3', '"\\u0069": 4', '"y": [NaN]'])))
    line = "{" + ", ".join(parts) + "}"
    odd = draw(st.integers(0, 39))
    ends = {
        0: line + line,
        1: line[:-1],
        2: line + " x",
        3: " " + line,
        4: line + " ",
        5: "",
        6: "[1]",
        7: "{}",
        8: "null",
    }
    return ends.get(odd, line + "\r" if odd == 9 else line)


# --- both readings ---------------------------------------------------------------------------------------------------


def batch_of(spark: SparkSession, ws: Workspace, source: LandingSource, table: Table, name: str, body: bytes) -> Any:
    path = Path(ws.home) / "in" / DAY / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(body) if name.endswith(".gz") else body)
    return LandingBatch(spark, source, table, (landing.find(source, ws, DAY),))


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


def compare(spark: SparkSession, ws: Workspace, batch: LandingBatch, scratch: Any) -> tuple[int, int]:
    """Read a batch both ways; (rows that Arrow took, rows that are good)."""
    plan = arrow_plan(batch, [])
    assert not isinstance(plan, str), plan
    read = read_by_arrow(batch, plan, scratch / "table", scratch / "arrow", "snappy")
    assert isinstance(read, ArrowRows), read
    typed, where = rows_by_spark(batch, source_format_of(batch), scratch / "typed")
    every = pq.read_table(where.local_path(), partitioning=None)
    names = [c.name for c in batch.table.columns]
    taken = 0
    if read.data:
        (data,) = read.data
        rows = pq.read_table((read.table / data.file.path).local_path(), partitioning=None)
        taken = rows.num_rows
        lines = rows.column("_source_line")
        mine = every.filter(pc.is_in(every.column("_line"), lines.combine_chunks())).sort_by("_line")
        others = mine.filter(pc.not_equal(mine.column("_state"), GOOD))
        assert others.select(["_line", "_raw", "_reason"]).to_pylist() == []
        assert bits(rows.select(names)) == bits(mine.select(names))
        stats = json.loads(data.file.stats)
        assert stats["numRecords"] == taken
        assert stats["nullCount"] == {n: rows.column(n).null_count for n in stats["nullCount"]}
        for name in stats["minValues"]:
            values = [v for v in rows.column(name).to_pylist() if v is not None]
            if isinstance(values[0], int | float):
                assert (stats["minValues"][name], stats["maxValues"][name]) == (min(values), max(values))
    skipped = int(pc.sum(pc.equal(every.column("_state"), SKIPPED)).as_py() or 0)
    (counts,) = read.counts.get(0, [None]) if read.counts else [None]
    assert counts is not None
    assert counts.lines == every.num_rows
    # What Arrow skips, Spark skips: the rest of them is among those that are left.
    assert counts.skipped <= skipped
    # The profile of both parts is that of the whole.
    left = None
    if read.left:
        rest = LandingBatch(spark, batch.source, batch.table, batch.days, read.scratch / LEFT_FOLDER)
        left, _ = rows_by_spark(rest, source_format_of(batch), scratch / "left-typed")
    found = read.profile(0, profiles(left, batch.table, batch, read.left)[0])
    (whole,) = profiles(typed, batch.table, batch)
    assert found == whole
    return taken, int(pc.sum(pc.equal(every.column("_state"), GOOD)).as_py() or 0)


def joined(lines: Sequence[str]) -> bytes:
    return "\n".join(lines).encode()


@pytest.mark.parametrize("form", ["csv", "csv of Berlin, nulls, no header", "jsonl", "criteo"])
def test_arrow_takes_what_spark_would(spark: SparkSession, tmp_path: Path, form: str) -> None:
    runs: list[tuple[int, int]] = []
    numbers = count()
    table = Table.model_validate(TABLE)

    def check(body: bytes, chosen: LandingSource, declared: Table, name: str) -> None:
        ws = Workspace(tmp_path / str(next(numbers)))
        batch = batch_of(spark, ws, chosen, declared, name, body)
        runs.append(compare(spark, ws, batch, ws.spark_local / "x"))

    plain = "e1,2026-03-01T05:06:07Z,1772323200000,3,-4,1.5,0.1,true,2026-03-01,a|b,1|2,0.5"

    if form == "jsonl":
        whole = (
            '{"id": "e1", "ts": "2026-03-01T05:06:07Z", "at": 1772323200000, "i": 3, "b": -4, "f": 1.5, "d": 0.1, '
            '"ok": true, "day": "2026-03-01", "tags": ["a", null], "sizes": [1], "weights": [0.5]}'
        )

        @EXAMPLES
        @given(st.lists(st.one_of(st.just(whole), json_lines()), min_size=40, max_size=120), st.booleans())
        def run(lines: list[str], bom: bool) -> None:
            body = (b"\xef\xbb\xbf" if bom else b"") + joined(lines) + b'\n{"id": "\xff"}'
            check(body, source(format="jsonl"), table, "a.jsonl.gz")

    elif form == "criteo":
        columns = [{"name": c, "type": "string" if c[0] == "C" else "int"} for c in CRITEO]
        fields = st.tuples(*[st.one_of(st.just(""), INTEGERS if c[0] != "C" else WORDS) for c in CRITEO])
        good = "\t".join(["1", *map(str, range(13)), *["0a1b"] * 26])

        @EXAMPLES
        @given(st.lists(st.one_of(st.just(good), fields.map("\t".join)), min_size=5, max_size=40))
        def run(lines: list[str]) -> None:
            declared = Table.model_validate({"columns": columns, "expectations": {"null_rate": {"I1": 1}}})
            check(joined([*lines, "", " ", good + "\r"]), source(format="criteo", timestamps={}), declared, "a.txt")

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

    run()
    # Arrow took rows, and nearly all that are written as people write them.
    assert sum(taken for taken, _ in runs) > 0.3 * sum(good for _, good in runs) > 0


def test_what_is_left_to_spark_alone() -> None:
    table = Table.model_validate(TABLE)
    assert why_spark(source(format="csv"), table) is None
    assert why_spark(source(format="csv", trim=True), table) == "source.trim"
    assert why_spark(source(format="csv", separator="::"), table) == "separator '::'"
    assert why_spark(source(format="movielens"), table) == "format 'movielens'"
    small = Table.model_validate(TABLE | {"columns": [*COLUMNS, {"name": "n", "type": "tinyint"}]})
    assert why_spark(source(format="csv"), small) == "column 'n', type tinyint"
    nested = Table.model_validate(TABLE | {"columns": [*COLUMNS, {"name": "n", "path": "a.b"}]})
    assert why_spark(source(format="jsonl"), nested) == "column 'n', path"
