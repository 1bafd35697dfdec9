"""Conditions for copying unchanged lists: scores that stand alone, and hashes of lists, without Spark."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.comm.base import LocalCollective
from headrace.config import Model
from headrace.models.saved import save_model
from headrace.models.sharded_model import ShardedModel
from headrace.score import ranking
from headrace.score.incremental import _Lists, _other_inputs
from headrace.score.items import ItemTable
from headrace.score.ranking import ITEMS, SOURCES, TaskInputs, score_batches, scores_stand_alone
from headrace.stage.manifest import fingerprint
from headrace.storage import local
from tests.unit.test_score_blocks import fitted, items, make_job, rows_of, spec, users, with_candidates


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A DLRM as it starts, but for the continuous features' weights: raw ages and prices would have it sure of all."""
    folder, workflow = tmp_path_factory.mktemp("network"), fitted()
    workflow.save(local(folder / "workflow"))
    shape = Model(embedding_dim=16, bottom_mlp=(32, 16), top_mlp=(64, 32))
    model = ShardedModel(workflow.schema, shape, LocalCollective(), 2)
    for name, p in model.named_dense_parameters():
        if name.startswith("bottom"):
            p.data.mul_(0.3)
    metadata = {"pipeline": "p", "ds": "2026-01-01", "key": "k", "metrics": {}}
    save_model(local(folder / "model"), model, workflow=local(folder / "workflow"), **metadata)
    return folder / "model"


@settings(max_examples=15)
@given(st.integers(0, 100), st.sets(st.integers(0, 39), min_size=1), st.sampled_from([7, 500, 32_768]))
def test_some_users_scored_again_have_the_scores_of_all(
    network: Path, seed: int, changed: set[int], block_pairs: int
) -> None:
    people, things = users(40, seed), items(90, seed)
    listed, _ = with_candidates(people, things, seed)
    task = make_job(network, things, part_rows=40, top_k=20)
    all_rows = rows_of(list(score_batches(task, iter([listed]), lambda n: None)))
    changed_users = listed.take(pa.array(sorted(changed)))
    task = make_job(network, things, part_rows=90, top_k=20, block_pairs=block_pairs)
    rescored = rows_of(
        list(score_batches(task, iter([changed_users.slice(0, 5), changed_users.slice(5)]), lambda n: None))
    )
    assert len({score for *_, score, _ in all_rows}) > len(all_rows) / 2
    names = set(changed_users.column(0).to_pylist())
    assert rescored == [row for row in all_rows if row[0] in names]


def test_a_model_that_looks_at_other_rows_is_noticed(network: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = make_job(network, items(30))
    assert scores_stand_alone(task, users(8))
    assert scores_stand_alone(task, users(1))
    predictor, workflow = ranking.loaded_model(task.model, task.threads, task.output, task.maps)

    class LooksBeside:
        """Scores less what is in the batch: as of a normalization by the batch."""

        schema, kind = predictor.schema, predictor.kind

        def predict(self, columns: Mapping[str, Any]) -> np.ndarray:
            predictions = predictor.predict(columns)
            return predictions - predictions.mean()

    monkeypatch.setattr(ranking, "loaded_model", lambda *_: (LooksBeside(), workflow))
    assert not scores_stand_alone(task, users(8))


@given(st.data())
def test_sums_of_lists_are_equal_of_equal_sets_alone(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    things = pa.table({"item": list(range(12)), "price": [float(i % 5) for i in range(12)]})
    table = ItemTable.of_arrow(things, "item", local(tmp_path_factory.mktemp("items") / "items"))
    pairs = st.dictionaries(st.integers(0, 11), st.integers(1, 3))
    lists = data.draw(st.lists(pairs, min_size=2, max_size=8))
    shuffled = [list(data.draw(st.permutations(sorted(x.items())))) for x in lists]

    def sums(with_sources: bool) -> list[tuple[int, ...]]:
        rows = pa.array([[i for i, _ in x] for x in shuffled], pa.list_(pa.int32()))
        masks = pa.array([[m for _, m in x] for x in shuffled], pa.list_(pa.int32()))
        task = _Lists(table, (ITEMS, SOURCES))
        return list(zip(*task.sums(rows, masks if with_sources else None), strict=True))

    for with_sources in (True, False):
        hashes = sums(with_sources)
        for a, x in zip(hashes, lists, strict=True):
            for b, y in zip(hashes, lists, strict=True):
                same = x == y if with_sources else x.keys() == y.keys()
                assert (a == b) == same
                assert same == all(i == j for i, j in zip(a, b, strict=True))
    # An item that is another makes other lists of those that have it.
    other_items = things.set_column(1, "price", pa.array([9.5, *things["price"].to_pylist()[1:]]))
    changed = ItemTable.of_arrow(other_items, "item", local(tmp_path_factory.mktemp("items") / "items"))
    sums_before, table = sums(True), changed
    assert [a != b for a, b in zip(sums_before, sums(True), strict=True)] == [0 in x for x in lists]


def test_lists_depend_on_the_model_the_settings_and_at_times_on_the_day(network: Path, tmp_path: Path) -> None:
    task = make_job(network, items(5))

    def lists_key(task: TaskInputs, ds: str = "2026-01-01", **more: Any) -> str:
        score = spec(**more).score
        assert score is not None
        return fingerprint(_other_inputs(score, task, ds))

    key = lists_key(task)
    assert (
        lists_key(task)
        == lists_key(task, ds="2026-01-02")
        == lists_key(task, incremental=True, model="baseline")
        == key
    )
    model_copy = tmp_path / "model"
    shutil.copytree(network, model_copy)
    assert lists_key(replace(task, model=local(model_copy))) == key
    card = (model_copy / "model.json").read_text()
    (model_copy / "model.json").write_text(card.replace('"key": "k"', '"key": "k2"'))
    changed = [
        lists_key(replace(task, model=local(model_copy))),
        lists_key(task, top_k=7),
        lists_key(replace(task, threads=2)),
    ]
    by_day = {"caps": {"price": 2}}, {"freshness": {"days": 3.0, "boost": 0.1, "column": "price"}}
    for rules, of_day in (*((r, "freshness" in r) for r in by_day), ({"explore": {"epsilon": 0.1}}, True)):
        changed.append(lists_key(task, rerank=rules))
        assert (lists_key(task, ds="2026-01-02", rerank=rules) != changed[-1]) == of_day
    assert len({key, *changed}) == 1 + len(changed)
