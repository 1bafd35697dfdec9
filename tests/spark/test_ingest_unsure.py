"""Every line by the judge of the reading tasks and by Spark's rules: the same rows, reasons and counts."""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Sequence
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession

from headrace.config import LandingSource, Table
from headrace.config.workspace import Workspace
from headrace.lake.faults import BAD, FORGOTTEN, GOOD, SKIPPED
from headrace.lake.forgotten import ForgottenValues
from headrace.lake.landing.arrow_rows import arrow_plan, with_judged
from headrace.lake.landing.batch_rows import checked_reader, rows_by_spark
from headrace.lake.landing.blocks import Part, blocks
from headrace.lake.landing.files import find_files
from headrace.lake.landing.profile import FileProfile, profiles
from headrace.lake.landing.reader import LandingBatch
from headrace.lake.landing.text_lines import record_blocks
from headrace.lake.landing.unsure_lines import JudgedCounts, LineJudge
from tests import csv_dialects
from tests.ingest_lines import NAMES, SCALARS, TABLE, csv_lines, json_lines, source

DAY = "2026-03-01"
EXAMPLES = settings(
    # Each example is a run of Spark.
    max_examples=int(os.environ.get("HEADRACE_JUDGE_EXAMPLES", "2")),
    suppress_health_check=list(HealthCheck),
    derandomize="HEADRACE_JUDGE_EXAMPLES" not in os.environ,
    phases=[Phase.generate],
    deadline=None,
)

#: Lines of an example.
ROWS = int(os.environ.get("HEADRACE_JUDGE_ROWS", "150"))


def batch_of(spark: SparkSession, ws: Workspace, chosen: LandingSource, table: Table, name: str, body: bytes) -> Any:
    path = Path(ws.home) / "in" / DAY / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(body)
    ids = frozenset(c.name for c in table.columns if c.name == "id" and c.type == "string")
    return LandingBatch(spark, chosen, table, (find_files(chosen, ws, DAY),), ids=ids)


def bits(table: pa.Table) -> dict[int, dict[str, Any]]:
    """Rows by their lines, floats by their bits, times as numbers: years 0 and 10000 are none of Python's."""
    for i, field in enumerate(table.schema):
        if pa.types.is_temporal(field.type):
            number = pa.int64() if pa.types.is_timestamp(field.type) else pa.int32()
            table = table.set_column(i, field.name, table.column(i).cast(number))
    rows = table.to_pylist()
    return {row["_line"]: {k: without_digits(v) for k, v in row.items()} for row in rows}


def without_digits(value: Any) -> Any:
    """A double by its bits; a text with the doubles in it as Python spells them: Java 17 has more digits of some."""
    if isinstance(value, str):
        return re.sub(r"-?[0-9]+[.][0-9]+(?:E-?[0-9]+)?", lambda number: repr(float(number[0])), value)
    return value.hex() if isinstance(value, float) else value


def normal(profile: FileProfile) -> str:
    text = json.dumps(
        asdict(profile), sort_keys=True, default=lambda v: sorted(v) if isinstance(v, frozenset) else str(v)
    )
    return str(without_digits(text))


def differences(by_judge: dict[int, dict[str, Any]], by_spark: dict[int, dict[str, Any]]) -> list[str]:
    """Name the first lines that differ, and in what."""
    lines = [n for n in sorted(by_judge.keys() | by_spark.keys()) if by_judge.get(n) != by_spark.get(n)]
    texts = []
    for n in lines[:6]:
        judged, typed = by_judge.get(n, {}), by_spark.get(n, {})
        texts += [
            f"line {n}, {name}: {judged.get(name)!r}, by Spark {typed.get(name)!r}"
            for name in judged | typed
            if judged.get(name) != typed.get(name)
        ]
    return texts


def compare(spark: SparkSession, ws: Workspace, batch: LandingBatch, forgotten: ForgottenValues | None = None) -> None:
    """Judge all lines both ways."""
    plan = arrow_plan(batch, [])
    assert not isinstance(plan, str), plan
    file, declaration = plan.files[0], plan.declaration
    place = (0, file.ds, file.name)
    judge = LineJudge(declaration, file.form, plan.accept, file.times, place, forgotten)
    counts, tables = JudgedCounts(), []
    lines = 0
    part = Part(0, batch.files[0][1].path)
    for block in blocks(part, 1 << 16) if file.over_lines is None else record_blocks(part, file.over_lines):
        judged = judge.judge(block, np.ones(len(block), np.bool_))
        counts.add(judged.counts)
        tables.append(judged.rows)
        lines += len(block)
    rows = pa.concat_tables(tables).sort_by("_line")
    frame, folder = rows_by_spark(batch, checked_reader(batch), ws.spark_local / "typed", forgotten)
    every = pq.read_table(folder.local_path(), partitioning=None).sort_by("_line")
    assert every.num_rows == lines
    names = ["_file", "_ds", "_source_file", "_copy", "_state", "_raw", "_reason"]
    for state, columns in ((BAD, names), (GOOD, [*names, *(c.name for c in batch.table.columns)])):
        by_judge, by_spark = (
            bits(frame.filter(pc.equal(frame["_state"], state)).select(["_line", *columns])) for frame in (rows, every)
        )
        assert differences(by_judge, by_spark) == []
    if plan.accept:
        written = every.filter(pc.is_in(every.column("_state"), pa.array([GOOD, BAD])))
        for judged_extra, spark_extra in zip(rows["_extra"].to_pylist(), written["_extra"].to_pylist(), strict=True):
            by_judge, by_spark = ({k: without_digits(v) for k, v in (e or [])} for e in (judged_extra, spark_extra))
            assert by_judge == by_spark
    states = every.column("_state").to_pylist()
    totals = (counts.good, counts.bad, counts.skipped, counts.forgotten)
    assert totals == tuple(states.count(state) for state in (GOOD, BAD, SKIPPED, FORGOTTEN))
    (expected,) = profiles(frame, batch.table, batch)
    empty_profile = FileProfile(file.ds, file.name, nulls=dict.fromkeys(batch.table.expectations.null_rate, 0))
    profile = with_judged(empty_profile, [counts], [c.name for c in batch.table.columns])
    assert normal(profile) == normal(expected)


def joined(lines: Sequence[str], end: str = "\n") -> bytes:
    return end.join(lines).encode()


#: Cells of any kind in any column.
CELLS = st.one_of(*SCALARS.values(), st.text(st.characters(exclude_characters="\n"), max_size=6))
#: Texts at the edges of types, `;` between them.
_EDGES = """0000-01-01;0000-02-29;9999-12-31T23:59:59.999999-18:00;1899-12-31T00:00Z;0001-01-01T00:00+18:00;1500-02-29
2026-01-01T00:00:00+18:01;2026-01-01T10:00+01;1600-02-29 23:59:59 +0100;99999;1e19;1.0e18;9007199254740993e0;12.;e5;7
9007199254740992e0;+12.000;1E+05;1e-5;3.4028235e38;3.4028236e38;1e-46;7e-46;1.17549435e-38;16777217;1e12;Infinity;.
0.1000000014901161193847656250001;253402300799.999999;253402300799999.4999;253402300799999.9995;-62135596800000;-NaN
1772323200000.0005;1772323200000.00049;184467440737095516160;2026-03-01T05:06:07,123456789 +0530;-.;--5;1e99;e2;a b
2026-03-29T02:30:00;2026-10-25T02:30:00;2026-03-29 02:30:00.5;1969-06-01T00:00:00;1,234.5;1.234,5;01.03.2026;+1e3"""
ODD_CELLS = [cell for line in _EDGES.split("\n") for cell in line.split(";")]
ODD_CELLS += [
    " 5",
    "5\x7f",
    "5\u2028",
    "1.0\u2028",
    "1.0\r",
    "true ",
    "\tno",
    "TRUE\x85",
    "2026-03-01\r",
    "2026-03-01 ",
]
ODD_CELLS += [
    "\u0660",
    "1" * 40,
    "0" * 40 + "7",
    "a|b",
    "5|x|",
    "|",
    "NA",
    "\\N",
    "\x00",
    "é",
    "\ufeff",
    "253402300800000",
]
ODD_CELLS += ['"x^"y"', '"x\\"y"', '"x"y', '"a', 'a"b', '"1|2"', '"2026-03-01"', '"a""b"', "2026-03-01T00:00:00UTC\r"]
#: JSON values, `;` between them.
_VALUES = r"""1.5;1.50;100.0;1e3;-0;-0.0;0.1;1E400;NaN;-Infinity;null;true;false;[];{};"\ud83d";"\ud83d\ude00";01;1.;.5
"a\u0001\n";[[1.50]];"\u00e9\/";"it\'s";'single';12345678901234567890;0.30000000000000004;[NaN, "a", null, {"k": 1.0}]
+1;"[1]";{"a": {"b": [1.0, "x\u001f"], 'c': null}};[1, "2", 3.0];["a\"b"];1e15;1e16;123456.789;"\u0000";0.00012"""
JSON_VALUES = [value for line in _VALUES.split("\n") for value in line.split(";")]


@st.composite
def pools(draw: st.DrawFn) -> tuple[list[str], random.Random]:
    """Cells, and what picks from them: far faster than drawing each cell of each line."""
    return draw(st.lists(CELLS, max_size=60)) + ODD_CELLS, random.Random(draw(st.integers(0, 2**32)))


def records(pool: tuple[list[str], random.Random], separator: str, names: Sequence[str], rows: int) -> list[str]:
    """Lines of any cells, most of them with as many as there are names; in most lines one cell can be at fault."""
    cells, pick = pool
    lines = []
    for _ in range(rows):
        size = len(names) + (pick.choice((-1, 1)) if pick.random() < 0.1 else 0)
        share = pick.choice((0.7, 0.1, 0.1))
        fields = [pick.choice(cells) if pick.random() < share else "" for _ in range(size)]
        lines.append(separator.join([*(["e"] if share == 0.1 else []), *fields][:size]))
    return lines


def objects(pool: tuple[list[str], random.Random], names: Sequence[str], rows: int) -> list[str]:
    """Lines that are JSON objects of any values, most of them; in most lines one value can be at fault."""
    cells, pick = pool
    texts = ['"' + c.replace("\\", "\\\\").replace('"', '\\"').replace("\t", "\\t") + '"' for c in cells]
    values = [*texts, *cells, *JSON_VALUES, *JSON_VALUES]
    lines = []
    for _ in range(rows):
        chosen = pick.sample([*names, "ID", "Ts", "z", "y'"], pick.choice((1, 1, 1, 2, 6)))
        members = [f'"{name}": {pick.choice(values)}' for name in chosen]
        lines.append("{" + ", ".join([*members, *(['"id": "e"'] if "id" not in chosen else [])]) + "}")
    return [line.replace('"', "'") if pick.random() < 0.1 else line for line in lines]


#: Columns of every type that a field may have.
EVERY_TYPE = [
    {"name": "id"},
    {"name": "t", "type": "tinyint"},
    {"name": "s", "type": "smallint"},
    {"name": "price", "type": "decimal(5,2)"},
    {"name": "share", "type": "decimal(3,3)"},
    {"name": "whole", "type": "decimal(38,0)"},
    {"name": "wall", "type": "timestamp_ntz"},
    {"name": "key", "type": "binary"},
    {"name": "day", "type": "date"},
    {"name": "renamed", "type": "int", "path": "Renamed Field"},
    {"name": "ids", "type": "array<bigint>"},
]
TYPES = {
    "columns": EVERY_TYPE,
    "event_time": "day",
    "late_days": 3,
    "ids": {"max_bytes": 6},
    "expectations": {"ranges": {"price": [-10, 99.5], "t": [None, 100]}, "null_rate": {"share": 1}},
}
#: Columns by paths, of one field several too.
PATHS = [
    {"name": "id"},
    {"name": "a", "path": "o.a", "type": "int"},
    {"name": "deep", "path": "o.p.q", "required": True},
    {"name": "keyed", "path": "o['x.y']"},
    {"name": "listed", "path": "o.l", "type": "array<double>"},
    {"name": "o", "path": "o"},
    {"name": "amount", "path": "p.amount", "type": "double"},
]
LIST_PATHS = [
    *PATHS,
    {"name": "items", "path": "items[].id", "type": "array<string>"},
    {"name": "first", "path": "items[0].price", "type": "decimal(6,2)"},
    {"name": "param", "path": "params['os'].value"},
]
#: Values of fields of objects, `;` between them.
_INNER = r"""{"a": 5};{"a": 1.0, "A": 2};{"p": {"q": "x"}};{"p": {"q": null}};{"p": "{\"q\": NaN}"};{"p": 7};[1, 2];null
{"l": [1, 2.50, null]};{"l": "[1e2]", "x.y": "k"};{"p": {"q": [1, {"z": 0.10}]}, "x.y": true};"text";{"P": {"Q": "v"}};5
{"p": {"q": 1, "Q": 2}};{"p": {"q": "a", "q": "b"}};"{\"a\": 3, \"p\": {\"q\": \"y\"}}";{"amount": 1e3};""
[{"id": "i1", "price": 2.50}, {"id": 7}];[{"key": "os", "value": {"string_value": "web"}}];{"amount": -0}
[{"key": "os", "value": 1.50}]"""
INNER = [value for line in _INNER.split("\n") for value in line.split(";")]
#: Texts by the types of columns; in any column now and then.
TYPED_CELLS = {
    "string": ["e", "e"],
    "tinyint": ["127", "128", "-128", "1.0", "7", "+7", "1e2", "300e0", " 5"],
    "smallint": ["32767", "32768", "-32769", "12", "0012"],
    "decimal(5,2)": ["99.95", "99.5", "-10", "-10.01", "999.99", "1000", ".5", "1.500", "1.505", "+1", "5."],
    "decimal(3,3)": [".5", "0.125", "0.1234", "0.12340", "1"],
    "decimal(38,0)": ["123456789012345678901234567890123456789", "1" * 38, "-7", "7.0", "1e2"],
    "timestamp_ntz": ["2026-03-01T05:06:07", "2026-03-01 05:06:07Z", "2026-03-01", "0000-01-01 05:06", "9999-12-31"],
    "binary": ["QUJD", "QUJDRA==", "QUJD RA", "Q", "Q===", "QQ= =", "-_"],
    "date": ["2026-03-01", "2026-03-02", "2026-02-26", "2026-02-25", "2026-13-01"],
    "int": ["5", "x"],
    "array<bigint>": ["7|8", "7|x", "|", "9"],
}


def options(pick: random.Random) -> list[tuple[str, dict[str, Any], dict[str, Any], bytes]]:
    """Return names, keys of `source`, declarations and files of options that Arrow alone does not read."""
    names = [str(c.get("path", c["name"])) for c in EVERY_TYPE]
    fields = [str(c["name"]) for c in PATHS if "path" not in c] + ["o", "p", "Renamed Field"]

    def cells() -> list[str]:
        kinds = [str(c.get("type", "string")) for c in EVERY_TYPE]
        return [
            pick.choice(TYPED_CELLS[pick.choice(kinds) if pick.random() < 0.05 else kind])
            if k == 0 or pick.random() < 0.25
            else ""
            for k, kind in enumerate(kinds)
        ]

    def padded(cell: str) -> str:
        return pick.choice(["", " ", "\t", "  "]) + cell + pick.choice(["", " ", "\t "])

    def quoted(cell: str) -> str:
        return '"' + cell.replace('"', '""') + '"'

    typed = [cells() for _ in range(2 * ROWS)]
    header = ",".join(names)
    trimmed = [",".join(padded(quoted(c) if pick.random() < 0.3 else c) for c in row) for row in typed]
    broken = ['e,"a', 'e, "x" y,', "\t", ' , ,"', '"a,b" , 5', "\v"]
    records = []
    for cells_of_row in typed:
        row = [pick.choice(["e", "two\nlines", "cr\r\nlf", 'q"\n', "\n\n"]), *cells_of_row[1:]]
        records.append(",".join(quoted(c) if pick.random() < 0.3 or "\n" in c else c for c in row))
    records += ['"never closed', "e,5", 'x,"a', "b", '","c']
    values = [*INNER, *INNER, *INNER, *JSON_VALUES]
    objects_of = [
        "{" + ", ".join(f'"{k}": {pick.choice(values)}' for k in ["id", *pick.sample(["o", "p", "O", "z"], 2)]) + "}"
        for _ in range(2 * ROWS)
    ]
    by_lists = [
        "{" + ", ".join(f'"{k}": {pick.choice(values)}' for k in pick.sample(["o", "items", "params", "p"], 3)) + "}"
        for _ in range(2 * ROWS)
    ]
    inner = [";".join(["e", *(quoted(pick.choice(INNER)) for _ in fields[1:])]) for _ in range(2 * ROWS)]
    numbers = [f'{{"id": "e", "price": {v}, "t": {v}, "share": {v}, "Renamed Field": {v}}}' for v in JSON_VALUES]
    plainly = {"id": "e", "price": 5, "t": 7, "wall": "2026-03-01T00:00:00", "key": "QUJD", "renamed": 1, "ids": [1]}
    every = [json.dumps({n: v for n, v in zip(names, row, strict=True) if v}) for row in typed]
    return [
        ("a.csv", {"trim": True}, TYPES, joined([header, *trimmed, *broken])),
        (
            "a.csv",
            {"separator": "::", "header": False},
            TYPES,
            joined(["::".join(row) for row in typed] + ['"a::b"::']),
        ),
        ("a.csv", {"separator": "§", "trim": True}, TYPES, joined(["§".join(names)] + ["§".join(r) for r in typed])),
        ("a.csv", {"multiline": True}, TYPES, joined([header, *records], "\r\n")),
        ("a.csv", {"multiline": True, "header": False, "timezone": "America/Sao_Paulo"}, TYPES, joined(records)),
        ("a.csv", {"separator": ";"}, {"columns": PATHS}, joined([";".join(fields), *inner])),
        ("a.jsonl", {"timezone": "Europe/Berlin"}, TYPES, joined([*every, *numbers, json.dumps(plainly)])),
        ("a.jsonl", {}, {"columns": PATHS, "ids": {"max_bytes": 9}}, joined(objects_of)),
        ("a.jsonl", {}, {"columns": LIST_PATHS, "new_columns": "accept"}, joined(by_lists)),
    ]


@pytest.mark.parametrize("number", range(9))
def test_options_that_arrow_alone_does_not_read(spark: SparkSession, tmp_path: Path, number: int) -> None:
    pick = random.Random(int(os.environ.get("HEADRACE_JUDGE_SEED", "7")))
    name, keys, declared, body = options(pick)[number]
    chosen = LandingSource.model_validate({"path": "in/{ds}/*", "format": name.split(".")[-1], **keys})
    ws = Workspace(tmp_path)
    compare(spark, ws, batch_of(spark, ws, chosen, Table.model_validate(declared), name, body))


@pytest.mark.parametrize("form", ["csv", "csv of Berlin, nulls, no header", "dialects", "jsonl", "jsonl, accepted"])
def test_the_tasks_judge_as_spark_does(spark: SparkSession, tmp_path: Path, form: str) -> None:
    numbers = count()
    forgotten = ForgottenValues.new().having("id", ["e2", "a b"]).having("i", ["7"])

    def check(body: bytes, chosen: LandingSource, declared: Table, name: str, listed: bool = False) -> None:
        ws = Workspace(tmp_path / str(next(numbers)))
        batch = batch_of(spark, ws, chosen, declared, name, body)
        compare(spark, ws, batch, forgotten if listed else None)

    limits = {"ids": {"max_bytes": 6, "empty": "quarantine"}}
    few_columns = ["id", "ts", "i", "tags"]
    if form.startswith("jsonl"):
        accept: dict[str, Any] = {"new_columns": "accept"} if form != "jsonl" else {}
        table = Table.model_validate(TABLE | accept | (limits if form == "jsonl" else {}))

        @EXAMPLES
        @given(st.lists(json_lines(), max_size=20), pools(), st.booleans())
        def run(lines: list[str], pool: tuple[list[str], random.Random], listed: bool) -> None:
            lines = [*lines, *objects(pool, NAMES, ROWS), *objects(pool, few_columns, ROWS)]
            body = b"\xef\xbb\xbf" + joined(lines) + b'\n{"id": "\xff"}\n{"id": "\xe2\x82", "i": 5}'
            check(body, source(format="jsonl"), table, "a.jsonl", listed)

    elif form == "dialects":
        table = Table.model_validate({"columns": csv_dialects.COLUMNS})

        @EXAMPLES
        @given(csv_dialects.rows(), csv_dialects.dialects(), pools())
        def run(rows: list[Any], dialect: csv_dialects.Dialect, pool: tuple[list[str], random.Random]) -> None:
            body = csv_dialects.written(rows, dialect)
            lines = records(pool, dialect.separator, csv_dialects.NAMES, 2 * ROWS)
            chosen = LandingSource.model_validate({"path": "in/{ds}/*", **dialect.source()})
            check(body + joined(lines, dialect.line_end), chosen, table, "a.csv")

    else:
        plainly = form == "csv"
        more = {} if plainly else {"timezone": "Europe/Berlin", "null_value": "NA", "header": False}
        table = Table.model_validate(TABLE | (limits if plainly else {"ids": {"nul": "keep"}}))

        @EXAMPLES
        @given(st.lists(csv_lines(), max_size=20), pools(), st.booleans())
        def run(lines: list[str], pool: tuple[list[str], random.Random], crlf: bool) -> None:
            lines = [*lines, *records(pool, ",", NAMES, 2 * ROWS)]
            names = [*NAMES[1:], "z"] if plainly and crlf else NAMES
            end = "\r\n" if crlf else "\n"
            body = joined([",".join(names), *lines] if plainly else lines, end) + b"\n\xff,\xe2\x82,5"
            check(body, source(format="csv", **more), table, "a.csv", crlf)

    run()
