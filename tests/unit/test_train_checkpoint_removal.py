"""The checkpoints that a launch removes when it has written one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from headrace.comm.base import LocalCollective
from headrace.storage import LeaseLost, local
from headrace.train.callbacks.progress import LoopProgress
from headrace.train.checkpoint.read import RECORD, list_steps, restore, step_name
from headrace.train.checkpoint.write import CheckpointWriter


def test_an_overtaken_launch_removes_none_of_a_later_one(tmp_path: Path) -> None:
    folder = local(tmp_path)
    for step in (10, 20, 30):
        (folder / step_name(step)).make_dir()
        (folder / step_name(step) / RECORD).put_text("{}")

    def overtaken() -> None:
        raise LeaseLost("another launch")

    of_step_20: Any = SimpleNamespace(progress=LoopProgress(step=20), keep_step=None)
    writer = CheckpointWriter(folder, LocalCollective(), config="", keep=1, check_fence=overtaken)
    with pytest.raises(LeaseLost):
        writer._remove_older(of_step_20)
    assert sorted(list_steps(folder)) == [10, 20, 30]
    # The holder's own launch: older ones, and later ones, which were found damaged when it resumed.
    CheckpointWriter(folder, LocalCollective(), config="", keep=1, check_fence=lambda: None)._remove_older(of_step_20)
    assert list_steps(folder) == [20]


def test_an_overtaken_launch_that_resumes_removes_nothing_of_a_later_one(tmp_path: Path) -> None:
    folder, no_model = local(tmp_path), cast(Any, None)
    later_launch = (folder / step_name(40)).begin("another")
    (later_launch / "part").put_text("x")

    def overtaken() -> None:
        raise LeaseLost("another launch")

    with pytest.raises(LeaseLost):
        restore(folder, no_model, no_model, LocalCollective(), config="", check_fence=overtaken)
    assert (later_launch / "part").exists()
    assert restore(folder, no_model, no_model, LocalCollective(), config="", check_fence=lambda: None) is None
    assert not later_launch.exists()
