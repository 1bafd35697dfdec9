"""Items drawn for each row: those of a plain loop, in their shares, the same for any ranks and from any step on."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from scipy.stats import chisquare

from headrace.comm import World
from headrace.compute.jagged import JaggedArray
from headrace.config import Negatives, Train
from headrace.config.schema import DatasetSchema, Feature, Kind
from headrace.config.workspace import Workspace
from headrace.dataset.batches import Batch
from headrace.dataset.candidates import AliasTable, CandidateSampler
from headrace.dataset.layout import SplitLayout, split_of
from headrace.dataset.loaders import TrainLoader
from headrace.errors import UserError
from headrace.stage.manifest import Manifest
from headrace.train.evaluation.ranks import Ranks
from headrace.train.loop.training_rows import ItemShares

ITEMS, FIRST = 12, 3
SCHEMA = DatasetSchema(
    features=(
        Feature(name="user", kind=Kind.CATEGORICAL, dtype="int32", cardinality=50),
        Feature(
            name="item",
            kind=Kind.CATEGORICAL,
            dtype="int32",
            cardinality=ITEMS,
            vocabulary="item",
            oov_buckets=FIRST - 1,
        ),
        Feature(
            name="seen",
            kind=Kind.CATEGORICAL,
            dtype="int32",
            cardinality=ITEMS,
            vocabulary="item",
            length=9,
            is_list=True,
        ),
        Feature(name="click", kind=Kind.LABEL, dtype="float32"),
    )
)
COUNTS = np.array([9, 9, 9, 40, 20, 0, 10, 10, 5, 5, 5, 5])


def candidates(**more: Any) -> Negatives:
    return Negatives.model_validate({"column": "item", "as": "candidates", **more})


def rows_of(rng: np.random.Generator, rows: int, longest: int = 5) -> Batch:
    lists = [rng.integers(0, ITEMS, rng.integers(0, longest + 1)) for _ in range(rows)]
    offsets = np.concatenate([[0], np.cumsum([len(x) for x in lists])])
    seen = JaggedArray(offsets, np.concatenate([np.empty(0, np.int32), *lists]).astype(np.int32))
    codes = np.stack([rng.integers(0, 50, rows), rng.integers(0, ITEMS, rows)], axis=1)
    labels = (rng.random(rows) < 0.6).astype(np.float32)
    return Batch(np.zeros((rows, 0), np.float32), codes, labels, {}, {"seen": seen})


def mixed(x: int) -> int:
    """Return SplitMix64's finisher of one integer, in Python's integers."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % 2**64
    return x ^ (x >> 31)


def uniform(step: int, attempt: int, counter: int, seed: int = 7) -> float:
    key = int.from_bytes(hashlib.sha256(f"{seed}/candidates/{step}/{attempt}".encode()).digest()[:8], "little")
    bits = mixed(mixed((counter * 0x9E3779B97F4A7C15 + key) % 2**64) ^ key)
    return (bits >> 11) * 2.0**-53


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(["uniform", "popularity", "in_batch"]), st.booleans(), st.integers(0, 40))
def test_draws_are_those_of_a_loop(seed: int, method: str, excludes: bool, step: int) -> None:
    """Row by row and draw by draw: hash, look up, try again while it is the row's own or in its list."""
    batch, rows_each, n, first_row = rows_of(np.random.default_rng(seed), 12), 4, 3, 24
    negatives = candidates(method=method, per_positive=n, exclude="seen" if excludes else None)
    sampler = CandidateSampler.from_config(SCHEMA, negatives, 7, COUNTS)
    assert sampler is not None
    draws = sampler.draw(step, first_row, rows_each, batch)
    assert (draws.shape, draws.dtype) == ((12, n), np.int64)
    table = AliasTable(COUNTS[FIRST:].astype(float) ** 0.75)
    positives, seen = batch.codes[:, 1], batch.lists["seen"]
    for row in range(12):
        part = range(row // rows_each * rows_each, (row // rows_each + 1) * rows_each)
        pool = [positives[i] for i in part if batch.labels[i] > 0 and positives[i] >= FIRST]
        refused = {positives[row], *(seen.values[seen.offsets[row] : seen.offsets[row + 1]] if excludes else ())}
        for j in range(n):
            counter = (first_row + row) * n + j
            for attempt in range(8):
                u = uniform(step, attempt, counter)
                if method == "popularity":
                    drawn = FIRST + int(table.draw(np.array([u]))[0])
                elif method == "in_batch" and pool:
                    drawn = pool[int(u * len(pool))]
                else:
                    drawn = FIRST + int(u * (ITEMS - FIRST))
                if drawn not in refused:
                    break
            else:
                rest = [i for i in range(FIRST, ITEMS) if i not in refused]
                drawn = rest[int(uniform(step, 8, counter) * len(rest))]
            assert draws[row, j] == drawn


def test_ranks_of_any_number_draw_the_same_and_steps_differ() -> None:
    batch = rows_of(np.random.default_rng(1), 16)
    sampler = CandidateSampler.from_config(SCHEMA, candidates(per_positive=5, exclude="seen"), 7)
    assert sampler is not None
    alone = sampler.draw(3, 0, 4, batch)
    half = Batch(batch.continuous[8:], batch.codes[8:], batch.labels[8:], {}, {"seen": batch.lists["seen"].rows(8, 16)})
    np.testing.assert_array_equal(sampler.draw(3, 8, 4, half), alone[8:])
    assert (sampler.draw(4, 0, 4, batch) != alone).mean() > 0.5


@pytest.mark.parametrize("method", ["uniform", "popularity"])
@pytest.mark.parametrize("shared", [False, True])
def test_shares_of_what_is_drawn(method: str, shared: bool) -> None:
    """Chi-square over 60,000 draws; of the method's shares without the row's own, where rows have one."""
    sampler = CandidateSampler.from_config(
        SCHEMA, candidates(method=method, per_positive=3_000 if shared else 30, shared=shared, exponent=0.5), 5, COUNTS
    )
    assert sampler is not None
    batch = Batch(np.zeros((100, 0), np.float32), np.full((100, 2), 4), np.ones(100, np.float32))
    drawn = np.concatenate([sampler.draw(step, 0, 25, batch).reshape(-1) for step in range(20)])
    weights = np.sqrt(COUNTS) if method == "popularity" else np.ones(ITEMS)
    weights[:FIRST] = 0
    if not shared:
        weights[4] = 0  # the rows' own
    times = np.bincount(drawn, minlength=ITEMS)
    assert not times[weights == 0].any()
    expected = weights[weights > 0] / weights.sum() * len(drawn)
    assert chisquare(times[weights > 0], expected).pvalue > 1e-3
    # Draws of neighbouring rows and places are independent: pairs are where the product of shares says.
    if method == "uniform" and not shared:
        pairs = np.zeros((ITEMS, ITEMS))
        np.add.at(pairs, (drawn[:-1], drawn[1:]), 1)
        cells = pairs[np.ix_(weights > 0, weights > 0)].reshape(-1)
        assert chisquare(cells, np.full(cells.size, cells.sum() / cells.size)).pvalue > 1e-3


@example([0.0, 0.0, 1.0, 1.0])
@example([0.0, 1.0, 1.0, 2.0])
@example([1.0] * 49)  # 49 times 1 / 49 is below 1
@given(
    st.lists(st.floats(0, 1e6) | st.sampled_from([0.0, 1.0, 2.0]), min_size=1, max_size=60).filter(
        lambda w: sum(w) > 1e-3
    )
)
def test_an_alias_table_has_the_weights_shares(weights: list[float]) -> None:
    w = np.array(weights)
    table = AliasTable(w)
    np.testing.assert_allclose(table.shares(), w / w.sum(), atol=1e-12)
    uniforms = (np.arange(20_000) + 0.5) / 20_000
    np.testing.assert_allclose(np.bincount(table.draw(uniforms), minlength=len(w)) / 20_000, w / w.sum(), atol=2e-2)


def test_raw_ids_are_drawn_from_the_batch() -> None:
    schema = DatasetSchema(
        features=(
            Feature(name="item", kind=Kind.CATEGORICAL, dtype="int64", dynamic=True),
            Feature(name="click", kind=Kind.LABEL, dtype="float32"),
        )
    )
    sampler = CandidateSampler.from_config(schema, candidates(method="in_batch", per_positive=8), 1)
    assert sampler is not None
    codes = np.array([[10**16], [-4], [0], [5], [77], [77], [77], [77]])
    batch = Batch(np.zeros((8, 0), np.float32), codes, np.array([1, 1, 1, 0, 1, 1, 1, 1], np.float32))
    draws = sampler.draw(0, 0, 4, batch)
    known = [{-4}, {10**16}, {-4, 10**16}, {-4, 10**16}, {0}, {0}, {0}, {0}]
    assert [set(row) <= k for row, k in zip(draws.tolist(), known, strict=True)] == [True] * 8
    assert set(draws[3]) == {-4, 10**16}


def test_a_list_of_everything_leaves_any_other() -> None:
    batch = Batch(
        np.zeros((1, 0), np.float32),
        np.array([[1, 5]]),
        np.ones(1, np.float32),
        {},
        {"seen": JaggedArray(np.array([0, ITEMS]), np.arange(ITEMS, dtype=np.int32))},
    )
    sampler = CandidateSampler.from_config(SCHEMA, candidates(per_positive=500, exclude="seen"), 1)
    assert sampler is not None
    assert set(sampler.draw(0, 0, 1, batch)[0].tolist()) == set(range(FIRST, ITEMS)) - {5}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"as": "rows", "method": "popularity"}, "is for `as: candidates`"),
        ({"as": "rows", "shared": True}, "`shared` is for `as: candidates`"),
        ({"as": "candidates", "shared": True, "method": "in_batch"}, "draws once for all rows"),
        ({"as": "candidates", "shared": True, "exclude": "seen"}, "draws once for all rows"),
        ({"as": "items"}, "'rows' or 'candidates'"),
    ],
)
def test_settings_that_do_not_fit(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Negatives.model_validate({"column": "item", **values})


@pytest.mark.parametrize("name", ["item", "user", "sen"])
def test_a_list_that_cannot_be_left_out(name: str) -> None:
    with pytest.raises(UserError, match=r"exclude: .* is no list of codes .* \(there are: seen\)"):
        CandidateSampler.from_config(SCHEMA, candidates(exclude=name), 1)


def test_negatives_round_trip() -> None:
    negatives = candidates(exponent=1.0)
    assert negatives.model_dump(mode="json")["form"] == "candidates"
    assert Train.model_validate(Train(negatives=negatives).model_dump(mode="json")).negatives == negatives


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory, make_dataset: Callable[..., Manifest]) -> tuple[Any, ...]:
    home = Workspace(tmp_path_factory.mktemp("candidates"))
    manifest = make_dataset(home, train=1003, valid=20)
    return (*split_of(manifest, home, "train"), home, manifest)


@pytest.mark.parametrize("more", [{"method": "popularity", "per_positive": 3}, {"shared": True, "per_positive": 9}, {}])
def test_loaders_draw_beside_their_rows(split: tuple[Any, ...], more: dict[str, Any]) -> None:
    """One rank, two, and from a later step on: the same; the rows are those of a loader that draws nothing."""
    layout, schema = split[:2]
    train = Train(batch_size=64, streams=4, seed=3, negatives=candidates(**more))
    sampler = ItemShares(Ranks(), layout, schema, train).sampler()

    def batches(world: World, start: int, count: int) -> list[Batch]:
        with TrainLoader(layout, schema, train, world, start_step=start, candidates=sampler) as source:
            assert source.rows == 1003
            return [next(source) for _ in range(count)]

    alone = batches(World(), 0, 20)
    later = batches(World(), 13, 4)
    pairs = [batches(World(rank, 2), 13, 4) for rank in range(2)]
    plain = Train(batch_size=64, streams=4, seed=3)
    with TrainLoader(layout, schema, plain) as source:
        for b in alone:
            original = next(source)
            assert original.negatives is None
            np.testing.assert_array_equal(b.codes, original.codes)
    for i, b in enumerate(later):
        assert b.negatives is not None
        np.testing.assert_array_equal(b.negatives, alone[13 + i].negatives)
        both = [pair[i].negatives for pair in pairs]
        assert both[0] is not None
        np.testing.assert_array_equal(both[0] if b.negatives.ndim == 1 else np.concatenate(both), b.negatives)


def test_logarithms_of_shares(split: tuple[Any, ...]) -> None:
    """Counted by hand; of draws as the method says."""
    layout: SplitLayout = split[0]
    schema: DatasetSchema = split[1]
    rows = [r for f in layout.files for r in pq.read_table(f.local_path(), columns=["item", "click"]).to_pylist()]
    count = [sum(r["item"] == i for r in rows) for i in range(40)]
    clicks = [sum(r["item"] == i and r["click"] > 0 for r in rows) for i in range(40)]

    def shares(**more: Any) -> ItemShares:
        return ItemShares(Ranks(), layout, schema, Train(negatives=candidates(**more)))

    def close(logarithms: Any, weights: list[float]) -> None:
        np.testing.assert_allclose(
            logarithms.numpy()[2:], [math.log(max(w, 1) / sum(weights)) for w in weights[2:]], rtol=1e-5
        )

    close(shares().log_share("item", "rows"), count)
    close(shares().log_share("item", "positives"), clicks)
    close(shares().log_share("item", "negatives"), [0, 0] + [1] * 38)
    close(shares(method="in_batch").log_share("item", "negatives"), clicks)
    close(
        shares(method="popularity", exponent=0.6).log_share("item", "negatives"), [0, 0, *(c**0.6 for c in clicks[2:])]
    )
    close(shares(method="popularity", exponent=0).log_share("item", "negatives"), [0, 0] + [1] * 38)
    assert shares().log_share("item", "rows")[0] == pytest.approx(math.log(1 / 1003))
    with pytest.raises(UserError, match=r"set train\.negatives to candidates of it"):
        shares().log_share("user", "negatives")
    with pytest.raises(UserError, match="no categorical feature with one code a row"):
        shares().log_share("tags", "rows")
