"""The AUC that a day's model could come to at best: it has never seen an id that is born on that day."""

from __future__ import annotations

import numpy as np

from headrace.compute.counter_random import Floats, Ints
from headrace.lake.generate.click_model import ITEM_BIAS, USER_BIAS, ClickModel, events
from headrace.lake.generate.population import alive, items, users
from headrace.lake.generate.truth import auc


def knowable_auc(model: ClickModel, day: int) -> float | None:
    """Return the AUC over the rows that happen and land on a day (0 is the log's first) of the true logits without the
    biases of users and items that are born on it; None where rows are of one class.

    A bias is what no column tells (half of a taste is such a part, too, and stays in). With no new ids this is the
    day's ceiling.
    """
    params = model.params
    rows = np.arange(params.rows_per_day)
    log_events = events(model, np.full_like(rows, day), rows)
    new_users = users(params, _born(params.users, params.new_users, day), np.array([day]))
    new_items = items(params, _born(params.items, params.new_items, day), day)
    logit = (
        log_events.logit
        - USER_BIAS * _bias_of(log_events.users.id, log_events.users.bias, new_users.id)[log_events.user_row]
    )
    logit -= ITEM_BIAS * _bias_of(log_events.items.id, log_events.items.bias, new_items.id)[log_events.item_row]
    on_time = log_events.lag == 0
    return auc(logit[on_time], log_events.clicked[on_time].astype(np.float64))


def _born(first: int, growth: float, day: int) -> Ints:
    """Return the indices of those that are born on a day; those of the first day were there before."""
    return np.arange(alive(first, growth, day - 1) if day else first, alive(first, growth, day))


def _bias_of(ids: Ints, bias: Floats, new: Ints) -> Floats:
    """Return the biases of those that are new, 0 of the others."""
    return np.where(np.isin(ids, new), bias, 0.0)
