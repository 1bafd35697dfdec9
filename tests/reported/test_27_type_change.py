"""A declared type becomes wider after days were loaded: int to bigint, float to double, decimals with more digits.

Reported as https://github.com/delta-io/delta/issues/2622.
"""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyspark.sql import SparkSession

from headrace.config import Spec
from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.lake.delta.compact import join_files
from headrace.lake.delta.day_table import check_table_columns, write_day
from headrace.lake.delta.erase import Change, erase
from headrace.lake.delta.log import DeltaLog
from headrace.lake.delta.transaction import Transaction, create_table
from headrace.storage import local
from tests.reported.support import build_features, ingest, pipeline, read_table, write
from tests.spark.test_features_stage import assert_same_dataset, dataset, read

D1, D2 = "2026-01-08", "2026-01-09"
#: column: its type on the first day, and from the second on.
TYPES = {
    "event_id": ("int", "bigint"),
    "user_id": ("int", "bigint"),
    "item_id": ("smallint", "int"),
    "price": ("float", "double"),
    "paid": ("decimal(6,2)", "decimal(14,3)"),
    "sizes": ("array<int>", "array<bigint>"),
    "weights": ("array<float>", "array<double>"),
    "clicked": ("tinyint", "tinyint"),
}
ROWS = 40


def row(n: int, ds: str) -> dict[str, Any]:
    """Return an event; on the second day its values are too large for the first day's types."""
    wide = ds == D2
    return {
        "event_id": n + 2**40 * wide,
        "ts": f"{ds}T{n % 24:02d}:00:00Z",
        "user_id": n % 7 + 2**35 * wide,
        "item_id": None if n % 9 == 0 else n % 5 + 100_000 * wide,
        "price": n + 0.1,
        "paid": str(n + Decimal("12345678.125") if wide else n + Decimal("0.25")),
        "sizes": [n, None, 2**33 * wide],
        "weights": [n / 3],
        "clicked": n % 2,
    }


def body(rows: list[dict[str, Any]], ending: str) -> bytes:
    text = "".join(f"{json.dumps(r)}\n" for r in rows).encode()
    return pa.compress(text, "zstd", asbytes=True) if ending else text


def expected(rows: list[dict[str, Any]], narrow: bool) -> pd.DataFrame:
    """Compute what the wider table has of rows that were loaded as the first or as the second day's types."""
    small = np.float32 if narrow else np.float64
    paid = Decimal("0.01") if narrow else Decimal("0.001")
    return pd.DataFrame(
        [
            r
            | {
                "price": float(small(r["price"])),
                "paid": Decimal(r["paid"]).quantize(paid),
                "weights": [float(small(w)) for w in r["weights"]],
            }
            for r in rows
        ]
    )


def spec_of(day: int, ending: str = "", **features: Any) -> Spec:
    types = {name: both_types[day] for name, both_types in TYPES.items()} | {"ts": "timestamp"}
    columns = [{"name": name, "type": type_} for name, type_ in types.items()]
    table = {"keys": ["event_id"], "event_time": "ts", "late_days": 1}
    return pipeline({"format": "jsonl", "path": f"in/{{ds}}.jsonl{ending}"}, columns, table=table, features=features)


def assert_rows(actual: pd.DataFrame, expected: pd.DataFrame) -> None:
    actual = actual.sort_values("event_id").reset_index(drop=True)
    expected = expected.sort_values("event_id").reset_index(drop=True)
    for name in TYPES:
        assert list(map(plain, actual[name])) == list(map(plain, expected[name])), name


def plain(value: Any) -> Any:
    """Return a value of a frame as Python has it; what pandas has for null, in a list too, as None."""
    if isinstance(value, (list, np.ndarray)):
        return [plain(v) for v in value]
    return None if value is None or value is pd.NA or value != value else value


def files_of(ws: Workspace, ds: str, version: int | None = None) -> dict[str, int]:
    """Return the live files of a day and their sizes."""
    log = DeltaLog(ws.events("reported"))
    read_version = log.version if version is None else version
    assert read_version is not None
    return {str(f.path): f.size for f in log.files(read_version) or () if f.partition["ds"] == ds}


def types_of(spark: SparkSession, ws: Workspace, version: int | None = None) -> dict[str, str]:
    reader = spark.read.format("delta")
    reader = reader if version is None else reader.option("versionAsOf", version)
    types = dict(reader.load(str(ws.events("reported"))).dtypes)
    return {name: types[name] for name in TYPES}


@pytest.mark.parametrize("ending", ["", pytest.param(".zst", marks=pytest.mark.slow)])
def test_values_of_both_days_in_the_wider_types(spark: SparkSession, tmp_path: Path, ending: str) -> None:
    first_day, second_day = [row(n, D1) for n in range(ROWS)], [row(n, D2) for n in range(ROWS)]
    # Of the second day five rows repeat events of the first, whose keys are in a narrower column.
    write(
        tmp_path,
        {
            f"in/{D1}.jsonl{ending}": body(first_day, ending),
            f"in/{D2}.jsonl{ending}": body(second_day + first_day[:5], ending),
        },
    )
    ws = Workspace(tmp_path)
    assert ingest(spec_of(0, ending), ws, D1).manifest.rows["kept"] == ROWS
    files_before = files_of(ws, D1)
    assert types_of(spark, ws) == {name: both_types[0] for name, both_types in TYPES.items()}

    manifest = ingest(spec_of(1, ending), ws, D2).manifest
    assert manifest.facts["days"] == [D2]  # the first day is not loaded again
    assert manifest.rows == {"read": ROWS + 5, "kept": ROWS, "quarantined": 0, "duplicates": 5}
    assert files_of(ws, D1) == files_before
    assert types_of(spark, ws) == {name: both_types[1] for name, both_types in TYPES.items()}
    assert types_of(spark, ws, version=1) == {name: both_types[0] for name, both_types in TYPES.items()}
    both_days = pd.concat([expected(first_day, narrow=True), expected(second_day, narrow=False)])
    assert_rows(read_table(spark, ws), both_days)
    # Delta itself writes the old day's rows in the wider types.
    table = f"delta.`{ws.events('reported')}`"
    spark.sql(f"DELETE FROM {table} WHERE event_id = 3")
    assert_rows(read_table(spark, ws), both_days[both_days.event_id != 3])
    spark.sql(f"OPTIMIZE {table}").collect()
    assert_rows(read_table(spark, ws), both_days[both_days.event_id != 3])


def test_loaded_days_stay_where_their_landing_files_are_gone(spark: SparkSession, tmp_path: Path) -> None:
    rows = [row(n, D1) for n in range(ROWS)]
    write(tmp_path, {f"in/{D1}.jsonl": body(rows, "")})
    ws = Workspace(tmp_path)
    ingest(spec_of(0), ws, D1)
    files_before = files_of(ws, D1)
    (tmp_path / f"in/{D1}.jsonl").unlink()
    # The day itself, too: nothing is to be loaded, and its rows are read as the declaration has them.
    assert ingest(spec_of(1), ws, D1).manifest.rows["kept"] == ROWS
    assert files_of(ws, D1) == files_before
    assert types_of(spark, ws) == {name: both_types[0] for name, both_types in TYPES.items()}
    # A later day goes on from there.
    write(tmp_path, {f"in/{D2}.jsonl": body([row(n, D2) for n in range(3)], "")})
    assert ingest(spec_of(1), ws, D2).manifest.facts["days"] == [D2]
    assert files_of(ws, D1) == files_before


WORKFLOW = [
    {"columns": ["user_id", "item_id"], "ops": ["categorify"]},
    {"columns": ["sizes"], "ops": ["categorify", {"pad": {"length": 3}}]},
    {"columns": ["price", "paid"], "ops": ["fill_missing", "normalize"]},
    {"columns": ["weights"], "ops": [{"pad": {"length": 2}}]},
]


def test_features_by_arrow_and_by_spark(spark: SparkSession, tmp_path: Path) -> None:
    del spark
    first_day, second_day = [row(n, D1) for n in range(ROWS)], [row(n, D2) for n in range(ROWS)]
    write(tmp_path, {f"in/{D1}.jsonl": body(first_day, ""), f"in/{D2}.jsonl": body(second_day, "")})
    ws = Workspace(tmp_path)
    ingest(spec_of(0), ws, D1)
    # Of a version of narrower types, too.
    folders = {}
    for ds, day in ((D1, 1), (D2, 1)):
        ingest(spec_of(day), ws, ds)
        for engine in ("arrow", "spark"):
            features = {"workflow": WORKFLOW, "carried": ["event_id"], "engine": engine}
            manifest = build_features(spec_of(day, **features), ws, ds).manifest
            folder = dataset(ws, manifest)
            target = tmp_path / f"{ds}-{engine}"
            folder.rename(target)
            folders[ds, engine] = target
        assert_same_dataset(folders[ds, "arrow"], folders[ds, "spark"])
    rows = pd.concat([read(folders[D2, "arrow"], split) for split in ("train", "valid")])
    assert sorted(rows["event_id"]) == sorted(r["event_id"] for r in first_day + second_day)
    assert rows.groupby(rows.user_id).size().sort_values().tolist() == (
        pd.Series([r["user_id"] for r in first_day + second_day]).value_counts().sort_values().tolist()
    )


def test_rows_that_were_too_large_come_once(spark: SparkSession, tmp_path: Path) -> None:
    rows = [row(n, D1) for n in range(ROWS)]
    rows[7]["item_id"] = 70_000
    second_day = [row(n, D2) for n in range(ROWS)]
    write(tmp_path, {f"in/{D1}.jsonl": body(rows, ""), f"in/{D2}.jsonl": body(second_day, "")})
    ws = Workspace(tmp_path)
    assert ingest(spec_of(0), ws, D1).manifest.rows["quarantined"] == 1
    manifest = ingest(spec_of(1), ws, D2).manifest
    assert manifest.facts["days"] == [D1, D2]
    assert len(read_table(spark, ws, "quarantine")) == 0
    assert_rows(read_table(spark, ws), pd.concat([expected(rows, narrow=False), expected(second_day, narrow=False)]))


def test_rows_go_for_good_and_small_files_are_joined(spark: SparkSession, tmp_path: Path) -> None:
    first_day, second_day = [row(n, D1) for n in range(ROWS)], [row(n, D2) for n in range(ROWS)]
    write(tmp_path, {f"in/{D1}.jsonl": body(first_day, ""), f"in/{D2}.jsonl": body(second_day, "")})
    ws = Workspace(tmp_path)
    first = int(ingest(spec_of(0), ws, D1).manifest.outputs[0].version)
    ingest(spec_of(1), ws, D2)
    table = ws.events("reported")
    forgotten = pa.array([2, 2 + 2**35], pa.int64())

    def apply(rows: pa.Table) -> tuple[pa.Table, int]:
        remaining = rows.filter(pc.invert(pc.is_in(rows["user_id"].cast(pa.int64()), forgotten)))
        return remaining, rows.num_rows - remaining.num_rows

    rows = pd.concat([expected(first_day, narrow=True), expected(second_day, narrow=False)])
    assert (
        erase(table, Change(("user_id",), apply), "request", delete=True).rows
        == rows.user_id.isin([2, 2 + 2**35]).sum()
    )
    rest = rows[~rows.user_id.isin([2, 2 + 2**35])]
    assert_rows(read_table(spark, ws), rest)
    join_files(table, [None], 1 << 30, None)
    assert_rows(read_table(spark, ws), rest)
    # The narrow version is read without the person, and its features are made again in the wider types.
    assert first < (DeltaLog(table).version or 0)
    features = {"workflow": WORKFLOW, "carried": ["event_id"]}
    frames = []
    for engine in ("arrow", "spark"):
        folder = dataset(ws, build_features(spec_of(1, **features, engine=engine), ws, D2).manifest)
        frames.append(pd.concat([read(folder, split) for split in ("train", "valid")]))
    for frame in frames:
        assert sorted(frame.event_id) == sorted(rest.event_id)


@pytest.mark.parametrize(
    ("column", "type_", "table_type"),
    [
        ("user_id", "int", "bigint"),
        ("user_id", "double", "bigint"),
        ("price", "float", "double"),
        ("paid", "decimal(13,3)", "decimal(14,3)"),
        ("sizes", "array<int>", "array<bigint>"),
    ],
)
def test_another_type_is_refused(spark: SparkSession, tmp_path: Path, column: str, type_: str, table_type: str) -> None:
    del spark
    write(tmp_path, {f"in/{ds}.jsonl": body([row(n, D1) for n in range(3)], "") for ds in (D1, D2)})
    ws = Workspace(tmp_path)
    ingest(spec_of(1), ws, D1)
    version = DeltaLog(ws.events("reported")).version
    spec = spec_of(1)
    columns = tuple(c.model_copy(update={"type": type_}) if c.name == column else c for c in spec.table.columns)
    spec = spec.model_copy(update={"table": spec.table.model_copy(update={"columns": columns})})
    with pytest.raises(UserError) as refused:
        ingest(spec, ws, D2)
    assert f"declares '{column}' as {type_}, but" in str(refused.value)
    assert f"has '{column}' as {table_type}" in str(refused.value)
    assert "\n" not in str(refused.value)
    assert DeltaLog(ws.events("reported")).version == version


def test_a_day_that_is_refused_leaves_the_table_as_it_was(spark: SparkSession, tmp_path: Path) -> None:
    bad = [row(n, D2) | {"event_id": "x"} for n in range(ROWS)]
    write(tmp_path, {f"in/{D1}.jsonl": body([row(1, D1)], ""), f"in/{D2}.jsonl": body(bad, "")})
    ws = Workspace(tmp_path)
    ingest(spec_of(0), ws, D1)
    with pytest.raises(UserError, match="breaks 1 of its expectations"):
        ingest(spec_of(1), ws, D2)
    assert types_of(spark, ws) == {name: both_types[0] for name, both_types in TYPES.items()}


def test_what_the_log_says_of_the_change(tmp_path: Path) -> None:
    """Delta's protocol: the feature among readers' and writers', the property, and the types that were."""
    table = local(tmp_path / "t")
    fields = [
        {"name": "a", "type": "integer", "nullable": True, "metadata": {}},
        {
            "name": "b",
            "type": {"type": "array", "elementType": "float", "containsNull": True},
            "nullable": True,
            "metadata": {"comment": "x"},
        },
        {"name": "ds", "type": "string", "nullable": True, "metadata": {}},
    ]
    create_table(table, fields, ["ds"], configuration={})
    wider = [{**fields[0], "type": "long"}, {**fields[1], "type": {**fields[1]["type"], "elementType": "double"}}]  # type: ignore[dict-item]
    Transaction(table).widen(wider)
    Transaction(table).widen(wider)  # nothing is left to widen
    log = DeltaLog(table)
    assert log.version == 1
    actions = {kind: action[kind] for action in log.actions(1) for kind in action}
    assert actions["protocol"] == {
        "minReaderVersion": 3,
        "minWriterVersion": 7,
        "readerFeatures": ["typeWidening"],
        "writerFeatures": ["appendOnly", "invariants", "typeWidening"],
    }
    assert actions["metaData"]["configuration"] == {"delta.enableTypeWidening": "true"}
    a, b, ds = json.loads(actions["metaData"]["schemaString"])["fields"]
    assert a == {**wider[0], "metadata": {"delta.typeChanges": [{"toType": "long", "fromType": "integer"}]}}
    change = {"toType": "double", "fromType": "float", "fieldPath": "element"}
    assert b == {**wider[1], "metadata": {"comment": "x", "delta.typeChanges": [change]}}
    assert ds == fields[2]
    assert log.column_types() == {"a": "bigint", "b": "array<double>", "ds": "string"}
    assert log.column_types(0) == {"a": "int", "b": "array<float>", "ds": "string"}


def test_scores_follow_the_types_of_their_keys(spark: SparkSession, tmp_path: Path) -> None:
    table = local(tmp_path / "scores")
    schema = "user_id {0}, item_id {0}, rank int, score float, ds string"
    days = {D1: (spark.createDataFrame([(7, 9, 1, 0.5, D1)], schema.format("int")), "integer")}
    days[D2] = (spark.createDataFrame([(2**40, 2**41, 1, 0.25, D2)], schema.format("bigint")), "long")
    for ds, (frame, key) in days.items():
        context: Any = SimpleNamespace(ds=ds, key="k", fence=None)
        types = {"user_id": key, "item_id": key, "rank": "integer", "score": "float", "ds": "string"}
        check_table_columns(table, types, "its keys were others")
        write_day(frame, table, context, "score")
    stored = spark.read.format("delta").load(str(table)).orderBy("ds")
    assert dict(stored.dtypes)["item_id"] == "bigint"
    assert [tuple(r) for r in stored.collect()] == [(7, 9, 1, 0.5, D1), (2**40, 2**41, 1, 0.25, D2)]
    with pytest.raises(UserError, match=r"'user_id': 'bigint'.*its keys were others"):
        check_table_columns(table, {**types, "user_id": "integer"}, "its keys were others")
