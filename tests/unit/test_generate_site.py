"""The site: visitors see their lists, look at places, click and buy as its models say."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from sklearn.metrics import roc_auc_score

from headrace.cli.generate import published_lists
from headrace.cli.generate import simulate_day as command
from headrace.compute.counter_random import scatter_ids, stream
from headrace.config import Spec, Warehouse, load_overlay, load_spec
from headrace.config.installation import checkout
from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.lake.generate import generate, truth_path
from headrace.lake.generate.click_model import ClickModel, Impressions, clicks, events, probability, purchases
from headrace.lake.generate.population import ITEM_ID_BITS, USER_ID_BITS
from headrace.lake.generate.site import LIST, NO_LIST, RANDOM, examined, simulate_site, summary, visits_of
from headrace.publish.postgres import server as warehouse
from headrace.publish.postgres import tables
from tests.publish_support import publish
from tests.storage_support import Killed, faulty

DS = "2026-01-04"
SMALL = ["generate.rows_per_day=20000", "generate.users=300", "generate.items=60", "generate.late=0.2"]


def spec(*settings: str) -> Spec:
    return load_spec("clicks", [*SMALL, *settings])


def model(settings: Spec) -> ClickModel:
    assert settings.generate is not None
    return ClickModel(settings.generate, settings.table.late_days)


def ids(kind: str, n: int, bits: int) -> list[int]:
    return [int(i) for i in scatter_ids(stream(7, f"{kind}/id"), np.arange(n), bits)]


USERS, ITEMS = ids("user", 300, USER_ID_BITS), ids("item", 60, ITEM_ID_BITS)


def fixed(users: Sequence[int]) -> Mapping[int, Sequence[int]]:
    """Two of three users have a list, of ten items, one of which nobody has heard of."""
    known = {u: [ITEMS[(k + j) % 60] for j in range(9)] for k, u in enumerate(USERS) if k % 3}
    return {u: [known[u][0], 12345, *known[u][1:]] for u in users if u in known}


def test_visitors_are_shown_their_lists() -> None:
    site_spec = spec("generate.site={random: 0.25}")
    visits = visits_of(model(site_spec), 3, fixed)
    assert len(visits.source) == 2000
    shares = {s: float((visits.source == s).mean()) for s in (LIST, RANDOM, NO_LIST)}
    assert shares[RANDOM] == pytest.approx(0.25, abs=0.03)
    events = visits.events
    for visit in np.flatnonzero(visits.source == LIST)[:50]:
        in_visit = visits.visit == visit
        (user,) = set(events.users.id[events.user_row[in_visit]].tolist())
        expected = [i for i in fixed([user])[user] if i in ITEMS]
        assert events.items.id[events.item_row[in_visit]].tolist() == expected
        assert len(set(events.millisecond[in_visit].tolist())) == 1
    drawn = visits.items[visits.source == RANDOM]
    assert all(len(set(row)) == 10 for row in drawn.tolist())
    # Evenly: of 61 items each is in about a sixth of the draws; one was born since the first day.
    assert np.bincount(drawn.ravel()) / len(drawn) == pytest.approx(np.full(61, 10 / 61), abs=0.08)


def test_clicks_follow_the_click_model_and_the_place() -> None:
    site_spec = spec("generate.site={random: 1, position_bias: 0.7}", "generate.rows_per_day=200000")
    visits = visits_of(model(site_spec), 3, fixed)
    p = probability(visits.events.logit)
    for place in (0, 1, 4, 9):
        at_place = visits.place == place
        expected = p[at_place].mean() * (place + 1) ** -0.7
        deviation = np.sqrt(expected * (1 - expected) / at_place.sum())
        assert visits.events.clicked[at_place].mean() == pytest.approx(expected, abs=4 * deviation)
    assert (visits.events.lag > 0).mean() == pytest.approx(0.2, abs=0.01)
    assert set(np.unique(visits.events.lag)) == {0, 1, 2, 3}


def test_no_list_beats_the_best_one() -> None:
    """Lists by the probabilities themselves are at the best rate, draws at the rate of draws."""
    site_spec = spec("generate.site={random: 0, length: 5}", "generate.nulls=0", "generate.rows_per_day=1500")
    click_model = model(site_spec)
    assert click_model.params.site.length == 5

    def everything(users: Sequence[int]) -> Mapping[int, Sequence[int]]:
        return dict.fromkeys(users, ITEMS)

    # All items in 12 places of five: what each visit would click of each item.
    full_spec = load_spec("clicks", [*SMALL, "generate.site={random: 0, length: 60}", "generate.nulls=0"])
    settings = full_spec.generate.model_copy(update={"rows_per_day": 300 * 60})  # type: ignore[union-attr]
    all_visits = visits_of(ClickModel(settings, 3), 3, everything)
    p = probability(all_visits.events.logit).reshape(300, 60)
    weight = examined(click_model.params.site, np.arange(5))
    day = summary(click_model, DS, 3, visits_of(click_model, 3, everything), DS, "k")
    # An item was born since the first day, which ITEMS lacks and the best lists may have.
    assert day.best_rate is not None
    assert day.random_rate == pytest.approx(p.mean() * weight.mean(), rel=0.05)
    best = (np.sort(p, axis=1)[:, ::-1][:, :5] * weight).mean()
    assert day.best_rate >= best - 1e-9
    assert day.best_rate == pytest.approx(best, rel=0.05)
    assert day.list_rate == pytest.approx((p[:, :5] * weight).mean(), rel=1e-9)
    assert day.list_rate == pytest.approx(day.shown[LIST].expected, rel=1e-9)


def test_lists_of_a_better_model_are_clicked_more() -> None:
    """Models that know the users' tastes but for more and more noise: the rate that the site sees falls with it."""
    site_spec = spec("generate.site={random: 0, length: 5, position_bias: 0.3}", "generate.rows_per_day=30000")
    user_rows = np.repeat(np.arange(300), 60)
    impressions = Impressions(
        counter=np.arange(len(user_rows), dtype=np.uint64),
        day=np.full(len(user_rows), 3),
        user=user_rows,
        item=np.tile(np.arange(60), 300),
        millisecond=np.full(len(user_rows), 43_200_000),
        at_home=np.ones(len(user_rows), bool),
        other_device=np.zeros(len(user_rows), np.int64),
    )
    logit = clicks(model(site_spec), impressions, np.zeros(len(user_rows), np.int64), "test").logit.reshape(300, 60)
    rng = np.random.default_rng(0)
    rates = []
    for noise in (0.0, 1.0, 3.0, 100.0):
        order = np.argsort(-(logit + noise * rng.normal(size=logit.shape)), axis=1)
        lists = {u: [ITEMS[i] for i in order[k]] for k, u in enumerate(USERS)}
        visits = visits_of(model(site_spec), 3, lambda users, lists=lists: {u: lists[u] for u in users if u in lists})  # type: ignore[misc]
        day = summary(model(site_spec), DS, 3, visits, DS, "k")
        rate, expected = day.shown[LIST].rate, day.shown[LIST].expected
        assert rate is not None
        assert expected is not None
        deviation = np.sqrt(expected * (1 - expected) / day.shown[LIST].impressions)
        assert rate == pytest.approx(expected, abs=4 * deviation)
        rates.append(rate)
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] == pytest.approx(day.random_rate, rel=0.1)


def landed(ws: Workspace, ds: str) -> list[dict[str, object]]:
    files = [p for p in (ws.landing("clicks") / ds).entries() if p.name.endswith(".gz")]
    return [json.loads(line) for p in files for line in gzip.decompress(p.read_bytes()).splitlines()]


def test_days_land_whole_late_ones_later_and_alike_every_time(ws: Workspace) -> None:
    site_spec = spec()
    days = ["2026-01-04", "2026-01-05", "2026-01-06", "2026-01-07"]
    simulated = [simulate_site(site_spec, ws, ds, fixed, "2026-01-03") for ds in days]
    rows = {ds: landed(ws, ds) for ds in days}
    visits = visits_of(model(site_spec), 3, fixed)
    expected = {ds: int((visits.events.lag == lag).sum()) for lag, ds in enumerate(days)}
    for ds in days:
        assert sum(str(r["ts"]).startswith("2026-01-04") for r in rows[ds]) == expected[ds]
        assert all(str(r["ts"])[:10] <= ds for r in rows[ds])
    event_ids = [r["event_id"] for ds in days for r in rows[ds]]
    assert len(event_ids) == len(set(event_ids))
    clicks = sum(int(r["clicked"]) for ds in days for r in rows[ds] if str(r["ts"]).startswith("2026-01-04"))  # type: ignore[call-overload]
    assert clicks == sum(figures.clicks for figures in simulated[0].shown.values())
    landed_bytes = (ws.landing("clicks") / DS / "site-0000.json.gz").read_bytes()
    assert simulate_site(site_spec, ws, DS, fixed, "2026-01-03") == simulated[0]
    simulate_site(site_spec, ws, DS, fixed, "2026-01-03", force=True)
    assert (ws.landing("clicks") / DS / "site-0000.json.gz").read_bytes() == landed_bytes
    with pytest.raises(UserError, match="has landed already"):
        simulate_site(site_spec, ws, DS, lambda users: {}, None)
    # The random log of a day gives way to the site only where it is told to.
    generate(site_spec, ws, ["2026-01-08"])
    with pytest.raises(UserError, match="has landed already"):
        simulate_site(site_spec, ws, "2026-01-08", fixed, None)
    simulate_site(site_spec, ws, "2026-01-08", fixed, None, force=True)
    assert not (ws.landing("clicks") / "truth" / "2026-01-08.json").exists()


def test_a_day_that_a_killed_run_replaced_is_not_done(ws: Workspace) -> None:
    """Killed at any change of the disk: the next run says that the day has to be made, or it is there whole."""
    site_spec = load_spec("clicks", [*SMALL, "generate.rows_per_day=1000"])
    simulate_site(site_spec, ws, DS, fixed, None)
    expected = landed(ws, DS)
    seen = {True: 0, False: 0}
    for call_number in range(1, 60):
        simulate_site(site_spec, ws, DS, lambda users: {}, None, force=True)
        if call_number % 2:
            generate(site_spec, ws, [DS], force=True)
        with contextlib.suppress(Killed), faulty(call_number, kills=True) as fault:
            simulate_site(site_spec, ws, DS, fixed, None, force=True)
        is_done = True
        try:
            simulate_site(site_spec, ws, DS, fixed, None)
        except UserError as e:
            is_done = "has landed already" not in str(e)
        if is_done:
            assert landed(ws, DS) == expected
            assert not (ws.landing("clicks") / "truth" / f"{DS}.json").exists()
        seen[is_done] += 1
        if fault.calls_made < call_number:
            break
    else:
        pytest.fail("more changes of the disk than were tried")
    assert seen[True]
    assert seen[False]


def test_a_site_changes_nothing_of_the_random_log(ws: Workspace) -> None:
    (first_truth,) = generate(spec(), ws, [DS])
    (after,) = generate(spec("generate.site={random: 0.9}"), ws, [DS])
    assert first_truth == after


def test_the_site_reads_the_newest_published_day_from_postgresql(
    ws: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    site_spec = spec("generate.site={random: 0}")
    with warehouse.serve(Warehouse(), ws) as server:
        with pytest.raises(UserError, match=r"there is no view public\.clicks_scores_current: publish a day first"):
            command(site_spec, ws, DS, False)
        types = [("ds", "string"), ("user_id", "bigint"), ("item_id", "bigint"), ("rank", "int"), ("score", "float")]
        table = tables.scores_table(
            "public", "clicks_scores", "user_id", "item_id", [*types, ("model_version", "string")]
        )
        with server.connect() as conn:
            tables.create_tables(conn, table)
            for ds, shift in (("2026-01-02", 7), ("2026-01-03", 0)):
                rows = [
                    (ds, u, ITEMS[(k + r + shift) % 60], r, 1 / r, "m") for k, u in enumerate(USERS) for r in (2, 1, 3)
                ]
                publish(conn, rows, ds, ds, table)
        with published_lists(site_spec, ws) as (lists, newest):
            assert newest == "2026-01-03"
            user_ids = [USERS[5], USERS[9], 12345]
            assert lists(user_ids) == {USERS[k]: [ITEMS[k + r] for r in (1, 2, 3)] for k in (5, 9)}
        with pytest.raises(UserError, match="are of 2026-01-03, made after the visitors of 2026-01-03 have left"):
            command(site_spec, ws, "2026-01-03", False)
        day = command(site_spec, ws, DS, False)
    assert day.lists_ds == "2026-01-03"
    assert day.shown[LIST].impressions == 3 * day.shown[LIST].visits > 0
    assert "lists of 2026-01-03; expected CTR of the same visits: random 0." in capsys.readouterr().out
    with pytest.raises(UserError, match="does not publish there"), published_lists(spec("publish=null"), ws):
        pass


DAY = "2026-01-02"
SMALL_SHOP = ["generate.rows_per_day=4000", "generate.users=200", "generate.items=60"]


def read(folder: Path) -> pd.DataFrame:
    """The lines that are rows: of JSON and of CSV, by pandas."""
    frames = []
    for path in sorted(folder.glob("*.gz")):
        text = gzip.decompress(path.read_bytes()).decode()
        if path.name.endswith(".csv.gz"):
            frames.append(pd.read_csv(io.StringIO(text), dtype=str, keep_default_na=False))
        else:
            frames.append(pd.DataFrame([json.loads(line) for line in text.splitlines()]).astype(str))
    return pd.concat(frames, ignore_index=True)


def test_a_column_more_of_the_same_log(tmp_path: Path) -> None:
    clean = [*SMALL_SHOP, "generate.malformed=0"]
    plain, bought = Workspace(tmp_path / "plain"), Workspace(tmp_path / "bought")
    (clicks_only,) = generate(load_spec("clicks", clean), plain, [DAY])
    (truth,) = generate(load_spec("clicks", [*clean, "generate.purchase_rate=0.3"]), bought, [DAY])
    old, new = (read((ws.landing("clicks") / DAY).local_path()) for ws in (plain, bought))
    pd.testing.assert_frame_equal(new.drop(columns="purchased"), old)
    assert list(new.columns)[-1] == "purchased"
    clicked, purchased = new["clicked"].astype(int), new["purchased"].astype(int)
    assert (purchased <= clicked).all()
    assert abs(purchased.sum() / clicked.sum() - 0.3) < 0.06
    assert clicks_only.purchases is None
    assert "purchases" not in truth_path(plain.landing("clicks"), DAY).read_text()
    assert truth.purchases is not None
    assert truth.purchases.rate is not None
    assert abs(truth.purchases.rate - 0.3) < 0.06
    assert type(truth).load(truth_path(bought.landing("clicks"), DAY)) == truth
    # The same days again: nothing is made, with purchases or without.
    assert generate(load_spec("clicks", clean), plain, [DAY]) == [clicks_only]


def test_the_ceilings_are_those_of_the_true_probabilities(tmp_path: Path) -> None:
    spec = load_spec("clicks", [*SMALL_SHOP, "generate.purchase_rate=0.25"])
    (truth,) = generate(spec, Workspace(tmp_path), [DAY])
    assert spec.generate is not None
    model = ClickModel(spec.generate, spec.table.late_days)
    rows = events(model, np.full(4_000, 1), np.arange(4_000))
    purchase_events = purchases(model, rows)
    assert purchase_events is not None
    on_time = rows.lag == 0
    clicked = on_time & rows.clicked
    probability = 1 / (1 + np.exp(-rows.logit)) / (1 + np.exp(-purchase_events.logit))
    assert truth.purchases is not None
    of_clicks, of_rows = truth.purchases.auc_of_clicks, truth.purchases.auc_of_rows
    assert of_clicks is not None
    assert of_rows is not None
    assert abs(of_clicks - roc_auc_score(purchase_events.purchased[clicked], purchase_events.logit[clicked])) < 1e-9
    assert abs(of_rows - roc_auc_score(purchase_events.purchased[on_time], probability[on_time])) < 1e-9
    assert of_clicks > 0.65
    # Over many clicks the share is what was asked for, and purchases are as frequent as their probability.
    many = events(model, np.zeros(60_000, int), np.arange(60_000))
    of_many = purchases(model, many)
    assert of_many is not None
    chance = 1 / (1 + np.exp(-of_many.logit[many.clicked]))
    share = of_many.purchased[many.clicked].mean()
    assert abs(share - 0.25) < 0.02
    assert abs(share - chance.mean()) < 4 * np.sqrt((chance * (1 - chance)).sum()) / len(chance)


def test_the_shipped_overlay_learns_purchases_over_all_rows() -> None:
    spec = load_spec("clicks", load_overlay(checkout() / "conf" / "overlays" / "purchases.yaml"))
    assert spec.train.tasks["click_and_purchase"].product == ("click", "purchase")
    assert spec.score is not None
    assert (spec.model.kind, spec.score.output, spec.score.item.key) == ("esmm", "click_and_purchase", "item_id")
    columns = [c for c in spec.table.columns if c.name != "purchased"]
    assert columns == list(load_spec("clicks").table.columns)
