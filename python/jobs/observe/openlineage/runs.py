"""The events of one process: of the stages of an application, or of a whole `headrace run`."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from typing import Any

from headrace.config import Spec
from headrace.config.stages import StageEntry
from headrace.config.workspace import Workspace
from headrace.jobs.observe.openlineage.names import ParentRun, Run, job_name
from headrace.jobs.observe.openlineage.sender import EventSender, is_enabled, namespace_of
from headrace.stage import RunPlan, stage_entry
from headrace.stage.manifest import Manifest

#: `namespace/job/run id` of the run that has started this process; the same of the outermost one.
PARENT, ROOT = "OPENLINEAGE_PARENT_ID", "OPENLINEAGE_ROOT_PARENT_ID"


def parent_of_process() -> tuple[ParentRun | None, ParentRun | None]:
    """Return the run that started this process, and the outermost one, as variables of the environment name them."""
    return ParentRun.parse(os.environ.get(PARENT)), ParentRun.parse(os.environ.get(ROOT))


class RunEvents:
    """Sends events; nothing where they are not asked for. What is in an event is found out in the sender's thread."""

    def __init__(self, spec: Spec, ws: Workspace) -> None:
        conf = spec.observe.openlineage
        self._spec, self._ws, self._namespace = spec, ws, namespace_of(conf)
        self._sender = EventSender(conf) if is_enabled(conf) else None

    def as_parent(self, run: Run) -> ParentRun | None:
        """Return a run as the parent of what it starts; None where no events are sent."""
        if self._sender is None:
            return None
        return ParentRun(self._namespace, job_name(run.pipeline, run.stage), run.run_id)

    def start(self, run: Run, plan: RunPlan | None = None) -> None:
        """Send the event of a run's begin; for a stage with its inputs."""
        time = datetime.now(UTC)

        def make() -> Any:
            from openlineage.client.event_v2 import RunState

            from headrace.jobs.observe.openlineage.datasets import inputs_of
            from headrace.jobs.observe.openlineage.events import event

            inputs = inputs_of(self._ws, plan.inputs, plan.ctx.upstream) if plan else []
            return event(RunState.START, run, self._entry(run), self._namespace, time, inputs)

        self._send(make)

    def complete(self, run: Run, plan: RunPlan | None = None, manifest: Manifest | None = None) -> None:
        """Send the event of a run's success; for a stage with its inputs and outputs."""
        time = datetime.now(UTC)

        def make() -> Any:
            from openlineage.client.event_v2 import RunState

            from headrace.jobs.observe.openlineage.datasets import inputs_of, outputs_of
            from headrace.jobs.observe.openlineage.events import event

            if plan is None or manifest is None:
                return event(RunState.COMPLETE, run, self._entry(run), self._namespace, time)
            inputs = inputs_of(self._ws, plan.inputs, plan.ctx.upstream, manifest)
            outputs = outputs_of(self._spec, self._ws, manifest)
            return event(RunState.COMPLETE, run, self._entry(run), self._namespace, time, inputs, outputs)

        self._send(make)

    def fail(self, run: Run, error: str, trace: str | None = None, plan: RunPlan | None = None) -> None:
        """Send the event of a run's failure; for a stage with its planned inputs."""
        time = datetime.now(UTC)

        def make() -> Any:
            from openlineage.client.event_v2 import RunState

            from headrace.jobs.observe.openlineage.datasets import inputs_of
            from headrace.jobs.observe.openlineage.events import event

            inputs = inputs_of(self._ws, plan.inputs, plan.ctx.upstream) if plan else []
            return event(RunState.FAIL, run, self._entry(run), self._namespace, time, inputs, error=error, trace=trace)

        self._send(make)

    def _entry(self, run: Run) -> StageEntry | None:
        return stage_entry(self._spec, run.stage) if run.stage else None

    def close(self) -> None:
        """Wait for what is on its way, no longer than the spec allows."""
        if self._sender is not None:
            self._sender.close()

    def _send(self, make: Any) -> None:
        if self._sender is not None:
            self._sender.send(make)
