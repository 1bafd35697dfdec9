"""Purchases after clicks: a column more of the same log, and what a model of them can reach."""

from __future__ import annotations

import gzip
import io
import json
from pathlib import Path

import numpy as np
import pandas as pd
from sklearn.metrics import roc_auc_score

from headrace.config import load_overlay, load_spec
from headrace.generate import generate, truth_path
from headrace.generate.click_model import ClickModel, events, purchases
from headrace.workspace import Workspace, checkout

DAY = "2026-01-02"
SMALL = ["generate.rows_per_day=4000", "generate.users=200", "generate.items=60"]


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
    clean = [*SMALL, "generate.malformed=0"]
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
    spec = load_spec("clicks", [*SMALL, "generate.purchase_rate=0.25"])
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
