"""A whole `headrace run` as those who observe see it: the parent of the stages' runs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from headrace.config import Spec
from headrace.jobs.observe.openlineage.runs import PARENT, ROOT, RunEvents, parent_of_process
from headrace.jobs.observe.run_id import Run, new_run_id
from headrace.workspace import Workspace


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
