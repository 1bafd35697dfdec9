"""How rows are laid out in files and row groups."""

from __future__ import annotations

import math

import pytest

from headrace.config import load_spec
from headrace.features.split import time_ranges
from headrace.features.stage import engine_of
from headrace.features.writer import partition_keys, plan_files


@pytest.mark.parametrize("rows", [1, 5, 12, 13, 2_000, 60_000, 840_000, 45_000_000])
@pytest.mark.parametrize("group_rows", [100, 131_072])
def test_row_groups_are_enough_and_small_enough(rows: int, group_rows: int) -> None:
    plans = plan_files({"train": rows, "valid": 0}, group_rows, 12)
    assert all(p.split == "train" for p in plans)
    assert len({p.name for p in plans}) == len(plans)
    each = rows / len(plans)
    groups = sum(min(p.groups, math.ceil(each)) for p in plans)
    assert groups >= min(12, rows)
    assert all(each / p.groups <= group_rows for p in plans)
    # Not many more than needed, either.
    assert groups <= max(12 + len(plans), math.ceil(2.5 * rows / group_rows) + 1)


def test_splits_are_planned_alone() -> None:
    plans = plan_files({"train": 900, "valid": 90}, 100, 4)
    assert [(p.name, p.groups) for p in plans if p.split == "valid"] == [("valid/part-00000.parquet", 4)]
    assert [p.name for p in plans if p.split == "train"] == [f"train/part-{i:05d}.parquet" for i in range(3)]


def test_each_partition_has_a_key() -> None:
    keys = partition_keys(50)
    assert len(set(keys)) == 50


def test_ranges_by_time() -> None:
    features = load_spec("clicks", ["features.window_days=14", "features.split.valid_days=2"]).features
    assert time_ranges(features, "2026-03-01") == (("2026-02-14", "2026-02-27"), ("2026-02-28", "2026-03-01"))


def test_engine_follows_the_profile() -> None:
    assert engine_of(load_spec("clicks")) == "arrow"
    assert engine_of(load_spec("clicks", ["spark.profile=gpu"])) == "spark"
    assert engine_of(load_spec("clicks", ["features.engine=spark"])) == "spark"
