"""Observation of an application's stages, and of a whole `headrace run`, which is their parent.

Observers get log context, events, metrics, and a status file of the running stage for others on this machine, which
exists while the stage runs.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass

from headrace import logs
from headrace.config import Spec
from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.jobs.observe.openlineage.names import Run, new_run_id
from headrace.jobs.observe.openlineage.runs import PARENT, ROOT, RunEvents, parent_of_process
from headrace.logs import Progress, listening_to_progress
from headrace.stage import RunPlan
from headrace.stage.manifest import Manifest
from headrace.storage import Location

log = logging.getLogger("headrace.observe")


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


class Observation:
    """Observation of the stages that this process runs. Nothing here fails a stage: a fault is reported once.

    Args:
        spec: the pipeline.
        ws: the workspace.
    """

    def __init__(self, spec: Spec, ws: Workspace) -> None:
        self._spec, self._ws = spec, ws
        self._events = RunEvents(spec, ws)
        self._parent, self._root = parent_of_process()
        self._has_warned = False

    @contextmanager
    def stage(self, name: str, ds: str) -> Iterator[StageObservation]:
        """Around one turn of a stage; an exception that leaves it is told as its failure, where it had begun."""
        run = Run(self._spec.pipeline, ds, name, new_run_id(), self._parent, self._root)
        logs.set_context(pipeline=run.pipeline, ds=ds, stage=name, run_id=run.run_id)
        stage = StageObservation(run, self)
        try:
            yield stage
        except BaseException as e:
            stage.failed(e)
            raise
        finally:
            stage.end()
            logs.set_context(pipeline=run.pipeline)

    def close(self) -> None:
        """Wait for events that are on their way, no longer than the spec allows."""
        self.quietly(self._events.close)

    def started(self, run: Run, plan: RunPlan) -> RunningFile:
        """Its work begins."""
        self.quietly(lambda: self._events.start(run, plan))
        previous = plan.manifest or self._earlier(run)
        now = time.time()
        stage = RunningStage(
            run.stage, run.ds, run.run_id, os.getpid(), now, now, previous.seconds if previous else None
        )
        return RunningFile(self._ws, run.pipeline, stage)

    def completed(self, run: Run, plan: RunPlan, manifest: Manifest) -> None:
        """Its manifest is written."""
        self.quietly(lambda: self._events.complete(run, plan, manifest))
        if (folder := self._spec.observe.prometheus) is not None:
            self.quietly(lambda: self._write_metrics(folder))

    def failed(self, run: Run, plan: RunPlan, e: BaseException) -> None:
        """Report that the stage raised."""
        trace = None if isinstance(e, UserError) else "".join(traceback.format_exception(e))
        self.quietly(lambda: self._events.fail(run, str(e) or type(e).__name__, trace, plan))

    def quietly(self, act: Callable[[], object]) -> None:
        """Do something that no stage depends on."""
        try:
            act()
        except Exception as e:  # observers must not fail the stage, whatever their libraries raise
            if not self._has_warned:
                self._has_warned = True
                log.warning("who observes pipeline '%s' was not told: %s: %s", self._spec.pipeline, type(e).__name__, e)

    def _write_metrics(self, folder: str) -> None:
        # Reads tables' logs, and with them imports pyarrow: not in each application.
        from headrace.jobs.observe.prometheus import write_metrics

        write_metrics(self._ws, self._spec, folder)

    def _earlier(self, run: Run) -> Manifest | None:
        """Return the manifest of the newest earlier day on which the stage ran."""
        days = [ds for ds in self._ws.days_of_stages(run.pipeline).get(run.stage, ()) if ds < run.ds]
        return Manifest.load(self._ws.manifest(run.pipeline, days[-1], run.stage)) if days else None


@dataclass
class StageObservation:
    """One turn of a stage."""

    run: Run
    observation: Observation
    plan: RunPlan | None = None
    file: RunningFile | None = None

    def begin(self, plan: RunPlan) -> None:
        """Report that the stage has work to do."""
        self.plan = plan
        self.observation.quietly(self._open)

    def done(self, manifest: Manifest) -> None:
        """Report that the stage is done."""
        if self.plan is not None:
            self.observation.completed(self.run, self.plan, manifest)

    def failed(self, e: BaseException) -> None:
        """Report a failure, if the stage had begun."""
        if self.plan is not None:
            self.observation.failed(self.run, self.plan, e)

    def end(self) -> None:
        """Report that the run is over, in one way or the other."""
        if self.file is not None:
            self.observation.quietly(lambda: self.file.__exit__() if self.file else None)

    def _open(self) -> None:
        assert self.plan is not None
        file = self.observation.started(self.run, self.plan)
        file.__enter__()
        self.file = file


class WholeRun:
    """Tells of the run once it has started something, and of stages that could not tell their own end."""

    def __init__(self, spec: Spec, ws: Workspace, ds: str) -> None:
        self._parent, self._root = parent_of_process()
        self.run = Run(spec.pipeline, ds, "", new_run_id(), self._parent, self._root)
        self._events = RunEvents(spec, ws)
        self._begun, self._error = False, ""

    def start(self) -> None:
        """Something is about to be started: what is, learns from variables of the environment whose child it is."""
        if self._begun:
            return
        self._begun = True
        self._events.start(self.run)
        parent = self._events.as_parent(self.run)
        if parent is not None:
            os.environ[PARENT] = str(parent)
            os.environ[ROOT] = str(self._root or self._parent or parent)

    def fail(self, error: str) -> None:
        """End the run with a failure."""
        self._error = error

    def fail_stage(self, stage: str, ds: str, run_id: str, error: str) -> None:
        """Report a stage whose process died before it could report anything."""
        parent = self._events.as_parent(self.run)
        self._events.fail(Run(self.run.pipeline, ds, stage, run_id, parent, self._root or self._parent), error)

    def end(self) -> None:
        """End the run."""
        if self._begun and self._error:
            self._events.fail(self.run, self._error)
        elif self._begun:
            self._events.complete(self.run)
        self._events.close()


@contextmanager
def whole_run(spec: Spec, ws: Workspace, ds: str) -> Iterator[WholeRun]:
    """Around the applications of a run; an exception that leaves it is told as its failure."""
    variables = {name: os.environ.get(name) for name in (PARENT, ROOT)}
    run = WholeRun(spec, ws, ds)
    try:
        yield run
    except BaseException as e:
        run.fail(str(e) or type(e).__name__)
        raise
    finally:
        run.end()
        for name, value in variables.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
