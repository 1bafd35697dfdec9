"""Files whose columns have other types by day, as pandas types them by what a day has.

Reported as https://github.com/aws/aws-sdk-pandas/issues/457 and https://github.com/NVIDIA-Merlin/NVTabular/issues/429.
"""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from headrace.config.workspace import Workspace
from headrace.errors import UserError
from tests.reported.click_log import COLUMNS, DAYS, by_day, click_log, kept_rows, utc, write_days
from tests.reported.support import ingest, pipeline, read_table

_US = pa.timestamp("us")
#: Declared type -> (Arrow type, values as they are written, values as they are read) of two files.
PAIRS: dict[str, tuple[str, list[tuple[pa.DataType, list[Any], list[Any]]]]] = {
    "int_long": ("bigint", [(pa.int32(), [1, None], [1, None]), (pa.int64(), [2**40, None], [2**40, None])]),
    "long_double": ("bigint", [(pa.int64(), [1, 2], [1, 2]), (pa.float64(), [3.0, None], [3, None])]),
    "float_double": ("double", [(pa.float32(), [0.5, 1.5], [0.5, 1.5]), (pa.float64(), [0.1, None], [0.1, None])]),
    "short_int": ("int", [(pa.int16(), [1, 2], [1, 2]), (pa.int32(), [70_000, None], [70_000, None])]),
    "null_string": ("string", [(pa.null(), [None, None], [None, None]), (pa.string(), ["a", None], ["a", None])]),
    "null_long": ("bigint", [(pa.null(), [None, None], [None, None]), (pa.int64(), [7, None], [7, None])]),
    "null_list": (
        "array<string>",
        [(pa.null(), [None] * 2, [None] * 2), (pa.list_(pa.string()), [["a"], []], [["a"], []])],
    ),
    "list_null": (
        "array<string>",
        [
            (pa.list_(pa.null()), [[], [None]], [[], [None]]),
            (pa.list_(pa.string()), [["a", None], None], [["a", None], None]),
        ],
    ),
    "lists": (
        "array<bigint>",
        [(pa.list_(pa.int32()), [[1], None], [[1], None]), (pa.list_(pa.int64()), [[2**40], []], [[2**40], []])],
    ),
    "ts_ntz": (
        "timestamp",
        [
            (pa.timestamp("us", "UTC"), [10**15, None], [pd.Timestamp(10**15, unit="us"), None]),
            (_US, [10**15 + 1, None], [pd.Timestamp(10**15 + 1, unit="us"), None]),
        ],
    ),
    "date_ts": (
        "timestamp",
        [
            (pa.date32(), [10_000, None], [pd.Timestamp(10_000, unit="D"), None]),
            (pa.timestamp("us", "UTC"), [10**15, None], [pd.Timestamp(10**15, unit="us"), None]),
        ],
    ),
    "decimals": (
        "decimal(14,4)",
        [
            (pa.decimal128(10, 2), [Decimal("1.25"), None], [Decimal("1.2500"), None]),
            (pa.decimal128(12, 4), [Decimal("0.0001"), None], [Decimal("0.0001"), None]),
        ],
    ),
    "bool_int": ("int", [(pa.bool_(), [True, None], [1, None]), (pa.int32(), [5, None], [5, None])]),
    "string_double": ("double", [(pa.string(), ["1.5", None], [1.5, None]), (pa.float64(), [2.5, None], [2.5, None])]),
    "unsigned": (
        "bigint",
        [(pa.uint64(), [2**63 - 1, 1], [2**63 - 1, 1]), (pa.uint32(), [2**32 - 1, 0], [2**32 - 1, 0])],
    ),
    "dictionary": (
        "string",
        [(pa.string(), ["a", "b"], ["a", "b"]), (pa.dictionary(pa.int32(), pa.string()), ["c", None], ["c", None])],
    ),
}


def same(actual: Any, expected: Any) -> bool:
    if isinstance(actual, (list, np.ndarray)):
        return list(actual) == expected
    if expected is None:
        return actual is None or bool(pd.isna(actual))
    return bool(actual == expected)


def test_every_pair_of_types(spark: SparkSession, ws: Workspace, tmp_path: Path) -> None:
    """All pairs at once: two files of two rows each, every column of its own types, an undeclared one of more."""
    rows = click_log(2)
    tables = {}
    for k, day in enumerate(DAYS[:2]):
        columns = {
            name: pa.array(files[k][1], pa.int64()).cast(files[k][0])
            if _is_time(files[k][0])
            else pa.array(files[k][1], files[k][0])
            for name, (_, files) in PAIRS.items()
        }
        undeclared = pa.array(["x", "y"]) if k else pa.array([1, 2], pa.time32("s"))
        tables[day] = utc(by_day(rows)[day], **columns, undeclared=undeclared)
    write_days(tmp_path / "data", tables, "dt")
    declared = [{"name": name, "type": type_} for name, (type_, _) in PAIRS.items()]
    spec = pipeline(
        {"format": "parquet", "path": str(tmp_path / "data"), "day": {"partition": "dt"}}, [*COLUMNS, *declared]
    )
    actual = kept_rows(spark, spec, ws, DAYS[1])
    assert len(actual) == 4
    assert read_table(spark, ws, "quarantine").empty
    for name, (_, files) in PAIRS.items():
        expected = [*files[0][2], *files[1][2]]
        assert all(same(a, b) for a, b in zip(actual[name], expected, strict=True)), (name, actual[name].tolist())


def _is_time(type_: pa.DataType) -> bool:
    return bool(pa.types.is_timestamp(type_))


@pytest.mark.parametrize("last", [None, np.nan], ids=["null", "nan"])
def test_days_one_by_one_and_together(spark: SparkSession, ws: Workspace, tmp_path: Path, last: float | None) -> None:
    """Visits are doubles on the second day, of which one has a fraction; coupons are all missing on the third."""
    rows = click_log()
    rows["visits"] = (rows.price * 3).astype("int64")
    tables = {}
    for k, (day, part) in enumerate(by_day(rows).items()):
        part = part.assign(coupon=np.where(part.user_id % 3 == 0, "SPRING", "none"))
        if k == 1:
            part["visits"] = part.visits.astype("float64").where(part.event_id % 7 != 0)
            part.loc[part.index[3], "visits"] = 1.5
        if k == 2:
            part["coupon"] = last
        tables[day] = utc(part)
    write_days(tmp_path / "data", tables, "dt")
    columns = [*COLUMNS, {"name": "visits", "type": "bigint"}, {"name": "coupon"}]
    if last is not None:
        columns = columns[:-1]  # a double is no text: refused below
    spec = pipeline({"format": "parquet", "path": str(tmp_path / "data"), "day": {"partition": "dt"}}, columns)
    half = int(by_day(rows)[DAYS[1]].event_id.iloc[3])
    expected_rows = rows[rows.event_id != half]
    missing = (expected_rows.ts.dt.date.astype(str) == DAYS[1]) & (expected_rows.event_id % 7 == 0)
    expected = expected_rows.visits.astype("float64").where(~missing)
    for ds in DAYS:
        actual = kept_rows(spark, spec, ws, ds)
    assert actual.event_id.tolist() == expected_rows.event_id.tolist()
    np.testing.assert_array_equal(actual.visits.astype("float64"), expected)
    bad = read_table(spark, ws, "quarantine")
    assert bad._reason.tolist() == ["visits: '1.5' is not a bigint"]
    if last is None:
        assert actual.coupon.isna().tolist() == (expected_rows.ts.dt.date.astype(str) == DAYS[2]).tolist()
        return
    spec = pipeline(
        {"format": "parquet", "path": str(tmp_path / "data"), "day": {"partition": "dt"}},
        [*columns, {"name": "coupon"}],
    )
    with pytest.raises(
        UserError, match=r"'coupon' is double in dt=2026-01-08/part\.parquet, which cannot be read as string"
    ):
        ingest(spec, Workspace(ws.home / "text"), DAYS[2])
