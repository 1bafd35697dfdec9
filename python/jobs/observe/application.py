"""Observation of an application's stages, and of a whole `headrace run`, which is their parent.

Observers get log context, events, metrics, and a file about the running stage.
"""

from __future__ import annotations

import logging
import os
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from headrace import logs
from headrace.config import Spec
from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.jobs.observe.openlineage.names import Run, new_run_id
from headrace.jobs.observe.openlineage.runs import PARENT, ROOT, RunEvents, parent_of_process
from headrace.jobs.observe.running import RunningFile, RunningStage
from headrace.stage import RunPlan
from headrace.stage.manifest import Manifest

log = logging.getLogger("headrace.observe")


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
