"""The stage from the lake's files, from files that Spark writes, and by the Spark engine: equal datasets and facts."""

from __future__ import annotations

from contextlib import nullcontext
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from headrace.config import Spec, build_spec
from headrace.config.workspace import Workspace
from headrace.features.arrow import fit
from headrace.features.arrow.decode import LakeFile
from headrace.features.arrow.scan import LakeRows
from headrace.features.build import run
from headrace.features.build.stage import BuildFeatures
from headrace.features.table_ops.preparation import row_preparation
from headrace.features.vocabulary.keyed_tables import FileKeyedTable
from headrace.features.workflow.fitted import FittedWorkflow
from headrace.quality.drift.count_day import count_day
from headrace.stage import run_stage
from tests.spark.test_features_stage import (
    DS,
    SNAPSHOT,
    assert_same_dataset,
    clicks,
    dataset,
    digests,
    land,
    make_clicks,
    make_snapshot,
    read,
    snapshot,
)
from tests.tables_support import commit_delta

#: Beside what the pipelines have: what is not value by value, what is out of fold, what looks at several columns.
FURTHER = [
    {"columns": ["device", "hour"], "ops": [{"hashed_cross": {"buckets": 50}}]},
    {"columns": ["item_category"], "ops": [{"target_encoding": {"folds": 3}}]},
    {
        "columns": ["item_id", "item_price"],
        "ops": [{"join_groupby": {"by": "item_id", "stats": ["count", "mean", "std", "min"]}}],
    },
    {"columns": ["user_country"], "ops": ["value_count", "normalize"]},
    # One vocabulary, to which the chains come in different turns.
    {"columns": ["user_id"], "ops": ["value_count", {"categorify": {"vocabulary": "numbers", "min_count": 5}}]},
    {
        "columns": ["hour"],
        "ops": [{"categorify": {"vocabulary": "numbers", "min_count": 5}}, {"rename": {"suffix": "_shared"}}],
    },
    {"columns": ["user_id", "device"], "ops": ["raw_id", {"rename": {"suffix": "_raw"}}]},
    {"columns": ["item_tags"], "ops": ["raw_id", {"pad": {"length": 3}}, {"rename": {"suffix": "_raw"}}]},
    {
        "columns": ["item_tags"],
        "ops": [
            {"hash_bucket": {"buckets": 3}},
            {"pad": {"length": 2, "keep": "last"}},
            {"rename": {"suffix": "_new"}},
        ],
    },
]
#: Operators on a row alone, which the Arrow engine applies to the files, and Spark to a frame.
PREPARE: list[dict[str, Any]] = [
    {"filter": {"where": "not (device = 'phone' and item_price > 2000) or user_country is null"}},
    {"dropna": {"subset": ["user_age", "user_country"], "how": "all"}},
    {
        "lambda": {
            "add": {
                "paid": {"expression": "coalesce(item_price, 0.0) / 2 - item_age_days * 0.1", "type": "float"},
                "young": {
                    "expression": "case when user_age < 18 then 'yes' when user_age >= 18 then 'no' end",
                    "type": "string",
                },
            }
        }
    },
    {"rename": {"to": {"young": "minor", "paid": "spent"}}},
]
PREPARED = [{"columns": ["spent"], "ops": ["fill_missing", "normalize"]}, {"columns": ["minor"], "ops": ["categorify"]}]


def both(ws: Workspace, spec: Spec, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """Manifests of the stage from the lake's files, and from those that Spark writes of the rows."""
    first_run = run_stage(BuildFeatures(count_day), spec, ws, DS).manifest
    first = digests(dataset(ws, first_run))
    assert list(ws.encoded(spec.pipeline).local_path().glob("*/*/0.arrow"))
    monkeypatch.setattr(run, "pinned_files", lambda *_: nullcontext())
    ws.manifest(spec.pipeline, DS, "features").remove()
    scanned = files_scanned(monkeypatch)
    two = run_stage(BuildFeatures(count_day), spec, ws, DS).manifest
    assert scanned
    assert all(file.columns for file in scanned)
    assert not list((ws.spark_local / "features").files())
    assert digests(dataset(ws, two)) == first
    return first_run, two


def test_by_time(spark: SparkSession, ws: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    data = clicks().model_dump(mode="json", by_alias=True, exclude_none=True)
    data["features"]["workflow"] += [*FURTHER, *PREPARED]
    data["features"]["prepare"] = PREPARE
    data["features"]["split"]["test_days"] = 1
    spec = build_spec(data)
    assert row_preparation(spec) is not None
    # Several files a day, days of which no row is seen, rows that landed a day late.
    land(spark, ws, spec, make_clicks(1200, days=6), partitions=2)
    first_run, two = both(ws, spec, monkeypatch)
    assert first_run.facts == two.facts
    assert first_run.rows == two.rows
    assert first_run.dataset_schema == two.dataset_schema
    ranges = [first_run.facts[f"{split}_range"] for split in ("train", "valid", "test")]
    assert ranges == [["2026-01-01", "2026-01-03"], ["2026-01-04"] * 2, ["2026-01-05"] * 2]
    assert {split for split, rows in first_run.rows.items() if rows} == {"train", "valid", "test"}
    monkeypatch.undo()
    # Of keys with more text than an array holds Spark merges the statistics, and the next turn maps their tables.
    first, merged_by_key, requested = digests(dataset(ws, first_run)), fit.merged_by_key, list[str]()

    def watched(*args: Any) -> Any:
        requested.extend(name for _, _, name in args[3].statistics)
        return merged_by_key(*args)

    def refused(table: FileKeyedTable) -> pa.Table:
        raise AssertionError(f"{table.path} is read whole")

    with monkeypatch.context() as patch:
        patch.setattr(FileKeyedTable, "table", property(refused))
        patch.setattr(fit, "MOST_TEXT", 0)
        patch.setattr(fit, "merged_by_key", watched)
        ws.manifest(spec.pipeline, DS, "features").remove()
        rerun = run_stage(BuildFeatures(count_day), spec, ws, DS).manifest
    assert digests(dataset(ws, rerun)) == first
    assert sorted(requested) == ["groups", "item_category_te", "user_country", "user_id"]
    # And by the Spark engine, whose lists are not padded either.
    data["features"]["engine"] = "spark"
    three = run_stage(BuildFeatures(count_day), build_spec(data), ws, DS).manifest
    assert_same_dataset(dataset(ws, three), dataset(ws, first_run))
    assert three.facts == first_run.facts


def test_by_position_and_column(spark: SparkSession, ws: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    events = make_snapshot(("train", "valid", "test", "rank"))
    for spec in (snapshot(), snapshot(split={"by": "column", "column": "part"})):
        with monkeypatch.context() as patch:
            land(spark, ws, spec, events)
            first_run, two = both(ws, spec, patch)
            assert first_run.facts == two.facts
            assert first_run.rows == two.rows


def test_rows_that_spark_prepared(spark: SparkSession, ws: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark's table operators leave files, with numbers for names; the dataset of them is the Spark engine's."""
    keys = pa.table({"user_id": [1, 2, 3, 5], "user": [1, 2, 3, 5], "maker; of {it}": list("abca")})
    commit_delta(ws.home / "tables" / "makers", keys)
    maker = {"columns": ["maker; of {it}"], "ops": ["categorify", {"rename": {"suffix": "_made"}}]}

    def joined(key: str) -> dict[str, Any]:
        return {"join_external": {"path": "tables/makers", "keys": [key], "add": {"maker; of {it}": "string"}}}

    by_time = clicks().model_dump(mode="json", by_alias=True, exclude_none=True)
    past = {"history": {"keys": ["user_id"], "values": ["item_id"], "length": 3}}
    by_time["features"]["prepare"] = [*PREPARE, joined("user_id"), past]
    histories = {"columns": ["item_id_history"], "ops": ["categorify", {"pad": {"length": 3}}]}
    by_time["features"]["workflow"] += [*FURTHER, *PREPARED, maker, histories]
    features = {"prepare": [joined("user")], "workflow": [*SNAPSHOT["features"]["workflow"], maker]}
    by_position, by_column = snapshot(**features), snapshot(**features, split={"by": "column", "column": "part"})
    events = make_snapshot(("train", "valid", "test", "rank"))
    for spec, rows in ((build_spec(by_time), make_clicks(1200, days=6)), (by_position, events), (by_column, events)):
        assert row_preparation(spec) is None
        land(spark, ws, spec, rows)
        with monkeypatch.context() as patch:
            scanned = files_scanned(patch)
            of_files = run_stage(BuildFeatures(count_day), spec, ws, DS).manifest
        assert scanned
        assert all(file.columns for file in scanned)
        assert not list((ws.spark_local / "prepared").files())
        fields = spec.model_dump(mode="json", by_alias=True, exclude_none=True)
        fields["features"]["engine"] = "spark"
        by_spark = run_stage(BuildFeatures(count_day), build_spec(fields), ws, DS).manifest
        assert_same_dataset(dataset(ws, by_spark), dataset(ws, of_files))
        assert by_spark.facts == of_files.facts
        assert by_spark.rows == of_files.rows


def files_scanned(patch: pytest.MonkeyPatch) -> list[LakeFile]:
    """Return the list of the files that are scanned from now on."""
    scanned, scan = list[LakeFile](), LakeRows.scan

    def noted(rows: LakeRows, *args: Any) -> list[Any]:
        scanned.extend(rows.files)
        return scan(rows, *args)

    patch.setattr(LakeRows, "scan", noted)
    return scanned


TYPES: list[dict[str, Any]] = [
    {"name": "label", "type": "tinyint"},
    {"name": "price", "type": "decimal(10,2)"},
    {"name": "ladder", "type": "decimal(4,1)"},
    {"name": "age", "type": "smallint"},
    {"name": "local", "type": "timestamp_ntz"},
    {"name": "day", "type": "date"},
    {"name": "blob", "type": "binary"},
]


def test_types_that_features_see_as_others(spark: SparkSession, ws: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Declared types that features have no operators for are read from files, and by the Spark engine."""
    n = 40
    events = pd.DataFrame(
        {
            "label": [i % 2 for i in range(n)],
            "price": [None if i % 9 == 5 else Decimal(i * 1037 - 9000).scaleb(-2) for i in range(n)],
            "ladder": [Decimal(i % 4 * 5).scaleb(-1) for i in range(n)],
            "age": [i % 7 - 3 for i in range(n)],
            "local": pd.Series(
                [None if i % 13 == 5 else datetime(2026, 1, 1, i % 24, 30, 0, i, tzinfo=UTC) for i in range(n)],
                dtype=object,
            ),
            "day": [date(2026, 1, 1 + i % 20) for i in range(n)],
            "blob": [f"{i % 5:064x}" for i in range(n)],
            "_source_file": ["in/a.csv"] * n,
            "_source_line": range(n),
            "ds": ["2026-01-03"] * n,
        }
    )
    features = SNAPSHOT["features"] | {
        "label": "label",
        "carried": ["age", "local"],
        "workflow": [
            {"columns": ["price"], "ops": [{"fill_missing": {"value": -1}}]},
            {"columns": ["ladder", "blob"], "ops": ["categorify"]},
            {"columns": ["age"], "ops": []},
            {"columns": ["local"], "ops": [{"cyclic": {"of": "hour"}}]},
            {"columns": ["day"], "ops": [{"cyclic": {"of": "weekday"}}]},
        ],
    }
    data = SNAPSHOT | {"table": {"columns": TYPES}, "features": features}
    spec = build_spec(data)
    land(spark, ws, spec, events)
    first_run, two = both(ws, spec, monkeypatch)
    assert first_run.facts == two.facts
    monkeypatch.undo()
    rows = pd.concat([read(dataset(ws, first_run), split) for split in ("train", "valid")])
    assert sorted(rows["price"]) == sorted(-1.0 if p is None else np.float32(float(p)) for p in events["price"])
    assert sorted(rows["age"]) == sorted(events["age"])
    # A timestamp is carried as its microseconds.
    micros = [int(v.timestamp()) * 1_000_000 + v.microsecond for v in events["local"].dropna()]
    assert sorted(rows["local"].dropna().astype("int64")) == sorted(micros)
    assert rows["local"].isna().sum() == n - len(micros) > 0
    schema = first_run.dataset_schema
    assert schema is not None
    assert [f.name for f in schema.features if f.is_timestamp] == ["local"]
    fitted = FittedWorkflow.load(ws.locate(first_run.output("dataset").name) / "workflow")
    # A decimal as a category is its text, with all digits of its scale.
    assert sorted(fitted.vocabularies["ladder"].table.column("value").to_pylist()) == ["0.0", "0.5", "1.0", "1.5"]

    # Table operators compare and sum decimals as doubles; and the other engine's dataset is the same.
    features["prepare"] = [
        {"filter": {"where": "price < 200 and age is not null"}},
        {"lambda": {"add": {"cheap": {"expression": "price < 10", "type": "tinyint"}}}},
    ]
    features["workflow"].append({"columns": ["cheap"], "ops": []})
    three = run_stage(BuildFeatures(count_day), build_spec(data), ws, DS).manifest
    features["engine"] = "spark"
    four = run_stage(BuildFeatures(count_day), build_spec(data), ws, DS).manifest
    assert three.rows == four.rows
    assert sum(three.rows.values()) == sum(p is not None and p < 200 for p in events["price"])
    assert_same_dataset(dataset(ws, four), dataset(ws, three))
    assert three.facts == four.facts
