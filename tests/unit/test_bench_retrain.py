"""`make month`: which days it runs, and what it says of them."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from PIL import Image

from bench.retrain.__main__ import main, table
from bench.retrain.measure import DayResult, results_of
from bench.retrain.plot import draw
from bench.retrain.run import Run
from headrace.errors import EXIT_USER_ERROR
from headrace.workspace import checkout

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


def test_without_a_day_there_is_nothing_to_show(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--show", "--home", str(tmp_path)]) == EXIT_USER_ERROR
    assert "no day is trained yet" in capsys.readouterr().err
