"""Landing files show enough to come near the ceiling of AUC, and no model gets above it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from scipy.sparse import csr_matrix, hstack
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

from headrace.config import load_spec
from headrace.generate import days_between, generate
from headrace.generate.population import TAGS
from headrace.workspace import Workspace


def read(folder: Path) -> pd.DataFrame:
    frames = [pd.read_csv(p, dtype={"user_id": "Int64", "item_id": "Int64"}) for p in sorted(folder.glob("*.csv.gz"))]
    return pd.concat(frames, ignore_index=True).drop_duplicates("event_id")


def design(days: pd.DataFrame, levels: dict[str, pd.Index]) -> csr_matrix:
    """One-hot ids and categories and their products, tags, and the numbers: what a linear model can make of a row."""
    parts = []
    for name, index in levels.items():
        codes = index.get_indexer(days[name].fillna("null" if days[name].dtype == object else 0))
        known = codes >= 0
        shape = (len(days), len(index))
        parts.append(csr_matrix((np.ones(known.sum()), (np.flatnonzero(known), codes[known])), shape=shape))
    tags = days["item_tags"].fillna("").str.get_dummies("|").reindex(columns=TAGS, fill_value=0)
    numbers = np.column_stack(
        [
            np.log(days["item_price"].fillna(20.0)) / 2,
            np.log(days["user_activity"].fillna(4.0)),
            np.exp(-days["item_age_days"].fillna(100.0) / 10),
            days["user_age"].fillna(38) / 20,
        ]
    )
    return hstack([*parts, csr_matrix(tags.to_numpy(dtype=float)), csr_matrix(numbers)], format="csr")


def crossed(days: pd.DataFrame) -> pd.DataFrame:
    group = np.searchsorted([25, 35, 45, 60], days["user_age"].fillna(38), side="right").astype(str)
    return days.assign(
        by_country=days["item_category"].fillna("null") + "/" + days["user_country"].fillna("null"),
        by_age=days["item_category"].fillna("null") + "/" + group,
        by_device=days["item_category"].fillna("null") + "/" + days["device"].fillna("null"),
        by_hour=days["device"].fillna("null") + "/" + days["hour"].astype(str),
    )


def test_a_linear_model_comes_near_the_ceiling_and_not_above_it(ws: Workspace) -> None:
    spec = load_spec(
        "clicks",
        [
            "generate.rows_per_day=15000",
            "generate.users=400",
            "generate.items=150",
            "generate.formats=[csv]",
            "generate.malformed=0",
            "generate.taste=0",
        ],
    )
    truths = generate(spec, ws, days_between("2026-01-01", "2026-01-05"))
    frames = [crossed(read(ws.landing("clicks").local_path() / t.ds)) for t in truths]
    train, last = pd.concat(frames[:-1], ignore_index=True), frames[-1]
    last = last[last["ts"].str.startswith(truths[-1].ds)]
    assert truths[-1].valid_rows <= len(last) <= truths[-1].valid_rows + 100  # repeats of the day before's late rows
    columns = ("user_id", "item_id", "item_category", "by_country", "by_age", "by_device", "by_hour")
    levels = {c: pd.Index(train[c].fillna("null" if train[c].dtype == object else 0).unique()) for c in columns}
    model = LogisticRegression(C=0.3, max_iter=300).fit(design(train, levels), train["clicked"])
    reached = roc_auc_score(last["clicked"], model.decision_function(design(last, levels)))
    ceiling = truths[-1].auc_ceiling
    assert ceiling is not None
    assert 0.78 < ceiling < 0.87
    share = (reached - 0.5) / (ceiling - 0.5)
    assert 0.9 < share < 1.0
