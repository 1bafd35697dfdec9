"""The generator's random numbers, ids, popularity and tastes, each against its definition."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.compute.counter_random import (
    bits,
    hexadecimal,
    integers,
    normal,
    scatter_64,
    scatter_ids,
    stream,
    uniform,
)
from headrace.config import Generate
from headrace.lake.generate.population import (
    ITEM_ID_BITS,
    MAX_TAGS,
    TAGS,
    USER_ID_BITS,
    alive,
    birthday,
    draw,
    items,
    users,
)


def test_bits_are_splitmix64_of_python_integers() -> None:
    # The same hash with Python's unbounded integers: catches a silent overflow or cast to float in NumPy.
    mask = (1 << 64) - 1

    def mix(x: int) -> int:
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        return x ^ (x >> 31)

    key = stream(7, "event/user")
    counters = [0, 1, 2**53 + 1, 2**63 + 12345]
    want = [mix(mix((c * 0x9E3779B97F4A7C15 + key) & mask) ^ key) for c in counters]
    assert bits(key, np.array(counters, dtype=np.uint64)).tolist() == want
    assert scatter_64(key, np.array(counters, dtype=np.uint64)).tolist() == [mix(c ^ key) for c in counters]


def test_uniform_and_normal_have_their_moments_and_do_not_correlate() -> None:
    counter = np.arange(200_000)
    u = uniform(stream(1, "a"), counter)
    assert 0.0 <= u.min() < 1e-4
    assert 1.0 - 1e-4 < u.max() < 1.0
    # Means of 200,000: standard errors 0.00065 and 0.0022.
    assert abs(u.mean() - 0.5) < 0.003
    z = normal(stream(1, "b"), counter, 3)
    assert z.shape == (200_000, 3)
    assert np.abs(z.mean(axis=0)).max() < 0.01
    assert np.abs(z.std(axis=0) - 1.0).max() < 0.01
    draws = np.column_stack([z, u, uniform(stream(1, "c"), counter), uniform(stream(2, "a"), counter)])
    correlations = np.corrcoef(draws, rowvar=False) - np.eye(6)
    assert np.abs(correlations).max() < 0.01
    assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 0.01


def test_integers_cover_their_range_evenly() -> None:
    counts = np.bincount(integers(stream(3, "x"), np.arange(70_000), 7), minlength=7)
    assert len(counts) == 7
    assert np.abs(counts - 10_000).max() < 500  # five standard deviations


@pytest.mark.parametrize("width", [1, 2, 3, 7, 10, 13])
def test_scattered_ids_are_a_bijection(width: int) -> None:
    ids = scatter_ids(stream(5, "user/id"), np.arange(1 << width), width)
    assert sorted(ids.tolist()) == list(range(1 << width))


def test_ids_need_64_bit_integers() -> None:
    ids = scatter_ids(stream(7, "user/id"), np.arange(100_000), USER_ID_BITS)
    assert len(set(ids.tolist())) == 100_000
    assert ids.min() >= 0
    # A detour through float64 (or float32) would merge or move nearly all of them.
    assert (ids.astype(np.float64).astype(np.int64) != ids).mean() > 0.9
    small = scatter_ids(stream(7, "item/id"), np.arange(100_000), ITEM_ID_BITS)
    assert len(set(small.tolist())) == 100_000
    assert (small > 2**32).mean() > 0.99


def test_hexadecimal_is_pythons() -> None:
    values = np.array([0, 1, 255, 2**64 - 1, 0x0123456789ABCDEF], dtype=np.uint64)
    assert [h.decode() for h in hexadecimal(values).tolist()] == [f"{v:016x}" for v in values.tolist()]


def test_popularity_is_zipf() -> None:
    params = Generate(items=50, item_zipf=1.1, new_items=0.0)
    n = 200_000
    drawn = draw(params, "item", uniform(stream(9, "u"), np.arange(n)), np.zeros(n, dtype=np.int64), 0)
    shares = np.sort(np.bincount(drawn, minlength=50))[::-1] / n
    want = np.arange(1, 51) ** -1.1
    want /= want.sum()
    assert np.abs(shares - want).max() < 5 * np.sqrt(want[0] / n)


def test_only_the_living_are_drawn_and_newcomers_are_among_them() -> None:
    params = Generate(users=100, new_users=0.05)
    assert [alive(100, 0.05, d) for d in range(4)] == [100, 105, 110, 115]
    n = 50_000
    day = np.arange(n) % 4
    drawn = draw(params, "user", uniform(stream(9, "u"), np.arange(n)), day, 3)
    assert (birthday(100, 0.05, drawn, 3) <= day).all()
    for d in range(4):
        assert set(drawn[day == d].tolist()) == set(range(100 + 5 * d))


def test_taste_drifts_by_the_given_step_and_keeps_its_length() -> None:
    params = Generate(drift=0.05)
    index = np.arange(20_000)
    today, tomorrow = (users(params, index, np.full(20_000, d)).taste for d in (30, 31))
    steps = tomorrow - today
    assert steps.std() == pytest.approx(0.05, rel=0.03)
    np.testing.assert_allclose((today**2).sum(axis=1), (tomorrow**2).sum(axis=1), rtol=1e-9)
    still = Generate(drift=0.0)
    np.testing.assert_array_equal(
        users(still, index, np.full(20_000, 3)).taste, users(still, index, np.full(20_000, 300)).taste
    )


def test_traits_do_not_depend_on_who_else_is_asked_for() -> None:
    params = Generate()
    some = np.array([700, 3, 801])
    every = items(params, np.arange(900), 20)
    few = items(params, some, 20)
    for name in ("id", "category", "price", "born", "bias", "tags", "taste"):
        np.testing.assert_array_equal(getattr(few, name), getattr(every, name)[some])
    assert every.born[:800].max() <= 0.0
    assert every.born[800:].min() >= 1.0


def test_tags_of_an_item_differ_and_come_first() -> None:
    tags = items(Generate(items=5_000), np.arange(5_000), 0).tags
    counts = (tags >= 0).sum(axis=1)
    assert set(counts.tolist()) == set(range(MAX_TAGS + 1))
    for row, count in zip(tags.tolist(), counts.tolist(), strict=True):
        assert row[count:] == [-1] * (MAX_TAGS - count)
        assert len(set(row[:count])) == count
        assert all(0 <= tag < len(TAGS) for tag in row[:count])
