"""Triggers that wait in place of a worker's slot: for a day that is complete, for an application that ends.

The triggerer imports this module by its name: `airflow_dags` must be on its PYTHONPATH.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

from airflow.triggers.base import BaseTrigger, TriggerEvent

from headrace_airflow.cluster import NOT_FOUND, Cluster, State
from headrace_airflow.outside import environment
from headrace_airflow.settings import ERRORS

#: Looks in a row at which an API may not answer, or not know the application.
_SILENT = 10


class DayComplete(BaseTrigger):
    """Fires when a command no longer answers that the day is not complete (exit code 75), with its code and last words.

    Args:
        argv: the command.
        seconds: between two looks.
    """

    def __init__(self, argv: Sequence[str], seconds: float) -> None:
        super().__init__()
        self.argv, self.seconds = list(argv), seconds

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Return the class path and arguments from which the triggerer creates it."""
        return "headrace_airflow.triggers.DayComplete", {"argv": self.argv, "seconds": self.seconds}

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Look, wait, look again."""
        while True:
            await asyncio.sleep(self.seconds)
            code, message = await look(self.argv)
            if code != ERRORS.EXIT_INCOMPLETE:
                yield TriggerEvent({"code": code, "said": message})
                return
            self.log.info("%s", message)


async def look(argv: Sequence[str]) -> tuple[int, str]:
    """Run a command; its exit code and the end of what it said."""
    process = await asyncio.create_subprocess_exec(
        *argv, env=environment(), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        output, _ = await process.communicate()
    except asyncio.CancelledError:
        process.kill()
        raise
    return process.returncode or 0, output.decode(errors="replace").strip()[-2000:]


class ApplicationEnded(BaseTrigger):
    """Fires when an application of a cluster has ended, with its `State`.

    Args:
        kind: see `Cluster`.
        rest: see `Cluster`.
        web: see `Cluster`.
        application: its id.
        seconds: between two looks.
    """

    def __init__(self, kind: str, rest: str, web: str, application: str, seconds: float) -> None:
        super().__init__()
        self.kind, self.rest, self.web, self.application, self.seconds = kind, rest, web, application, seconds

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Return the class path and arguments from which the triggerer creates it."""
        names = ("kind", "rest", "web", "application", "seconds")
        kwargs = {name: getattr(self, name) for name in names}
        return "headrace_airflow.triggers.ApplicationEnded", kwargs

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Wait, ask, wait again; an API that is silent for a while is asked on.

        So is one that does not know the application: a ResourceManager that is started anew answers before it has read
        which applications it has. By the first answer the scheduler has read that the task is deferred: one that goes
        on before, it tries again.
        """
        cluster, lost = Cluster(self.kind, self.rest, self.web), 0
        while True:
            await asyncio.sleep(self.seconds)
            try:
                state = await asyncio.to_thread(cluster.state, self.application)
            except OSError as e:
                self.log.warning("%s does not answer: %s", self.rest, e)
                lost, state = lost + 1, State(True, False, "UNKNOWN", message=str(e))
            else:
                lost = lost + 1 if state.name == NOT_FOUND else 0
                if lost:
                    self.log.warning("%s does not know %s: %s", self.rest, self.application, state.message)
            if state.is_final and lost in (0, _SILENT):
                yield TriggerEvent(state.as_event())
                return
