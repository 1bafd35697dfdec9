"""Every declared type from the text of landing files and from another writer's table; columns by path."""

from __future__ import annotations

import base64
import hashlib
import json
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from headrace.config import Spec, Table, TableSource
from headrace.config.schema import TableColumn
from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.features.ops.numbers import decimal_doubles, decimal_texts
from headrace.lake.faults import BAD, GOOD
from headrace.lake.landing.expectations import empty_profiles
from headrace.lake.tables.declared import table_rows
from headrace.lake.tables.folder import FolderSnapshot
from headrace.lake.values import extract
from headrace.storage import local
from tests.spark.test_sources import ingest, judge, read, shipped

#: type -> what is written -> its value; and what is none.
READABLE: dict[str, dict[str, Any]] = {
    "tinyint": {"-128": -128, "+7": 7, "5.00": 5, "1.2E1": 12, "-0.0": 0},
    "smallint": {"32767": 32767, "-1": -1},
    "decimal(5,2)": {
        "1.5": Decimal("1.50"),
        "-999.99": Decimal("-999.99"),
        "7": Decimal("7.00"),
        "0.1000": Decimal("0.10"),
        ".5": Decimal("0.50"),
        "3.": Decimal("3.00"),
    },
    "decimal(38,0)": {"1" + "0" * 37: Decimal("1" + "0" * 37)},
    "decimal(20,18)": {"3.141592653589793238": Decimal("3.141592653589793238")},
    "timestamp_ntz": {
        "2026-03-29T02:30:00.25": datetime(2026, 3, 29, 2, 30, 0, 250000),
        "2026-03-29": datetime(2026, 3, 29),
    },
    "date": {"2024-02-29": date(2024, 2, 29)},
    "binary": {base64.b64encode(b).decode(): hashlib.sha256(b).hexdigest() for b in (b"x", b"\x00\xff" * 20, b"abc")},
}
UNREADABLE = {
    "tinyint": ["128", "128.0", "1.5", "1.25E1", "1e-1", "1.0f"],
    "smallint": ["-32769", "x"],
    "decimal(5,2)": ["1.005", "1000", "1e2", "NaN", "", ".", "1,5"],
    "decimal(38,0)": ["1" * 39, "0.5"],
    "decimal(20,18)": ["100"],
    "timestamp_ntz": ["2026-03-29T02:30:00Z", "2026-03-29 02:30:00+01:00", "12:30"],
    "date": ["2023-02-29", "2023-2-1"],
    "binary": ["not Base64!", "a", "YQ==YQ=="],
}


def spec_of(format_: str, columns: list[dict[str, Any]], **source: Any) -> Spec:
    spec = shipped("talkingdata", format=format_, **source)
    return spec.model_copy(update={"table": type(spec.table).model_validate({"columns": columns})})


def test_text_of_every_type(spark: SparkSession, ws: Workspace) -> None:
    types = list(READABLE)
    columns = [{"name": f"c{i}", "type": t} for i, t in enumerate(types)]
    good = [(i, t, text) for i, t in enumerate(types) for text in READABLE[t]]
    bad = [(i, t, text) for i, t in enumerate(types) for text in UNREADABLE[t]]
    lines = [json.dumps({f"c{i}": text}) for i, _, text in good + bad]
    spec = spec_of("jsonl", columns, timezone="Europe/Berlin")
    rows = read(spark, ws, spec, {"x.jsonl": "\n".join(lines)})
    for (i, t, text), row in zip(good, rows, strict=False):
        assert row["_state"] == GOOD, (text, row["_reason"])
        assert row[f"c{i}"] == READABLE[t][text], (t, text)
        assert sum(row[f"c{k}"] is not None for k in range(len(types))) == 1
    for (i, t, text), row in zip(bad, rows[len(good) :], strict=True):
        article = "an" if t[0] in "aeiou" else "a"
        assert (row["_state"], row["_reason"]) == (BAD, f"c{i}: '{text}' is not {article} {t}"), (t, text)


def test_columns_by_path_in_json_and_csv(spark: SparkSession, ws: Workspace) -> None:
    columns = [
        {"name": "user", "type": "bigint", "path": "userId"},
        {"name": "country", "path": "user.geo.country"},
        {"name": "area", "type": "array<int>", "path": "user.geo.area"},
        {"name": "os", "path": "attributes['os.name']", "required": True},
        {"name": "plain", "type": "int"},
    ]
    geo: dict[str, Any] = {"country": "NO", "area": [1, None]}
    bodies = [
        {"userId": 1, "user": {"geo": geo, "age": 9}, "attributes": {"os.name": "x", "o": 2}, "plain": 3, "new": 1},
        {"userId": 2, "user": {"geo": {"country": None}}, "attributes": {"os.name": "y"}},
        {"userId": 3, "user": {"geo": "nowhere"}, "attributes": {"os.name": "z"}},
        {"userId": 4, "user": {"geo": {"area": [1, "x"]}}, "attributes": {"os.name": "z"}},
        {"userId": 5, "user": None, "attributes": {"other": 1}},
    ]
    good = [(1, "NO", [1, None], "x", 3), (2, None, None, "y", None)]
    reasons = [
        "country: 'nowhere' is not a string; area: 'nowhere' is not an array<int>",
        """area: '[1,"x"]' is not an array<int>""",
        "os: required, but null",
    ]
    fields = ("userId", "user", "attributes", "plain", "new")

    def csv_line(body: dict[str, Any]) -> str:
        texts = [body.get(f) for f in fields]
        cells = [json.dumps(t) if isinstance(t, dict) else "" if t is None else str(t) for t in texts]
        return ",".join('"' + c.replace('"', '""') + '"' for c in cells)

    files = {
        "a.jsonl": "\n".join(json.dumps(b) for b in bodies),
        "b.csv": "\n".join([",".join(fields), *map(csv_line, bodies)]),
    }
    rows = read(spark, ws, spec_of("clicks", columns), files)
    names = [c["name"] for c in columns]
    for number in (0, 1):
        file_rows = [r for r in rows if r["_file"] == number and r["_state"] != 2]
        assert [tuple(r[n] for n in names) for r in file_rows[:2]] == good
        assert [r["_state"] for r in file_rows] == [GOOD, GOOD, BAD, BAD, BAD]
        assert [r["_reason"].replace(", ", ",") for r in file_rows[2:]] == [r.replace(", ", ",") for r in reasons]
        assert file_rows[0]["_extra"] == {"new": "1"}


def test_a_null_in_json_counts_as_present_and_a_missing_name_does_not(spark: SparkSession, ws: Workspace) -> None:
    columns = [
        {"name": "country", "path": "user.geo.country"},
        {"name": "area", "type": "array<int>", "path": "user.geo.area"},
        {"name": "os", "path": "attributes['os.name']"},
    ]
    absent_by_body: list[tuple[dict[str, Any], set[str]]] = [
        ({"user": {"geo": {"country": "NO", "area": [1]}}, "attributes": {"os.name": "x"}}, set()),
        ({"user": {"geo": {"country": None}}, "attributes": {"os.name": "y"}}, {"area"}),
        ({"user": {"geo": "nowhere"}, "attributes": {"os.name": "z"}}, {"country", "area"}),
        ({"user": {"geo": {"area": [1, "x"]}}, "attributes": {"os.name": None}}, {"country"}),
        ({"user": None, "attributes": {"other": 1}}, {"country", "area", "os"}),
    ]
    files = {f"{i}.jsonl": json.dumps(body) for i, (body, _) in enumerate(absent_by_body)}
    spec = spec_of("clicks", columns)
    batch, rows = judge(spark, ws, spec, files)
    profiles = [rows.profile(i, profile) for i, profile in enumerate(empty_profiles(spec.table, batch))]
    assert [profile.absent for profile in profiles] == [names for _, names in absent_by_body]


def test_paths_are_for_formats_with_names(spark: SparkSession, ws: Workspace) -> None:
    spec = shipped("criteo")
    moved = [c.model_copy(update={"path": "x"}) if c.name == "I1" else c for c in spec.table.columns]
    spec = spec.model_copy(update={"table": spec.table.model_copy(update={"columns": tuple(moved)})})
    (ws.home / "in").mkdir(parents=True)
    (ws.home / "in" / "x").write_text("1\n")
    spec = spec.model_copy(update={"source": spec.source.model_copy(update={"path": "in/x"})})
    with pytest.raises(UserError, match="'I1' has a path, but the fields of 'criteo' have none"):
        ingest(spec, ws)


#: SQL of a table's value -> declared -> what it becomes; ... : it cannot be read.
TABLE: list[tuple[str, dict[str, Any]]] = [
    ("cast(7 as tinyint)", {"tinyint": 7, "bigint": 7, "double": 7.0, "decimal(3,1)": Decimal("7.0"), "string": "7"}),
    ("300", {"int": 300, "smallint": 300, "tinyint": ..., "decimal(2,0)": ..., "float": 300.0}),
    ("9007199254740993L", {"bigint": 2**53 + 1, "int": ..., "double": 2.0**53}),
    ("true", {"boolean": True, "int": 1, "string": "true"}),
    ("2.0D", {"int": 2, "double": 2.0, "float": 2.0}),
    ("2.5D", {"int": ..., "double": 2.5}),
    ("double('NaN')", {"int": None, "bigint": None}),
    ("cast('12.50' as decimal(6,2))", {"decimal(6,2)": Decimal("12.50"), "decimal(4,1)": Decimal("12.5")}),
    ("cast('12.55' as decimal(6,2))", {"decimal(4,1)": ..., "double": 12.55, "string": "12.55", "bigint": ...}),
    (
        "cast('9223372036854775807' as decimal(20,0))",
        {"bigint": 2**63 - 1, "int": ..., "decimal(20,0)": Decimal(2**63 - 1)},
    ),
    ("cast('9223372036854775808' as decimal(20,0))", {"bigint": ..., "string": "9223372036854775808"}),
    ("timestamp_micros(253402300800000000L)", {"timestamp": ..., "timestamp_ntz": ...}),
    ("date_add(date'9999-12-31', 2)", {"date": ..., "timestamp": ...}),
    ("date'2026-03-29'", {"date": date(2026, 3, 29), "timestamp": datetime(2026, 3, 28, 23), "string": "2026-03-29"}),
    (
        "timestamp_ntz'2026-07-01 12:00:00'",
        {"timestamp_ntz": datetime(2026, 7, 1, 12), "timestamp": datetime(2026, 7, 1, 10)},
    ),
    (
        "timestamp'2026-07-01 12:00:00'",
        {"timestamp": datetime(2026, 7, 1, 12), "timestamp_ntz": datetime(2026, 7, 1, 14)},
    ),
    ("X'00ff'", {"binary": hashlib.sha256(b"\x00\xff").hexdigest()}),
    ("'12.5'", {"string": "12.5", "double": 12.5, "int": ..., "decimal(3,1)": Decimal("12.5"), "timestamp": ...}),
    (
        "array(1, null, 3)",
        {"array<int>": [1, None, 3], "array<bigint>": [1, None, 3], "array<string>": ["1", None, "3"]},
    ),
    ("array('1', 'x')", {"array<string>": ["1", "x"], "array<int>": ...}),
]
NO_WAY = [("1.5D", "decimal(3,1)"), ("1", "boolean"), ("1", "timestamp"), ("X'00'", "string"), ("1", "array<int>")]


def test_columns_of_a_table(spark: SparkSession) -> None:
    source = shipped("talkingdata", timezone="Europe/Berlin").source
    values = ", ".join(f"{sql} as v{i}" for i, (sql, _) in enumerate(TABLE))
    nulls = ", ".join(f"cast(null as {t}) as v{i}" for i, (_, t) in enumerate(spark.sql(f"select {values}").dtypes))
    frame = spark.sql(f"select 0 as row, {values} union all select 1, {nulls}").orderBy("row")
    cases = [(i, declared, value) for i, (_, reads) in enumerate(TABLE) for declared, value in reads.items()]
    columns = []
    for k, (i, declared, _) in enumerate(cases):
        extracted = extract(TableColumn(name=f"V{i}", type=declared), frame.schema, source)
        assert extracted is not None
        value = extracted.value.cast("string") if declared == "timestamp" else extracted.value
        columns += [value.alias(f"value{k}"), extracted.unread.alias(f"unread{k}"), extracted.text.alias(f"text{k}")]
    row, none = frame.select(*columns).collect()
    for k, (i, declared, value) in enumerate(cases):
        place = (TABLE[i][0], declared)
        value = str(value) if isinstance(value, datetime) and declared == "timestamp" else value
        assert row[f"unread{k}"] == (value is ...), place
        assert row[f"value{k}"] == (None if value is ... else value), place
        assert row[f"text{k}"] is not None or value is None, place
        assert (none[f"value{k}"], none[f"unread{k}"]) == (None, False), place
    for sql, declared in NO_WAY:
        with pytest.raises(UserError, match=r"'v' is .* in the table, which cannot be read as"):
            extract(TableColumn(name="v", type=declared), spark.sql(f"select {sql} as v").schema, source)


def test_paths_of_a_table(spark: SparkSession) -> None:
    source = shipped("talkingdata", timestamps={"at": "epoch_milliseconds"}).source
    frame = spark.sql(
        "select struct(struct('NO' as country) as geo, 5 as `a.b`) as user, map('os', 1, 'x', null) as attributes, "
        """'{"a": {"b": "7"}}' as text, 1500L as at"""
    )
    columns = {
        "country": ("string", "user.geo.country", "NO"),
        "ab": ("bigint", "user['a.b']", 5),
        "os": ("string", "attributes['os']", "1"),
        "none": ("int", "attributes.nothing", None),
        "deep": ("int", "text.a.b", 7),
        "at": ("timestamp", None, "1970-01-01 00:00:01.5"),
    }
    extracted_columns = []
    for name, (type_, path, _) in columns.items():
        extracted = extract(TableColumn(name=name, type=type_, path=path), frame.schema, source)
        assert extracted is not None
        extracted_columns.append(extracted.value.cast("string").alias(name))
    row = frame.select(*extracted_columns).collect()[0]
    assert row.asDict() == {n: None if v is None else str(v) for n, (_, _, v) in columns.items()}
    assert extract(TableColumn(name="c", path="user.geo.land"), frame.schema, source) is None
    with pytest.raises(UserError, match="leads through 'at', which is"):
        extract(TableColumn(name="c", path="at.x"), frame.schema, source)


#: Declared columns of GA4's export: type, path, and its value in each of two rows.
RECORDS: dict[str, tuple[str, str, list[Any]]] = {
    "items": ("array<string>", "items[].id", [["a", None, "c"], []]),
    "prices": ("array<double>", "items[].price.amount", [[1.5, None, 2.0], []]),
    "tags": ("array<string>", "items[].tags[]", [["x", "y", "z"], []]),
    "first": ("string", "items[0].id", ["a", None]),
    "third": ("double", "items[2].price.amount", [2.0, None]),
    "tenth": ("string", "items[9].id", [None, None]),
    "session": ("bigint", "params['session'].value.int_value", [7, None]),
    "page": ("string", "params.page.value.string_value", ["/", None]),
    "none": ("string", "params['other'].value.string_value", [None, None]),
}


def test_paths_through_lists_of_records(spark: SparkSession, ws: Workspace, tmp_path: Path) -> None:
    """Nothing else is read of the Parquet files: a record's TIME is no type of Spark's."""
    price = pa.struct([("amount", pa.float64()), ("at", pa.time64("us"))])
    item = pa.struct([("id", pa.string()), ("price", price), ("tags", pa.list_(pa.string())), ("at", pa.time64("us"))])
    value = pa.struct([("string_value", pa.string()), ("int_value", pa.int64())])
    param = pa.struct([("key", pa.string()), ("value", value), ("at", pa.time32("s"))])
    rows = pa.table(
        {
            "click": pa.array([1, 0], pa.int32()),
            "items": pa.array(
                [
                    [
                        {"id": "a", "price": {"amount": 1.5, "at": 1}, "tags": ["x", "y"], "at": 5},
                        {"id": None, "price": None, "tags": None},
                        {"id": "c", "price": {"amount": 2.0}, "tags": ["z"]},
                    ],
                    [],
                ],
                pa.list_(item),
            ),
            "params": pa.array(
                [
                    [
                        {"key": "session", "value": {"int_value": 7}, "at": 1},
                        {"key": "page", "value": {"string_value": "/"}},
                        {"key": "session", "value": {"int_value": 8}},
                    ],
                    None,
                ],
                pa.list_(param),
            ),
        }
    )
    (tmp_path / "t").mkdir()
    pq.write_table(rows, tmp_path / "t" / "a.parquet")
    columns = [{"name": n, "type": t, "path": path} for n, (t, path, _) in RECORDS.items()]
    table = Table.model_validate({"columns": columns})
    source = TableSource.model_validate({"format": "parquet", "path": str(tmp_path / "t")})
    snapshot = FolderSnapshot(source, local(tmp_path / "t"), "parquet")
    frame, _ = table_rows(spark, snapshot, table, source, [], "2026-01-01")
    assert not any(r["__faults"] for r in frame.select("__faults").collect())
    for k, row in enumerate(frame.orderBy("_source_line").collect()):
        assert {n: row[n] for n in RECORDS} == {n: values[k] for n, (_, _, values) in RECORDS.items()}
    for path, message in (("items.id", "no text field 'key'"), ("click[].id", "no list"), ("items[].nothing", "")):
        column = TableColumn(name="c", type="array<string>", path=path)
        schema = spark.read.schema("click int, items array<struct<id string>>").parquet(str(tmp_path / "t")).schema
        if not message:
            assert extract(column, schema, source) is None
            continue
        with pytest.raises(UserError, match=message):
            extract(column, schema, source)


def test_decimals_as_doubles_and_texts_are_sparks(spark: SparkSession) -> None:
    random = np.random.default_rng(7)
    for precision, scale in ((5, 2), (18, 6), (38, 18), (38, 0), (38, 38)):
        digits = ["".join(map(str, random.integers(0, 10, precision))) for _ in range(200)]
        numbers = [Decimal(f"{'-' if i % 2 else ''}{d}E-{scale}") for i, d in enumerate(digits)]
        numbers += [Decimal(f"{n}E-{scale}") for n in (0, 1, -7)]
        values = pa.array([numbers[0], *numbers, None], pa.decimal128(precision, scale))[1:]
        frame = spark.createDataFrame(pa.table({"x": values}))
        seen = frame.select(F.col("x").cast("double").alias("d"), F.col("x").cast("string").alias("s")).toArrow()
        assert decimal_doubles(values).equals(seen.column("d").combine_chunks())
        assert decimal_texts(values).equals(seen.column("s").combine_chunks())
        assert decimal_doubles(values)[:-1].to_pylist() == [float(n) for n in numbers]
