"""Simulated site that shows users their lists: visits, impressions and clicks of a day, written as landing files.

A visit is a user drawn by popularity at a time by the day's traffic, as for an event of the random log. The site shows
the first items of the user's list. In some visits, and to users without a list, it shows items drawn evenly from all. A
visitor looks at place r (from 1) with probability r^-position_bias, and clicks the items that they look at with the
click model's probability: the position-based model (Richardson, Dominowska and Ragno, 2007; Craswell et al., 2008).
The log has every impression, whether or not the visitor looked at it, as on a real site.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, timedelta

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError

from headrace.compute.counter_random import Floats, Ints, integers, scatter_ids, stream, uniform
from headrace.config import Site, Spec
from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.lake.generate.click_model import ClickModel, Events, Impressions, arrivals, clicks, probability, purchases
from headrace.lake.generate.event_lines import lines, values
from headrace.lake.generate.landing_files import truth_path, write_gzip
from headrace.lake.generate.population import ITEM_ID_BITS, USER_ID_BITS, alive
from headrace.stage import run_lock
from headrace.stage.manifest import fingerprint
from headrace.storage import Location

log = logging.getLogger("headrace.generate")

#: Function that maps user ids to the items of their lists, best first; users without a list are missing.
Lists = Callable[[Sequence[int]], Mapping[int, Sequence[int]]]

#: Source of a visit's items: the user's list, a draw, or a draw because the user has no list.
LIST, RANDOM, NO_LIST = "list", "random", "no_list"
SOURCES = (LIST, RANDOM, NO_LIST)
#: Most visits for which expected click rates over all items are computed.
_COMPARED = 1000
#: Number of these visits in one step of the computation.
_CHUNK = 50

#: Increase it when the same parameters and lists give other bytes.
_SITE_VERSION = 1
_FILE = "site-0000.json.gz"


@dataclass(frozen=True)
class Visits:
    """Visits of a day: v visits of l places."""

    source: NDArray[np.object_]  # [v], of SOURCES
    #: Indices of items by place; -1 where a list is shorter.
    items: Ints  # [v, l]
    #: Impressions, visit by visit, place by place.
    events: Events
    visit: Ints  # [n], of each impression
    place: Ints  # [n], from 0


class ClickRate(BaseModel):
    """Impressions and their clicks."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    visits: int
    impressions: int
    clicks: int
    #: clicks / impressions.
    rate: float | None
    #: Mean probability of a click: the rate without the noise of the draws.
    expected: float | None


class SiteDay(BaseModel):
    """Content of `site/<ds>.json`: figures of a day's log, and click rates that no real site knows."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    ds: str
    #: The day of the lists that were shown, as the warehouse had it; None where there were none.
    lists_ds: str | None
    #: Impressions and clicks by source of the items (SOURCES).
    shown: dict[str, ClickRate]
    #: Mean probability of a click in the visits with lists (the first 1,000), if they had been shown items drawn
    #: evenly, and if they had been shown the items with the highest probabilities, which no list exceeds.
    random_rate: float | None
    best_rate: float | None
    #: Mean probability of a click in the same visits, with the lists that they were shown.
    list_rate: float | None
    key: str


def examined(site: Site, place: Ints) -> Floats:
    """Return the probability that a visitor looks at a place (from 0)."""
    probability_: Floats = (place + 1.0) ** -site.position_bias
    return probability_


def visits_of(model: ClickModel, day: int, lists: Lists) -> Visits:
    """Draw a day's visits: a function of the model, the day and the lists.

    Their number is chosen so that lists of full length make `rows_per_day` impressions.

    Args:
        model: parameters.
        day: days since the first day.
        lists: what the site has for a user.
    """
    params, site = model.params, model.params.site
    count = max(1, params.rows_per_day // site.length)
    number = np.arange(count)
    user, millisecond, at_home, other_device = arrivals(model, day, number, "site")
    user_ids = scatter_ids(stream(params.seed, "user/id"), user, USER_ID_BITS)
    known = lists(sorted(set(user_ids.tolist())))
    n_items = alive(params.items, params.new_items, day)
    item_ids = scatter_ids(stream(params.seed, "item/id"), np.arange(n_items), ITEM_ID_BITS)
    index_of = {int(i): k for k, i in enumerate(item_ids)}
    is_random = uniform(stream(params.seed, "site/random"), _impression_counter(day, number)) < site.random
    has_list = np.array([int(u) in known for u in user_ids])
    source = np.where(is_random, RANDOM, np.where(has_list, LIST, NO_LIST)).astype(object)
    items = np.full((count, site.length), -1)
    for v in range(count):
        if source[v] == LIST:
            item_indices = [index_of[i] for i in known[int(user_ids[v])] if i in index_of][: site.length]
        else:
            rng = np.random.default_rng([stream(params.seed, "site/items"), day, v])
            item_indices = rng.permutation(n_items)[: site.length].tolist()
        items[v, : len(item_indices)] = item_indices
    visit, place = np.nonzero(items >= 0)
    impressions = Impressions(
        counter=_impression_counter(day, visit * site.length + place),
        day=np.full(len(visit), day),
        user=user[visit],
        item=items[visit, place],
        millisecond=millisecond[visit],
        at_home=at_home[visit],
        other_device=other_device[visit],
        examined=examined(site, place),
    )
    return Visits(source, items, clicks(model, impressions, _lag(model, impressions), "site"), visit, place)


def _impression_counter(day: int, number: Ints) -> NDArray[np.uint64]:
    return np.uint64(day << 40) | number.astype(np.uint64)


def _lag(model: ClickModel, impressions: Impressions) -> Ints:
    """Return the days until each impression lands: 0 for most, else 1..late_days evenly, as in the random log."""
    if not model.late_days:
        return np.zeros(len(impressions.day), np.int64)
    seed = model.params.seed
    late = uniform(stream(seed, "site/late"), impressions.counter) < model.params.late
    return np.where(late, 1 + integers(stream(seed, "site/lag"), impressions.counter, model.late_days), 0)


def summary(model: ClickModel, ds: str, day: int, visits: Visits, lists_ds: str | None, key: str) -> SiteDay:
    """Summarise a day's visits, with the click rates that other lists would have had."""
    site = model.params.site
    events = visits.events
    p = probability(events.logit) * examined(site, visits.place)
    by_source = {}
    for source in SOURCES:
        of_source = visits.source[visits.visit] == source
        n, hits = int(of_source.sum()), int(events.clicked[of_source].sum())
        by_source[source] = ClickRate(
            visits=int((visits.source == source).sum()),
            impressions=n,
            clicks=hits,
            rate=hits / n if n else None,
            expected=float(p[of_source].mean()) if n else None,
        )
    compared = np.flatnonzero(visits.source == LIST)[:_COMPARED]
    of_lists = np.isin(visits.visit, compared)
    random_rate, best_rate = _alternatives(model, day, compared)
    return SiteDay(
        ds=ds,
        lists_ds=lists_ds,
        shown=by_source,
        random_rate=random_rate,
        best_rate=best_rate,
        list_rate=float(p[of_lists].mean()) if of_lists.any() else None,
        key=key,
    )


def _alternatives(model: ClickModel, day: int, visit: Ints) -> tuple[float | None, float | None]:
    """Return mean click probabilities of some visits, for items drawn evenly and for the best items."""
    if not len(visit):
        return None, None
    params, site = model.params, model.params.site
    n_items = alive(params.items, params.new_items, day)
    length = min(site.length, n_items)
    weight = examined(site, np.arange(length))
    evenly, best = [], []
    for start in range(0, len(visit), _CHUNK):
        chunk = visit[start : start + _CHUNK]
        user, millisecond, at_home, other_device = arrivals(model, day, chunk, "site")
        visitor = np.arange(len(chunk)).repeat(n_items)
        item = np.tile(np.arange(n_items), len(chunk))
        counter, days = _impression_counter(day, np.arange(len(item))), np.full(len(item), day)
        all_items = Impressions(
            counter, days, user[visitor], item, millisecond[visitor], at_home[visitor], other_device[visitor]
        )
        # Without nulls, since the site knows the values that the log loses.
        logit = clicks(model, all_items, np.zeros_like(days), "site", nulls=0.0).logit
        p = probability(logit).reshape(len(chunk), n_items)
        evenly.append(p.mean(1) * weight.mean())
        best.append((np.sort(p, axis=1)[:, ::-1][:, :length] * weight).mean(1))
    return float(np.concatenate(evenly).mean()), float(np.concatenate(best).mean())


def site_path(landing: Location, ds: str) -> Location:
    """Return the path of a site day's description, below the pipeline's landing folder."""
    return landing / "site" / f"{ds}.json"


def simulate_site(
    spec: Spec, ws: Workspace, ds: str, lists: Lists, lists_ds: str | None, *, force: bool = False
) -> SiteDay:
    """Write a day's landing files: impressions with their clicks, and late events of the days before.

    The bytes depend only on seed, parameters, day and lists. Events that land later wait in `landing/PIPELINE/late/`.

    Args:
        spec: a pipeline with a `generate` section, and the format `clicks`.
        ws: writes `landing/<pipeline>/<ds>/site-0000.json.gz` and `landing/<pipeline>/site/<ds>.json`.
        ds: the day.
        lists: what the site has for a user.
        lists_ds: the day of these lists.
        force: replace an existing day.

    Returns:
        the day's summary.

    Raises:
        UserError: there is no section, the day is before the log's first, or it has landed already otherwise.
    """
    if spec.generate is None:
        raise UserError(f"pipeline '{spec.pipeline}' has no 'generate' section, so there is nobody to visit a site")
    model = ClickModel(spec.generate, spec.table.late_days)
    start = date.fromisoformat(spec.generate.start)
    number = (date.fromisoformat(ds) - start).days
    if number < 0:
        raise UserError(f"{ds} is before the log's first day, {start} (generate.start)")
    landing = ws.landing(spec.pipeline)
    known_lists: dict[int, Sequence[int]] = {}

    def remember(users: Sequence[int]) -> Mapping[int, Sequence[int]]:
        known_lists.update(lists(users))
        return known_lists

    with run_lock(ws, f"{spec.pipeline}-generate"):
        visits = visits_of(model, number, remember)
        parts = {"site": _SITE_VERSION, "ds": ds, "lists": sorted((u, list(i)) for u, i in known_lists.items())}
        key = fingerprint({**spec.generate.model_dump(mode="json"), "late_days": model.late_days, **parts})
        existing = _load_day(site_path(landing, ds))
        if (landing / ds).is_dir() and not force:
            if existing is not None and existing.key == key:
                log.info("%s: the site's day exists already; nothing to do", ds)
                return existing
            raise UserError(f"{landing / ds} has landed already: simulate another day, or replace it with --force")
        site_day = summary(model, ds, number, visits, lists_ds, key)
        # Remove the description first, so that an interrupted run does not count as done.
        site_path(landing, ds).remove()
        columns = values(visits.events, start, "jsonl", purchases(model, visits.events))
        all_lines = lines(columns, "jsonl")
        for lag in range(1, model.late_days + 1):
            later = (start + timedelta(days=number + lag)).isoformat()
            path = landing / "late" / later / f"{ds}.json"
            path.put_text("".join(all_lines.filter(pa.array(visits.events.lag == lag)).to_pylist()))
        late = [p for p in (landing / "late" / ds).entries() if p.name.endswith(".json")]
        late_lines = "".join(p.read_text() for p in sorted(late, key=lambda p: p.name))
        lines_now = all_lines.filter(pa.array(visits.events.lag == 0))
        with (landing / ds).new_folder() as folder:
            write_gzip(
                folder / _FILE, late_lines, pa.concat_arrays([lines_now]).take(pa.array(np.arange(len(lines_now))))
            )
        truth_path(landing, ds).remove()  # the truth is that of the random log, which this day replaces
        site_path(landing, ds).put_text(site_day.model_dump_json(indent=1) + "\n")
    log.info("%s: %d visits, %d impressions", ds, len(visits.source), len(visits.visit))
    return site_day


def _load_day(path: Location) -> SiteDay | None:
    """Read a site day; return None where there is none, or another version wrote it."""
    try:
        return SiteDay.model_validate_json(path.read_text())
    except (FileNotFoundError, ValidationError):
        return None
