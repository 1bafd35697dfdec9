"""Rankings of all items against plain loops over users and items, on any number of ranks."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from headrace.comm.base import run_ranks
from headrace.compute.jagged import JaggedArray
from headrace.config import Evaluation, Model, Train
from headrace.config.schema import DatasetSchema
from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.models.predictor import load_predictor
from headrace.stage.manifest import Manifest
from headrace.train.evaluation import full_ranking
from headrace.train.evaluation.evaluate import Predictions
from headrace.train.evaluation.full_ranking import RelevantRows, RowsOfUsers, rank_all_items
from headrace.train.evaluation.ranking import LIST_METRICS, metrics_of_places, ranking_metrics
from headrace.train.evaluation.ranks import Dimension, Ranks
from headrace.train.job import Job, TrainingReport
from headrace.train.loop.run import train, train_local
from tests.evaluation_support import list_metrics
from tests.train_support import TRAIN, job_of, read_padded

#: Codes 0 (null) and 1 (unknown) are no items.
FIRST = 2
#: (user, item, order, which query, which excluded items)
ROWS = st.lists(
    st.tuples(st.integers(-2, 4), st.integers(1, 9), st.integers(0, 2), st.integers(0, 3), st.integers(0, 2)),
    max_size=25,
)
PAIRS = st.lists(st.tuples(st.integers(-2, 5), st.integers(0, 9)), max_size=20)
EXCLUDED = [[], [0, 1, 3], [4, 5, 6, 7, 8, 9]]


def rows_on(drawn: list[tuple[Any, ...]], positions: list[int], queries: np.ndarray) -> RelevantRows:
    """Return the rows of a rank, taken as they come."""
    representatives = RowsOfUsers()
    n = len(drawn)
    users, items = (np.array([r[i] for r in drawn], np.int64) for i in range(2))
    lists = [EXCLUDED[r[4]] for r in drawn]
    representatives.add(
        [
            users,
            np.array([r[2] for r in drawn], np.float64),
            np.array(positions, np.int64),
            np.arange(n),
            queries[np.array([r[3] for r in drawn], np.int64)],
        ],
        JaggedArray(np.cumsum([0, *map(len, lists)]), np.array([c for x in lists for c in x], np.int64)),
    )
    (user, order, position, row, vectors), excluded = representatives.take()
    empty = np.empty(0, np.float32)
    return RelevantRows(users, items, Predictions(empty, empty), user, order, position, row, vectors, excluded)


@settings(max_examples=60, deadline=None)
@given(ROWS, PAIRS, st.integers(1, 5), st.integers(0, 2**16), st.booleans())
def test_full_rankings_equal_sorting_all_items(
    drawn: list[Any], seen_pairs: list[Any], k: int, seed: int, in_groups: bool
) -> None:
    rng = np.random.default_rng(seed)
    # Whole numbers: dot products are exact, and many are equal.
    queries, items = rng.integers(-1, 2, (4, 3)).astype(np.float32), rng.integers(-1, 2, (10, 3)).astype(np.float32)

    def evaluate(ranks: Ranks, owner: np.ndarray) -> Any:
        local_rows = np.flatnonzero(owner == ranks.world.rank).tolist()
        part = rows_on([drawn[i] for i in local_rows], local_rows, queries)
        pairs = [p for i, p in enumerate(seen_pairs) if i % ranks.world.size == ranks.world.rank]
        parts = [tuple(np.array([p[i] for p in pairs[a::2]], np.int64) for i in range(2)) for a in range(2)]
        slices = [part.users % 2]
        lists = rank_all_items(ranks, part, slices, torch.from_numpy(items), FIRST, k, parts)
        tables = ranking_metrics(ranks, lists, k, dimensions=[Dimension("half", ("a", "b"))])
        ranked_items = {u: lists.items[lists.list == i].tolist() for i, u in enumerate(lists.ids.tolist())}
        places = {u: lists.hits.place[lists.hits.list == i].tolist() for i, u in enumerate(lists.ids.tolist())}
        return tables, ranked_items, places

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(full_ranking, "_GROUP", 2 if in_groups else 64)
        patch.setattr(full_ranking, "_BLOCK_ROWS", 2)
        alone = evaluate(Ranks(), np.zeros(len(drawn)))
        for size in (2, 3):
            owner = rng.integers(0, size, len(drawn))
            by_rank = run_ranks(size, lambda c, owner=owner: evaluate(Ranks(c), owner))
            for table, expected in zip(by_rank[0][0], alone[0], strict=True):
                for name in LIST_METRICS:
                    np.testing.assert_array_equal(table[name], expected[name])
            for i in (1, 2):
                assert {u: x for t in by_rank for u, x in t[i].items()} == alone[i]
    by_user: dict[int, Any] = {}
    for position, (user, item, order, query, excluded) in enumerate(drawn):
        by_user.setdefault(user, []).append((order, position, query, excluded, item))
    expected = {}
    for user, rows in by_user.items():
        _, _, query, excluded, _ = min(rows)
        left_out = {i for i in [*EXCLUDED[excluded], *(i for u, i in seen_pairs if u == user)] if i >= FIRST}
        relevant = {r[4] for r in rows} - left_out
        scores = items @ queries[query]
        ranked = [(-scores[i], i in relevant) for i in range(FIRST, 10) if i not in left_out]
        ranked = sorted(ranked) + [(math.inf, False)] * k + [(math.inf, True)] * len([i for i in relevant if i < FIRST])
        if relevant:
            expected[user] = list_metrics([(-place, hit) for place, (_, hit) in enumerate(ranked)], k)
            places = [p for p, (_, hit) in enumerate(ranked) if hit]
            assert [p for p in alone[2][user] if p < k] == [p for p in places if p < k]
            assert len(alone[2][user]) == len(places)
            best = [-s for s, _ in ranked[:k] if s < math.inf]
            assert [scores[i] for i in alone[1][user]] == best
            assert not set(alone[1][user]) & left_out
    assert alone[1].keys() == expected.keys()
    for table, column, chosen in ((alone[0][0], 0, {0, 1}), (alone[0][1], 0, {0}), (alone[0][1], 1, {1})):
        values = [m for user, m in expected.items() if user % 2 in chosen]
        for name in LIST_METRICS:
            mean = np.mean([v[name] for v in values]) if values else math.nan
            assert table[name][0, column] == pytest.approx(mean, rel=1e-12, nan_ok=True), name


def test_rows_that_stand_for_users_do_not_depend_on_when_others_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    user, order, position = rng.integers(0, 9, 500), rng.integers(0, 3, 500).astype(float), rng.permutation(500)
    columns_by_limit = []
    for waiting in (3, 10_000):
        monkeypatch.setattr("headrace.train.evaluation.full_ranking._WAITING", waiting)
        rows = RowsOfUsers()
        for start in range(0, 500, 7):
            part = slice(start, start + 7)
            n = len(user[part])
            lists = JaggedArray(np.arange(n + 1), position[part])
            rows.add([user[part], order[part], position[part], np.arange(n), np.zeros((n, 1), np.float32)], lists)
        columns, lists = rows.take()
        assert lists.values.tolist() == columns[2].tolist()
        columns_by_limit.append([c.tolist() for c in columns[:3]])
    frame = pd.DataFrame({"user": user, "order": order, "position": position}).sort_values(
        ["user", "order", "position"]
    )
    first = frame.groupby("user", as_index=False).first()
    assert columns_by_limit[0] == columns_by_limit[1] == [first[c].tolist() for c in ("user", "order", "position")]


def test_a_constant_model_gains_nothing() -> None:
    rows = rows_on([(0, 5, 0, 0, 0)], [0], np.zeros((4, 3), np.float32))
    lists = rank_all_items(Ranks(), rows, [], torch.zeros(10, 3), FIRST, 7)
    assert {float(v[0]) for v in metrics_of_places(lists.hits, 7).values()} == {0.0}
    (hit,) = metrics_of_places(rank_all_items(Ranks(), rows, [], torch.zeros(10, 3), FIRST, 8).hits, 8)["hr_at_k"]
    assert hit == 1


def test_vectors_that_are_not_finite_are_refused() -> None:
    def of_rank(ranks: Ranks) -> None:
        queries = np.full((4, 1), math.nan if ranks.world.rank else 1, np.float32)
        rank_all_items(ranks, rows_on([(0, 5, 0, 0, 0)], [0], queries), [], torch.ones(9, 1), FIRST, 3)

    with pytest.raises(UserError, match="not finite"):
        run_ranks(2, lambda c: of_rank(Ranks(c)))


FULL = {"k": [3, 10], "user": "query", "order_by": "row", "seen": ["train"], "splits": ["valid", "test"]}
SETTINGS = {
    "metrics": ["coverage_at_k", "novelty_at_k"],
    "item": "item",
    "user": "query",
    "slices": {"half": "case when query < 45 then 'low' else 'high' end"},
    "bootstrap": {"replicates": 10},
    "full_ranking": FULL,
}
TOWERS = Model.model_validate({"class": "tests.plugin_models:Towers", "embedding_dim": 4})


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    return Workspace(tmp_path_factory.mktemp("full_ranking"))


@pytest.fixture(scope="module")
def features(home: Workspace, make_dataset: Callable[..., Manifest]) -> Manifest:
    """Make a dataset with a user's rows in `query`, and a split `test`."""
    manifest = make_dataset(home, train=400, valid=300, users=90, groups=8)
    folder = home.locate(manifest.output("dataset").name).local_path()
    for path in sorted(folder.glob("*/*.parquet")):
        table = pd.read_parquet(path)
        table.assign(query=table["user"].astype(np.int64)).to_parquet(path, row_group_size=50)
    shutil.copytree(folder / "valid", folder / "test")
    return manifest


def run_of(home: Workspace, features: Manifest, key: str, **more: Any) -> Job:
    conf = TRAIN.model_copy(update={"epochs": 1, "evaluation": Evaluation.model_validate(SETTINGS), **more})
    return job_of(home, features, key, conf, model=TOWERS)


@pytest.fixture(scope="module")
def evaluated(home: Workspace, features: Manifest) -> tuple[Job, TrainingReport]:
    job = run_of(home, features, "evaluated")
    return job, train_local(job)


def test_a_trained_model_is_ranked_by_its_own_logits(evaluated: tuple[Job, TrainingReport]) -> None:
    """Each user's row with each item in turn, by the saved model's predictions."""
    job, report = evaluated
    schema = job.features.dataset_schema
    assert schema is not None
    dataset = job.ws.locate(job.features.output("dataset").name).local_path()
    training, valid = (read_padded(sorted((dataset / s).glob("*.parquet")), schema) for s in ("train", "valid"))
    newest = training.sort_values("row").groupby("item").last()
    of_items = ["tags__0", "tags__1", "tags__2", "price"]
    catalogue = newest[of_items].reindex(range(40)).fillna(0)
    predict = load_predictor(job.saved_model).predict
    metrics_by_slice: dict[str, list[Any]] = {"all": [], "low": [], "high": []}
    recommended = set()
    for user, rows in valid[valid["click"] == 1].groupby("query"):
        row = rows.sort_values("row").iloc[:1]
        pairs = row.loc[row.index.repeat(38)].reset_index(drop=True).assign(item=np.arange(2, 40, dtype=np.int32))
        for name in of_items:
            pairs[name] = catalogue.loc[2:, name].astype(training[name].dtype).to_numpy()
        seen = training[(training["query"] == user) & (training["click"] == 1)]["item"]
        relevant = set(rows["item"]) - set(seen)
        pairs["p"] = predict({name: pairs[name].to_numpy() for name in pairs.columns})
        pairs = pairs[~pairs["item"].isin(seen)]
        if relevant:
            ranked = [(p, i in relevant) for p, i in zip(pairs["p"], pairs["item"], strict=True)]
            values = {k: list_metrics(ranked, k) for k in (3, 10)}
            metrics_by_slice["all"].append(values)
            metrics_by_slice["low" if int(str(user)) < 45 else "high"].append(values)
            recommended |= set(pairs.sort_values("p", ascending=False)["item"][:3])
    full = report.evaluation["valid_full"]
    tables = {"all": full["metrics"]} | {s["value"]: s["metrics"] for s in full["slices"]}
    for slice_name, lists in metrics_by_slice.items():
        for k in (3, 10):
            for name in LIST_METRICS:
                expected = np.mean([x[k][name] for x in lists])
                assert tables[slice_name][full_ranking_name(name, k)] == pytest.approx(expected, abs=1e-9), (
                    slice_name,
                    name,
                )
    assert full["metrics"]["coverage_at_3_full"] == len(recommended) / 38
    assert report.metrics["ndcg_at_10_full"] == full["metrics"]["ndcg_at_10_full"]
    assert report.evaluation["test_full"] == full
    low, high = full["intervals"]["recall_at_10_full"]
    assert low <= full["metrics"]["recall_at_10_full"] <= high


def test_rows_are_lists_of_their_own_without_what_their_list_excludes(home: Workspace, features: Manifest) -> None:
    """Against all logits of the saved model's own vectors; the list feature has the item's codes."""
    assert features.dataset_schema is not None
    shared = {"tags": {"vocabulary": "item", "cardinality": 40}}
    schema = DatasetSchema(
        features=tuple(f.model_copy(update=shared.get(f.name, {})) for f in features.dataset_schema.features)
    )
    evaluation = Evaluation.model_validate({"full_ranking": {"k": 4, "exclude": "tags"}})
    args = {"item": "item", "user_features": ["user", "tags", "age"], "user_mlp": [6], "item_mlp": [6]}
    model = Model.model_validate({"class": "two_tower", "embedding_dim": 4, "args": args})
    conf = TRAIN.model_copy(update={"epochs": 1, "evaluation": evaluation})
    job = job_of(home, features.model_copy(update={"dataset_schema": schema}), "lists", conf, model=model)
    report = train_local(job)
    dataset = job.ws.locate(features.output("dataset").name).local_path()
    rows = read_padded(sorted((dataset / "valid").glob("*.parquet")), schema)
    rows = rows[rows["click"] == 1]
    tags = rows[["tags__0", "tags__1", "tags__2"]].to_numpy()
    predictor = load_predictor(job.saved_model)
    by_row = []
    for row, item in enumerate(rows["item"]):
        pairs = rows.iloc[[row] * 38].assign(item=np.arange(2, 40, dtype=np.int32))
        p = predictor.predict({name: pairs[name].to_numpy() for name in pairs.columns})
        scored = [(x, i == item) for x, i in zip(p, range(2, 40), strict=True) if i not in tags[row]]
        by_row.append(list_metrics(scored, 4))
    known = [x for x in by_row if x is not None]
    assert 0 < len(known) < len(by_row)  # some rows' items are in their own lists
    for name in LIST_METRICS:
        expected = np.mean([x[name] for x in known])
        assert report.metrics[full_ranking_name(name, 4)] == pytest.approx(expected, abs=1e-9), name
    wrong = conf.model_copy(update={"evaluation": Evaluation.model_validate({"full_ranking": {"exclude": "item"}})})
    with pytest.raises(UserError, match=r"exclude: 'item' is no list of codes of 'item'; .* are: tags"):
        train_local(job.model_copy(update={"train": wrong, "key": "wrong"}))


def full_ranking_name(name: str, k: int) -> str:
    return name.replace("at_k", f"at_{k}_full")


def test_two_ranks_rank_as_one(home: Workspace, features: Manifest, evaluated: tuple[Job, TrainingReport]) -> None:
    """With the weights that one rank learned."""
    job = run_of(home, features, "again")
    shutil.copytree(evaluated[0].checkpoints.local_path(), job.checkpoints.local_path())
    first, second = run_ranks(2, lambda collective: train(job, collective))
    assert first.evaluation == second.evaluation
    assert first.evaluation["valid_full"] == evaluated[1].evaluation["valid_full"]


def test_the_model_is_that_of_the_best_monitored_metric(home: Workspace, features: Manifest) -> None:
    job = run_of(home, features, "monitored", epochs=4, patience=2, monitor="ndcg_at_10_full")
    report = train_local(job)
    values = [e["ndcg_at_10_full"] or 0.0 for e in report.evals]
    best = int(np.argmax(values))
    assert report.best_step == report.evals[best]["step"]
    assert len(values) == min(4, best + 3)
    assert report.metrics["ndcg_at_10_full"] == values[best]
    assert (
        job.config_fingerprint != run_of(home, features, "monitored", epochs=4, patience=2).config_fingerprint
    ) is True


def test_models_in_no_retrieval_form_are_refused(home: Workspace, features: Manifest) -> None:
    job = run_of(home, features, "none").model_copy(update={"model": Model(embedding_dim=4)})
    with pytest.raises(UserError, match="full_ranking is for models in retrieval form, and DLRM is none"):
        train_local(job)


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        ({"full_ranking": {"seen": ["train"]}}, "`seen` is of users"),
        ({"full_ranking": {"order_by": "row"}}, "`order_by` is of users"),
        ({"full_ranking": {"k": []}}, "k"),
        ({"full_ranking": {"k": 0}}, "greater than or equal to 1"),
        ({"metrics": ["map_at_k"]}, "is of lists"),
    ],
)
def test_settings_that_lack_something_are_refused(settings_: Any, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Train.model_validate({"evaluation": settings_})


def test_only_what_is_measured_can_be_monitored() -> None:
    assert Train().monitored() == ["log_loss", "auc"]
    with pytest.raises(ValidationError, match="'ndcg_at_20_full' is not measured"):
        Train.model_validate({"monitor": "ndcg_at_20_full"})
    ranked = Train.model_validate({"monitor": "ndcg_at_20_full", "evaluation": {"full_ranking": {}}})
    assert not ranked.monitor_falls
    assert Train().monitor_falls
