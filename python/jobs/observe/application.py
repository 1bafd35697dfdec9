"""Observation of an application's stages, and of `headrace run`, which is their parent.

It sets the log context, sends events and writes metrics. While a stage runs, a status file tells other processes of
this machine about it.
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


#: Seconds between two writes of the status file, with the progress of Spark's tasks.
_INTERVAL_SECONDS = 2.0
#: Seconds after a stage's own report of progress before the progress of its tasks is shown again.
_SILENT_SECONDS = 30.0


@dataclass(frozen=True)
class RunningStage:
    """State of a running stage at the time `updated`."""

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
                if _is_alive(stage.pid):
                    running.append(stage)
        return sorted(running, key=lambda s: s.began)

    def write(self, file: Location) -> None:
        """Replace the file in one step."""
        file.put_text(json.dumps(asdict(self)))


class RunningFile:
    """Status file of a running stage, for the length of a `with` block. Its faults are ignored."""

    def __init__(self, ws: Workspace, pipeline: str, stage: RunningStage) -> None:
        self._file = ws.running(pipeline) / f"{stage.stage}.json"
        self._stage, self._progress_at, self._stopped = stage, 0.0, threading.Event()
        self._thread = threading.Thread(target=self._follow, name="running-stage", daemon=True)
        self._progress: Progress | None = None
        self._listening = listening_to_progress(self._on_progress)

    def __enter__(self) -> RunningFile:
        self._listening.__enter__()
        self._write()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._listening.__exit__(None, None, None)
        self._stopped.set()
        self._thread.join(_INTERVAL_SECONDS)
        with suppress(OSError):
            self._file.remove_quietly()

    def _on_progress(self, progress: Progress) -> None:
        self._progress, self._progress_at = progress, time.monotonic()

    def _follow(self) -> None:
        while not self._stopped.wait(_INTERVAL_SECONDS):
            if time.monotonic() - self._progress_at > _SILENT_SECONDS:
                self._progress = _spark_tasks()
            self._write()

    def _write(self) -> None:
        stage = {**asdict(self._stage), "updated": time.time(), "progress": self._progress}
        with suppress(OSError):
            if not self._stopped.is_set():
                RunningStage(**stage).write(self._file)
            if self._stopped.is_set():  # `__exit__` may have removed the file during the write
                self._file.remove_quietly()


def _spark_tasks() -> Progress | None:
    """Return the progress of Spark's tasks in this process, ended ones of all; None without tasks."""
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


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


class Observation:
    """Observation of the stages that this process runs. Its faults never fail a stage; the first one is logged.

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
        """Observe one run of a stage in this block; an exception is reported as its failure, if it had work to do."""
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
        """Wait for events that are being sent, no longer than the spec allows."""
        self.report_safely(self._events.close)

    def started(self, run: Run, plan: RunPlan) -> RunningFile:
        """Report that a stage begins its work, and return its status file."""
        self.report_safely(lambda: self._events.start(run, plan))
        previous = plan.manifest or self._earlier(run)
        now = time.time()
        stage = RunningStage(
            run.stage, run.ds, run.run_id, os.getpid(), now, now, previous.seconds if previous else None
        )
        return RunningFile(self._ws, run.pipeline, stage)

    def completed(self, run: Run, plan: RunPlan, manifest: Manifest) -> None:
        """Report that a stage has written its manifest, and write the metrics."""
        self.report_safely(lambda: self._events.complete(run, plan, manifest))
        if (folder := self._spec.observe.prometheus) is not None:
            self.report_safely(lambda: self._write_metrics(folder))

    def failed(self, run: Run, plan: RunPlan, e: BaseException) -> None:
        """Report that the stage raised."""
        trace = None if isinstance(e, UserError) else "".join(traceback.format_exception(e))
        self.report_safely(lambda: self._events.fail(run, str(e) or type(e).__name__, trace, plan))

    def report_safely(self, report: Callable[[], object]) -> None:
        """Call `report`, and log its first exception as a warning."""
        try:
            report()
        except Exception as e:  # observers must not fail the stage, whatever their libraries raise
            if not self._has_warned:
                self._has_warned = True
                log.warning(
                    "could not report a stage of pipeline '%s': %s: %s", self._spec.pipeline, type(e).__name__, e
                )

    def _write_metrics(self, folder: str) -> None:
        # Imported here, since it imports pyarrow, which most applications do not need.
        from headrace.jobs.observe.prometheus import write_metrics

        write_metrics(self._ws, self._spec, folder)

    def _earlier(self, run: Run) -> Manifest | None:
        """Return the manifest of the newest earlier day on which the stage ran."""
        days = [ds for ds in self._ws.days_of_stages(run.pipeline).get(run.stage, ()) if ds < run.ds]
        return Manifest.load(self._ws.manifest(run.pipeline, days[-1], run.stage)) if days else None


@dataclass
class StageObservation:
    """Observation of one run of a stage."""

    run: Run
    observation: Observation
    plan: RunPlan | None = None
    file: RunningFile | None = None

    def begin(self, plan: RunPlan) -> None:
        """Report that the stage has work to do."""
        self.plan = plan
        self.observation.report_safely(self._open)

    def done(self, manifest: Manifest) -> None:
        """Report that the stage is done."""
        if self.plan is not None:
            self.observation.completed(self.run, self.plan, manifest)

    def failed(self, e: BaseException) -> None:
        """Report a failure, if the stage had begun."""
        if self.plan is not None:
            self.observation.failed(self.run, self.plan, e)

    def end(self) -> None:
        """Remove the status file after success or failure."""
        if self.file is not None:
            self.observation.report_safely(lambda: self.file.__exit__() if self.file else None)

    def _open(self) -> None:
        assert self.plan is not None
        file = self.observation.started(self.run, self.plan)
        file.__enter__()
        self.file = file


class RunObservation:
    """Observation of a `headrace run`: its start, its end, and stages that died before they reported theirs."""

    def __init__(self, spec: Spec, ws: Workspace, ds: str) -> None:
        self._parent, self._root = parent_of_process()
        self.run = Run(spec.pipeline, ds, "", new_run_id(), self._parent, self._root)
        self._events = RunEvents(spec, ws)
        self._has_started, self._error = False, ""

    def start(self) -> None:
        """Report the start, once, and name this run in the environment as the parent of its child processes."""
        if self._has_started:
            return
        self._has_started = True
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
        if self._has_started and self._error:
            self._events.fail(self.run, self._error)
        elif self._has_started:
            self._events.complete(self.run)
        self._events.close()


@contextmanager
def observed_run(spec: Spec, ws: Workspace, ds: str) -> Iterator[RunObservation]:
    """Observe a run in this block; an exception is reported as its failure."""
    variables = {name: os.environ.get(name) for name in (PARENT, ROOT)}
    run = RunObservation(spec, ws, ds)
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
