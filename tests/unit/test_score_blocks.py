"""Scoring without Spark, against plain Python: blocks of pairs, the union of candidates, sums of similarities."""

from __future__ import annotations

import hashlib
import shutil
import uuid
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import xgboost as xgb
from hypothesis import given
from hypothesis import strategies as st

from headrace.config import Chain, Spec, build_spec
from headrace.config.schema import TableColumn
from headrace.errors import UserError
from headrace.features.vocabulary.lookup import Lookup
from headrace.features.workflow.fitted import FittedWorkflow
from headrace.features.workflow.workflow import Workflow
from headrace.models import xgboost_model
from headrace.models.predictor import load_predictor
from headrace.score.candidates.candidates import Quotas, unite
from headrace.score.candidates.covisitation import Neighbors, best_neighbors
from headrace.score.columns import check_columns, context_scalars
from headrace.score.item_features import ItemFeatures
from headrace.score.items import ItemTable
from headrace.score.loaded_model import PairFeatures, check_pair_features
from headrace.score.ranking import ITEMS, SEEN, SOURCES, OutputRows, Ranked, TaskInputs, blocks, score_batches
from headrace.storage import local

COLUMNS = [
    {"name": "user", "type": "string"},
    {"name": "age", "type": "int"},
    {"name": "likes", "type": "array<string>"},
    {"name": "item", "type": "bigint"},
    {"name": "price", "type": "double"},
    {"name": "hour", "type": "int"},
    {"name": "click", "type": "int"},
]
CHAINS = [
    {"columns": ["user"], "ops": [{"categorify": {}}]},
    {"columns": ["hour", "age"], "ops": ["fill_missing"]},
    {"columns": ["item"], "ops": [{"hash_bucket": {"buckets": 7}}]},
    {"columns": ["price"], "ops": [{"clip": {"min": 0, "max": 5}}, "log"]},
    {"columns": ["likes"], "ops": [{"categorify": {}}, {"pad": {"length": 2}}]},
    # Of user and item, of user and context, of item and context.
    {"columns": ["user", "item", "hour"], "ops": [{"hashed_cross": {"buckets": 4, "to": "pair"}}]},
    {"columns": ["age", "hour"], "ops": [{"hashed_cross": {"buckets": 9, "to": "user_hour"}}]},
    {"columns": ["hour", "item"], "ops": [{"hashed_cross": {"buckets": 9, "to": "item_hour"}}]},
]
USER, ITEM = ("user", "age", "likes"), ("item", "price")


def spec(**score: Any) -> Spec:
    base = {
        "user": {"key": "user", "columns": ["age", "likes"]},
        "item": {"key": "item", "columns": ["price"]},
        "context": {"hour": 9},
    }
    return build_spec(
        {
            "pipeline": "p",
            "source": {"format": "jsonl", "path": "x"},
            "table": {"columns": COLUMNS},
            "features": {"label": "click", "workflow": CHAINS, "split": {"by": "position"}},
            "score": base | score,
        }
    )


def fitted() -> FittedWorkflow:
    workflow = Workflow([Chain.model_validate(c) for c in CHAINS], [TableColumn(**c) for c in COLUMNS], label="click")
    states = [[{c: {} for c in chain.columns} for _ in chain.steps] for chain in workflow.chains]
    vocabularies = {}
    for name, values in (("user", [f"u{i}" for i in range(0, 40, 2)]), ("likes", ["jazz", "rock"])):
        codes = np.arange(2, 2 + len(values))
        vocabularies[name] = Lookup(pa.table({"value": values, "code": pa.array(codes, pa.int64())}))
    return FittedWorkflow(workflow, states, vocabularies)


def users(n: int, seed: int = 1) -> pa.RecordBatch:
    rng = np.random.default_rng(seed)
    likes = [
        None if rng.random() < 0.2 else list(rng.choice(["jazz", "rock", "pop"], rng.integers(0, 4))) for _ in range(n)
    ]
    age = [None if rng.random() < 0.2 else int(rng.integers(18, 80)) for _ in range(n)]
    return pa.record_batch(
        [pa.array([f"u{i}" for i in range(n)]), pa.array(age, pa.int32()), pa.array(likes, pa.list_(pa.string()))],
        names=list(USER),
    )


def items(n: int, seed: int = 2) -> pa.RecordBatch:
    rng = np.random.default_rng(seed)
    price = [None if rng.random() < 0.2 else float(rng.normal(2, 2)) for _ in range(n)]
    keys = np.sort(rng.choice(10**12, n, replace=False))
    return pa.record_batch([pa.array(keys), pa.array(price, pa.float64())], names=list(ITEM))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shallow trees: most pairs tie with others, so the order of ties is put to the test."""
    folder = tmp_path_factory.mktemp("m")
    workflow = fitted()
    workflow.save(local(folder / "dataset" / "workflow"))
    names = xgboost_model.matrix_columns(workflow.schema)
    width, heavy = len(names), np.array([5.0 if n == "pair" else 1.0 for n in names])
    rng = np.random.default_rng(5)
    data = rng.normal(2, 3, (400, width)).astype(np.float32)
    label = ((data * heavy).sum(1) + rng.normal(0, 2, 400) > 2 * width).astype(np.float32)
    booster = xgb.train({"objective": "binary:logistic", "max_depth": 2, "nthread": 1}, xgb.DMatrix(data, label), 4)
    (folder / "model").mkdir()
    xgboost_model.save(local(folder / "model"), booster, workflow.schema, local(folder / "dataset" / "workflow"), {})
    return folder / "model"


def sides() -> PairFeatures:
    s = spec()
    assert s.score is not None
    return PairFeatures(USER, ITEM, context_scalars(s, s.score), fitted())


def make_job(model: Path, candidates: pa.RecordBatch, part_rows: int = 5, **changes: Any) -> TaskInputs:
    s, folder = sides(), model.parent / uuid.uuid4().hex
    table = ItemTable.of_arrow(pa.Table.from_batches([candidates]), "item", local(folder / "items"), part_rows)
    inputs = {
        "model": local(model),
        "threads": 1,
        "top_k": 3,
        "user_key": "user",
        "items": table,
        "item_features": ItemFeatures.write(table, local(model), s, local(folder / "features"), None),
        "user_columns": USER,
        "item_names": ITEM,
        "context": dict(s.context),
    }
    return TaskInputs(**(inputs | changes))


def plain(
    model: Path, people: pa.RecordBatch, things: pa.RecordBatch, k: int, seen: Any = None
) -> list[tuple[Any, ...]]:
    """Each pair alone, as a row of the events table through the whole workflow; a plain sort for each user."""
    predictor, workflow = load_predictor(model, threads=1), fitted()
    out = []
    for n, person in enumerate(people.to_pylist()):
        rows = [{**person, **thing, "hour": 9, "click": None} for thing in things.to_pylist()]
        schema = pa.schema([*people.schema, *things.schema, ("hour", pa.int32()), ("click", pa.int32())])
        transformed = workflow.transform_batch(pa.RecordBatch.from_pylist(rows, schema=schema))
        scores = predictor.predict(
            {c: transformed.column(c).to_numpy(zero_copy_only=False) for c in transformed.schema.names}
        )
        order = sorted(zip(-scores, things.column("item").to_pylist(), strict=True))
        order = [(s, i) for s, i in order if not (seen and i in seen[n])]
        out += [(person["user"], i, rank, -s) for rank, (s, i) in enumerate(order[:k], 1)]
    return out


def rows_of(batches: list[pa.RecordBatch]) -> list[tuple[Any, ...]]:
    return [tuple(r.values()) for r in pa.Table.from_batches(batches).to_pylist()]


@pytest.mark.parametrize("block_pairs", [1, 7, 50, 10_000])
def test_equals_a_loop_over_pairs(model: Path, block_pairs: int) -> None:
    people, things = users(23), items(17)
    counted: list[int] = []
    task = make_job(model, things, block_pairs=block_pairs)
    result = rows_of(list(score_batches(task, iter([people.slice(0, 11), people.slice(11)]), counted.append)))
    expected = plain(model, people, things, k=3)
    assert result == expected
    assert sum(counted) == 23 * 17
    # The test is worth something: there are ties at the edge of the top 3.
    wide = plain(model, people, things, k=4)
    assert sum(a[3] == b[3] for a, b in zip(wide[2::4], wide[3::4], strict=True)) > 0


def test_more_places_than_items(model: Path) -> None:
    people, things = users(4), items(2)
    result = rows_of(list(score_batches(make_job(model, things), iter([people]), lambda n: None)))
    assert result == plain(model, people, things, k=3)
    assert len(result) == 8


def test_seen_items_are_left_out(model: Path) -> None:
    people, things = users(6), items(9)
    keys = things.column("item").to_pylist()
    seen = [[], keys[:8], keys, [keys[3], 5, keys[0]], [], [7]]
    lists = pa.array([None, *seen[1:]], pa.list_(pa.int64()))
    with_seen = pa.RecordBatch.from_arrays([*people.columns, lists], [*people.schema.names, SEEN])
    result = rows_of(list(score_batches(make_job(model, things), iter([with_seen]), lambda n: None)))
    assert result == plain(model, people, things, k=3, seen=seen)
    by_user = {u: sum(r[0] == u for r in result) for u in people.column("user").to_pylist()}
    assert (by_user["u1"], by_user["u2"]) == (1, 0)


def with_candidates(people: pa.RecordBatch, things: pa.RecordBatch, seed: int) -> tuple[pa.RecordBatch, list[Any]]:
    """Users with lists of their own, in any order: some are empty, one is null; and by user (item: bits)."""
    rng = np.random.default_rng(seed)
    keys = things.column("item").to_pylist()
    rows = [rng.permutation(len(keys))[: rng.integers(0, len(keys) + 1)].tolist() for _ in range(people.num_rows)]
    bits = [rng.integers(1, 8, len(r)).tolist() for r in rows]
    rows[1], bits[1] = [], []
    lists = pa.array([None if i == 1 else r for i, r in enumerate(rows)], pa.list_(pa.int32()))
    masks = pa.array([None if i == 1 else b for i, b in enumerate(bits)], pa.list_(pa.int32()))
    batch = pa.RecordBatch.from_arrays([*people.columns, lists, masks], [*people.schema.names, ITEMS, SOURCES])
    return batch, [
        {keys[i]: b for i, b in zip(r, row_bits, strict=True)} for r, row_bits in zip(rows, bits, strict=True)
    ]


@pytest.mark.parametrize("block_pairs", [1, 13, 10_000])
def test_lists_of_candidates_equal_a_loop_over_them(model: Path, block_pairs: int) -> None:
    people, things = users(19), items(17)
    batch, lists = with_candidates(people, things, block_pairs)
    task = make_job(model, things, block_pairs=block_pairs)
    counted: list[int] = []
    result = rows_of(list(score_batches(task, iter([batch.slice(0, 8), batch.slice(8)]), counted.append)))
    excluded = [[k for k in things.column("item").to_pylist() if k not in listed] for listed in lists]
    expected = plain(model, people, things, k=3, seen=excluded)
    by_user = dict(zip(people.column("user").to_pylist(), lists, strict=True))
    assert result == [(u, i, rank, score, by_user[u][i]) for u, i, rank, score in expected]
    assert sum(counted) == sum(map(len, lists))


@dataclass(frozen=True)
class Reversed:
    """The worst of what is kept first, without the best."""

    def __call__(self, ranked: Ranked, items: ItemTable) -> OutputRows:
        spans = [range(e - 1, s, -1) for s, e in zip(ranked.offsets[:-1], ranked.offsets[1:], strict=True)]
        offsets = np.cumsum([0, *map(len, spans)])
        rows = np.array([i for span in spans for i in span], np.int64)
        return OutputRows(offsets, rows, 1 / (1 + rows), pa.array([f"row {i}" for i in ranked.item_rows[rows]]))


def test_what_is_ranked_may_be_listed_otherwise(model: Path) -> None:
    people, things = users(6), items(9)
    batch, lists = with_candidates(people, things, 3)
    keys = things.column("item").to_pylist()
    ranked = rows_of(list(score_batches(make_job(model, things), iter([batch]), lambda n: None)))
    task = make_job(model, things, rerank=Reversed())
    result = pa.Table.from_batches(list(score_batches(task, iter([batch]), lambda n: None)))
    assert result.schema.names == ["user", "item", "rank", "score", "sources", "propensity", "reason"]
    expected = []
    for u in people.column("user").to_pylist():
        user_rows = [r for r in ranked if r[0] == u][1:][::-1]
        expected += [(u, r[1], place, *r[3:], f"row {keys.index(r[1])}") for place, r in enumerate(user_rows, 1)]
    assert [tuple(r.values()) for r in result.drop(["propensity"]).to_pylist()] == expected
    assert result["propensity"].to_numpy().min() > 0
    # Without candidates all items are ranked, and the lists are made of these.
    unranked = pa.Table.from_batches(list(score_batches(task, iter([people]), lambda n: None)))
    assert len(unranked) == 2 * len(people)
    assert len(lists) == 6


@pytest.mark.parametrize(("with_lists", "block_pairs"), [(False, 10_000), (False, 7), (True, 10_000), (True, 7)])
def test_a_second_stage_ranks_what_the_first_has_kept(
    model: Path, tmp_path: Path, with_lists: bool, block_pairs: int
) -> None:
    """Each user has the best 6 by the first model, and of these the best 3 by the trees that look at its answers."""
    first, folder = tmp_path / "a" / "model", tmp_path / "b" / "model"
    shutil.copytree(model, first)
    folder.mkdir(parents=True)
    schema = fitted().schema
    width = len(xgboost_model.matrix_columns(schema)) + 1
    rng = np.random.default_rng(8)
    data = rng.normal(1, 3, (400, width)).astype(np.float32)
    data[:, -1] = rng.random(400)
    label = (data[:, 0] + 9 * (0.5 - data[:, -1]) > 1).astype(np.float32)
    booster = xgb.train({"objective": "binary:logistic", "max_depth": 3, "nthread": 1}, xgb.DMatrix(data, label), 5)
    digest = hashlib.sha256((first / "model.json").read_bytes()).hexdigest()
    card = {"kind": "second_stage", "first": {"key": "a", "sha256": digest, "outputs": ["label"]}}
    xgboost_model.save(local(folder), booster, schema, local(model / "workflow"), card)

    people, things = users(19), items(17)
    batch, lists = with_candidates(people, things, block_pairs)
    task = make_job(folder, things, block_pairs=block_pairs, rank_depth=6)
    input_batch = batch if with_lists else people
    result = [r[:4] for r in rows_of(list(score_batches(task, iter([input_batch]), lambda n: None)))]
    keys = things.column("item").to_pylist()
    excluded = [[k for k in keys if k not in listed] for listed in lists] if with_lists else [[] for _ in lists]
    first_stage: dict[str, list[int]] = {}
    for u, i, _, _ in plain(first, people, things, k=6, seen=excluded):
        first_stage.setdefault(u, []).append(i)
    left_out = [[k for k in keys if k not in first_stage.get(u, [])] for u in people.column("user").to_pylist()]
    assert result == plain(folder, people, things, k=3, seen=left_out)
    # The second stage alone would have chosen others.
    assert result != plain(folder, people, things, k=3, seen=excluded)


@given(st.lists(st.integers(0, 12), max_size=20), st.integers(1, 20))
def test_blocks_are_as_full_as_they_may_be(lengths: list[int], most: int) -> None:
    user_blocks = list(blocks(np.array(lengths, np.int64), most))
    assert [u for users in user_blocks for u in users] == list(range(len(lengths)))
    for users, following in zip_longest(user_blocks, user_blocks[1:]):
        pairs = sum(lengths[u] for u in users)
        assert pairs <= most or len(users) == 1
        assert following is None or pairs + lengths[following.start] > most


def test_features_by_side_are_those_of_whole_pairs() -> None:
    check_pair_features(sides(), users(9), items(6))


def test_features_belong_to_the_side_that_they_are_made_of() -> None:
    s = sides()
    assert s.of_user == ("user", "age", "likes", "user_hour")
    assert s.of_item == ("hour", "item", "price", "item_hour")
    assert s.of_pair == ("pair",)
    assert s.item_parts == ("item",)
    people, things = users(8), items(8)
    cross = s.cross_columns(people, things.select(["item"]))
    for i in range(8):
        assert cross["pair"][i] == s.pair_columns(people.slice(i, 1), things.slice(i, 1))["pair"][0]
    assert len(set(cross["pair"])) > 2


def test_a_feature_that_says_too_few_sources_would_be_noticed() -> None:
    fitted_features = fitted()
    (place,) = (i for i, c in enumerate(fitted_features.workflow.chains) if "pair" in c.outputs)
    wrong_chain = replace(fitted_features.workflow.chains[place], sources={"pair": ("user",)})
    fitted_features.workflow.chains = (
        *fitted_features.workflow.chains[:place],
        wrong_chain,
        *fitted_features.workflow.chains[place + 1 :],
    )
    s = sides()
    lied = PairFeatures(
        s.user,
        s.item,
        s.context,
        FittedWorkflow(fitted_features.workflow, fitted_features.states, fitted_features.vocabularies),
    )
    assert "pair" in lied.of_user
    with pytest.raises(RuntimeError, match="'pair'"):
        check_pair_features(lied, users(9), items(6))


def test_an_operator_across_columns_would_be_noticed() -> None:
    class Crossed(FittedWorkflow):
        """The price as a share of the age: no column is alone in it."""

        def transform_lists(self, batch: pa.RecordBatch, only: Any = None) -> list[pa.Array]:
            columns = dict(zip([f.name for f in self.features], super().transform_lists(batch), strict=True))
            columns["price"] = pa.array(columns["price"].to_numpy() / (1 + columns["age"].to_numpy()))
            return [columns[f.name] for f in self.features if only is None or f.name in only]

    fitted_features = fitted()
    crossed = Crossed(fitted_features.workflow, fitted_features.states, fitted_features.vocabularies)
    s = sides()
    with pytest.raises(RuntimeError, match="'price'"):
        check_pair_features(PairFeatures(s.user, s.item, s.context, crossed), users(9), items(6))


def test_scores_that_are_no_numbers_are_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        xgboost_model.XGBoostPredictor, "predict", lambda self, c: np.full(len(c["item"]), np.nan, np.float32)
    )
    with pytest.raises(UserError, match="no numbers"):
        list(score_batches(make_job(model, items(3)), iter([users(2)]), lambda n: None))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"context": {}}, "the features read 'hour'"),
        ({"context": {"hour": "noon"}}, r"score\.context\.hour: 'noon' is no int"),
        ({"context": {"hour": 2**40}}, r"score\.context\.hour"),
        ({"context": {"hour": 9, "age": 3}}, "'age' is in score.user and in score.context"),
        ({"item": {"key": "item", "columns": ["price", "age"]}}, "'age' is in score.user and in score.item"),
        ({"user": {"key": "likes", "columns": ["user", "age"]}}, "a key is a single value"),
    ],
)
def test_columns_from_nowhere_or_twice_are_refused(change: dict[str, Any], message: str) -> None:
    s = spec(**change)
    assert s.score is not None
    with pytest.raises(UserError, match=message):
        check_columns(s, s.score)


#: For each user, for each source, its items best first.
Users = list[list[list[int]]]


def plain_union(sources: list[list[int]], limit: int, places: list[int]) -> tuple[list[int], list[int]]:
    """One user's union: kept places first, then source by source; listed by source and order."""
    order: list[int] = []
    for items in sources:
        order += [item for item in items if item not in order]
    guaranteed = {item for items, n in zip(sources, places, strict=True) for item in items[:n]}
    fill = [item for item in order if item not in guaranteed][: limit - len(guaranteed)]
    chosen = [item for item in order if item in guaranteed or item in fill]
    return chosen, [sum(1 << s for s, items in enumerate(sources) if item in items) for item in chosen]


@st.composite
def cases(draw: st.DrawFn) -> tuple[Users, int, list[int]]:
    n_sources, n_items = draw(st.integers(1, 5)), draw(st.integers(1, 12))
    source_list = st.lists(st.integers(0, n_items - 1), unique=True)
    users = draw(st.lists(st.lists(source_list, min_size=n_sources, max_size=n_sources), min_size=1, max_size=5))
    places = draw(st.lists(st.integers(0, 4), min_size=n_sources, max_size=n_sources))
    return users, draw(st.integers(max(1, sum(places)), sum(places) + 8)), places


@given(cases())
def test_union_equals_a_plain_one(case: tuple[Users, int, list[int]]) -> None:
    users, limit, places = case
    lists = []
    for s in range(len(places)):
        offsets = np.cumsum([0, *(len(u[s]) for u in users)])
        lists.append((offsets.astype(np.int64), np.array([i for u in users for i in u[s]], np.int32)))
    union = unite(lists, Quotas(limit, tuple(places)))
    assert union.offsets[0] == 0
    for u, sources in enumerate(users):
        user_slice = slice(union.offsets[u], union.offsets[u + 1])
        items, bits = plain_union(sources, limit, places)
        assert union.items[user_slice].tolist() == items
        assert union.sources[user_slice].tolist() == bits
        for s in range(len(places)):
            assert union.alone[u, s] == sum(b == 1 << s for b in bits)
            for t in range(len(places)):
                both_sources = 1 << s | 1 << t
                assert union.shared[u, s, t] == sum(b & both_sources == both_sources for b in bits)


@given(
    st.lists(st.lists(st.tuples(st.integers(0, 6), st.integers(1, 9))), min_size=1, max_size=6),
    st.lists(st.integers(0, 5), min_size=6, max_size=6),
)
def test_best_neighbors_are_the_greatest_sums(users: list[list[tuple[int, int]]], counts: list[int]) -> None:
    flat = [pair for user in users for pair in user]
    lists = Neighbors(
        np.cumsum([0, *map(len, users)]).astype(np.int64),
        np.array([item for item, _ in flat], np.int32),
        np.array([similarity for _, similarity in flat], np.int64),
    )
    offsets, items = best_neighbors(lists, np.array(counts[: len(users)]))
    for u, user in enumerate(users):
        sums: dict[int, int] = {}
        for item, similarity in user:
            sums[item] = sums.get(item, 0) + similarity
        best = sorted(sums, key=lambda item: (-sums[item], item))[: counts[u]]
        assert items[offsets[u] : offsets[u + 1]].tolist() == best
