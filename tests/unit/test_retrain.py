"""The section retrain: weights of days, what a warm start changes, and keys that stay."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from headrace.comm.base import run_ranks
from headrace.config import Retrain, Spec, build_spec
from headrace.config.schema import MICROSECONDS, DatasetSchema, Feature, Kind
from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.stage.manifest import Manifest
from headrace.train.carried_columns import DayDecay, SampleWeights
from headrace.train.loop.run import train
from headrace.train.stage import Train
from tests.train_support import TRAIN, assert_same_weights, job_of

_DAY = 86_400_000_000
_DECAY = DayDecay(column="ts", half_life_days=2, last_day="2026-01-09", days=4)
_TIME = Feature(name="ts", kind=Kind.CARRIED, dtype="int64", metadata={"unit": MICROSECONDS})
_WEIGHT = Feature(name="w", kind=Kind.CARRIED, dtype="float32")


def micros(text: str) -> int:
    return int(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp() * 1_000_000)


def spec_of(**sections: Any) -> Spec:
    table = {"columns": [{"name": "click", "type": "int"}, {"name": "ts", "type": "timestamp"}], "event_time": "ts"}
    features = {"label": "click", "workflow": [], "split": {"by": "time"}, "window_days": 4, "carried": ["ts"]}
    return build_spec(
        {"pipeline": "clicks", "source": {"format": "clicks", "path": "{ds}"}, "table": table, "features": features}
        | sections
    )


def test_a_row_counts_by_the_age_of_its_day() -> None:
    times = [
        "2026-01-09T23:59:59.999999",
        "2026-01-09T00:00",
        "2026-01-08T12:00",
        "2026-01-06T00:00",
        "2025-12-01T07:00",
    ]
    weights = _DECAY.weights(np.array([micros(t) for t in times]))
    mean = sum(2.0 ** (-age / 2) for age in range(4)) / 4
    np.testing.assert_allclose(weights, [2.0 ** (-age / 2) / mean for age in (0, 0, 1, 3, 3)], rtol=1e-6)
    evenly = _DECAY.weights(micros("2026-01-06T00:00") + np.arange(0, 4 * _DAY, _DAY // 24))
    assert float(evenly.mean()) == pytest.approx(1, rel=1e-6)


def test_weights_of_days_and_of_rows_multiply() -> None:
    schema = DatasetSchema(features=(_TIME, _WEIGHT))
    weighted = TRAIN.model_copy(update={"sample_weight": "w"})
    rows = {"ts": np.array([micros("2026-01-09"), micros("2026-01-07")]), "w": np.array([3.0, 5.0])}
    combined = SampleWeights(weighted, schema, _DECAY)
    assert combined.carried == ("w", "ts")
    np.testing.assert_allclose(combined.weights(rows), _DECAY.weights(rows["ts"]) * [3, 5], rtol=1e-6)
    assert SampleWeights(TRAIN, schema).carried == ()
    assert SampleWeights(TRAIN, schema).weights(rows) is None
    with pytest.raises(UserError, match="rows of a batch have no ts"):
        SampleWeights(TRAIN, schema, _DECAY).weights({"ts": np.array([1.0, np.nan])})
    with pytest.raises(UserError, match="'ts' is no carried column of timestamps"):
        SampleWeights(TRAIN, DatasetSchema(features=(_WEIGHT,)), _DECAY)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    return Workspace(tmp_path_factory.mktemp("retrain"))


def timed(
    home: Workspace, manifest: Manifest, values: Callable[[int], np.ndarray], kind: Mapping[str, Any]
) -> Manifest:
    """The column `query` of the training rows, replaced."""
    for path in sorted((home.locate(manifest.output("dataset").name).local_path() / "train").glob("*.parquet")):
        table = pd.read_parquet(path)
        frame = pa.Table.from_pandas(table.assign(query=values(len(table))), preserve_index=False)
        pa.parquet.write_table(frame, path, row_group_size=125, compression="none")
    schema = manifest.dataset_schema
    assert schema is not None
    features = tuple(f.model_copy(update=kind) if f.name == "query" else f for f in schema.features)
    return manifest.model_copy(update={"dataset_schema": DatasetSchema(features=features)})


def test_training_with_decay_is_training_with_weights(home: Workspace, make_dataset: Callable[..., Manifest]) -> None:
    decay = _DECAY.model_copy(update={"column": "query"})

    def times(n: int) -> np.ndarray:
        return micros("2026-01-06T05:00") + np.arange(n) % 4 * _DAY

    by_days = timed(
        home, make_dataset(home, train=1_000, valid=100, ds="2026-01-12"), times, {"metadata": {"unit": MICROSECONDS}}
    )
    by_rows = timed(
        home,
        make_dataset(home, train=1_000, valid=100, ds="2026-01-13"),
        lambda n: decay.weights(times(n)),
        {"dtype": "float32"},
    )
    once = TRAIN.model_copy(update={"epochs": 1})
    job = job_of(home, by_days, "decay", once, decay=decay)
    weighted = job_of(home, by_rows, "weights", once.model_copy(update={"sample_weight": "query"}))
    for trained_job in (job, weighted):
        run_ranks(2, lambda c, own_job=trained_job: train(own_job, c))
    assert_same_weights(job, weighted)
    assert job.config_fingerprint != job_of(home, by_days, "decay", once).config_fingerprint


def test_what_a_spec_asks_for() -> None:
    spec = spec_of(retrain={"half_life_days": 2, "warm": {"epochs": 1, "dense": {"learning_rate": 0.5}}})
    assert DayDecay.from_spec(spec, "2026-01-10") == _DECAY
    warm = spec.train_of_warm_start()
    assert (warm.epochs, warm.dense.learning_rate, warm.dense.kind) == (1, 0.5, "adam")
    assert (spec.train.epochs, warm.embeddings) == (3, spec.train.embeddings)
    assert DayDecay.from_spec(spec_of(retrain={}), "2026-01-10") is None
    assert "retrain" not in Train().spec_part(spec_of())
    # How a model is saved, and what else it is measured on, changes nothing in it.
    excluded = {"full_copy_days", "forgetting_day"}
    assert Train().spec_part(spec_of(retrain={}))["train"]["retrain"] == Retrain().model_dump(
        mode="json", exclude=excluded
    )


@pytest.mark.parametrize(
    ("retrain", "message"),
    [
        ({"half_life_days": 2, "x": 1}, "x"),
        ({"warm": {"epochs": 0}}, r"retrain.warm.epochs: .*greater than or equal to 1"),
        ({"warm": {"epoch": 1}}, r"retrain.warm.epoch"),
        ({"warm": {"warm_start": False}}, "'warm_start' is of all days"),
        ({"new_rows": "zero"}, "new_rows"),
    ],
)
def test_other_settings_are_refused(retrain: Mapping[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        spec_of(retrain=retrain)


def test_days_have_weights_where_they_are_known() -> None:
    features = {"label": "click", "workflow": [], "split": {"by": "time"}}
    with pytest.raises(UserError, match=r"retrain.half_life_days .*features.carried"):
        spec_of(retrain={"half_life_days": 2}, features=features)
