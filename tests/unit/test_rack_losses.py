"""Losses as a Spark application's log of events tells them."""

from __future__ import annotations

import json
from pathlib import Path

from bench.rack.losses import Losses, losses


def test_what_was_lost_is_counted_up_to_the_end_of_the_application(tmp_path: Path) -> None:
    events: list[dict[str, object]] = [
        {"Event": "SparkListenerTaskEnd", "Task End Reason": {"Reason": reason}}
        for reason in ("Success", "ExecutorLostFailure", "FetchFailed", "FetchFailed")
    ]
    removed = {"Event": "SparkListenerExecutorRemoved"}
    failed = {"Event": "SparkListenerStageCompleted", "Stage Info": {"Failure Reason": "FetchFailed"}}
    stage_completed = {"Event": "SparkListenerStageCompleted", "Stage Info": {}}
    events += [removed, failed, stage_completed, {"Event": "SparkListenerApplicationEnd"}, removed]
    complete, killed = tmp_path / "whole", tmp_path / "killed"
    complete.write_text("".join(json.dumps(event) + "\n" for event in events))
    killed.write_text(json.dumps(removed) + "\n" + json.dumps(removed)[:9])
    counted = losses([complete, killed])
    assert counted == Losses(2, {"ExecutorLostFailure": 1, "FetchFailed": 2}, 1)
    assert str(counted) == "2 executors, 3 tasks (1 ExecutorLostFailure, 2 FetchFailed), 1 attempt of a stage"
    assert str(Losses(0, {}, 0)) == "no executors, no tasks, no attempts of a stage"
