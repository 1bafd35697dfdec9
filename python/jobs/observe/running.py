"""Status file of a running stage for others on this machine; it exists while the stage runs."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass

from headrace.config.workspace import Workspace
from headrace.logs import Progress, listening_to_progress
from headrace.storage import Location

#: Seconds between two looks at Spark's tasks, and most seconds between two writes.
_SECONDS = 2.0
#: Seconds for which a stage's own progress is shown in place of its tasks.
_SILENT_SECONDS = 30.0


@dataclass(frozen=True)
class RunningStage:
    """A stage at work, as it was at `updated`."""

    stage: str
    ds: str
    run_id: str
    pid: int
    #: Seconds since 1970.
    began: float
    updated: float
    #: Duration of its last run; None: it has not run before.
    expected_seconds: float | None = None
    progress: Progress | None = None

    @staticmethod
    def read(ws: Workspace, pipeline: str) -> list[RunningStage]:
        """Return the running stages of a pipeline whose processes are alive, in the order in which they began."""
        running = []
        for file in ws.running(pipeline).entries():
            with suppress(OSError, ValueError, TypeError, KeyError):
                record = json.loads(file.read_text())
                progress = record.pop("progress")
                stage = RunningStage(**record, progress=Progress(**progress) if progress else None)
                if _lives(stage.pid):
                    running.append(stage)
        return sorted(running, key=lambda s: s.began)

    def write(self, file: Location) -> None:
        """Replace the file in one step."""
        file.put_text(json.dumps(asdict(self)))


class RunningFile:
    """Keeps the file of a stage for the length of a `with` block; what goes wrong with it is nobody's business."""

    def __init__(self, ws: Workspace, pipeline: str, stage: RunningStage) -> None:
        self._file = ws.running(pipeline) / f"{stage.stage}.json"
        self._stage, self._heard_at, self._over = stage, 0.0, threading.Event()
        self._thread = threading.Thread(target=self._follow, name="running-stage", daemon=True)
        self._progress: Progress | None = None
        self._listening = listening_to_progress(self._hear)

    def __enter__(self) -> RunningFile:
        self._listening.__enter__()
        self._write()
        self._thread.start()
        return self

    def __exit__(self, *of_error: object) -> None:
        self._listening.__exit__(None, None, None)
        self._over.set()
        self._thread.join(_SECONDS)
        with suppress(OSError):
            self._file.remove_quietly()

    def _hear(self, progress: Progress) -> None:
        self._progress, self._heard_at = progress, time.monotonic()

    def _follow(self) -> None:
        while not self._over.wait(_SECONDS):
            if time.monotonic() - self._heard_at > _SILENT_SECONDS:
                self._progress = _spark_tasks()
            self._write()

    def _write(self) -> None:
        stage = {**asdict(self._stage), "updated": time.time(), "progress": self._progress}
        with suppress(OSError):
            if not self._over.is_set():
                RunningStage(**stage).write(self._file)
            if self._over.is_set():  # `__exit__` may have removed the file during the write
                self._file.remove_quietly()


def _spark_tasks() -> Progress | None:
    """Return the progress of Spark's tasks in this process: ended ones, of all."""
    if "pyspark" not in sys.modules:
        return None
    from pyspark import SparkContext

    context = SparkContext._active_spark_context
    if context is None:
        return None
    try:
        tracker = context.statusTracker()
        infos = [tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds()]
    except Exception:  # the session may end during the call
        return None
    known = [info for info in infos if info is not None]
    total = sum(info.numTasks for info in known)
    return Progress(sum(info.numCompletedTasks for info in known), total, "tasks of Spark") if total else None


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
