"""Rows of new ids: at the mean of what was known, by any plan on any world, as NumPy and pandas say it."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.comm.base import Collective, LocalCollective, run_ranks
from headrace.config import EmbeddingOptimizer, Optimizer
from headrace.config.schema import DatasetSchema, Feature, Kind
from headrace.config.workspace import Workspace
from headrace.dataset.layout import RowGroup, SplitLayout, split_of
from headrace.embeddings.checkpoint import saved_rows as writing
from headrace.embeddings.checkpoint.saved_rows import GrownTable, start_at_means
from headrace.embeddings.layer import ShardedEmbeddings
from headrace.embeddings.sharding_plan import Table
from headrace.embeddings.storage import decode, encode
from headrace.errors import UserError
from headrace.models.saved import load_model
from headrace.stage.manifest import Manifest
from headrace.storage import local
from headrace.train.loop.run import train, train_local
from headrace.train.setup import initial_weights
from headrace.train.setup.initial_weights import segments_of
from tests.plans_support import KINDS, TABLES, full_tables, planned
from tests.train_support import TRAIN, first_of, job_of

_STORAGES = {"fp32": 1e-6, "bf16": 4e-4, "int8": 4e-4}


@settings(max_examples=25, deadline=None)
@given(
    world=st.integers(1, 3),
    kinds=st.lists(st.sampled_from(KINDS), min_size=4, max_size=4),
    storage=st.sampled_from(sorted(_STORAGES)),
    data=st.data(),
)
def test_new_rows_start_at_means_of_known_rows(world: int, kinds: list[str], storage: Any, data: st.DataObject) -> None:
    if storage == "int8":
        kinds = ["row_wise" if k == "column_wise" else k for k in kinds]
    tables = tuple(Table(t.name, t.rows + 6, t.dim, storage) for t in TABLES)
    plan = planned(kinds, world, tables)
    grown: dict[str, GrownTable] = {}
    for t in tables[:3]:
        known = range(2, data.draw(st.integers(2, t.rows - 1)))
        segments = data.draw(
            st.none() | st.lists(st.integers(-1, 3), min_size=t.rows, max_size=t.rows).map(lambda x: np.int32(x))
        )
        grown[t.name] = GrownTable(known, segments)

    def start(collective: Collective) -> tuple[ShardedEmbeddings, list[torch.Tensor]]:
        embeddings = ShardedEmbeddings(plan, collective, seed=5)
        weights_before = [decode(w).clone() for w in embeddings.weights]
        start_at_means(embeddings, grown)
        return embeddings, weights_before

    ranks = run_ranks(world, start)
    old = full_tables(plan, [e for e, _ in ranks], [w for _, w in ranks])
    new = full_tables(plan, [e for e, _ in ranks], [[decode(w) for w in e.weights] for e, _ in ranks])
    for t in tables:
        expected = old[t.name].double().numpy().copy()
        if t.name in grown and len(grown[t.name].known):
            known, segments = grown[t.name].known, grown[t.name].segments
            mean = expected[known.start : known.stop].mean(axis=0)
            of_segment = {}
            if segments is not None:
                frame = pd.DataFrame(expected[known.start : known.stop])
                of_segment = {
                    int(s): f.to_numpy().mean(axis=0) for s, f in frame.groupby(segments[known.start : known.stop])
                }
                of_segment.pop(-1, None)
            for row in range(known.stop, t.rows):
                expected[row] = of_segment.get(-2 if segments is None else int(segments[row]), mean)
        np.testing.assert_allclose(new[t.name].numpy(), expected, rtol=0, atol=_STORAGES[storage], err_msg=t.name)


def test_new_rows_are_written_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []

    def counted(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        written.append(len(rows))
        return encode(rows, dtype)

    monkeypatch.setattr(writing, "_ROWS", 7)
    monkeypatch.setattr(writing, "encode", counted)
    tables = tuple(Table(t.name, 40, t.dim) for t in TABLES)
    plan, name = planned(["row_wise"] * 4, 2, tables), tables[0].name
    segments = np.arange(40, dtype=np.int32) % 3

    def start(collective: Collective) -> tuple[ShardedEmbeddings, list[torch.Tensor]]:
        embeddings = ShardedEmbeddings(plan, collective, seed=5)
        weights_before = [w.clone() for w in embeddings.weights]
        start_at_means(embeddings, {name: GrownTable(range(2, 12), segments)})
        return embeddings, weights_before

    ranks = run_ranks(2, start)
    old, new = (
        full_tables(plan, [e for e, _ in ranks], weights)[name].double().numpy()
        for weights in ([w for _, w in ranks], [e.weights for e, _ in ranks])
    )
    np.testing.assert_array_equal(new[:12], old[:12])
    for row in range(12, 40):
        alike = [k for k in range(2, 12) if k % 3 == row % 3]
        np.testing.assert_allclose(new[row], old[alike].mean(axis=0), rtol=0, atol=1e-6)
    assert sum(written) == 28
    assert max(written) <= 7


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    return Workspace(tmp_path_factory.mktemp("new_rows"))


def named(features: Manifest, segment: str, feature_name: str = "user") -> Manifest:
    """The manifest of a dataset whose feature names its segment."""
    schema = features.dataset_schema
    assert schema is not None
    changed = [
        f.model_copy(update={"metadata": {"segment": segment}}) if f.name == feature_name else f
        for f in schema.features
    ]
    return features.model_copy(update={"dataset_schema": DatasetSchema(features=tuple(changed))})


@pytest.fixture(scope="module")
def today(home: Workspace, make_dataset: Callable[..., Manifest]) -> Manifest:
    return make_dataset(home, train=1_500, valid=200, users=60, items=12, ds="2026-01-10")


@pytest.fixture(scope="module")
def tomorrow(home: Workspace, make_dataset: Callable[..., Manifest]) -> Manifest:
    return named(make_dataset(home, train=1_500, valid=200, users=80, items=12, ds="2026-01-11", seed=1), "item")


def rows_of(home: Workspace, features: Manifest) -> pd.DataFrame:
    folder = home.locate(features.output("dataset").name).local_path() / "train"
    return pd.concat(pd.read_parquet(p, columns=["user", "item"]) for p in sorted(folder.glob("*.parquet")))


def most_common(rows: pd.DataFrame) -> dict[int, int]:
    """Return each user's most frequent item, of equals the lowest."""
    return {int(u): int(f.item[f.item != 0].mode().min()) for u, f in rows.groupby("user") if (f.item != 0).any()}


@pytest.mark.parametrize(("ranks", "codes"), [(1, 1 << 20), (2, 1 << 20), (3, 7)])
def test_an_id_is_of_the_segment_of_most_of_its_rows(
    home: Workspace, tomorrow: Manifest, monkeypatch: pytest.MonkeyPatch, ranks: int, codes: int
) -> None:
    monkeypatch.setattr(initial_weights, "_CODES", codes)
    schema = tomorrow.dataset_schema
    assert schema is not None
    user = next(f for f in schema.features if f.name == "user")
    layout = split_of(tomorrow, home, "train")[0]
    for segments in run_ranks(ranks, lambda c: segments_of(user, schema, layout, c)):
        expected = np.full(user.cardinality or 0, -1)
        for code, segment in most_common(rows_of(home, tomorrow)).items():
            expected[code] = segment
        np.testing.assert_array_equal(segments, expected)
        assert len(set(segments.tolist())) > 5


def test_a_warm_start_puts_new_users_at_their_segments_mean(
    home: Workspace, today: Manifest, tomorrow: Manifest
) -> None:
    first_job = job_of(home, today, "before", TRAIN.model_copy(update={"epochs": 1}))
    train_local(first_job)
    kinds = {"dense": Optimizer, "embeddings": EmbeddingOptimizer}
    still = TRAIN.model_copy(
        update={"epochs": 1, "max_steps": 1}
        | {k: optimizer(kind="sgd", learning_rate=1e-12) for k, optimizer in kinds.items()}
    )
    job = job_of(home, tomorrow, "after", still, warm_start=str(first_job.saved_model), new_rows="segment")
    run_ranks(2, lambda c: train(job, c))
    old, new = (load_model(j.saved_model).embeddings for j in (first_job, job))
    known = old.weight[first_of(old, "user") :][:60].double().numpy()
    user_rows = new.weight[first_of(new, "user") :][:80].numpy()
    segments = most_common(rows_of(home, tomorrow))
    np.testing.assert_allclose(user_rows[:60], known, rtol=0, atol=1e-9)
    for user in range(60, 80):
        alike = [u for u in range(2, 60) if u in segments and segments[u] == segments.get(user)]
        expected = known[alike or range(2, 60)].mean(axis=0)
        np.testing.assert_allclose(user_rows[user], expected, rtol=0, atol=1e-7)


@pytest.mark.parametrize(
    ("segment", "feature_name", "message"), [("itme", "user", "did you mean 'item'"), ("item", "tags", "is a list")]
)
def test_a_segment_that_is_none_is_refused(
    home: Workspace, today: Manifest, segment: str, feature_name: str, message: str
) -> None:
    features = named(today, segment, feature_name)
    schema = features.dataset_schema
    assert schema is not None
    feature = next(f for f in schema.features if f.name == feature_name)
    with pytest.raises(UserError, match=rf"feature '{feature_name}' names the segment '{segment}'.*{message}"):
        run_ranks(1, lambda c: segments_of(feature, schema, split_of(features, home, "train")[0], c))


def test_segments_of_many_ids_take_little_memory(tmp_path: Path) -> None:
    users, groups = 200_000, 4
    codes = np.random.default_rng(0).permutation(users).astype(np.int32)
    table = pa.table({"user": codes, "city": codes % 50 + 2})
    pq.write_table(table, path := tmp_path / "0.parquet", row_group_size=users // groups)
    user, city = (
        Feature(name=n, kind=Kind.CATEGORICAL, dtype="int32", cardinality=c) for n, c in (("user", users), ("city", 52))
    )
    user = user.model_copy(update={"metadata": {"segment": "city"}})
    split = tuple(RowGroup(i, local(path), i, users // groups) for i in range(groups))
    layout = SplitLayout("train", (local(path),), split)
    schema = DatasetSchema(features=(user, city))
    tracemalloc.start()
    try:
        segments = segments_of(user, schema, layout, LocalCollective())
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    np.testing.assert_array_equal(segments, np.arange(users) % 50 + 2)
    assert peak < 130 * users  # a Python tuple and two integers are more for themselves
