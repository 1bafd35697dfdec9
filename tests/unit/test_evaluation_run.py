"""Evaluation over ranks: its runs, and columns that grow with the rows."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from sklearn import metrics as reference

from headrace.comm.base import run_ranks
from headrace.config import Evaluation, Train
from headrace.config.schema import DatasetSchema, Feature, Kind
from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.models.predictor import load_predictor
from headrace.stage.manifest import Manifest, fingerprint
from headrace.train.evaluation.predict import GrowingColumn
from headrace.train.evaluation.ranks import Ranks
from headrace.train.evaluation.request import OTHER_VALUES, Request, carried_ids, make_dimension, slice_values
from headrace.train.job import Job, TrainingReport
from headrace.train.loop.run import train, train_local
from tests.train_support import TRAIN, job_of, read_padded

SETTINGS = {
    "metrics": [
        *("pr_auc", "normalized_entropy", "calibration_error", "gauc", "user_auc"),
        *("recall_at_k", "mrr_at_k", "map_at_k"),
        *("popularity_at_k", "popularity_lift_at_k", "novelty_at_k", "coverage_at_k"),
    ],
    "user": "query",
    "item": "item",
    "slices": {
        "third": "case when row < 1000300 then 'first' when row < 1000600 then 'second' else 'third' end",
        "odd": "row = 1000001",
        "new_user": {"seen": "user"},
    },
    "bootstrap": {"replicates": 20, "seed": 5},
    "off_policy": {"propensity": "propensity", "action": "item", "temperature": 0.7},
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    return Workspace(tmp_path_factory.mktemp("evaluation"))


@pytest.fixture(scope="module")
def features(home: Workspace, make_dataset: Callable[..., Manifest]) -> Manifest:
    """Make a dataset with users that only valid has, a user's rows in `query`, drawn actions, and a split `test`."""
    manifest = make_dataset(home, train=400, valid=900, rank=40, users=800, groups=16)
    folder = home.locate(manifest.output("dataset").name).local_path()
    for path in sorted([*(folder / "valid").glob("*.parquet"), *(folder / "rank").glob("*.parquet")]):
        table = pd.read_parquet(path)
        propensity = 0.01 + np.random.default_rng(0).random(len(table))
        table["propensity"] = propensity / 1.01
        if path.parent.name == "valid":
            table["query"] = table["user"].astype(np.int64)
        table.to_parquet(path)
    shutil.copytree(folder / "valid", folder / "test")
    assert manifest.dataset_schema is not None
    drawn = Feature(name="propensity", kind=Kind.CARRIED, dtype="float64")
    schema = DatasetSchema(features=(*manifest.dataset_schema.features, drawn))
    return manifest.model_copy(update={"dataset_schema": schema})


@pytest.fixture(scope="module")
def evaluated(home: Workspace, features: Manifest) -> tuple[Job, TrainingReport]:
    conf = TRAIN.model_copy(
        update={"epochs": 1, "rank_group": "query", "rank_k": 3, "evaluation": Evaluation.model_validate(SETTINGS)}
    )
    job = job_of(home, features, "evaluated", conf)
    return job, train_local(job)


def predicted(job: Job, split: str) -> pd.DataFrame:
    """Return the rows of a split with the saved model's probabilities."""
    assert job.features.dataset_schema is not None
    dataset = job.ws.locate(job.features.output("dataset").name).local_path()
    table = read_padded(sorted((dataset / split).glob("*.parquet")), job.features.dataset_schema)
    table["p"] = load_predictor(job.saved_model).predict({name: table[name].to_numpy() for name in table.columns})
    return table


def test_metrics_and_slices_are_those_of_the_saved_model(evaluated: tuple[Job, TrainingReport]) -> None:
    job, report = evaluated
    rows, evaluation = predicted(job, "valid"), report.evaluation["valid"]
    dataset = job.ws.locate(job.features.output("dataset").name).local_path()
    known_users = set(pd.concat([pd.read_parquet(f) for f in (dataset / "train").glob("*.parquet")])["user"])
    rows["third"] = np.select([rows["row"] < 1_000_300, rows["row"] < 1_000_600], ["first", "second"], "third")
    rows["odd"] = np.where(rows["row"] == 1_000_001, "true", "false")
    rows["new_user"] = np.where(rows["user"].isin(known_users), "known", "new")
    expected = {("", ""): rows} | {
        (name, str(value)): part for name in ("third", "odd", "new_user") for value, part in rows.groupby(name)
    }
    by_slice = {(s["slice"], s["value"]): s for s in evaluation["slices"]} | {("", ""): evaluation}
    assert by_slice.keys() == expected.keys()
    for key, part in expected.items():
        metrics, y = by_slice[key]["metrics"], part["click"].to_numpy()
        assert by_slice[key]["rows"] == len(part)
        if len(set(y)) == 1:
            assert metrics["auc"] is None
            continue
        assert metrics["auc"] == pytest.approx(reference.roc_auc_score(y, part["p"]), abs=1e-6)
        assert metrics["pr_auc"] == pytest.approx(reference.average_precision_score(y, part["p"]), abs=1e-6)
        assert metrics["log_loss"] == pytest.approx(reference.log_loss(y, part["p"].astype(float)), abs=1e-6)
        users = [u for _, u in part.groupby("user") if u["click"].nunique() == 2]
        areas = [reference.roc_auc_score(u["click"], u["p"]) for u in users]
        assert metrics["gauc"] == pytest.approx(np.average(areas, weights=[len(u) for u in users]), abs=1e-6)
    for name, (low, high) in evaluation["intervals"].items():
        assert low <= high, name
        assert low - 0.2 < evaluation["metrics"][name] < high + 0.2, name
    assert {"auc", "log_loss", "gauc"} <= evaluation["intervals"].keys()
    assert report.metrics["pr_auc"] == evaluation["metrics"]["pr_auc"]


def test_the_model_as_a_policy_has_the_value_of_plain_sums(evaluated: tuple[Job, TrainingReport]) -> None:
    job, report = evaluated
    rows = predicted(job, "valid")
    dataset = job.ws.locate(job.features.output("dataset").name).local_path()
    files = sorted((dataset / "valid").glob("*.parquet"))
    w_of_row = dict(pd.concat([pd.read_parquet(f, columns=["row", "propensity"]) for f in files]).to_numpy())
    training = pd.concat([pd.read_parquet(f) for f in (dataset / "train").glob("*.parquet")])
    actions = sorted(set(training["item"]) - {0, 1})
    predictor = load_predictor(job.saved_model)
    columns = {name: rows[name].to_numpy() for name in rows.columns if name not in ("p", "propensity")}
    p = np.stack(
        [predictor.predict({**columns, "item": np.full(len(rows), a, np.int32)}).astype(float) for a in actions], axis=1
    )
    odds = (p / (1 - p)) ** (1 / 0.7)
    share = odds / odds.sum(1, keepdims=True)
    logged = [share[i, actions.index(a)] if a in actions else 0.0 for i, a in enumerate(rows["item"])]
    w = np.array(logged) / np.array([w_of_row[r] for r in rows["row"]])
    y, expected = rows["click"].to_numpy(), (share * p).sum(1)
    values = {
        "ips": (w * y).mean(),
        "snips": (w * y).sum() / w.sum(),
        "dm": expected.mean(),
        "dr": (expected + w * (y - rows["p"])).mean(),
        "logged_value": y.mean(),
        "effective_sample_size": w.sum() ** 2 / (w * w).sum(),
    }
    evaluation = report.evaluation["valid"]
    assert {name: evaluation["metrics"][name] for name in values} == pytest.approx(values, rel=1e-4)
    assert values.keys() <= evaluation["intervals"].keys()
    new_users = next(s for s in evaluation["slices"] if (s["slice"], s["value"]) == ("new_user", "new"))
    assert new_users["metrics"]["ips"] is not None
    assert "ips" not in report.evaluation["rank"]["metrics"]


def test_the_split_test_is_evaluated_once_and_beside(evaluated: tuple[Job, TrainingReport]) -> None:
    _, report = evaluated
    assert report.evaluation["test"] == report.evaluation["valid"]
    assert report.rows == {"train": 400, "valid": 900, "test": 900, "rank": 400}


def test_lists_and_what_is_recommended(evaluated: tuple[Job, TrainingReport]) -> None:
    job, report = evaluated
    rows, metrics = predicted(job, "rank"), report.metrics
    dataset = job.ws.locate(job.features.output("dataset").name).local_path()
    training = pd.concat([pd.read_parquet(f) for f in (dataset / "train").glob("*.parquet")])
    popular = training[training["click"] == 1]["item"].value_counts()
    places = [int((g["p"] > g.loc[g["click"] == 1, "p"].item()).sum()) for _, g in rows.groupby("query")]
    assert metrics["mrr_at_k"] == pytest.approx(np.mean([1 / (p + 1) if p < 3 else 0 for p in places]))
    assert metrics["map_at_k"] == pytest.approx(metrics["mrr_at_k"])
    assert metrics["recall_at_k"] == metrics["hr_at_k"] == pytest.approx(np.mean([p < 3 for p in places]))
    recommended = rows.sort_values("p", ascending=False).groupby("query").head(3)
    counts = recommended["item"].map(popular).fillna(0)
    assert metrics["popularity_at_k"] == pytest.approx(counts.mean())
    assert metrics["novelty_at_k"] == pytest.approx(-np.log2(counts.clip(lower=1) / popular.sum()).mean())
    assert metrics["coverage_at_k"] == recommended["item"].nunique() / 38
    assert report.evaluation["rank"]["intervals"].keys() == report.evaluation["rank"]["metrics"].keys() - {
        "coverage_at_k"
    }


def test_two_ranks_report_the_same(home: Workspace, features: Manifest, evaluated: tuple[Job, TrainingReport]) -> None:
    """Both go on from the last checkpoint of one rank."""
    reports = []
    for ranks in (1, 2):
        job = job_of(home, features, f"again-{ranks}", evaluated[0].train)
        shutil.copytree(evaluated[0].checkpoints.local_path(), job.checkpoints.local_path())
        reports_by_rank = run_ranks(ranks, lambda collective, job=job: train(job, collective))
        assert all(r.evaluation == reports_by_rank[0].evaluation for r in reports_by_rank)
        reports.append(reports_by_rank[0])
    assert reports[0].resumed_from_step == evaluated[1].steps
    one_rank, two_ranks = (r.evaluation["valid"] for r in reports)
    assert one_rank == evaluated[1].evaluation["valid"]
    for name, value in one_rank["metrics"].items():
        # Logits of other batches differ in their last bits.
        assert two_ranks["metrics"][name] == pytest.approx(value, abs=1e-5), name
    for a, b in zip(one_rank["slices"], two_ranks["slices"], strict=True):
        assert (a["slice"], a["value"], a["rows"]) == (b["slice"], b["value"], b["rows"])


def test_without_anything_asked_nothing_is_said(home: Workspace, make_dataset: Callable[..., Manifest]) -> None:
    job = job_of(home, make_dataset(home, train=400, valid=50), "basic", TRAIN.model_copy(update={"epochs": 1}))
    report = train_local(job)
    assert report.evaluation == {}
    assert list(report.metrics) == ["auc", "log_loss", "calibration", "base_rate"]


CARRIED = DatasetSchema(
    features=(
        Feature(name="item", kind=Kind.CATEGORICAL, dtype="int32", cardinality=9),
        Feature(name="tags", kind=Kind.CATEGORICAL, dtype="int32", cardinality=9, is_list=True, length=2),
        Feature(name="country", kind=Kind.CARRIED, dtype="string"),
        Feature(name="age", kind=Kind.CARRIED, dtype="int64"),
        Feature(name="weight", kind=Kind.CARRIED, dtype="float64"),
        Feature(name="item__carried", kind=Kind.CARRIED, dtype="int64"),
    )
)


def test_a_column_that_is_a_feature_too_is_meant_by_its_own_name() -> None:
    request = Request(Train(evaluation=Evaluation.model_validate({"slices": {"s": "item > 5"}})), CARRIED)
    assert request.carried() == ["item__carried"]
    values = slice_values(request.expressions["s"], {"item__carried": np.array([3, 9])}, CARRIED)
    assert values.tolist() == ["false", "true"]


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["DE", "FR", "", "ü"]) | st.none(), st.integers(0, 9) | st.none()), max_size=40),
    st.integers(1, 6),
)
def test_slices_are_the_most_frequent_values(drawn: list[tuple[str | None, int | None]], most: int) -> None:
    countries, ages = [np.array([r[i] for r in drawn], object) for i in range(2)]
    text = "case when age < 5 then concat_country else country end".replace("concat_country", "'young'")
    request = Request(Train(evaluation=Evaluation.model_validate({"slices": {"s": text}})), CARRIED)
    assert request.carried() == ["age", "country"]
    expected = ["young" if a is not None and a < 5 else "(null)" if c is None else c for c, a in drawn]
    counts = pd.Series(expected, dtype=object).value_counts()
    owner = np.random.default_rng(0).integers(0, 3, len(drawn))

    def of_rank(ranks: Ranks, is_local: np.ndarray) -> Any:
        carried = {"country": countries[is_local], "age": pd.Series(ages[is_local], dtype=float).to_numpy()}
        values = slice_values(request.expressions["s"], carried, CARRIED)
        assert values.tolist() == [e for e, m in zip(expected, is_local, strict=True) if m]
        return make_dimension(ranks, "s", values, most)

    dimension, codes = of_rank(Ranks(), np.ones(len(drawn), bool))
    frequent = [v for v in dimension.values if v != OTHER_VALUES]
    assert len(frequent) == min(most, len(counts))
    assert sorted((counts[v] for v in frequent), reverse=True) == counts.tolist()[:most]
    assert (OTHER_VALUES in dimension.values) == (len(counts) > most)
    assert [dimension.values[c] for c in codes] == [e if e in frequent else OTHER_VALUES for e in expected]
    for rank, (dimension_of_rank, is_local) in enumerate(
        run_ranks(3, lambda c: of_rank(Ranks(c), owner == c.world.rank))
    ):
        assert dimension_of_rank == dimension
        assert is_local.tolist() == codes[owner == rank].tolist()


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        (
            {"slices": {"s": "city"}},
            r"slices.s: 'city' is no expression over the carried columns \(country, age, weight, item",
        ),
        ({"slices": {"s": "country like 'D%'"}}, "is no expression"),
        ({"slices": {"s": {"seen": "tags"}}}, "slices.s.seen: 'tags' is no categorical feature with one code a row"),
        (
            {"off_policy": {"propensity": "country", "action": "item"}},
            r"off_policy.propensity: 'country' is no carried column of numbers; there are: age, weight, item$",
        ),
        (
            {"off_policy": {"propensity": "weight", "reward": "country", "action": "item"}},
            r"off_policy.reward: 'country' is no carried column of numbers",
        ),
        ({"item": "country"}, r"item: 'country' is no categorical feature .*; there are: item"),
    ],
)
def test_what_the_dataset_lacks_is_named(settings_: Mapping[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Request(Train(evaluation=Evaluation.model_validate(settings_)), CARRIED)


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        ({"metrics": ["gauc"]}, "gauc is of users"),
        ({"bootstrap": {}}, "bootstrap draws users"),
        ({"metrics": ["novelty_at_k"]}, "novelty_at_k is of items"),
        ({"metrics": ["auc_of_everything"]}, "pr_auc"),
        ({"slices": {"s": {}}}, "write an expression"),
        ({"metrics": ["map_at_k"]}, "map_at_k is of lists: set rank_group"),
    ],
)
def test_settings_that_lack_something_are_refused(settings_: Mapping[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Train.model_validate({"evaluation": settings_})


def test_rows_of_nobody_are_refused() -> None:
    ids = carried_ids(Ranks(), np.array(["a", "b", "a"], object), "country", CARRIED)
    assert ids[0] == ids[2] != ids[1]
    assert carried_ids(Ranks(), np.array([3, 4]), "age", CARRIED).tolist() == [3, 4]
    with pytest.raises(UserError, match="'age' is null in 1 rows"):
        carried_ids(Ranks(), np.array([3, math.nan]), "age", CARRIED)


def test_keys_follow_evaluation_and_precision() -> None:
    from headrace.config import build_spec
    from headrace.train.stage import Train as TrainStage

    minimal = {
        "pipeline": "clicks",
        "source": {"format": "clicks", "path": "{ds}"},
        "table": {"columns": [{"name": "click", "type": "int"}, {"name": "user"}]},
        "features": {"label": "click", "workflow": [], "split": {"by": "position"}, "carried": ["user"]},
    }
    plain = TrainStage().spec_part(build_spec(minimal))
    evaluated_spec = build_spec({**minimal, "train": {"evaluation": {"user": "user", "metrics": ["gauc"]}}})
    assert fingerprint(dict(TrainStage().spec_part(evaluated_spec))) != fingerprint(dict(plain))
    assert plain["train"]["precision"] != "bf16"
    assert (
        TrainStage().spec_part(build_spec({**minimal, "train": {"precision": "bf16"}}))["train"]["precision"] == "bf16"
    )
    policy = {"off_policy": {"propensity": "user", "action": "item"}}
    with pytest.raises(UserError, match=r"off_policy takes probabilities, and model\.loss squared_error predicts"):
        build_spec({**minimal, "model": {"loss": "squared_error"}, "train": {"evaluation": policy}})
    with pytest.raises(UserError, match=r"train.evaluation.user: 'nobody' must be in features.carried"):
        build_spec({**minimal, "train": {"evaluation": {"user": "nobody"}}})


BATCHES = st.lists(
    st.tuples(st.sampled_from(["f4", "i8", "U3", "U9", "O"]), st.integers(0, 50_000)), min_size=1, max_size=6
).filter(lambda drawn: len({kind[0] in "fi" for kind, _ in drawn if kind != "O"}) < 2)


@settings(max_examples=40, deadline=None)
@given(BATCHES)
def test_a_column_is_its_batches_one_behind_the_other(drawn: list[tuple[str, int]]) -> None:
    batches = [np.arange(i, i + rows).astype(kind) for i, (kind, rows) in enumerate(drawn)]
    column = GrowingColumn(np.float32)
    assert (len(column.array), column.array.dtype) == (0, np.float32)
    for batch in batches:
        column.add(batch)
    expected = np.concatenate(batches)
    assert column.array.dtype == expected.dtype
    assert np.array_equal(column.array, expected)


def test_memory_is_one_piece() -> None:
    column = GrowingColumn(np.float32)
    for _ in range(100):
        column.add(np.zeros(4_096, np.float32))
    held = column.array.base
    assert held is not None
    assert 409_600 <= len(held) <= 2 * 409_600
