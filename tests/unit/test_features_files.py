"""Layout of rows in files and row groups."""

from __future__ import annotations

import math

import numpy as np
import pytest

from headrace.config import load_spec
from headrace.errors import UserError
from headrace.features.layout.files import FilePlan, engine_of, plan_files, time_ranges
from headrace.lake.spark.exchange import partition_keys


@pytest.mark.parametrize("rows", [1, 5, 12, 13, 2_000, 60_000, 840_000, 45_000_000])
@pytest.mark.parametrize("group_rows", [100, 131_072])
def test_row_groups_are_enough_and_small_enough(rows: int, group_rows: int) -> None:
    plans = plan_files({"train": rows, "valid": 0}, group_rows, 12)
    assert all(p.split == "train" for p in plans)
    assert len({p.file(g) for p in plans for g in range(p.groups)}) == sum(p.groups for p in plans)
    each = rows / len(plans)
    groups = sum(min(p.groups, math.ceil(each)) for p in plans)
    assert groups >= min(12, rows)
    assert all(each / p.groups <= group_rows for p in plans)
    # Not many more than needed, either.
    assert groups <= max(12 + len(plans), math.ceil(2.5 * rows / group_rows) + 1)


def test_splits_are_planned_alone() -> None:
    plans = plan_files({"train": 900, "valid": 90}, 100, 4)
    assert [(p.file(1), p.groups) for p in plans if p.split == "valid"] == [("valid/part-00000-001.parquet", 4)]
    assert [p.file(0) for p in plans if p.split == "train"] == [f"train/part-{i:05d}-000.parquet" for i in range(3)]


@pytest.mark.parametrize("rows", [1, 3, 4, 99, 100, 401, 1_000])
def test_places_fall_evenly_into_files(rows: int) -> None:
    groups = FilePlan("train", 0, 4, 100).groups_of(rows)
    assert groups == min(max(4, math.ceil(rows / 100)), rows)
    by_edges = np.repeat(np.arange(groups), np.diff([rows * g // groups for g in range(groups + 1)]))
    # What the Spark engine's plan computes for place 1, 2, ...
    by_place = (np.arange(1, rows + 1) * groups - 1) // rows
    assert by_place.tolist() == by_edges.tolist()
    assert np.bincount(by_place).max() <= 100
    assert np.ptp(np.bincount(by_place)) <= 1


def test_each_partition_has_a_key() -> None:
    keys = partition_keys(50)
    assert len(set(keys)) == 50


def test_ranges_by_time() -> None:
    features = load_spec("clicks", ["features.window_days=14", "features.split.valid_days=2"]).features
    assert time_ranges(features, "2026-03-01") == (("2026-02-14", "2026-02-27"), ("2026-02-28", "2026-03-01"))
    tested = load_spec(
        "clicks", ["features.window_days=14", "features.split.valid_days=2", "features.split.test_days=3"]
    ).features
    assert time_ranges(tested, "2026-03-04") == time_ranges(features, "2026-03-01")
    assert tested.model_dump()["split"]["test_days"] == 3
    with pytest.raises(UserError, match="`test_days` goes with `by: time`"):
        load_spec("clicks", ["features.split.by=position", "features.split.test_days=1"])


def test_engine_follows_the_profile() -> None:
    assert engine_of(load_spec("clicks")) == "arrow"
    assert engine_of(load_spec("clicks", ["spark.profile=gpu"])) == "spark"
    assert engine_of(load_spec("clicks", ["features.engine=spark"])) == "spark"
