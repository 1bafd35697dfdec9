"""The model of the purchases: which clicks a purchase follows, where a log has them (`generate.purchase_rate`).

    logit P(purchase | click) = intercept + category + category x country + price (cheap things are bought) + activity

The intercept is set so that the mean of P over the first day's clicks is `purchase_rate`. All of it can be known from
the log, so P is the best that a model can say of a click, and P(click) P(purchase | click) of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from headrace.counter_random import Floats, stream, uniform
from headrace.generate.click_model import ClickModel, Events, events, probability
from headrace.generate.population import CATEGORIES, COUNTRIES

_CALIBRATION_ROWS = 1 << 15


@dataclass(frozen=True)
class Purchases:
    """Of n events: logit float64 [n] of a purchase after a click; whether the item was clicked and bought, [n]."""

    logit: Floats
    purchased: NDArray[np.bool_]


def purchases(model: ClickModel, clicks: Events) -> Purchases | None:
    """What was bought; None where the log has no purchases. Each is a function of its event alone."""
    if model.params.purchase_rate is None:
        return None
    logit = _intercept(model) + _logit(model.params.seed, clicks)
    wanted = uniform(stream(model.params.seed, "event/purchase"), clicks.event_id) < probability(logit)
    return Purchases(logit, clicks.clicked & wanted)


@lru_cache(maxsize=16)
def _intercept(model: ClickModel) -> float:
    assert model.params.purchase_rate is not None
    rows = np.arange(_CALIBRATION_ROWS)
    first = events(model, np.zeros_like(rows), rows)
    logit = _logit(model.params.seed, first)[first.clicked]
    low, high = -30.0, 30.0
    for _ in range(60):
        middle = (low + high) / 2
        below = probability(logit + middle).mean() < model.params.purchase_rate
        low, high = (middle, high) if below else (low, middle)
    return (low + high) / 2


def _logit(seed: int, clicks: Events) -> Floats:
    rng = np.random.default_rng(stream(seed, "purchase-effects"))
    of_category = rng.normal(0.0, 0.8, len(CATEGORIES))
    of_country = rng.normal(0.0, 0.4, (len(CATEGORIES), len(COUNTRIES)))
    people, things = clicks.users, clicks.items
    category = things.category[clicks.item_row]
    logit: Floats = (
        of_category[category]
        + of_country[category, people.country[clicks.user_row]]
        - 0.8 * things.log_price_z[clicks.item_row]
        + 0.4 * np.log(people.activity / 4.0)[clicks.user_row]
    )
    return logit
