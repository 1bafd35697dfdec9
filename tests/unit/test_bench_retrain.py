"""`make month`: the days that it runs, and its tables."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.metrics import roc_auc_score

from bench.retrain.__main__ import draw, main, table
from bench.retrain.days import DayResult, RetrainRun, TrainHere, knowable_auc, results_of
from bench.retrain.replay import Replayed, compare, days_with_replay, replayed_of, with_overrides
from bench.retrain.replay import table as replay_table
from headrace.config import Generate, build_spec
from headrace.config.installation import checkout
from headrace.config.workspace import Workspace
from headrace.errors import EXIT_USER_ERROR, UserError
from headrace.lake.generate.click_model import ClickModel, events
from headrace.stage import check_stage, run_stage
from headrace.stage.manifest import Manifest
from headrace.train.stage import Train

_OVERLAY = checkout() / "conf" / "overlays" / "month.yaml"
_DAYS = [
    DayResult("2026-01-08", 1_000, 0.9, 0.9, 0.892, 0.892, 0.892, 20.0, 40_960, 40_960),
    DayResult("2026-01-09", 1_000, 0.8, 0.798, 0.794, 0.77, 0.896, 10.4),
]


def test_days_begin_where_the_window_is_full(tmp_path: Path) -> None:
    run = RetrainRun(tmp_path, 30, _OVERLAY)
    assert (run.dates()[0], run.dates()[-1], len(run.dates())) == ("2026-01-08", "2026-02-06", 30)
    assert RetrainRun(tmp_path, 1, _OVERLAY, ("features.window_days=3",)).dates() == ["2026-01-04"]


def test_shares_are_of_the_way_to_each_days_ceiling(tmp_path: Path) -> None:
    assert table(_DAYS).splitlines()[2:] == [
        "| 2026-01-08 | 0.9000 | 98.00% | 98.00% | 98.00% | 98.0% | 40.0 KiB | 20 |",
        "| 2026-01-09 | 0.8000 | 98.00% | 98.66% | 90.00% | 99.0% |  | 10 |",
    ]
    known = json.loads(json.dumps({d.ds: {"key": "k", **asdict(d)} for d in _DAYS}))
    assert results_of(known, ["2026-01-09", "2026-01-10"]) == _DAYS[1:]
    draw(_DAYS, tmp_path / "days" / "plain.png")
    draw(_DAYS, tmp_path / "days" / "found.png", {"2026-01-09": 0.898})
    assert (tmp_path / "days" / "plain.png").read_bytes() != (tmp_path / "days" / "found.png").read_bytes()
    with Image.open(tmp_path / "days" / "found.png") as picture:
        assert picture.size > (800, 500)
        assert len(picture.convert("RGB").getcolors(1 << 20) or ()) > 10


def test_a_day_trained_in_this_process_is_the_stages(ws: Workspace, make_dataset: Callable[..., Manifest]) -> None:
    """The command line finds it done; the next day starts from it."""
    spec = build_spec(
        {
            "pipeline": "clicks",
            "source": {"format": "clicks", "path": "{ds}"},
            "table": {"columns": [{"name": "click", "type": "int"}]},
            "features": {"label": "click", "workflow": [], "split": {"by": "position"}},
            "model": {"embedding_dim": 4, "bottom_mlp": [8], "top_mlp": [16]},
            "train": {"epochs": 1, "batch_size": 200},
        }
    )
    for ds in ("2026-01-08", "2026-01-09"):
        make_dataset(ws, train=400, valid=100, users=60, ds=ds)
        outcome = run_stage(TrainHere(), spec, ws, ds)
        assert (outcome.skipped, outcome.manifest.rows["train"]) == (False, 400)
        assert check_stage(Train(), spec, ws, ds) is None
        assert run_stage(TrainHere(), spec, ws, ds).skipped
    first = Manifest.load(ws.manifest("clicks", "2026-01-08", "train"))
    assert first is not None
    assert outcome.manifest.facts["warm_start"] == first.output("model").name


def test_what_can_be_known_is_the_ceiling_less_what_new_ids_hide() -> None:
    """Against the logits of a log that is the same but for the biases of the ids that are born on its last day."""
    params = Generate(
        rows_per_day=20_000, users=40, items=20, new_users=0.1, new_items=0.2, user_zipf=0.2, item_zipf=0.2
    )
    model, day = ClickModel(params, 3), 4
    rows = np.arange(20_000)
    last_day = events(model, np.full(20_000, day), rows)
    day_before = events(model, np.full(20_000, day - 1), rows)
    old = {"user": set(day_before.users.id.tolist()), "item": set(day_before.items.id.tolist())}
    users, items = last_day.users.id[last_day.user_row], last_day.items.id[last_day.item_row]
    hidden = np.where(
        [u not in old["user"] for u in users.tolist()], 0.35 * last_day.users.bias[last_day.user_row], 0.0
    )
    hidden += np.where(
        [i not in old["item"] for i in items.tolist()], 0.6 * last_day.items.bias[last_day.item_row], 0.0
    )
    undelayed = last_day.lag == 0
    expected = roc_auc_score(last_day.clicked[undelayed], (last_day.logit - hidden)[undelayed])
    assert 0.05 < (hidden != 0).mean() < 0.5
    assert knowable_auc(model, day) == pytest.approx(expected, abs=1e-12)
    assert expected < roc_auc_score(last_day.clicked[undelayed], last_day.logit[undelayed]) - 1e-3
    still = ClickModel(params.model_copy(update={"new_users": 0.0, "new_items": 0.0}), 3)
    last_day = events(still, np.full(20_000, day), rows)
    undelayed = last_day.lag == 0
    assert knowable_auc(still, day) == pytest.approx(
        roc_auc_score(last_day.clicked[undelayed], last_day.logit[undelayed]), abs=1e-12
    )


def test_the_days_again_with_replay(tmp_path: Path, make_dataset: Callable[..., Manifest]) -> None:
    """Train beside the existing days, on their datasets, and measure both on the first day's rows."""
    overlay = tmp_path / "month.yaml"
    overlay.write_text(
        """
features: {window_days: 1}
model: {embedding_dim: 4, bottom_mlp: [8], top_mlp: [16]}
train: {ranks: 1, batch_size: 80, epochs: 1}
retrain: {forgetting_day: 2026-01-02}
"""
    )
    run = RetrainRun(tmp_path / "home", 6, overlay)
    run.home.mkdir()
    with pytest.raises(UserError, match="no dataset of 2026-01-02: make month first"):
        with_overrides(run, [])
    assert replayed_of(run) == {}
    for seed, ds in enumerate(run.dates()):
        make_dataset(run.ws, train=400, valid=200, users=60, ds=ds, seed=seed)
        run_stage(TrainHere(), run.spec(), run.ws, ds)
    manifests = {ds: run.ws.manifest("clicks", ds, "train").read_bytes() for ds in run.dates()}
    replayed = with_overrides(run, ["retrain.replay={share: 0.5, by: day}"])
    assert days_with_replay(replayed) == run.dates()[3:]
    for ds in run.dates()[3:]:
        outcome = run_stage(TrainHere(), replayed.spec(), replayed.ws, ds)
    assert with_overrides(run, ["retrain.replay={share: 0.5, by: day}"]) == replayed
    assert manifests == {ds: run.ws.manifest("clicks", ds, "train").read_bytes() for ds in run.dates()}
    days = compare(run, replayed)
    assert [d.ds for d in days] == run.dates()
    # Of the first days nothing is before the window that has no rows of the day that is measured.
    is_alike = [d.rows[0] == d.rows[1] and d.first_day[0] == d.first_day[1] for d in days]
    assert is_alike == [True] * 3 + [False] * 3
    assert len(outcome.manifest.facts["replayed"]) == 3
    assert replayed_of(run) == {d.ds: d.first_day[1] for d in days}
    by_hand = [Replayed("2026-01-02", (0.7, 0.7), (0.7, 0.7)), Replayed("2026-01-03", (0.75, 0.74), (0.65, 0.69))]
    assert replay_table(by_hand, {"2026-01-02": 0.75, "2026-01-03": 0.8}).splitlines()[2:] == [
        "| 2026-01-02 | 80.00% | 80.00% | 80.00% | 80.00% |",
        "| 2026-01-03 | 83.33% | 80.00% | 60.00% | 76.00% |",
    ]


def test_without_a_day_there_is_nothing_to_show(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--show", "--home", str(tmp_path)]) == EXIT_USER_ERROR
    assert "no day is trained yet" in capsys.readouterr().err
