"""Negatives that are rows: copies of positive rows with other items."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from headrace.config import Negatives, Train
from headrace.config.schema import DatasetSchema, Feature, Kind
from headrace.config.workspace import Workspace
from headrace.dataset.layout import SplitLayout, split_of
from headrace.dataset.loaders import TrainLoader
from headrace.dataset.negatives import NegativeSampler, SeenPairs
from headrace.errors import UserError
from headrace.stage.manifest import Manifest
from tests.train_support import read_padded

Split = tuple[SplitLayout, DatasetSchema]
TRAIN = Train(batch_size=64, streams=4, seed=3)


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory, make_dataset: Callable[..., Manifest]) -> Split:
    home = Workspace(tmp_path_factory.mktemp("negatives"))
    return split_of(make_dataset(home, train=200, groups=4), home, "train")


@pytest.mark.parametrize(("column", "message"), [("tags", "one value a row"), ("colour", "there are: user, item")])
def test_negatives_of_a_wrong_column(split: Split, column: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        TrainLoader(*split, TRAIN.model_copy(update={"negatives": Negatives(column=column)}))


def test_negatives_of_the_batch() -> None:
    """Values of the batch as often as they are there, never the row's own, and any other where it is the only one."""
    plan = NegativeSampler(column=0, cardinality=50, per_positive=40, first=2, in_batch=True)
    codes = np.array([7] * 100 + [8] * 300 + [9] * 600 + [1, 0], np.int64)
    drawn = plan.draw(codes, np.random.default_rng(0))
    assert (drawn != codes[:, None]).all()
    for code, shares in ((7, {8: 0.3, 9: 0.6}), (1, {7: 0.1, 8: 0.3, 9: 0.6})):
        negatives = drawn[codes == code]
        for value, share in shares.items():
            # Five standard deviations; the generator's seed is fixed.
            assert abs((negatives == value).mean() - share) < 5 * np.sqrt(share * (1 - share) / negatives.size) + 1e-3
    alone = plan.draw(np.full(500, 7, np.int64), np.random.default_rng(0))
    assert set(np.unique(alone)) == set(range(2, 50)) - {7}


def test_negatives_that_a_user_has_not_seen() -> None:
    """All that is left is drawn alike; a user who has seen everything gets something all the same."""
    seen = {3: {2, 5, 6, 9}, 4: {7}, 5: set(range(2, 12))}
    keys = sorted(user * 12 + item for user, items in seen.items() for item in items)
    pairs = SeenPairs(np.array(keys, np.int64), items=12)
    plan = NegativeSampler(1, 12, per_positive=40, first=2, user=0, seen=pairs)
    users = np.repeat(np.array([3, 4, 5, 6]), 300)
    items = np.tile(np.array([5, 7, 8, 9, 10, 11]), 200)
    drawn = plan.draw(items, np.random.default_rng(0), users)
    assert drawn.shape == (1_200, 40)
    assert drawn.min() >= 2
    assert drawn.max() < 12
    for user in (3, 4, 6):
        negatives = drawn[(users == user) & (items == 5)]
        unseen = set(range(2, 12)) - seen.get(user, set()) - {5}
        assert set(np.unique(negatives)) == unseen
        for item in unseen:
            assert abs((negatives == item).mean() - 1 / len(unseen)) < 5 * np.sqrt(0.25 / negatives.size)


def test_pairs_that_a_split_has_seen(tmp_path: Path, make_dataset: Callable[..., Manifest]) -> None:
    """Against pandas; and batches: no copy of a positive row has an item of its user's."""
    ws = Workspace(tmp_path)
    manifest = make_dataset(ws, train=400, groups=4)
    schema = manifest.dataset_schema
    assert schema is not None
    negatives = Negatives(column="item", per_positive=3, exclude_seen="user")
    train = Train(batch_size=200, streams=2, ranks=1, negatives=negatives)
    parts = sorted((ws.home / manifest.output("dataset").name / "train").glob("*.parquet"))
    rows = read_padded(parts, schema)
    clicked = rows[rows[schema.label.name] > 0]
    expected = set(zip(clicked["user"], clicked["item"], strict=True))
    with TrainLoader.from_manifest(manifest, ws, train) as loader:
        batch = next(loader)
    scalars = [f.name for f in schema.of(Kind.CATEGORICAL) if not f.is_list]
    users, items = (batch.codes[:, scalars.index(name)] for name in ("user", "item"))
    pairs = set(zip(users.tolist(), items.tolist(), strict=True))
    positive = batch.labels > 0
    assert set(zip(users[positive].tolist(), items[positive].tolist(), strict=True)) <= expected
    copies = np.flatnonzero(positive)[:, None] + np.arange(1, 4)
    drawn = copies[copies < len(users)].ravel()
    drawn = drawn[batch.labels[drawn] == 0]
    assert len(drawn) > 20
    assert not set(zip(users[drawn].tolist(), items[drawn].tolist(), strict=True)) & expected
    assert pairs - expected


@pytest.mark.parametrize("user", ["tags", "item", "colour"])
def test_seen_by_a_wrong_column(split: Split, user: str) -> None:
    negatives = Negatives(column="item", exclude_seen=user)
    with pytest.raises(UserError, match=r"exclude_seen: .* there are: .*user"):
        TrainLoader(*split, TRAIN.model_copy(update={"negatives": negatives}))


def test_negatives_of_raw_ids_are_those_of_the_batch() -> None:
    plan = NegativeSampler(column=0, cardinality=0, per_positive=40, in_batch=True, raw=True)
    low, high = -(2**63), 2**63 - 1
    codes = np.array([low] * 100 + [5] * 300 + [high] * 600 + [0] * 50, np.int64)
    drawn = plan.draw(codes, np.random.default_rng(0))
    for code, shares in (
        (low, {5: 1 / 3, high: 2 / 3}),
        (5, {low: 1 / 7, high: 6 / 7}),
        (0, {low: 0.1, 5: 0.3, high: 0.6}),
    ):
        negatives = drawn[codes == code]
        assert set(np.unique(negatives)) == set(shares)
        for value, share in shares.items():
            assert abs((negatives == value).mean() - share) < 5 * np.sqrt(share * (1 - share) / negatives.size)
    for alone in ([7, 7], [0], []):
        assert not plan.draw(np.array(alone, np.int64), np.random.default_rng(0)).any()


def test_negatives_of_a_column_that_another_feature_is_made_of_are_refused() -> None:
    def feature(name: str, *sources: str) -> Feature:
        return Feature(name=name, kind=Kind.CATEGORICAL, dtype="int32", cardinality=9, sources=sources)

    item, user = feature("item", "item"), feature("user", "user")
    plan = NegativeSampler.from_config(DatasetSchema(features=(user, item)), Negatives(column="item"))
    assert plan is not None
    assert plan.column == 1
    with pytest.raises(UserError, match="pair is made of item too"):
        NegativeSampler.from_config(
            DatasetSchema(features=(user, item, feature("pair", "user", "item"))), Negatives(column="item")
        )
