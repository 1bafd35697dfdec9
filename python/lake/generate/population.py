"""Population of the generated log: users and items, their popularity, birthdays and traits.

An entity is an index 0, 1, 2, ... in order of birth. Its traits are hashes of (seed, index), so a process computes only
those of the entities in its rows. Each of the millions of others takes one float64 (the popularity sums).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from headrace.compute.counter_random import Floats, Ints, integers, normal, scatter_ids, stream, uniform
from headrace.config import Generate

COUNTRIES = ("US", "IN", "BR", "DE", "GB", "FR", "JP", "MX", "IT", "ES", "PL", "NL", "SE", "TR", "KR", "AR")
#: The comma, the ampersand and the letters beyond ASCII are on purpose: readers of CSV and JSON must handle them.
CATEGORIES = (
    "Books",
    "Music",
    "Films",
    "Games",
    "Toys",
    "Sport",
    "Outdoor",
    "Garden",
    "Home, Living",
    "Kitchen & Café",
    "Fashion",
    "Shoes",
    "Jewellery",
    "Beauty",
    "Health",
    "Baby",
    "Pets",
    "Groceries",
    "Électronique",
    "Computers",
    "Phones",
    "Cars",
    "Tools",
    "Travel",
)
DEVICES = ("mobile", "desktop", "tablet", "tv")
TAGS = (
    "new",
    "sale",
    "vegan",
    "organic",
    "wool",
    "cotton",
    "leather",
    "steel",
    "wood",
    "glass",
    "small",
    "large",
    "light",
    "heavy",
    "red",
    "green",
    "blue",
    "black",
    "white",
    "gold",
    "vintage",
    "modern",
    "classic",
    "luxury",
    "budget",
    "family",
    "kids",
    "adult",
    "summer",
    "winter",
    "spring",
    "autumn",
    "indoor",
    "wireless",
    "smart",
    "quiet",
    "fast",
    "handmade",
    "local",
    "imported",
    "recycled",
    "waterproof",
    "portable",
    "refurbished",
    "limited",
    "bestseller",
    "gift",
    "bundle",
)
AGE_EDGES = (25, 35, 45, 60)
MAX_TAGS = 4
TASTE_DIM = 8
#: Ids are scattered over this many bits: user ids do not fit a float64, item ids do not fit 32 bits.
USER_ID_BITS = 63
ITEM_ID_BITS = 40
#: Items of the first day were born up to this many days before it.
_OLDEST_ITEM_DAYS = 400
_CATEGORY_ZIPF = 0.6
_COUNTRY_ZIPF = 0.8
_DEVICE_SHARES = (0.55, 0.3, 0.1, 0.05)


@dataclass(frozen=True)
class Users:
    """Traits of n users on a day."""

    id: Ints  # [n]
    country: Ints  # [n], index into COUNTRIES
    age: Ints  # [n], years
    age_group: Ints  # [n], 0..len(AGE_EDGES)
    activity: Floats  # [n], sessions a week
    device: Ints  # [n], the device used most, index into DEVICES
    bias: Floats  # [n], standard normal
    taste: Floats  # [n, TASTE_DIM], each coordinate standard normal


@dataclass(frozen=True)
class Items:
    """Traits of n items."""

    id: Ints  # [n]
    category: Ints  # [n], index into CATEGORIES
    price: Floats  # [n], two decimals, > 0
    log_price_z: Floats  # [n], standardised within the category
    born: Floats  # [n], days since the log's first midnight; negative: before it
    bias: Floats  # [n], standard normal
    tags: Ints  # [n, MAX_TAGS], index into TAGS, -1 where there is none
    taste: Floats  # [n, TASTE_DIM], each coordinate standard normal


def alive(first: int, growth: float, day: int) -> int:
    """Return how many entities exist on a day (0 is the first)."""
    return first + int(first * growth * day)


def birthday(first: int, growth: float, index: Ints, last_day: int) -> Ints:
    """Return the day on which each entity appears, int64 [n]; 0 for those of the first day."""
    counts = np.array([alive(first, growth, d) for d in range(last_day + 1)])
    return np.searchsorted(counts, index, side="right").astype(np.int64)


@lru_cache(maxsize=4)
def _popularity_sums(seed: int, kind: str, first: int, total: int, exponent: float) -> Floats:
    """Return running sums of the entities' weights, float64 [total]: weight = rank^-exponent (Zipf).

    Entities of the first day have the ranks 1..first in random order; each newcomer has a random one of these ranks. A
    day's sums are a prefix of a later day's, so one array serves all days.
    """
    rng = np.random.default_rng(stream(seed, f"{kind}/rank"))
    ranks = np.empty(total, dtype=np.float64)
    ranks[:first] = rng.permutation(first) + 1.0
    newcomers = np.arange(first, total, dtype=np.int64)
    ranks[first:] = 1 + integers(stream(seed, f"{kind}/newcomer"), newcomers, first)
    sums: Floats = np.cumsum(ranks**-exponent)
    sums.setflags(write=False)
    return sums


def draw(params: Generate, kind: str, u: Floats, day: Ints, last_day: int) -> Ints:
    """Draw entity indices by popularity from those alive on each row's day.

    Args:
        params: the generator's parameters.
        kind: "user" or "item".
        u: uniform in [0, 1), float64 [n].
        day: int64 [n], each <= last_day.
        last_day: the newest day of this batch.

    Returns:
        int64 [n].
    """
    first, growth, exponent = (
        (params.users, params.new_users, params.user_zipf)
        if kind == "user"
        else (params.items, params.new_items, params.item_zipf)
    )
    sums = _popularity_sums(params.seed, kind, first, alive(first, growth, last_day), exponent)
    days = np.arange(last_day + 1)
    counts = np.array([alive(first, growth, int(d)) for d in days])
    index = np.searchsorted(sums, u * sums[counts - 1][day], side="right")
    return np.minimum(index, counts[day] - 1).astype(np.int64)


def users(params: Generate, index: Ints, day: Ints) -> Users:
    """Return the traits of users, each on its own day: index, day int64 [n]."""
    seed = params.seed
    trait = normal(stream(seed, "user/traits"), index, 3)
    age = np.clip(np.rint(38.0 + 13.0 * trait[:, 0]), 16, 90).astype(np.int64)
    return Users(
        id=scatter_ids(stream(seed, "user/id"), index, USER_ID_BITS),
        country=_zipf_choice(uniform(stream(seed, "user/country"), index), len(COUNTRIES), _COUNTRY_ZIPF),
        age=age,
        age_group=np.searchsorted(AGE_EDGES, age, side="right").astype(np.int64),
        activity=np.round(4.0 * np.exp(0.5 * trait[:, 1]), 2),
        device=_choice(uniform(stream(seed, "user/device"), index), np.asarray(_DEVICE_SHARES)),
        bias=trait[:, 2],
        taste=_drifted(params, index, day),
    )


def _drifted(params: Generate, index: Ints, day: Ints) -> Floats:
    """Return tastes [n, TASTE_DIM] on the given days.

    Each user's taste rotates in TASTE_DIM/2 planes, at its own rate in each: angle per day ~ N(0, drift^2). A small
    rotation moves each coordinate by angle * (the plane's other coordinate, of variance 1), so a day's step has the
    standard deviation `drift`. The taste keeps its length, and each day is computed without the days before it.
    """
    seed, half = params.seed, TASTE_DIM // 2
    start = normal(stream(seed, "user/taste"), index, TASTE_DIM)
    angle = params.drift * normal(stream(seed, "user/turn"), index, half) * day[:, None]
    cos, sin, x, y = np.cos(angle), np.sin(angle), start[:, :half], start[:, half:]
    return np.concatenate([x * cos - y * sin, x * sin + y * cos], axis=1)


def items(params: Generate, index: Ints, last_day: int) -> Items:
    """Return the traits of items: index int64 [n], each alive on `last_day`."""
    seed = params.seed
    category = _zipf_choice(uniform(stream(seed, "item/category"), index), len(CATEGORIES), _CATEGORY_ZIPF)
    trait = normal(stream(seed, "item/traits"), index, 2)
    age_at_start = uniform(stream(seed, "item/age"), index) * _OLDEST_ITEM_DAYS
    born = birthday(params.items, params.new_items, index, last_day).astype(np.float64)
    level = 1.5 + 3.5 * uniform(stream(seed, "category/price"), np.arange(len(CATEGORIES)))
    centre = normal(stream(seed, "category/taste"), np.arange(len(CATEGORIES)), TASTE_DIM)
    item_taste = normal(stream(seed, "item/taste"), index, TASTE_DIM)
    return Items(
        id=scatter_ids(stream(seed, "item/id"), index, ITEM_ID_BITS),
        category=category,
        price=np.maximum(np.round(np.exp(level[category] + 0.8 * trait[:, 0]), 2), 0.01),
        log_price_z=trait[:, 0],
        born=np.where(index < params.items, -age_at_start, born),
        bias=trait[:, 1],
        tags=_tags(seed, index, category),
        # Half of the variance of an item's taste is that of its category.
        taste=np.sqrt(0.5) * (centre[category] + item_taste),
    )


def _tags(seed: int, index: Ints, category: Ints) -> Ints:
    """Draw 0 to MAX_TAGS different tags per item, [n, MAX_TAGS]; the first is near its category's."""
    start = 2 * category + integers(stream(seed, "item/tag"), index, 6)
    # Steps without a common factor with the number of tags do not repeat a tag within a row.
    coprime = np.array([s for s in range(1, len(TAGS)) if np.gcd(s, len(TAGS)) == 1])
    step = coprime[integers(stream(seed, "item/tag-step"), index, len(coprime))]
    places = np.arange(MAX_TAGS)
    tags = (start[:, None] + step[:, None] * places) % len(TAGS)
    count = integers(stream(seed, "item/tag-count"), index, MAX_TAGS + 1)
    return np.where(places < count[:, None], tags, -1)


def _zipf_choice(u: Floats, size: int, exponent: float) -> Ints:
    return _choice(u, np.arange(1, size + 1, dtype=np.float64) ** -exponent)


def _choice(u: Floats, weights: Floats) -> Ints:
    sums = np.cumsum(weights) / weights.sum()
    return np.minimum(np.searchsorted(sums, u, side="right"), len(weights) - 1).astype(np.int64)
