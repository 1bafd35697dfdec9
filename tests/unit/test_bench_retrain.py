"""`make month`: which days it runs, and what it says of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
from PIL import Image

from bench.retrain.__main__ import main, table
from bench.retrain.measure import DayResult, results_of
from bench.retrain.plot import draw
from bench.retrain.run import Run, TrainHere
from headrace.config import build_spec
from headrace.errors import EXIT_USER_ERROR
from headrace.manifest import Manifest
from headrace.stage import check_stage, run_stage
from headrace.train.stage import Train
from headrace.workspace import Workspace, checkout

_OVERLAY = checkout() / "conf" / "overlays" / "month.yaml"
_DAYS = [
    DayResult("2026-01-08", 1_000, 0.9, 0.892, 0.892, 0.892, 20.0),
    DayResult("2026-01-09", 1_000, 0.8, 0.794, 0.77, 0.896, 10.4),
]


def test_days_begin_where_the_window_is_full(tmp_path: Path) -> None:
    run = Run(tmp_path, 30, _OVERLAY)
    assert (run.dates()[0], run.dates()[-1], len(run.dates())) == ("2026-01-08", "2026-02-06", 30)
    assert Run(tmp_path, 1, _OVERLAY, ("features.window_days=3",)).dates() == ["2026-01-04"]


def test_shares_are_of_the_way_to_each_days_ceiling(tmp_path: Path) -> None:
    assert table(_DAYS).splitlines()[2:] == [
        "| 2026-01-08 | 0.9000 | 98.0% | 98.0% | 98.0% | 20 |",
        "| 2026-01-09 | 0.8000 | 98.0% | 90.0% | 99.0% | 10 |",
    ]
    known = json.loads(json.dumps({d.ds: {"key": "k", **asdict(d)} for d in _DAYS}))
    assert results_of(known, ["2026-01-09", "2026-01-10"]) == _DAYS[1:]
    draw(_DAYS, tmp_path / "days" / "found.png")
    with Image.open(tmp_path / "days" / "found.png") as picture:
        assert picture.size > (800, 500)
        assert len(picture.convert("RGB").getcolors(1 << 20) or ()) > 10


def test_a_day_trained_in_this_process_is_the_stages(ws: Workspace, make_dataset: Callable[..., Manifest]) -> None:
    """The command line finds it done; the next day starts from it."""
    spec = build_spec(
        {
            "pipeline": "clicks",
            "source": {"format": "clicks", "path": "{ds}"},
            "table": {"columns": [{"name": "click"}]},
            "features": {"label": "click", "workflow": [], "split": {"by": "position"}},
            "model": {"embedding_dim": 4, "bottom_mlp": [8], "top_mlp": [16]},
            "train": {"epochs": 1, "batch_size": 200},
        }
    )
    for ds in ("2026-01-08", "2026-01-09"):
        make_dataset(ws, train=400, valid=100, users=60, ds=ds)
        found = run_stage(TrainHere(), spec, ws, ds)
        assert (found.skipped, found.manifest.rows["train"]) == (False, 400)
        assert check_stage(Train(), spec, ws, ds) is None
        assert run_stage(TrainHere(), spec, ws, ds).skipped
    first = Manifest.load(ws.manifest("clicks", "2026-01-08", "train"))
    assert first is not None
    assert found.manifest.facts["warm_start"] == first.output("model").name


def test_without_a_day_there_is_nothing_to_show(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--show", "--home", str(tmp_path)]) == EXIT_USER_ERROR
    assert "no day is trained yet" in capsys.readouterr().err
