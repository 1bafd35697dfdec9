"""Tasks whose command runs where the workspace is: as a driver of a standalone master, or as a pod of Kubernetes.

This machine then needs nothing but Airflow's environment, the DAGs, the pipelines' files and the list of the stages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from airflow.sdk.exceptions import AirflowException

from headrace_airflow.cluster import Cluster, last_words
from headrace_airflow.lineage import parent_variables
from headrace_airflow.outside import Master, command, master, secrets
from headrace_airflow.pipelines import Pipeline
from headrace_airflow.settings import ERRORS, SETTINGS
from headrace_airflow.triggers import ApplicationEnded

if TYPE_CHECKING:
    from airflow.sdk import Context

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
