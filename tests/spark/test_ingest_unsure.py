"""Texts and JSON by the judge of landing lines, and by the rules for columns of tables in Spark: the same values."""

from __future__ import annotations

import os
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from headrace.config import LandingSource
from headrace.config.schema import EpochUnit, TableColumn
from headrace.lake.landing.exact_casts import cast_texts, text_of
from headrace.lake.landing.unsure_lines import NestedPaths, Obstacle
from headrace.lake.values import extract, from_text
from tests.ingest_lines import SCALARS

EXAMPLES = settings(
    # Each example is a run of Spark.
    max_examples=int(os.environ.get("HEADRACE_JUDGE_EXAMPLES", "2")),
    suppress_health_check=list(HealthCheck),
    derandomize="HEADRACE_JUDGE_EXAMPLES" not in os.environ,
    phases=[Phase.generate],
    deadline=None,
)

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


TIMES: list[EpochUnit | None] = [None, "epoch_seconds", "epoch_milliseconds", "epoch_microseconds", "epoch_nanoseconds"]
COLUMNS: list[tuple[str, EpochUnit | None]] = [
    *((type_, None) for type_ in (*TYPED_CELLS, "bigint", "float", "double", "boolean") if "array" not in type_),
    *(("timestamp", unit) for unit in TIMES),
]


def comparable(value: Any) -> Any:
    """A value with its bits."""
    return value.hex() if isinstance(value, float) else str(value) if isinstance(value, Decimal) else value


@pytest.mark.parametrize("timezone", ["UTC", "Europe/Berlin"])
def test_texts_become_the_values_that_texts_of_tables_become(spark: SparkSession, timezone: str) -> None:
    source = LandingSource.model_validate({"path": "in/{ds}/*", "format": "csv", "timezone": timezone})

    @EXAMPLES
    @given(st.lists(CELLS, max_size=300))
    def run(drawn: list[str]) -> None:
        typed = [text for texts in TYPED_CELLS.values() for text in texts]
        texts = list(dict.fromkeys([*typed, *ODD_CELLS, *drawn]))
        frame = spark.createDataFrame([(i, text) for i, text in enumerate(texts)], "i int, text string")
        values = [from_text(F.col("text"), type_, source, unit) for type_, unit in COLUMNS]
        # Years 0 and 10000 are none of Python's.
        numbers = [
            F.unix_micros(value.cast("timestamp"))
            if type_.startswith("timestamp")
            else F.unix_date(value)
            if type_ == "date"
            else value
            for value, (type_, _) in zip(values, COLUMNS, strict=True)
        ]
        rows = frame.select("i", *(value.alias(f"v{k}") for k, value in enumerate(numbers))).orderBy("i").collect()
        for k, (type_, unit) in enumerate(COLUMNS):
            column = cast_texts(pa.array(texts), type_, timezone, unit)
            if pa.types.is_temporal(column.type):
                column = column.cast(pa.int64() if pa.types.is_timestamp(column.type) else pa.int32())
            judged = dict(zip(texts, map(comparable, column.to_pylist()), strict=True))
            by_spark = dict(zip(texts, (comparable(row[f"v{k}"]) for row in rows), strict=True))
            assert {t: v for t, v in judged.items() if v != by_spark[t]} == {}, (type_, unit)

    run()


#: Values of fields of objects, `;` between them.
_INNER = r"""{"a": 5};{"a": 1.0, "A": 2};{"p": {"q": "x"}};{"p": {"q": null}};{"p": "{\"q\": NaN}"};{"p": 7};[1, 2];null
{"l": [1, 2.50, null]};{"l": "[1e2]", "x.y": "k"};{"p": {"q": [1, {"z": 0.10}]}, "x.y": true};"text";{"P": {"Q": "v"}};5
{"p": {"q": 1, "Q": 2}};{"p": {"q": "a", "q": "b"}};"{\"a\": 3, \"p\": {\"q\": \"y\"}}";{"amount": 1e3};""
[{"id": "i1", "price": 2.50}, {"id": 7}];[{"key": "os", "value": {"string_value": "web"}}];{"amount": -0}
[{"key": "os", "value": 1.50}]"""
INNER = [value for line in _INNER.split("\n") for value in line.split(";")]
PATHS = ["o.a", "o.p.q", "o['x.y']", "o.amount"]


def test_paths_through_json_in_texts_lead_where_those_of_tables_lead(spark: SparkSession) -> None:
    texts = [value[1:-1].replace('\\"', '"') if value.startswith('"') else value for value in INNER]
    columns = [TableColumn(name=f"c{k}", path=path) for k, path in enumerate(PATHS)]
    source = LandingSource.model_validate({"path": "in/{ds}/*", "format": "csv"})
    schema = T.StructType([T.StructField("i", T.IntegerType()), T.StructField("o", T.StringType())])
    frame = spark.createDataFrame(list(enumerate(texts)), schema)
    extracted = [extract(column, schema, source) for column in columns]
    values = [x.value.alias(f"v{k}") for k, x in enumerate(extracted) if x is not None]
    rows = frame.select("i", *values).orderBy("i").collect()
    paths = NestedPaths({k: c.steps for k, c in enumerate(columns)}, [c.name for c in columns])
    for text, row in zip(texts, rows, strict=True):
        inside = paths.read({"o": text}.get)
        for k in range(len(columns)):
            value = inside.values[k]
            judged = None if value is None or isinstance(value, Obstacle) else text_of(value)
            assert judged == row[f"v{k}"], (text, PATHS[k])
