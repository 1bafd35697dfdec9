"""Settings of the baseline under XGBoost's names; no Spark session."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from headrace.config import Baseline, load_spec
from headrace.config.schema import DatasetSchema, Feature, Kind
from headrace.errors import UserError
from headrace.storage import local
from headrace.train.baseline.stage import TrainBaseline
from headrace.train.baseline.xgboost_spark import (
    RowGroupSample,
    TreeInputs,
    _number_lists,
    check_lists,
    estimator_parameters,
)

SCHEMA = DatasetSchema(
    features=(
        Feature(name="age", kind=Kind.CONTINUOUS, dtype="float32"),
        Feature(name="city", kind=Kind.CATEGORICAL, dtype="int32", cardinality=50),
        Feature(name="user", kind=Kind.CATEGORICAL, dtype="int32", cardinality=5000),
        Feature(name="tags", kind=Kind.CATEGORICAL, dtype="int32", cardinality=9, is_list=True, length=2),
        Feature(name="click", kind=Kind.LABEL, dtype="float32"),
    )
)


def parameters_of(device: str = "cpu", **settings: Any) -> dict[str, Any]:
    parameters = estimator_parameters(TreeInputs(SCHEMA), Baseline(**settings), seed=3, k=7, device=device, workers=2)
    assert np.isnan(parameters.pop("missing"))
    return parameters


def test_defaults_tell_xgboost_what_they_always_did() -> None:
    usual = {
        "features_col": ["f0", "f1", "f2", "f3", "f4"],
        "label_col": "label",
        "num_workers": 2,
        "n_estimators": 60,
        "max_depth": 6,
        "learning_rate": 0.2,
        "tree_method": "hist",
        "random_state": 3,
        "eval_metric": "logloss",
        "verbose": False,
    }
    assert parameters_of() == usual
    assert parameters_of("cuda") == {**usual, "device": "cuda"}


def test_settings_are_told_under_xgboosts_names() -> None:
    parameters = parameters_of(
        objective="ranking",
        early_stopping_rounds=4,
        subsample=0.5,
        max_depth=0,
        max_leaves=31,
        grow_policy="lossguide",
        enable_categorical=True,
        max_cat_to_onehot=8,
    )
    assert parameters["qid_col"] == "list"
    assert (parameters["objective"], parameters["eval_metric"]) == ("rank:ndcg", "ndcg@7")
    assert (parameters["early_stopping_rounds"], parameters["validation_indicator_col"]) == (4, "valid")
    assert (parameters["subsample"], parameters["max_leaves"], parameters["grow_policy"]) == (0.5, 31, "lossguide")
    # 5,000 users are more than max_categories: a histogram has a bin for each.
    assert parameters["feature_types"] == ["q", "c", "q", "c", "c"]
    assert parameters["max_cat_to_onehot"] == 8
    assert parameters_of(objective="regression")["eval_metric"] == "rmse"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"group": "query"}, "goes with `objective: ranking`"),
        ({"objective": "ranking", "scale_pos_weight": 2}, "goes with `objective: classification`"),
        ({"max_depth": 0}, "set `max_leaves`"),
    ],
)
def test_settings_that_do_not_agree(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Baseline(**settings)


def test_columns_and_what_a_warehouse_takes() -> None:
    with pytest.raises(UserError, match=r"baseline\.label: 'dwell' must be in features\.carried"):
        load_spec("clicks", ["baseline.label=dwell"])
    with pytest.raises(UserError, match=r"name the carried column of its lists"):
        load_spec("clicks", ["baseline.objective=ranking", "score.model=neural"])
    with pytest.raises(UserError, match=r"baseline\.objective is 'classification': set it to 'regression'"):
        load_spec("criteo", ["features.label_type=number", "model={class: deepfm, loss: squared_error}"])
    other_label = ["features.carried=[event_id, hour]", "baseline.label=hour"]
    with pytest.raises(UserError, match=r"score\.model is 'best', but the baseline learns 'hour'"):
        load_spec("clicks", [*other_label, "score.model=best"])
    assert load_spec("clicks", [*other_label, "score.model=neural"]).baseline is not None
    with pytest.raises(UserError, match="publish takes probabilities"):
        load_spec("clicks", ["baseline.objective=regression", "score.model=best"])


def test_trees_are_made_anew_by_their_settings_and_what_is_measured() -> None:
    spec = load_spec("criteo")
    assert spec.baseline is not None
    part = TrainBaseline().spec_part(spec)
    assert part == {
        "baseline": spec.baseline.model_dump(mode="json"),
        "seed": 1,
        "sample_weight": None,
        "rank_group": None,
        "rank_k": 10,
        "evaluation": spec.train.evaluation.model_dump(mode="json"),
    }
    changed = TrainBaseline().spec_part(load_spec("criteo", ["baseline.subsample=0.5"]))
    assert changed["baseline"] == {**part["baseline"], "subsample": 0.5}


def test_weights_of_samples_are_told_and_part_of_the_key() -> None:
    parameters = estimator_parameters(
        TreeInputs(SCHEMA), Baseline(), seed=3, k=7, device="cpu", workers=2, weighted=True
    )
    assert parameters["weight_col"] == "weight"
    carried = ["features.carried=[user_id]", "train.sample_weight=user_id"]
    weighted = TrainBaseline().spec_part(load_spec("clicks", carried))
    assert weighted["sample_weight"] == "user_id"
    assert weighted | {"sample_weight": None} == TrainBaseline().spec_part(load_spec("clicks", carried[:1]))
    # For ranking a weight is a list's, and rows have none.
    ranking = ["baseline.objective=ranking", "baseline.group=user_id", "score.model=neural"]
    assert TrainBaseline().spec_part(load_spec("clicks", [*carried, *ranking]))["sample_weight"] is None


def test_lists_are_numbered_across_batches() -> None:
    ids = [[-9, -9, 4], [4], [], [4, 2**62], [2**62, 2**62 + 1]]
    batches = [pa.record_batch([pa.array(i, pa.int64()), pa.array(i, pa.int64())], names=["row", "list"]) for i in ids]
    numbered = list(_number_lists(batches))
    assert [b["list"].to_pylist() for b in numbered] == [[0, 0, 1], [1], [1, 2], [2, 3]]
    assert [b["row"].to_pylist() for b in numbered] == [i for i in ids if i]
    assert numbered[0].schema.field("list").type == pa.int32()


@pytest.mark.parametrize("statistics", [True, False])
def test_rows_without_a_list_are_refused(tmp_path: Path, statistics: bool) -> None:
    """Counted over all row groups, without rows that are not learned from; where there are none nothing is read."""
    groups = []
    for k, (users, labels) in enumerate([([1, None, 2, None], [0, 1, None, None]), ([3, 3, 4, 4], [1, 0, 1, 0])]):
        table = pa.table({"user_id__carried": pa.array(users, pa.int64()), "y": pa.array(labels, pa.int8())})
        pq.write_table(table, tmp_path / f"{k}.parquet", write_statistics=statistics)
        groups.append(RowGroupSample(local(tmp_path / f"{k}.parquet"), 0, k, 4, 4))
    check_lists(groups[1:], "y", "user_id__carried", "user_id", "baseline.group")
    with pytest.raises(
        UserError, match=r"^column 'user_id', by which baseline\.group makes lists, is null in 1 of 8 rows"
    ):
        check_lists(groups, "y", "user_id__carried", "user_id", "baseline.group")
