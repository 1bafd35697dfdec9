"""Model of clicks and purchases: which user sees which item when, and with which probability the user clicks and buys.

    logit P(click) = intercept + user's bias + item's bias
                     + category + category x country + category x age group + category x device + hour x device
                     + tags + price (the young mind it more) + freshness + activity
                     + taste * <user's taste on that day, item's taste> + the category's trend on that day

The intercept is set so that the mean of P is `base_rate`. A null hides a value from the reader of the log, not from
the user: it is a trait of the user or item, which the id still identifies. `device` is the exception, a trait of the
row: a row without it has no device effect, so P is a function of values that are in the log.

Where a log has purchases (`generate.purchase_rate`), they follow clicks:

    logit P(purchase | click) = intercept + category + category x country + price (cheap things are bought) + activity

The intercept is set so that the mean of P over the first day's clicks is `purchase_rate`. The log has all of these
terms. So no model predicts the purchase after a click better than P, or a row's than P(click) P(purchase | click).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from headrace.compute.counter_random import Floats, Ints, UInts, integers, scatter_64, stream, uniform
from headrace.config import Generate
from headrace.lake.generate.population import (
    AGE_EDGES,
    CATEGORIES,
    COUNTRIES,
    DEVICES,
    TAGS,
    TASTE_DIM,
    Items,
    Users,
    draw,
    items,
    users,
)

DAY_MILLISECONDS = 86_400_000
#: Columns that may be null, in the order of `Events.null`.
NULLABLE = (
    "user_age",
    "user_country",
    "user_activity",
    "item_category",
    "item_price",
    "item_age_days",
    "item_tags",
    "device",
)
#: A day has fewer events than this; (day, row) is one 64-bit counter.
MAX_ROWS_PER_DAY = 1 << 40

#: Traffic by hour of the day (UTC), relative.
_TRAFFIC = 1.0 + 0.8 * np.sin((np.arange(24) - 9.0) / 24.0 * 2.0 * np.pi) + 0.3 * np.sin(np.arange(24) / 6.0 * np.pi)
_HOME_DEVICE_SHARE = 0.75
#: Weights in the logit of a user's and an item's standard normal bias, which only the id identifies, no other column.
USER_BIAS, ITEM_BIAS = 0.35, 0.6
_TREND_DAYS = 28.0
_CALIBRATION_ROWS = 1 << 15


@dataclass(frozen=True)
class ClickModel:
    """Parameters of the events: small, and the same in every process. An event also depends on its day and row."""

    params: Generate
    #: Events land at most this many days after they happened.
    late_days: int


@dataclass(frozen=True)
class Events:
    """Columns of n events. Traits are stored by entity; `user_row` and `item_row` are the event's rows of them."""

    event_id: UInts  # [n]
    day: Ints  # [n], days since the first day: when it happened
    lag: Ints  # [n], days between then and its landing
    millisecond: Ints  # [n], of the day
    users: Users
    user_row: NDArray[np.intp]  # [n]
    items: Items
    item_row: NDArray[np.intp]  # [n]
    device: Ints  # [n], index into DEVICES (also where null)
    item_age: Floats  # [n], days
    null: NDArray[np.bool_]  # [n, len(NULLABLE)]
    logit: Floats  # [n]
    clicked: NDArray[np.bool_]  # [n]

    def __len__(self) -> int:
        return len(self.event_id)


@dataclass(frozen=True)
class _Effects:
    """The fixed parts of the logit, each of mean 0 and of a fixed spread over its table."""

    category: Floats  # [CATEGORIES]
    country: Floats  # [CATEGORIES, COUNTRIES]
    age: Floats  # [CATEGORIES, age groups]
    device: Floats  # [CATEGORIES, DEVICES]
    tag: Floats  # [TAGS + 1]; the last is no tag
    hour: Floats  # [DEVICES + 1, 24]; the last is an unknown device
    phase: Floats  # [CATEGORIES], of the trend


@lru_cache(maxsize=4)
def _effects(seed: int) -> _Effects:
    rng = np.random.default_rng(stream(seed, "effects"))
    hours = np.arange(24) / 24.0 * 2.0 * np.pi
    shift = rng.uniform(0.0, 2.0 * np.pi, size=(len(DEVICES) + 1, 1))
    return _Effects(
        category=_normal(rng, 0.7, len(CATEGORIES)),
        country=_normal(rng, 0.6, len(COUNTRIES)) + _normal(rng, 0.25, (len(CATEGORIES), len(COUNTRIES))),
        age=_normal(rng, 0.4, (len(CATEGORIES), len(AGE_EDGES) + 1)),
        device=_normal(rng, 0.3, len(DEVICES)) + _normal(rng, 0.25, (len(CATEGORIES), len(DEVICES))),
        tag=np.append(_normal(rng, 0.45, len(TAGS)), 0.0),
        hour=0.4 * np.sin(hours + 0.5 * shift) + 0.1 * np.cos(2.0 * hours + shift),
        phase=rng.uniform(0.0, 2.0 * np.pi, size=len(CATEGORIES)),
    )


def _normal(rng: np.random.Generator, spread: float, shape: int | tuple[int, ...]) -> Floats:
    """Return normal draws, shifted and scaled to mean 0 and standard deviation `spread` exactly.

    So logs of different seeds differ in their pattern, but not in how much a model can learn.
    """
    draws = rng.normal(size=shape)
    centred: Floats = (draws - draws.mean()) * (spread / draws.std())
    return centred


def events(model: ClickModel, landing_day: Ints, row: Ints) -> Events:
    """Return the events at these days and rows of the landing log.

    Args:
        model: parameters.
        landing_day: int64 [n], days since the first day.
        row: int64 [n], each in [0, MAX_ROWS_PER_DAY).

    Returns:
        n events, each a pure function of (model, its landing day, its row).
    """
    return _events(model, landing_day, row, _intercept(model))


@lru_cache(maxsize=16)
def _intercept(model: ClickModel) -> float:
    """Return the intercept that makes the mean of P `base_rate` over the events of the first day, by bisection."""
    rows = np.arange(_CALIBRATION_ROWS)
    logit = _events(model, np.zeros_like(rows), rows, 0.0).logit
    low, high = -30.0, 30.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if probability(logit + middle).mean() < model.params.base_rate else (low, middle)
    return (low + high) / 2


def probability(logit: Floats) -> Floats:
    """Return P(click), float64 of the logit's shape."""
    p: Floats = 1.0 / (1.0 + np.exp(-logit))
    return p


def _events(model: ClickModel, landing_day: Ints, row: Ints, intercept: float) -> Events:
    params = model.params
    counter = _counter(landing_day, row)

    def u(purpose: str) -> Floats:
        return uniform(stream(params.seed, f"event/{purpose}"), counter)

    lag = lag_of(model, landing_day, row)
    day = landing_day - lag
    last_day = int(day.max(initial=0))
    impressions = Impressions(
        counter=counter,
        day=day,
        user=draw(params, "user", u("user"), day, last_day),
        item=draw(params, "item", u("item"), day, last_day),
        millisecond=_millisecond(u("time")),
        at_home=u("home-device") < _HOME_DEVICE_SHARE,
        other_device=integers(stream(params.seed, "event/other-device"), counter, len(DEVICES)),
    )
    return _clicks(model, impressions, lag, "event", intercept)


@dataclass(frozen=True)
class Impressions:
    """Columns of n impressions: a user was shown an item. Users and items are indices."""

    #: Counter of each impression's random numbers.
    counter: UInts  # [n]
    day: Ints  # [n], days since the first day
    user: Ints  # [n]
    item: Ints  # [n]
    millisecond: Ints  # [n], of the day
    at_home: NDArray[np.bool_]  # [n], whether the user is at the device that they use most
    other_device: Ints  # [n], the device otherwise, index into DEVICES
    #: Probability that the user looked at the item; 1: the user looks at every item.
    examined: Floats | float = 1.0


def clicks(model: ClickModel, impressions: Impressions, lag: Ints, purpose: str, nulls: float | None = None) -> Events:
    """Draw what users do with the items they are shown: each event is a function of the model and its own row.

    Args:
        model: parameters.
        impressions: n impressions.
        lag: days until each one's event lands, int64 [n].
        purpose: name of the stream of random numbers; `events` uses "event".
        nulls: share of missing values; None: the model's.
    """
    params = model.params if nulls is None else model.params.model_copy(update={"nulls": nulls})
    return _clicks(replace(model, params=params), impressions, lag, purpose, _intercept(model))


def arrivals(model: ClickModel, day: int, number: Ints, purpose: str) -> tuple[Ints, Ints, NDArray[np.bool_], Ints]:
    """Draw the visitors of a day: users by popularity, times by the day's traffic.

    Returns:
        for each number [n]: the user's index, the millisecond of the day, whether the visitor uses the device that the
        user uses most, and otherwise which device.
    """
    params, days = model.params, np.full(len(number), day)
    counter = _counter(days, number)

    def u(purpose_: str) -> Floats:
        return uniform(stream(params.seed, f"{purpose}/{purpose_}"), counter)

    return (
        draw(params, "user", u("user"), days, day),
        _millisecond(u("time")),
        u("home-device") < _HOME_DEVICE_SHARE,
        integers(stream(params.seed, f"{purpose}/other-device"), counter, len(DEVICES)),
    )


def _clicks(model: ClickModel, impressions: Impressions, lag: Ints, purpose: str, intercept: float) -> Events:
    params, counter, day = model.params, impressions.counter, impressions.day

    def u(draw_name: str) -> Floats:
        return uniform(stream(params.seed, f"{purpose}/{draw_name}"), counter)

    last_day = int(day.max(initial=0))
    user_row, people = _users(params, impressions.user, day)
    item_row, things = _items(params, impressions.item, last_day)
    device = np.where(impressions.at_home, people.device[user_row], impressions.other_device)
    null = np.stack([u(f"null/{name}") < params.nulls for name in NULLABLE], axis=1)
    # An item without tags has an empty list, not a null.
    item_age = np.maximum(day + impressions.millisecond / DAY_MILLISECONDS - things.born[item_row], 0.0)
    known_device = np.where(null[:, NULLABLE.index("device")], len(DEVICES), device)
    logit = intercept + _logit(
        params, people, user_row, things, item_row, day, impressions.millisecond, known_device, item_age
    )
    return Events(
        event_id=scatter_64(stream(params.seed, f"{purpose}/id"), counter),
        day=day,
        lag=lag,
        millisecond=impressions.millisecond,
        users=people,
        user_row=user_row,
        items=things,
        item_row=item_row,
        device=device,
        item_age=item_age,
        null=null,
        logit=logit,
        clicked=u("click") < probability(logit) * impressions.examined,
    )


def _counter(landing_day: Ints, row: Ints) -> UInts:
    return (landing_day.astype(np.uint64) << np.uint64(40)) | row.astype(np.uint64)


def lag_of(model: ClickModel, landing_day: Ints, row: Ints) -> Ints:
    """Return the days between event and landing, int64 [n]: 0 for most, else 1..late_days evenly.

    An event that would have happened before the first day is not late.
    """
    counter, seed = _counter(landing_day, row), model.params.seed
    late = uniform(stream(seed, "event/late"), counter) < model.params.late
    lag = np.where(late, 1 + integers(stream(seed, "event/lag"), counter, model.late_days), 0)
    return np.where((lag <= landing_day) & (lag <= model.late_days), lag, 0)


def _users(params: Generate, index: Ints, day: Ints) -> tuple[NDArray[np.intp], Users]:
    """Return the traits of each distinct (user, day), and for each row its position among them."""
    newest = int(day.max(initial=0))
    span = newest - int(day.min(initial=newest)) + 1
    keys, row = np.unique(index * span + (newest - day), return_inverse=True)
    return row, users(params, keys // span, newest - keys % span)


def _items(params: Generate, index: Ints, last_day: int) -> tuple[NDArray[np.intp], Items]:
    keys, row = np.unique(index, return_inverse=True)
    return row, items(params, keys, last_day)


def _millisecond(u: Floats) -> Ints:
    """Return milliseconds since midnight, by the day's traffic curve."""
    edges = np.concatenate([[0.0], np.cumsum(_TRAFFIC) / _TRAFFIC.sum()])
    place = np.interp(u, edges, np.arange(25) * 3_600_000.0)
    return np.minimum(place.astype(np.int64), DAY_MILLISECONDS - 1)


def _logit(
    params: Generate,
    people: Users,
    user_row: NDArray[np.intp],
    things: Items,
    item_row: NDArray[np.intp],
    day: Ints,
    millisecond: Ints,
    device: Ints,
    item_age: Floats,
) -> Floats:
    effects = _effects(params.seed)
    category = things.category[item_row]
    group = people.age_group[user_row]
    by_device = np.append(effects.device, np.zeros((len(CATEGORIES), 1)), axis=1)
    user_effect = USER_BIAS * people.bias + 0.4 * 2.0 * np.log(people.activity / 4.0)
    item_effect = ITEM_BIAS * things.bias + effects.tag[things.tags].sum(axis=1)
    price_slope = -0.75 + 0.12 * np.arange(len(AGE_EDGES) + 1)
    fit = np.einsum("nk,nk->n", people.taste[user_row], things.taste[item_row]) / np.sqrt(TASTE_DIM)
    trend = 7.5 * params.drift * np.sin(2.0 * np.pi * day / _TREND_DAYS + effects.phase[category])
    logit: Floats = (
        user_effect[user_row]
        + item_effect[item_row]
        + effects.category[category]
        + effects.country[category, people.country[user_row]]
        + effects.age[category, group]
        + by_device[category, device]
        + price_slope[group] * things.log_price_z[item_row]
        + effects.hour[device, millisecond // 3_600_000]
        + 0.5 * np.exp(-item_age / 10.0)
        + params.taste * fit
        + trend
    )
    return logit


@dataclass(frozen=True)
class Purchases:
    """Columns of the purchases of n events."""

    logit: Floats  # [n], of a purchase after a click
    purchased: NDArray[np.bool_]  # [n], whether the item was clicked and bought


def purchases(model: ClickModel, clicks: Events) -> Purchases | None:
    """Draw the purchases, each a function of its event alone; return None where the log has none."""
    if model.params.purchase_rate is None:
        return None
    logit = _purchase_intercept(model) + _purchase_logit(model.params.seed, clicks)
    would_buy = uniform(stream(model.params.seed, "event/purchase"), clicks.event_id) < probability(logit)
    return Purchases(logit, clicks.clicked & would_buy)


@lru_cache(maxsize=16)
def _purchase_intercept(model: ClickModel) -> float:
    assert model.params.purchase_rate is not None
    rows = np.arange(_CALIBRATION_ROWS)
    first = events(model, np.zeros_like(rows), rows)
    logit = _purchase_logit(model.params.seed, first)[first.clicked]
    low, high = -30.0, 30.0
    for _ in range(60):
        middle = (low + high) / 2
        below = probability(logit + middle).mean() < model.params.purchase_rate
        low, high = (middle, high) if below else (low, middle)
    return (low + high) / 2


def _purchase_logit(seed: int, clicks: Events) -> Floats:
    rng = np.random.default_rng(stream(seed, "purchase-effects"))
    category_effect = rng.normal(0.0, 0.8, len(CATEGORIES))
    country_effect = rng.normal(0.0, 0.4, (len(CATEGORIES), len(COUNTRIES)))
    people, things = clicks.users, clicks.items
    category = things.category[clicks.item_row]
    logit: Floats = (
        category_effect[category]
        + country_effect[category, people.country[clicks.user_row]]
        - 0.8 * things.log_price_z[clicks.item_row]
        + 0.4 * np.log(people.activity / 4.0)[clicks.user_row]
    )
    return logit
