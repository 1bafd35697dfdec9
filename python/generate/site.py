"""A site that shows users their lists: who comes, what they are shown, what they click; a day as landing files.

A visit is a user drawn by popularity at a time of the day's traffic, as an event of the random log is. The site shows
the first items of the user's list; a part of the visits, and users without a list, are shown items drawn evenly from
all of them. The visitor looks at place r (from 1) with probability r^-position_bias, and clicks what he looks at with
the probability of the click model: the position-based model (Richardson, Dominowska and Ragno, 2007; Craswell et al.,
2008). Everything that was shown is logged, whether it was looked at or not, as on a site.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from headrace.config import Site
from headrace.counter_random import Floats, Ints, integers, scatter_ids, stream, uniform
from headrace.generate.click_model import ClickModel, Events, Shown, arrivals, clicks, probability
from headrace.generate.population import ITEM_ID_BITS, USER_ID_BITS, alive

#: User ids -> the items of their lists, the best first; a user without a list is missing.
Lists = Callable[[Sequence[int]], Mapping[int, Sequence[int]]]

#: Why a visitor was shown what he was: his list, a draw, or a draw because he has no list.
LIST, RANDOM, NO_LIST = "list", "random", "no_list"
SOURCES = (LIST, RANDOM, NO_LIST)
#: What is expected of all items is computed of so many visits at most.
_COMPARED = 1000
#: Of a run, so many visits at once.
_CHUNK = 50


@dataclass(frozen=True)
class Visits:
    """The visits of a day: v visits of l places."""

    source: NDArray[np.object_]  # [v], of SOURCES
    #: Indices of items by place; -1 where a list is shorter.
    items: Ints  # [v, l]
    #: Impressions, visit by visit, place by place.
    events: Events
    visit: Ints  # [n], of each impression
    place: Ints  # [n], from 0


class ClickRate(BaseModel):
    """Impressions and what came of them."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    visits: int
    impressions: int
    clicks: int
    #: clicks / impressions.
    rate: float | None
    #: The mean probability of a click: the rate without the noise of the draws.
    expected: float | None


class SiteDay(BaseModel):
    """`site/<ds>.json`: what the site knows of a day, and what no site knows."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    ds: str
    #: The day of the lists that were shown, as the warehouse had it; None where there were none.
    lists_ds: str | None
    #: By SOURCES: what was shown.
    shown: dict[str, ClickRate]
    #: Of the visits to which lists were shown (the first 1,000), had they been shown items drawn evenly, and had they
    #: been shown the items that they would click most: the mean probability of a click. The latter no list exceeds.
    random_rate: float | None
    best_rate: float | None
    #: Of the same visits with the lists that they were shown.
    list_rate: float | None
    key: str


def examined(site: Site, place: Ints) -> Floats:
    """With which probability a visitor looks at a place (from 0)."""
    found: Floats = (place + 1.0) ** -site.position_bias
    return found


def visits_of(model: ClickModel, day: int, lists: Lists) -> Visits:
    """A day's visits: a function of the model, the day and the lists.

    There are as many as make `rows_per_day` impressions, of lists of full length.

    Args:
        model: parameters.
        day: days since the first day.
        lists: what the site has for a user.
    """
    params, site = model.params, model.params.site
    count = max(1, params.rows_per_day // site.length)
    number = np.arange(count)
    user, millisecond, at_home, other = arrivals(model, day, number, "site")
    user_ids = scatter_ids(stream(params.seed, "user/id"), user, USER_ID_BITS)
    known = lists(sorted(set(user_ids.tolist())))
    n_items = alive(params.items, params.new_items, day)
    item_ids = scatter_ids(stream(params.seed, "item/id"), np.arange(n_items), ITEM_ID_BITS)
    index_of = {int(i): k for k, i in enumerate(item_ids)}
    is_random = uniform(stream(params.seed, "site/random"), _counter(day, number)) < site.random
    has_list = np.array([int(u) in known for u in user_ids])
    source = np.where(is_random, RANDOM, np.where(has_list, LIST, NO_LIST)).astype(object)
    items = np.full((count, site.length), -1)
    for v in range(count):
        if source[v] == LIST:
            shown = [index_of[i] for i in known[int(user_ids[v])] if i in index_of][: site.length]
        else:
            rng = np.random.default_rng([stream(params.seed, "site/items"), day, v])
            shown = rng.permutation(n_items)[: site.length].tolist()
        items[v, : len(shown)] = shown
    visit, place = np.nonzero(items >= 0)
    impressions = Shown(
        counter=_counter(day, visit * site.length + place),
        day=np.full(len(visit), day),
        user=user[visit],
        item=items[visit, place],
        millisecond=millisecond[visit],
        at_home=at_home[visit],
        other_device=other[visit],
        examined=examined(site, place),
    )
    return Visits(source, items, clicks(model, impressions, _lag(model, impressions), "site"), visit, place)


def _counter(day: int, number: Ints) -> NDArray[np.uint64]:
    return np.uint64(day << 40) | number.astype(np.uint64)


def _lag(model: ClickModel, shown: Shown) -> Ints:
    """Days until each impression lands: 0 of most, else 1..late_days evenly, as in the random log."""
    if not model.late_days:
        return np.zeros(len(shown.day), np.int64)
    seed = model.params.seed
    late = uniform(stream(seed, "site/late"), shown.counter) < model.params.late
    return np.where(late, 1 + integers(stream(seed, "site/lag"), shown.counter, model.late_days), 0)


def summary(model: ClickModel, ds: str, day: int, visits: Visits, lists_ds: str | None, key: str) -> SiteDay:
    """What is known of a day's visits, with what other lists would have brought."""
    site = model.params.site
    events = visits.events
    p = probability(events.logit) * examined(site, visits.place)
    shown = {}
    for source in SOURCES:
        mine = visits.source[visits.visit] == source
        n, hits = int(mine.sum()), int(events.clicked[mine].sum())
        shown[source] = ClickRate(
            visits=int((visits.source == source).sum()),
            impressions=n,
            clicks=hits,
            rate=hits / n if n else None,
            expected=float(p[mine].mean()) if n else None,
        )
    compared = np.flatnonzero(visits.source == LIST)[:_COMPARED]
    of_lists = np.isin(visits.visit, compared)
    random_rate, best_rate = _alternatives(model, day, compared)
    return SiteDay(
        ds=ds,
        lists_ds=lists_ds,
        shown=shown,
        random_rate=random_rate,
        best_rate=best_rate,
        list_rate=float(p[of_lists].mean()) if of_lists.any() else None,
        key=key,
    )


def _alternatives(model: ClickModel, day: int, visit: Ints) -> tuple[float | None, float | None]:
    """Mean probabilities of a click of some visits: of items drawn evenly, and of the most probable in their order."""
    if not len(visit):
        return None, None
    params, site = model.params, model.params.site
    n_items = alive(params.items, params.new_items, day)
    length = min(site.length, n_items)
    weight = examined(site, np.arange(length))
    evenly, best = [], []
    for start in range(0, len(visit), _CHUNK):
        some = visit[start : start + _CHUNK]
        user, millisecond, at_home, other = arrivals(model, day, some, "site")
        each = np.arange(len(some)).repeat(n_items)
        item = np.tile(np.arange(n_items), len(some))
        counter, days = _counter(day, np.arange(len(item))), np.full(len(item), day)
        every = Shown(counter, days, user[each], item, millisecond[each], at_home[each], other[each])
        # As if no value were missing: what is shown does not depend on what the log loses.
        logit = clicks(model, every, np.zeros_like(days), "site", nulls=0.0).logit
        p = probability(logit).reshape(len(some), n_items)
        evenly.append(p.mean(1) * weight.mean())
        best.append((np.sort(p, axis=1)[:, ::-1][:, :length] * weight).mean(1))
    return float(np.concatenate(evenly).mean()), float(np.concatenate(best).mean())
