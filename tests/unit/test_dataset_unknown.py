"""Ids that are trained as out of vocabulary."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.comm import World
from headrace.config import Negatives, Train
from headrace.config.load import build_spec, load_spec
from headrace.config.schema import OOV_CODE, DatasetSchema, Feature, Kind
from headrace.config.workspace import Workspace
from headrace.dataset.batches import Batch
from headrace.dataset.layout import SplitLayout, open_split, split_of
from headrace.dataset.loaders import EvalLoader, ReplayLoader, ReplayRows, TrainLoader
from headrace.dataset.native import OutputColumns
from headrace.dataset.negatives import UnknownIds
from headrace.errors import UserError
from headrace.models.saved import load_model
from headrace.stage.manifest import Manifest
from headrace.train.loop.run import train_local
from headrace.train.stage import Train as TrainStage
from tests.train_support import MODEL, TRAIN, job_of

Split = tuple[SplitLayout, DatasetSchema]
LOADED = Train(batch_size=64, streams=4, seed=3)
UNKNOWN = LOADED.model_copy(update={"unknown_rate": {"item": 0.3}})


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    return Workspace(tmp_path_factory.mktemp("unknown"))


@pytest.fixture(scope="module")
def features(home: Workspace, make_dataset: Callable[..., Manifest]) -> Manifest:
    return make_dataset(home, train=4003, valid=800, groups=10)


@pytest.fixture(scope="module")
def split(home: Workspace, features: Manifest) -> Split:
    return split_of(features, home, "train", ["row"])


def batches(split: Split, n: int, train: Train, rank: int = 0, world: int = 1, start: int = 0) -> list[Batch]:
    with TrainLoader(*split, train, World(rank, world), start_step=start, carried=["row"]) as source:
        return list(itertools.islice(source, n))


def codes_of(loaded: Sequence[Batch]) -> np.ndarray:
    return np.concatenate([b.codes for b in loaded])


def test_a_share_of_the_ids_is_unknown_and_all_else_stays(split: Split) -> None:
    column = [f.name for f in split[1].of(Kind.CATEGORICAL) if not f.is_list].index("item")
    steps = 2 * (4003 // 64)
    plain, changed = batches(split, steps, LOADED), batches(split, steps, UNKNOWN)
    original, after = codes_of(plain), codes_of(changed)
    is_changed = original[:, column] != after[:, column]
    assert (after[is_changed, column] == OOV_CODE).all()
    assert abs(is_changed.mean() - 0.3) < 5 * np.sqrt(0.3 * 0.7 / len(original))
    np.testing.assert_array_equal(np.delete(original, column, axis=1), np.delete(after, column, axis=1))
    for a, b in zip(plain, changed, strict=True):
        np.testing.assert_array_equal(a.labels, b.labels)
        np.testing.assert_array_equal(a.continuous, b.continuous)
        np.testing.assert_array_equal(a.carried["row"], b.carried["row"])
    # Of each row another draw in each epoch: both times as often as it would be by chance.
    rows = np.concatenate([b.carried["row"] for b in plain])
    times = np.bincount(rows, is_changed, minlength=4003)[np.bincount(rows, minlength=4003) == 2]
    assert abs((times == 2).mean() - 0.09) < 5 * np.sqrt(0.09 * 0.91 / len(times))


def test_what_is_unknown_depends_on_neither_ranks_nor_where_a_run_goes_on(split: Split) -> None:
    uninterrupted = batches(split, 70, UNKNOWN)
    ranks = [batches(split, 70, UNKNOWN, rank, 2) for rank in range(2)]
    for step, batch in enumerate(uninterrupted):
        np.testing.assert_array_equal(batch.codes, np.concatenate([ranks[r][step].codes for r in range(2)]))
    for start in (1, 7, 65):
        for a, b in zip(uninterrupted[start:], batches(split, 5, UNKNOWN, start=start), strict=False):
            np.testing.assert_array_equal(a.codes, b.codes)


def test_negatives_and_replayed_rows_are_unknown_too(split: Split) -> None:
    column = [f.name for f in split[1].of(Kind.CATEGORICAL) if not f.is_list].index("item")
    negatives = {"negatives": Negatives(column="item", per_positive=2)}
    original, after = (
        codes_of(batches(split, 60, train.model_copy(update=negatives)))[:, column] for train in (LOADED, UNKNOWN)
    )
    is_changed = original != after
    assert (after[is_changed] == OOV_CODE).all()
    assert abs(is_changed.mean() - 0.3) < 5 * np.sqrt(0.3 * 0.7 / len(original))

    layout, schema = split
    plan = ReplayRows.plan([layout], 2_000, 40, "row", 4, seed=5)
    codes = []
    for train in (LOADED, UNKNOWN):
        loader = ReplayLoader(layout, schema, train, batch_rows=40, taken=plan.taken, seed=5)
        codes.append(codes_of(list(itertools.islice(loader, 50)))[:, column])
        loader.close()
    is_changed = codes[0] != codes[1]
    assert (codes[1][is_changed] == OOV_CODE).all()
    assert abs(is_changed.mean() - 0.3) < 5 * np.sqrt(0.3 * 0.7 / len(is_changed))


@given(
    cuts=st.lists(st.integers(0, 200), max_size=3).map(sorted),
    skip=st.integers(0, 200),
    buckets=st.integers(1, 3),
    rate=st.sampled_from([0.01, 0.5, 0.999]),
)
def test_known_codes_alone_become_buckets_wherever_they_are_written(
    cuts: list[int], skip: int, buckets: int, rate: float
) -> None:
    rows, first = 200, OOV_CODE + buckets
    codes = np.arange(2 * rows, dtype=np.int64).reshape(2, rows) % 9
    columns, parts = codes.copy(), codes[:, skip:].copy()
    plan = UnknownIds(column=1, rate=rate, first=first)
    plan.write(np.random.default_rng(1), rows, 0, OutputColumns([columns]))
    bounds = [max(0, c - skip) for c in cuts]
    views = [parts[:, a:b] for a, b in itertools.pairwise([0, *bounds, rows - skip])]
    plan.write(np.random.default_rng(1), rows, skip, OutputColumns(views))
    np.testing.assert_array_equal(parts, columns[:, skip:])
    np.testing.assert_array_equal(columns[0], codes[0])
    changed = columns[1] != codes[1]
    assert (codes[1][changed] >= first).all()
    assert set(columns[1][changed].tolist()) <= set(range(OOV_CODE, first))
    if rate > 0.9:
        assert set(columns[1][changed].tolist()) == set(range(OOV_CODE, first))
        assert changed.sum() > 0.9 * (codes[1] >= first).sum()


@pytest.mark.parametrize("rates", [{"tags": 0.1}, {"itm": 0.1}, {"age": 0.1}])
def test_of_a_feature_without_ids(split: Split, rates: Mapping[str, float]) -> None:
    with pytest.raises(UserError, match=r"train.unknown_rate: '\w+' is no .* there are: user, item"):
        TrainLoader(*split, LOADED.model_copy(update={"unknown_rate": rates}))
    raw = Feature(name="itm", kind=Kind.CATEGORICAL, dtype="int64", dynamic=True)
    with pytest.raises(UserError, match=r"there are: none"):
        UnknownIds.from_rates(DatasetSchema(features=(raw,)), {"itm": 0.1})


def test_rows_of_unknown_items_are_predicted_better(home: Workspace, features: Manifest, split: Split) -> None:
    """Against the label: the loss of rows whose item is unknown, by a model that has learned from such."""
    schema, dataset = split[1], home.locate(features.output("dataset").name)
    with EvalLoader(open_split(dataset, "valid", schema, ["row"]), schema, batch_size=1600, streams=4) as source:
        batch = next(iter(source))
    assert batch.rows == 800
    column = [f.name for f in schema.of(Kind.CATEGORICAL) if not f.is_list].index("item")
    losses = {}
    for name, rates in (("plain", {}), ("unknown", {"item": 0.2})):
        job = job_of(home, features, name, TRAIN.model_copy(update={"unknown_rate": rates, "patience": None}), MODEL)
        train_local(job)
        model = load_model(job.saved_model).eval()
        codes = np.concatenate([batch.codes, np.zeros((800, 3), np.int64)], axis=1)
        codes[:, column] = OOV_CODE
        with torch.no_grad():
            logits = model(torch.from_numpy(np.ascontiguousarray(batch.continuous)), torch.from_numpy(codes)).numpy()
        p = 1 / (1 + np.exp(-logits.astype(np.float64)))
        losses[name] = -np.mean(np.where(batch.labels > 0, np.log(p), np.log1p(-p)))
    assert losses["unknown"] < losses["plain"] - 0.003


def test_it_is_in_keys_where_it_is_asked_for(home: Workspace, features: Manifest) -> None:
    assert not TrainStage().spec_part(load_spec("clicks"))["train"]["unknown_rate"]
    spec = load_spec("clicks", ["train.unknown_rate.item_id=0.1"])
    assert dict(TrainStage().spec_part(spec)["train"]["unknown_rate"]) == {"item_id": 0.1}
    plain, unknown = (
        job_of(home, features, "key", TRAIN.model_copy(update={"unknown_rate": rates})).config_fingerprint
        for rates in ({}, {"item": 0.1})
    )
    assert plain != unknown
    assert plain == job_of(home, features, "key", TRAIN).config_fingerprint
    for wrong in ("0", "1", "-0.1"):
        with pytest.raises(UserError, match=r"train.unknown_rate.item_id"):
            load_spec("clicks", [f"train.unknown_rate.item_id={wrong}"])
    searched = load_spec(
        "clicks",
        ["train.search.parameters={train.unknown_rate.item_id: {low: 0.01, high: 0.2}}", "train.search.trials=2"],
    )
    assert build_spec(searched.model_dump(mode="json", by_alias=True)) == searched
