"""The events of one process: of the stages of an application, or of a whole `headrace run`.

A thread makes and sends them: who works never waits for the receiver, and never fails with it.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from queue import Full, Queue
from typing import Any

from headrace.config import OpenLineage, Spec
from headrace.config.stages import StageEntry
from headrace.config.workspace import Workspace
from headrace.jobs.observe.openlineage.names import ParentRun, Run, job_name
from headrace.stage import RunPlan, stage_entry
from headrace.stage.manifest import Manifest

log = logging.getLogger("headrace.observe")

#: Longest queue of events; a stage has two.
_WAITING = 1000
_FILE = "openlineage.yml"
_THREAD = "openlineage"
#: Defaults of the client's configuration: it need not look for a Git repository.
_DEFAULTS: Mapping[str, Any] = {"facets": {"source_code_location": {"disabled": True}}}

#: Creates an event in the sender's thread, where the client's modules are imported.
Make = Callable[[], Any]


def is_enabled(conf: OpenLineage | None) -> bool:
    """Return whether events are requested: by the spec, or by the settings of OpenLineage's clients."""
    if os.environ.get("OPENLINEAGE_DISABLED", "").strip().lower() == "true":
        return False
    named = any(
        v in ("OPENLINEAGE_URL", "OPENLINEAGE_CONFIG") or v.startswith("OPENLINEAGE__TRANSPORT") for v in os.environ
    )
    return conf is not None or named or any(map(_has_file, (Path.cwd, lambda: Path.home() / ".openlineage")))


def _has_file(folder: Callable[[], Path]) -> bool:
    # A working directory may be removed, a user without a home.
    with suppress(OSError, RuntimeError):
        return (folder() / _FILE).is_file()
    return False


def namespace_of(conf: OpenLineage | None) -> str:
    """Return the namespace of the pipelines' jobs."""
    return os.environ.get("OPENLINEAGE_NAMESPACE") or (conf or OpenLineage()).namespace


class EventSender:
    """Sends events in the order in which they come. What goes wrong is told once, as a warning.

    Args:
        conf: the section; None: only variables and `openlineage.yml` say where to.
    """

    def __init__(self, conf: OpenLineage | None) -> None:
        self._conf = conf or OpenLineage()
        self._queue: Queue[Make | None] = Queue(_WAITING)
        self._has_warned = False
        # A daemon, so that a receiver that does not answer keeps no process alive.
        self._thread = threading.Thread(target=self._work, name=_THREAD, daemon=True)
        self._thread.start()

    def send(self, make: Make) -> None:
        """Have an event made and sent."""
        try:
            self._queue.put_nowait(make)
        except Full:
            self._warn(f"{_WAITING} events wait for a receiver that does not take them")

    def close(self) -> None:
        """Wait for what is on its way, no longer than `wait_seconds`."""
        deadline = time.monotonic() + self._conf.wait_seconds
        with suppress(Full):
            self._queue.put(None, timeout=self._conf.wait_seconds)
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._warn("the receiver has not taken all events in time (observe.openlineage.wait_seconds)")

    def _work(self) -> None:
        client = None
        while (make := self._queue.get()) is not None:
            try:
                client = client or self._client()
                client.emit(make())
            except Exception as e:  # transports of the client raise errors of their own
                self._warn(f"{type(e).__name__}: {e}")
        if client is not None:
            try:
                client.close()
            except Exception as e:
                self._warn(f"{type(e).__name__}: {e}")

    def _client(self) -> Any:
        from openlineage.client import OpenLineageClient

        # `_warn` reports once; the client's own lines would repeat it for each attempt.
        logging.getLogger("openlineage").setLevel(logging.ERROR)
        logging.getLogger("urllib3.connectionpool").addFilter(lambda record: record.threadName != _THREAD)
        config: dict[str, Any] = dict(_DEFAULTS)
        if self._conf.transport:
            config["transport"] = dict(self._conf.transport)
        return OpenLineageClient(config=config)

    def _warn(self, reason: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            log.warning("OpenLineage: an event was not sent, and perhaps others; stages go on without (%s)", reason)


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

            from headrace.jobs.observe.openlineage.events import event, inputs_of

            inputs = inputs_of(self._ws, plan.inputs, plan.ctx.upstream) if plan else []
            return event(RunState.START, run, self._entry(run), self._namespace, time, inputs)

        self._send(make)

    def complete(self, run: Run, plan: RunPlan | None = None, manifest: Manifest | None = None) -> None:
        """Send the event of a run's success; for a stage with its inputs and outputs."""
        time = datetime.now(UTC)

        def make() -> Any:
            from openlineage.client.event_v2 import RunState

            from headrace.jobs.observe.openlineage.events import event, inputs_of, outputs_of

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

            from headrace.jobs.observe.openlineage.events import event, inputs_of

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
