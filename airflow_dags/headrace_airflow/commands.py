"""Commands of `headrace` that a task runs: as its process, or where the workspace is, and what their exit codes mean.

- `LocalCommand` runs a command as a process of the task, where the task's machine has the workspace.
- `RemoteCommand` runs it where the workspace is, as a driver of a standalone master or as a pod of Kubernetes. The
  task's machine then needs Airflow's environment, the DAGs, the pipelines' files and the list of the stages alone.
- Triggers wait in place of a worker's slot: for a day that is complete, for an application that ends. The triggerer
  imports this module by its name: `airflow_dags` must be on its PYTHONPATH.
- `end` gives an exit code its meaning for the task: README.md, "Tries".
- `parent_variables` name the parents of the jobs' runs, the task's and its DAG run's, as OpenLineage names the parents
  of started programs. Where Airflow's provider for OpenLineage is installed, by the ids that it sends its own events
  with.
"""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, NoReturn
from uuid import NAMESPACE_URL, uuid5

from airflow.sdk.exceptions import AirflowException, AirflowFailException, AirflowRescheduleException
from airflow.triggers.base import BaseTrigger, TriggerEvent

from headrace_airflow.cluster import NOT_FOUND, Cluster, State, last_words
from headrace_airflow.connections import Master, command, environment, master, secrets
from headrace_airflow.pipelines import Pipeline
from headrace_airflow.settings import ERRORS, SETTINGS

if TYPE_CHECKING:
    from airflow.sdk import Context


def parent_variables(context: Context) -> dict[str, str]:
    """Return variables for what a task starts: `namespace/job/run id` of the task's try, and of the DAG's run."""
    task: Any = context["ti"]
    try:
        # Late: without the provider nothing else of this is needed.
        from airflow.providers.openlineage.plugins.macros import lineage_parent_id, lineage_root_parent_id
    except ImportError:
        parent, root = _ids(task)
    else:
        parent, root = lineage_parent_id(task), lineage_root_parent_id(task)
    return {"OPENLINEAGE_PARENT_ID": parent, "OPENLINEAGE_ROOT_PARENT_ID": root}


def _ids(task: Any) -> tuple[str, str]:
    """Return ids that are the same whenever a try is asked, as after its deferral; the provider names jobs in the same
    way.
    """
    namespace = os.environ.get("AIRFLOW__OPENLINEAGE__NAMESPACE") or os.environ.get("OPENLINEAGE_NAMESPACE", "default")
    dag, run = task.dag_id, f"{task.dag_id}/{task.run_id}"
    attempt = uuid5(NAMESPACE_URL, f"airflow:{run}/{task.task_id}/{task.map_index}/{task.try_number}")
    return f"{namespace}/{dag}.{task.task_id}/{attempt}", f"{namespace}/{dag}/{uuid5(NAMESPACE_URL, f'airflow:{run}')}"


log = logging.getLogger("headrace.airflow")


class RefusedException(AirflowFailException):
    """Exit code 3: an audit, a limit of drift or a gate has refused."""


def end(code: int | None, job: str, message: str) -> NoReturn:
    """Raise what the task of a job with this exit code (not 0) ends with; None: it is not known.

    Raises:
        RefusedException: 3.
        AirflowFailException: 2. Neither is tried again.
        AirflowRescheduleException: 69, another run of the pipeline is at work, or 75, the day is not complete or its
            store is away. The task gives its slot back and comes again, as often as the DAG's time limit allows; that
            is no try.
        AirflowException: anything else, which is tried again.
    """
    if code == ERRORS.EXIT_REFUSED:
        raise RefusedException(f"{job} was refused: {message}")
    if code == ERRORS.EXIT_USER_ERROR:
        raise AirflowFailException(f"{job}: {message}")
    if code in (ERRORS.EXIT_INCOMPLETE, ERRORS.EXIT_BUSY):
        reason = (
            "the day is not complete yet, or its store is away"
            if code == ERRORS.EXIT_INCOMPLETE
            else "another run is at work"
        )
        log.info("%s waits: %s", job, reason)
        raise AirflowRescheduleException(datetime.now(UTC) + timedelta(seconds=SETTINGS.wait_seconds))
    raise AirflowException(f"{job} failed{'' if code is None else f' with exit code {code}'}: {message}")


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
        return "headrace_airflow.commands.DayComplete", {"argv": self.argv, "seconds": self.seconds}

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
        return "headrace_airflow.commands.ApplicationEnded", kwargs

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


#: What a command has to end its ranks and give its lease back.
_GRACE_SECONDS = 30.0


class LocalCommand:
    """Operator part that runs a command, writes its output to the task's log, and stops it with the task."""

    pipeline: Pipeline
    _process: subprocess.Popen[str] | None = None

    def run_locally(self, context: Context, argv: Sequence[str]) -> tuple[int, str]:
        """Run it to its end; its exit code and its last line."""
        env, last = environment(self.pipeline) | parent_variables(context), ""
        with subprocess.Popen(
            argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as self._process:
            assert self._process.stdout is not None
            try:
                for line in self._process.stdout:
                    self.log.info("%s", line.rstrip())  # type: ignore[attr-defined]
                    last = line.strip() or last
            except BaseException:
                # A timeout of the task: the end of the block would wait for the command.
                self.stop_process()
                _end(self._process)
                raise
        return self._process.returncode, last

    def stop_process(self) -> None:
        """Stop the command, where there is one."""
        if self._process is not None:
            self._process.terminate()


def _end(process: subprocess.Popen[str]) -> None:
    try:
        process.wait(_GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()


#: What a worker counts for a command that looks at files alone.
LITTLE = "512m"


class RemoteCommand:
    """Operator part that sends a command, has the triggerer wait for it, and handles its end.

    The operator has `pipeline`, and `handle_end(context, code, message)`.
    """

    pipeline: Pipeline

    def handle_end(self, context: Context, code: int | None, message: str) -> None:
        """Handle the command's end; `code` is None where it is not known."""
        raise NotImplementedError

    def run_remotely(
        self, context: Context, place: Master, words: Sequence[str], timeout: timedelta | None, memory: str = LITTLE
    ) -> None:
        """Send a command, then defer."""
        if place.kind == "kubernetes":
            pod = self._pod(place, words, timeout, parent_variables(context))
            self._see_through(pod, context, lambda: pod.start(context))
        else:
            self.wait_for(place, self.send_driver(context, place, words, memory), timeout)

    def send_driver(self, context: Context, place: Master, words: Sequence[str], memory: str) -> str:
        """Have a standalone master start a driver; its id."""
        python = str(SETTINGS.python)
        env = {"PYSPARK_PYTHON": python, "PYSPARK_DRIVER_PYTHON": python, "PYTHONUNBUFFERED": "1", "PYTHONPATH": ""}
        env |= parent_variables(context)
        name = f"headrace {self.pipeline.name} {self.task_id}"  # type: ignore[attr-defined]
        program = str(SETTINGS.command_program)
        return known(place).submit(place.url, program, words, env | secrets(self.pipeline), name, memory)

    def wait_for(self, place: Master, application: str, timeout: timedelta | None) -> None:
        """Leave a driver or an application to the triggerer."""
        cluster = known(place)
        trigger = ApplicationEnded(cluster.kind, cluster.rest, cluster.web, application, SETTINGS.poll_seconds)
        self.defer(trigger=trigger, method_name="application_ended", timeout=timeout)  # type: ignore[attr-defined]

    def application_ended(self, context: Context, event: dict[str, Any]) -> None:
        """Handle the end of a driver or an application."""
        self.log.info("the application is %s: %s", event["name"], event["message"])  # type: ignore[attr-defined]
        if event["done"]:
            self.handle_end(context, ERRORS.EXIT_DONE, "")
        else:
            self.handle_end(context, event["code"], f"the application is {event['name']}: {event['message']}")

    def trigger_reentry(self, context: Context, event: dict[str, Any]) -> None:
        """Handle the end of a pod (the provider's operator names this method): read the log, and remove the pod."""
        pod = self._pod(master(self.pipeline), command(), None)
        self._see_through(pod, context, lambda: pod.trigger_reentry(context, event))

    def _see_through(self, pod: Any, context: Context, act: Callable[[], None]) -> None:
        try:
            act()
        except AirflowException as e:
            self.handle_end(context, pod.code, last_words(pod.last_output) or str(e))
        else:  # deferring is an exception, too
            self.handle_end(context, ERRORS.EXIT_DONE, "")

    def _pod(
        self, place: Master, words: Sequence[str], timeout: timedelta | None, env: Mapping[str, str] | None = None
    ) -> Any:
        # Late: the client of Kubernetes takes a second to import, and most tasks need none.
        from headrace_airflow.pods import CommandPod

        task_id, pool = self.task_id, self.pool  # type: ignore[attr-defined]
        return CommandPod(
            pipeline=self.pipeline,
            place=place,
            words=words,
            timeout=timeout,
            env_vars=dict(env or {}),
            task_id=task_id,
            pool=pool,
        )


def known(place: Master) -> Cluster:
    """Return the cluster that knows the applications of a master."""
    return Cluster(place.kind, place.rest, place.web)
