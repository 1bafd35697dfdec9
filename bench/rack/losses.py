"""Losses of a Spark application, and what it made again, by its own log of events."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: Properties of an application that writes such a log, besides its folder (`spark.eventLog.dir`), which must be there.
PROPERTIES = {"eventLog.enabled": "true", "eventLog.compress": "false", "eventLog.rolling.enabled": "false"}


@dataclass(frozen=True)
class Losses:
    """Losses of some applications."""

    executors: int
    #: Tasks whose work was lost, by Spark's name of the reason.
    tasks: Mapping[str, int]
    #: Attempts of stages that failed.
    stages: int

    def __str__(self) -> str:
        reasons = ", ".join(f"{count} {name}" for name, count in sorted(self.tasks.items()))
        counts = [
            _many(self.executors, "executor"),
            _many(sum(self.tasks.values()), "task") + (f" ({reasons})" if reasons else ""),
            _many(self.stages, "attempt") + " of a stage",
        ]
        return ", ".join(counts)


def losses(logs: Sequence[Path]) -> Losses:
    """Read applications' logs; that of a driver that was killed as far as it goes."""
    executors, stages, tasks = 0, 0, Counter[str]()
    for log in logs:
        for event in _events(log):
            match event["Event"]:
                case "SparkListenerExecutorRemoved":
                    executors += 1
                case "SparkListenerStageCompleted":
                    stages += "Failure Reason" in event["Stage Info"]
                case "SparkListenerTaskEnd":
                    reason = event["Task End Reason"]["Reason"]
                    tasks[reason] += reason != "Success"
    return Losses(executors, {name: count for name, count in tasks.items() if count}, stages)


def _events(log: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the events up to the end of the application: what it ends itself then is no loss."""
    for line in log.read_text(encoding="utf-8").splitlines(keepends=True):
        if not line.endswith("\n"):
            return
        event = json.loads(line)
        if event["Event"] == "SparkListenerApplicationEnd":
            return
        yield event


def _many(count: int, noun: str) -> str:
    return f"{count or 'no'} {noun}{'' if count == 1 else 's'}"
