"""The operator of a stage: an application of Spark, on this machine or on a cluster."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from airflow.providers.standard.operators.branch import BranchMixIn
from airflow.sdk.exceptions import AirflowException, AirflowFailException

from headrace_airflow.cluster import last_words
from headrace_airflow.ends import RefusedException, end
from headrace_airflow.lineage import parent_variables
from headrace_airflow.local_command import LocalCommand
from headrace_airflow.notify import tell
from headrace_airflow.outside import PUBLIC, SPARK, Master, command, master, run, secrets
from headrace_airflow.pipelines import Pipeline
from headrace_airflow.remote_command import LITTLE, RemoteCommand, known
from headrace_airflow.settings import ERRORS, HAND_OVER, SETTINGS, STAGES, private_variables
from headrace_airflow.spark_provider import SparkSubmitHook, SparkSubmitOperator, with_kubernetes

if TYPE_CHECKING:
    from airflow.sdk import Context


class _Hook(SparkSubmitHook):
    """Spark's hook; the secrets are in the environment of spark-submit alone, not among its arguments."""

    secrets: dict[str, str]

    def _build_spark_common_args(self) -> list[str]:
        args: list[str] = super()._build_spark_common_args()
        hidden = dict.fromkeys(private_variables(), "")
        self._env = {**hidden, **(self._env or {}), **self.secrets}
        return args

    @property
    def code(self) -> int | None:
        """The exit code of spark-submit; None: it has not ended."""
        return getattr(self._submit_sp, "returncode", None)

    @property
    def last_output(self) -> str:
        """The end of what it said."""
        return last_words("\n".join(self._last_submit_log_lines))


class HeadraceJob(RemoteCommand, LocalCommand, SparkSubmitOperator):
    """`spark-submit python/jobs/run_stage.py STAGE PIPELINE --ds DS --home HOME`, one stage for one day.

    Before it submits, it has the pipelines' environment write the Spark properties of the pipeline, so that a change
    of its YAML needs no further step. Where the connection `spark_default` asks for a cluster's own drivers, or for
    pods, the task gives its slot back until the application has ended. A standalone cluster's drivers and pods are
    `headrace run PIPELINE --from STAGE --to STAGE`, which does all of that where it runs. So is, as a process of the
    task, a stage without Spark of a pipeline on YARN: an application that opens no session has failed there.
    """

    template_fields = (*SparkSubmitOperator.template_fields, "ds")

    def __init__(self, *, stage: str, pipeline: Pipeline, ds: str, **kwargs: Any) -> None:
        self.stage, self.pipeline, self.ds = stage, pipeline, ds
        super().__init__(
            task_id=stage,
            application=str(SETTINGS.program),
            application_args=[stage, str(pipeline.path), "--ds", ds, "--home", SETTINGS.home],
            name=f"headrace {pipeline.name} {stage} {ds}",
            conn_id=SPARK,
            spark_binary=str(SETTINGS.spark_submit),
            env_vars={
                "SPARK_HOME": str(SETTINGS.spark_home),
                "PYSPARK_PYTHON": str(SETTINGS.python),
                "PYSPARK_DRIVER_PYTHON": str(SETTINGS.python),
                # Airflow's own modules must not get in the way of the other environment's.
                "PYTHONPATH": "",
                "PYTHONUNBUFFERED": "1",
            },
            execution_timeout=timedelta(hours=STAGES[stage].hours),
            pool=pipeline.pool(STAGES[stage]),
            **kwargs,
        )

    def execute(self, context: Context) -> None:
        """Submit and wait, or have the triggerer wait.

        Raises:
            AirflowFailException: something is not set up.
            AirflowException: as `headrace_airflow.ends.end`.
        """
        place = self._place = master(self.pipeline)
        if place.kind == "kubernetes":
            self.run_remotely(context, place, self._words(place), self.execution_timeout)
            return
        if place.kind == "yarn" and not STAGES[self.stage].spark:
            code, message = self.run_locally(context, self._words(place))
            self.handle_end(context, code, message)
            return
        if not place.is_remote:
            # What the application sets up depends on where it runs, so it is told the connection's master.
            self.properties_file = _spark_properties(self.pipeline, place)
            self.application_args = [*self.application_args, *place.overrides]
        if place.url.startswith("k8s"):
            with_kubernetes()
        self.env_vars = {**self.env_vars, **parent_variables(context)}
        if place.url.startswith("local"):
            self.env_vars = {**self.env_vars, "SPARK_LOCAL_IP": "127.0.0.1"}
        if place.kind != "local":
            self.execute_resumable(context)
            return
        self._hook = self._get_hook()
        try:
            self._hook.submit(self.application)
        except AirflowException as e:
            if self._hook.code is None:
                raise
            self._end(context, self._hook.code, self._hook.last_output, e)
        else:
            self.succeeded(context)

    def _words(self, place: Master) -> list[str]:
        """Return the stage as a command."""
        words = ("run", str(self.pipeline.path), "--ds", self.ds, "--from", self.stage, "--to", self.stage)
        return [*command(*words), *place.overrides]

    def handle_end(self, context: Context, code: int | None, message: str) -> None:
        """Handle the end of the driver or the pod. Raises AirflowException as `headrace_airflow.ends.end`."""
        if code == ERRORS.EXIT_DONE:
            self.succeeded(context)
        else:
            self._end(context, code, message)

    def on_kill(self) -> None:
        """Stop what this process has started. The triggerer stops a pod; a driver of a cluster works on."""
        self.stop_process()
        if self._hook is not None:
            super().on_kill()

    def succeeded(self, context: Context) -> None:
        """Handle the job's success."""

    def _end(self, context: Context, code: int | None, message: str, cause: BaseException | None = None) -> None:
        try:
            end(code, f"{self.stage} of '{self.pipeline.name}' for {self.ds}", message)
        except RefusedException as e:
            self.refused(context, str(e))
        except AirflowException as e:
            raise e from cause

    def refused(self, context: Context, reason: str) -> None:
        """Handle exit code 3. Raises RefusedException."""
        raise RefusedException(reason)

    def _get_hook(self) -> _Hook:
        hook = _Hook(
            conf=self.conf or {},
            conn_id=self._place.conn_id,
            name=self.name,
            application_args=self.application_args,
            env_vars=self.env_vars,
            spark_binary=str(SETTINGS.spark_submit),
            properties_file=self.properties_file,
            yarn_track_via_rm_api=self._yarn_track_via_rm_api,
        )
        hook.secrets = secrets(self.pipeline)
        return hook

    # An application of a cluster; called by `execute_resumable`, which keeps its id for a retry of the task.

    def submit_job(self, context: Context) -> str:
        """Send the application; its id."""
        if self._place.kind == "standalone":
            heap = str(self.pipeline.value("spark.driver_memory", "3g")) if STAGES[self.stage].spark else LITTLE
            return self.send_driver(context, self._place, self._words(self._place), heap)
        private = secrets(self.pipeline)
        public = {name: private.pop(name) for name in PUBLIC if name in private} | parent_variables(context)
        with _private_properties(self.properties_file, private, public) as path:
            self.properties_file = path
            self._yarn_track_via_rm_api = True
            hook = self._get_hook()
            # They go to the application by the file; spark-submit itself needs none.
            hook.secrets = {}
            hook.submit(self.application)
        return str(hook._yarn_application_id)

    def get_job_status(self, external_id: Any, context: Context) -> str:
        """Return the state of an application that an earlier try has sent."""
        try:
            state = known(self._place).state(str(external_id))
        except OSError as e:
            raise AirflowException(f"{self._place.rest} does not answer: {e}") from e
        return "SUCCEEDED" if state.done else "ENDED" if state.is_final else "ACTIVE"

    def is_job_active(self, status: str) -> bool:
        """Return whether the application runs or waits."""
        return status == "ACTIVE"

    def is_job_succeeded(self, status: str) -> bool:
        """Return whether the application succeeded."""
        return status == "SUCCEEDED"

    def poll_until_complete(self, external_id: Any, context: Context) -> None:
        """Leave it to the triggerer."""
        self.wait_for(self._place, str(external_id), self.execution_timeout)

    def get_job_result(self, external_id: Any, context: Context) -> None:
        """Do nothing: an earlier try has finished the application."""
        self.succeeded(context)


class HeadraceGate(HeadraceJob, BranchMixIn):
    """The stage `gate`: a day's model that is refused is not promoted, and the day goes on with the champion."""

    inherits_from_skipmixin = True
    #: The tasks that follow a refusal; the DAG sets it.
    refused_next: Sequence[str] = ()

    def succeeded(self, context: Context) -> None:
        """Ask for the verdict: the stage's own work is done whatever it is. `headrace run` has told it."""
        if master(self.pipeline).is_remote:
            return
        done = run(command("gate", str(self.pipeline.path), "--ds", self.ds), self.pipeline)
        self.log.info("%s", done.stdout.strip())
        if done.returncode:
            self._end(context, done.returncode, (done.stderr.strip() or done.stdout.strip())[-1500:])

    def refused(self, context: Context, reason: str) -> None:
        """Skip the promotion, and notify whoever is to know which rule refused the model."""
        self.log.warning("%s", reason)
        tell("refused", self.pipeline.name, self.ds, f"{reason}\nThe champion goes on scoring.")
        self.do_branch(context, self.refused_next)


def _spark_properties(pipeline: Pipeline, place: Master) -> str:
    """Have the pipelines' environment write the Spark properties of a pipeline on this machine; the file's path."""
    done = run([*command("spark-properties", str(pipeline.path)), *place.overrides], pipeline)
    if done.returncode:
        message = done.stderr.strip() or done.stdout.strip()
        raise AirflowFailException(f"headrace spark-properties {pipeline.path}: {message}")
    return done.stdout.strip().splitlines()[-1]


@contextlib.contextmanager
def _private_properties(properties: str, secrets: dict[str, str], public: dict[str, str]) -> Iterator[str]:
    """Write the file with variables for YARN's application master and secrets in files beside it, while the block runs.

    YARN starts a failed application again by itself, whatever its exit code says; here Airflow decides about tries.
    """
    with open(properties, encoding="utf-8") as file:
        text = file.read()
    if "\nspark.yarn.maxAppAttempts=" not in text:
        text += "spark.yarn.maxAppAttempts=1\n"
    with tempfile.TemporaryDirectory() as name:  # 0700
        path = Path(name, "spark.properties")
        path.write_text(HAND_OVER.with_secrets(text, path.parent, secrets, public), encoding="utf-8")
        yield str(path)
