"""Target encodings in the files of a dataset: no row of train has learned from its own label or those of its fold."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from pyspark.sql import SparkSession

from headrace.config import build_spec
from headrace.config.workspace import Workspace
from headrace.features.build.stage import BuildFeatures
from headrace.features.learn.statistics import folds_of
from headrace.quality.drift.count_day import count_day
from headrace.stage import run_stage
from headrace.udfs.arrow import xxhash64_integers, xxhash64_strings
from tests.spark.test_features_stage import DS, clicks, dataset, land, make_clicks, read


def test_the_written_dataset_is_out_of_fold(spark: SparkSession, ws: Workspace) -> None:
    """Train, in the files, is without the own fold, valid has all of train, and no label of valid is anywhere."""
    spec = clicks().model_dump(mode="json", by_alias=True, exclude_none=True)
    spec["features"]["workflow"] = [
        {"columns": ["item_category"], "ops": [{"target_encoding": {"folds": 3, "smoothing": 4}}]}
    ]
    events = make_clicks(600)
    land(spark, ws, build_spec(spec), events)
    folder = dataset(ws, run_stage(BuildFeatures(count_day), build_spec(spec), ws, DS).manifest)
    lines = events["_source_line"].to_numpy(np.int64)
    hashes = xxhash64_integers(lines, xxhash64_strings(pa.array(events["_source_file"])))
    events["fold"] = folds_of(hashes, 3)
    train = read(folder, "train").merge(events, on="event_id", suffixes=("", "_raw"))
    valid = read(folder, "valid").merge(events, on="event_id", suffixes=("", "_raw"))
    assert len(train) > 200
    assert len(valid) > 50

    def expected(row: Any, other_folds: pd.DataFrame) -> float:
        same_category = other_folds[other_folds["item_category"] == row["item_category"]]["clicked"]
        return float((same_category.sum() + 4 * other_folds["clicked"].mean()) / (len(same_category) + 4))

    expected_means = [expected(row, train[train["fold"] != row["fold"]]) for _, row in train.iterrows()]
    np.testing.assert_allclose(train["item_category_te"], expected_means, rtol=1e-6)
    expected_means = [expected(row, train) for _, row in valid.iterrows()]
    np.testing.assert_allclose(valid["item_category_te"], expected_means, rtol=1e-6)
