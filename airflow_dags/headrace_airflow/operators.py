"""The operators of the DAGs' tasks: stages and their gate, the day's sensor, commands, a model event, a next day."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import tempfile
from collections.abc import Iterator, Sequence
from datetime import date, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from airflow.providers.standard.operators.branch import BranchMixIn
from airflow.providers.standard.operators.trigger_dagrun import TriggerDagRunOperator
from airflow.sdk import Asset, BaseOperator
from airflow.sdk.exceptions import AirflowException, AirflowFailException, AirflowSkipException

from headrace_airflow.cluster import last_words
from headrace_airflow.commands import (
    LITTLE,
    DayComplete,
    LocalCommand,
    RefusedException,
    RemoteCommand,
    end,
    known,
    look,
    parent_variables,
)
from headrace_airflow.connections import PUBLIC, SPARK, Master, command, master, run, secrets
from headrace_airflow.notify import tell
from headrace_airflow.pipelines import POOL, Pipeline
from headrace_airflow.settings import APPLICATION_PROCESS, ERRORS, SETTINGS, private_variables

if TYPE_CHECKING:
    from airflow.sdk import Context


# Airflow's provider for Spark imports the client of Kubernetes wherever that is installed. That takes two seconds of
# each process that reads a DAG file, where most jobs need none: it is imported without.
_CLIENT = "airflow.providers.cncf.kubernetes.kube_client"
_hidden = _CLIENT not in sys.modules
if _hidden:
    sys.modules[_CLIENT] = None  # type: ignore[assignment]  # an import of it fails, which the provider allows for
try:
    from airflow.providers.apache.spark.hooks import spark_submit
    from airflow.providers.apache.spark.operators.spark_submit import SparkSubmitOperator
finally:
    if _hidden:
        del sys.modules[_CLIENT]


def _with_kubernetes() -> None:
    """Give the hook the client: it asks for it where the master is Kubernetes'."""
    from airflow.providers.cncf.kubernetes import kube_client

    spark_submit.kube_client = kube_client


class WaitForDay(RemoteCommand, BaseOperator):
    """Wait until a day's data are complete, as far as markers and files tell (`source.complete`), in the triggerer.

    It asks `headrace run --from ingest --to ingest --dry-run --offline`, whose exit code is 75 until then. What needs
    the rows to be known, `ingest` finds out, and waits with the same exit code.
    """

    template_fields: Sequence[str] = ("ds",)

    def __init__(self, *, pipeline: Pipeline, ds: str, timeout: timedelta, **kwargs: Any) -> None:
        super().__init__(task_id="complete", pool=POOL, **kwargs)
        self.pipeline, self.ds, self.timeout = pipeline, ds, timeout

    def execute(self, context: Context) -> None:
        """Look once, then leave it to the triggerer. Raises AirflowException as `headrace_airflow.commands.end`."""
        words = ("--ds", self.ds, "--from", "ingest", "--to", "ingest", "--dry-run", "--offline")
        argv = command("run", str(self.pipeline.path), *words)
        place = master(self.pipeline)
        if place.is_remote:  # each look is one there; between two of them the task waits for its time
            self.run_remotely(context, place, argv, self.timeout)
            return
        code, message = asyncio.run(look(argv))
        if code == ERRORS.EXIT_INCOMPLETE:
            self.log.info("%s", message)
            trigger = DayComplete(argv, SETTINGS.wait_seconds)
            self.defer(trigger=trigger, method_name="complete", timeout=self.timeout)
        self.complete(context, {"code": code, "said": message})

    def complete(self, context: Context, event: dict[str, Any]) -> None:
        """Finish the task: the day is complete, or the command has failed."""
        self.handle_end(context, event["code"], event["said"])

    def handle_end(self, context: Context, code: int | None, message: str) -> None:
        """Handle the end of a look. Raises AirflowException as `headrace_airflow.commands.end`."""
        self.log.info("%s", message)
        if code != ERRORS.EXIT_DONE:
            end(code, f"a look at the day {self.ds} of '{self.pipeline.name}'", message)


class HeadraceCommand(RemoteCommand, LocalCommand, BaseOperator):
    """`headrace WORDS... --home HOME` in the pipelines' environment; its exit code means what a job's does."""

    template_fields: Sequence[str] = ("words", "ds")

    def __init__(self, *, pipeline: Pipeline, words: Sequence[str], ds: str, **kwargs: Any) -> None:
        super().__init__(pool=POOL, **kwargs)
        self.pipeline, self.words, self.ds = pipeline, list(words), ds

    def execute(self, context: Context) -> None:
        """Run it. Raises AirflowException as `headrace_airflow.commands.end`."""
        argv, place = command(*self.words), master(self.pipeline)
        if place.is_remote:
            self.run_remotely(context, place, argv, None)
        else:
            self.handle_end(context, *self.run_locally(context, argv))

    def handle_end(self, context: Context, code: int | None, message: str) -> None:
        """Handle the command's end. Raises AirflowException as `headrace_airflow.commands.end`."""
        if code != ERRORS.EXIT_DONE:
            end(code, f"headrace {' '.join(self.words)}", message)

    def on_kill(self) -> None:
        """Stop the command with its task."""
        self.stop_process()


class ModelEvent(BaseOperator):
    """An event of the pipeline's asset for one day: that day is to be scored. One key, so one run of the scoring DAG.

    The key is the day, as an asset's partition: events of different days never end in one run.
    """

    template_fields: Sequence[str] = ("ds",)

    def __init__(self, *, pipeline: Pipeline, ds: str, **kwargs: Any) -> None:
        self.asset = model_asset(pipeline)
        super().__init__(task_id="model_event", outlets=[self.asset], **kwargs)
        self.pipeline, self.ds = pipeline, ds

    def execute(self, context: Context) -> None:
        """Name the day."""
        context["outlet_events"][self.asset].add_partitions(self.ds)


def model_asset(pipeline: Pipeline) -> Asset:
    """Return the asset that schedules the DAG of the scores."""
    return Asset(name=f"headrace_{pipeline.name}_model", uri=f"headrace://models/{pipeline.name}")


class BackfillRange(BaseOperator):
    """See that a range of days may be worked on: days, the right way round, not too many."""

    template_fields: Sequence[str] = ("first", "last", "ds")

    def __init__(self, *, pipeline: Pipeline, first: str, last: str, **kwargs: Any) -> None:
        super().__init__(task_id="range", **kwargs)
        self.pipeline, self.first, self.last = pipeline, first, last
        self.ds = first

    def execute(self, context: Context) -> None:
        """Check the range of days. Raises AirflowFailException."""
        days = (date.fromisoformat(self.last) - date.fromisoformat(self.first)).days + 1
        if not 1 <= days <= SETTINGS.backfill_days:
            raise AirflowFailException(
                f"{self.first} to {self.last} is {days} days; a backfill has 1 to {SETTINGS.backfill_days} "
                f"(HEADRACE_BACKFILL_DAYS)"
            )
        self.log.info("%s days to go, the oldest first", days)


class NextDay(TriggerDagRunOperator):
    """Start the run of a backfill's next day; skipped after the last."""

    def __init__(self, *, pipeline: Pipeline, dag_id: str, **kwargs: Any) -> None:
        following = "{{ macros.ds_add(params.first, 1) }}"
        super().__init__(
            task_id="next_day",
            trigger_dag_id=dag_id,
            # A day that is cleared starts the next one again.
            trigger_run_id=f"backfill__{{{{ params.last }}}}__{following}",
            reset_dag_run=True,
            conf={"first": following, "last": "{{ params.last }}"},
            logical_date=None,
            fail_when_dag_is_paused=True,
            openlineage_inject_parent_info=False,
            **kwargs,
        )
        self.pipeline, self.ds = pipeline, "{{ params.first }}"

    def execute(self, context: Context) -> None:
        """Start the run of the next day. Raises AirflowSkipException after the last day."""
        if self.conf["first"] > self.conf["last"]:
            raise AirflowSkipException("that was the last day")
        super().execute(context)


class Fault(BaseOperator):
    """Say what is wrong with a pipeline's file."""

    def __init__(self, *, pipeline: Pipeline, ds: str, **kwargs: Any) -> None:
        super().__init__(task_id="pipeline_file", **kwargs)
        self.pipeline, self.ds = pipeline, ds

    def execute(self, context: Context) -> None:
        """Fail the task with the file's fault. Raises AirflowFailException."""
        raise AirflowFailException(str(self.pipeline.fault))


class _Hook(spark_submit.SparkSubmitHook):
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
            execution_timeout=timedelta(hours=pipeline.stage(stage).hours),
            pool=pipeline.pool(pipeline.stage(stage)),
            **kwargs,
        )

    def execute(self, context: Context) -> None:
        """Submit and wait, or have the triggerer wait.

        Raises:
            AirflowFailException: something is not set up.
            AirflowException: as `headrace_airflow.commands.end`.
        """
        place = self._place = master(self.pipeline)
        if place.kind == "kubernetes":
            self.run_remotely(context, place, self._words(place), self.execution_timeout)
            return
        if place.kind == "yarn" and not self.pipeline.stage(self.stage).spark:
            code, message = self.run_locally(context, self._words(place))
            self.handle_end(context, code, message)
            return
        if not place.is_remote:
            # What the application sets up depends on where it runs, so it is told the connection's master.
            # On this machine it costs no JVM to see that a stage is done already.
            unless_done = ("--unless-done", self.stage, "--ds", self.ds) if place.kind == "local" else ()
            self.properties_file = _spark_properties(self.pipeline, place, unless_done)
            if self.properties_file is None:
                self.log.info("%s: already done with the same inputs; nothing to do", self.stage)
                self.succeeded(context)
                return
            self.application_args = [*self.application_args, *place.overrides]
        if place.url.startswith("k8s"):
            _with_kubernetes()
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
        """Handle the end of the driver or the pod. Raises AirflowException as `headrace_airflow.commands.end`."""
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
            has_session = self.pipeline.stage(self.stage).spark
            heap = str(self.pipeline.value("spark.driver_memory", "3g")) if has_session else LITTLE
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


def _spark_properties(pipeline: Pipeline, place: Master, unless_done: Sequence[str]) -> str | None:
    """Have the pipelines' environment write the Spark properties of a pipeline on this machine.

    Returns:
        the file's path; None: the stage that `unless_done` names has nothing to do.
    """
    done = run([*command("spark-properties", str(pipeline.path), *unless_done), *place.overrides], pipeline)
    if done.returncode:
        message = done.stderr.strip() or done.stdout.strip()
        raise AirflowFailException(f"headrace spark-properties {pipeline.path}: {message}")
    lines = done.stdout.strip().splitlines()
    return lines[-1] if lines or not unless_done else None


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
        path.write_text(APPLICATION_PROCESS.with_secrets(text, path.parent, secrets, public), encoding="utf-8")
        yield str(path)
