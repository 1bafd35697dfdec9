"""A whole day by the command line with a package's format, model, stage and warehouse, which entry points name."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml

from headrace.config.workspace import Workspace
from tests.support import headrace, manifests
from tests.users_package import installed

DS, ROWS, USERS, ITEMS = "2026-01-10", 3000, 40, 12


def pipeline(path: Path, ledger: Path) -> None:
    kinds = {"id": "bigint", "user_id": "bigint", "item_id": "bigint", "price": "double", "clicked": "int"}
    columns = [{"name": name, "type": kind, "required": name != "price"} for name, kind in kinds.items()]
    spec = {
        "pipeline": "shop",
        "source": {"format": "acme_pipes", "path": "in/{ds}/*.pipes"},
        "table": {"columns": columns, "keys": ["id"]},
        "features": {
            "label": "clicked",
            "split": {"by": "position"},
            "workflow": [
                {"columns": ["price"], "ops": ["fill_missing", "normalize"], "tags": ["continuous"]},
                {"columns": ["user_id", "item_id"], "ops": ["categorify"]},
            ],
        },
        "model": {"class": "acme_factors", "args": {"user": "user_id", "item": "item_id", "dim": 4}},
        "train": {"ranks": 1, "epochs": 1, "batch_size": 256},
        "stages": {"acme_row_counts": {}},
        "score": {"user": {"key": "user_id"}, "item": {"key": "item_id", "columns": ["price"]}, "top_k": 3},
        "publish": {"warehouse": {"kind": "acme_ledger", "path": str(ledger)}},
    }
    path.write_text(yaml.safe_dump(spec, sort_keys=False))


@pytest.mark.service
def test_a_day_with_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(3)
    user, item = rng.integers(0, USERS, ROWS), rng.integers(0, ITEMS, ROWS)
    rows = zip(range(ROWS), user, item, item / 4, (rng.random(ROWS) < item / ITEMS).astype(int), strict=True)
    landing = tmp_path / "home" / "in" / DS / "a.pipes"
    landing.parent.mkdir(parents=True)
    landing.write_text("".join("|".join(map(str, row)) + "\n" for row in rows))
    path, ledger, ws = tmp_path / "shop.yaml", tmp_path / "ledger.db", Workspace(tmp_path / "home")
    pipeline(path, ledger)
    with installed(tmp_path / "site", monkeypatch):
        monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
        completed = headrace(ws.home, "run", str(path), "--ds", DS, settings={})
        assert completed.code == 0, completed.output
        status = headrace(ws.home, "status", str(path), "--json", settings={})
    states = json.loads(status.output)["stages"]
    day = ["ingest", "features", "acme_row_counts", "train", "promote", "score", "publish", "report"]
    assert [(s["stage"], s["state"]) for s in states] == [(name, "done") for name in day]
    by_stage = manifests(ws.home, DS, "shop")
    assert by_stage["ingest"].rows["kept"] == ROWS
    text = (ws.home / "exports" / "shop" / f"{DS}.csv").read_text()
    assert text == "".join(f"{split},{count}\n" for split, count in by_stage["features"].rows.items())
    model = by_stage["train"].output("model")
    assert '"acme_factors"' in (ws.home / model.name / "model.json").read_text()
    with closing(sqlite3.connect(ledger)) as db:
        published = pd.read_sql("SELECT * FROM shop_scores", db)
    assert published.groupby("user_id").size().to_dict() == dict.fromkeys(sorted(set(user.tolist())), 3)
