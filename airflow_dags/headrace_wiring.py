"""What both DAGs share: where the pipeline's environment is, which day a run is for, and the operator of a job.

Imported by the scheduler's processes each time they read a DAG file, so nothing heavy comes in here: no pyspark, no
torch, nothing of the package `headrace`, which lives in another environment, but for two files of it that need no
other: the list of stages and the exit codes. Its settings are variables of the scheduler's and workers' environment;
see README.md beside this file.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from airflow.providers.apache.spark.operators.spark_submit import SparkSubmitOperator
from airflow.providers.standard.operators.trigger_dagrun import TriggerDagRunOperator
from airflow.sdk import Param
from airflow.sdk.bases.hook import BaseHook
from airflow.sdk.exceptions import (
    AirflowException,
    AirflowFailException,
    AirflowRescheduleException,
    AirflowSkipException,
)

if TYPE_CHECKING:
    from airflow.sdk import Context

CONN_ID = "spark_default"

# The day of a run, one expression for all tasks: the one asked for, else the start of the data interval, else (a run by
# hand has no interval) the day on which it was started.
DS = "{{ params.ds or (((data_interval_start | default(none)) or dag_run.run_after) | ds) }}"
PIPELINE = "{{ params.pipeline }}"
#: As a pipeline's own name must be: nothing that could lead out of the folder of pipelines.
_NAME = "[a-z][a-z0-9_]*"


@dataclass(frozen=True)
class Settings:
    """The other environment's places."""

    checkout: Path
    python: Path
    home: Path
    spark_submit: Path
    #: The folder of the pipelines' YAML files: only these may be asked for.
    pipelines: Path
    pipeline: str

    @property
    def spark_home(self) -> Path:
        """The pyspark package of the pipeline's environment."""
        return _pyspark(self.python)

    def known_pipelines(self) -> list[str]:
        """The names that may be asked for."""
        return sorted(p.stem for p in self.pipelines.glob("*.yaml") if re.fullmatch(_NAME, p.stem))

    def pipeline_file(self, pipeline: str) -> Path:
        """The YAML of a pipeline.

        Raises:
            AirflowFailException: the folder has none of that name.
        """
        known = self.known_pipelines()
        if pipeline not in known:
            raise AirflowFailException(f"no pipeline {pipeline!r} in {self.pipelines}; there are: {', '.join(known)}")
        return self.pipelines / f"{pipeline}.yaml"


def settings(environ: Mapping[str, str] = os.environ) -> Settings:
    """Read HEADRACE_CHECKOUT, _PYTHON, _HOME, _SPARK_SUBMIT, _PIPELINES and _PIPELINE; all have defaults."""
    checkout = Path(environ.get("HEADRACE_CHECKOUT") or Path(__file__).resolve().parent.parent)
    # Not resolved: the link is what makes it the virtual environment's interpreter.
    python = Path(environ.get("HEADRACE_PYTHON") or checkout / ".venv" / "bin" / "python")
    return Settings(
        checkout=checkout,
        python=python,
        home=Path(environ.get("HEADRACE_HOME") or checkout / "var"),
        spark_submit=Path(environ.get("HEADRACE_SPARK_SUBMIT") or _pyspark(python) / "bin" / "spark-submit"),
        pipelines=Path(environ.get("HEADRACE_PIPELINES") or checkout / "conf" / "pipelines"),
        pipeline=environ.get("HEADRACE_PIPELINE") or "clicks",
    )


def _pyspark(python: Path) -> Path:
    found = sorted((python.parent.parent / "lib").glob("python3*/site-packages/pyspark"))
    return found[0] if found else python.parent.parent / "pyspark-is-not-installed"


SETTINGS = settings()


def _by_path(name: str) -> Any:
    """A module of the package `headrace` that imports nothing but the standard library."""
    spec = spec_from_file_location(f"headrace_by_path_{name}", SETTINGS.checkout / "python" / f"{name}.py")
    assert spec is not None, "a path that ends in .py"
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


STAGES = _by_path("stages").STAGES
_ERRORS = _by_path("errors")


def params() -> dict[str, Param]:
    """What may be given when a run is started by hand."""
    return {
        "pipeline": Param(
            SETTINGS.pipeline,
            type="string",
            pattern=f"^{_NAME}$",
            examples=SETTINGS.known_pipelines(),
            description=f"The name of a pipeline in {SETTINGS.pipelines}",
        ),
        "ds": Param(
            None,
            type=["null", "string"],
            format="date",
            description="The day, YYYY-MM-DD; empty: the one that the run is for",
        ),
    }


DEFAULT_ARGS: dict[str, Any] = {
    "owner": "headrace",
    "retries": 1,
    # Also the wait for another run of the same pipeline (a job refuses to start beside it), and for a day's data.
    "retry_delay": timedelta(minutes=5),
}


class HeadraceJob(SparkSubmitOperator):
    """`spark-submit python/jobs/run_stage.py STAGE PIPELINE --ds DS --home HOME`, one stage for one day.

    Before it submits, it has the pipeline's environment write the Spark properties of the pipeline, so that a change
    of its YAML needs no further step; and it is skipped where the pipeline has no such stage.
    """

    def __init__(self, *, stage: str, **kwargs: Any) -> None:
        self.stage = stage
        super().__init__(
            task_id=stage,
            application=str(SETTINGS.checkout / "python" / "jobs" / "run_stage.py"),
            application_args=[stage, PIPELINE, "--ds", DS, "--home", str(SETTINGS.home)],
            name=f"headrace {stage} {DS}",
            conn_id=CONN_ID,
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
            # A skipped stage does not hold up those after it.
            trigger_rule="none_failed",
            **kwargs,
        )

    def execute(self, context: Context) -> None:
        """Submit and wait.

        Raises:
            AirflowSkipException: the pipeline has no such stage.
            AirflowFailException: something is not set up, or the job says that the user must mend something: trying
                again would not help.
            AirflowRescheduleException: the day is not complete yet. The task gives its slot back and comes again, as
                often as the DAG's time limit allows; that is no try.
            AirflowException: the job failed in another way, or another run of the pipeline is at work.
        """
        stage, pipeline, *options = self.application_args
        path = SETTINGS.pipeline_file(pipeline)
        section = STAGES[stage].section
        if section is not None and not _has_section(path, section):
            raise AirflowSkipException(f"pipeline '{pipeline}' has no '{section}' section")
        # What the application sets up depends on where it runs, so it is told the connection's master.
        overrides = ["--set", f"spark.master={_master(CONN_ID)}"]
        self.properties_file = _spark_properties(path, overrides)
        self.application_args = [stage, str(path), *options, *overrides]
        # The jobs' processes inherit Airflow's environment; connections and variables are none of their business.
        private = [k for k in os.environ if k.startswith(("AIRFLOW_CONN_", "AIRFLOW_VAR_", "AIRFLOW__"))]
        self.env_vars = {**dict.fromkeys(private, ""), **(self.env_vars or {})}
        if overrides[1].startswith("spark.master=local"):
            self.env_vars["SPARK_LOCAL_IP"] = "127.0.0.1"
        try:
            super().execute(context)
        except AirflowException as e:
            code = None if self._hook is None else getattr(self._hook._submit_sp, "returncode", None)
            if code in (_ERRORS.EXIT_USER_ERROR, _ERRORS.EXIT_REFUSED):
                raise AirflowFailException(f"{stage} of '{pipeline}': its log says what to mend") from e
            if code == _ERRORS.EXIT_INCOMPLETE:
                self.log.info("%s of '%s': the day is not complete yet, as its log says", stage, pipeline)
                raise AirflowRescheduleException(datetime.now(UTC) + self.retry_delay) from e
            raise


def jobs(dag_id: str) -> list[HeadraceJob]:
    """The stages of a DAG, to be run one after another: a pipeline has one writer at a time."""
    return [HeadraceJob(stage=entry.name) for entry in STAGES.values() if f"headrace_{entry.dag}" == dag_id]


def score_this_day() -> TriggerDagRunOperator:
    """One run of headrace_score for each pipeline and day that was trained, and the end of it waited for.

    Waiting keeps the next day's training, which is a writer of the same pipeline, behind this day's scores: a backfill
    of ten days is ten days trained, scored and published in turn. A day that is trained again is scored again, in the
    same run (cleared).
    """
    return TriggerDagRunOperator(
        task_id="score_this_day",
        trigger_dag_id="headrace_score",
        trigger_run_id=f"{PIPELINE}__{DS}",
        conf={"pipeline": PIPELINE, "ds": DS},
        # The day is in `conf`; as a logical date it would be taken by the first of two pipelines.
        logical_date=None,
        reset_dag_run=True,
        wait_for_completion=True,
        fail_when_dag_is_paused=True,
        openlineage_inject_parent_info=False,
        trigger_rule="none_failed",
        # The scoring run has retries of its own.
        retries=0,
    )


def _has_section(path: Path, name: str) -> bool:
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError):
        return True  # the job will say what is wrong with the file
    return not isinstance(data, dict) or data.get(name) is not None


def _master(conn_id: str) -> str:
    """Spark's master of a connection. Without this look, a missing connection would silently mean the master `yarn`."""
    advice = (
        f"define the connection '{conn_id}' as JSON, for example "
        f"""AIRFLOW_CONN_{conn_id.upper()}='{{"conn_type":"spark","host":"local[2]"}}'"""
    )
    try:
        found = BaseHook.get_connection(conn_id)
    except (AirflowException, ValueError) as e:
        raise AirflowFailException(f"{advice} ({e})") from e
    if not found.host:
        raise AirflowFailException(f"the connection '{conn_id}' has no host (Spark's master): {advice}")
    return f"{found.host}:{found.port}" if found.port else found.host


def _spark_properties(pipeline: Path, overrides: Sequence[str]) -> str:
    """Have the pipeline's environment write its Spark properties; returns the file's path."""
    headrace = SETTINGS.python.with_name("headrace")
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    try:
        done = subprocess.run(
            [str(headrace), "spark-properties", str(pipeline), "--home", str(SETTINGS.home), *overrides],
            capture_output=True,
            text=True,
            check=False,
            env=env,
            timeout=300,
        )
    except OSError as e:
        raise AirflowFailException(
            f"cannot run {headrace} ({e.strerror}): set HEADRACE_PYTHON, or run `make env`"
        ) from e
    if done.returncode:
        raise AirflowFailException(
            f"headrace spark-properties {pipeline}: {done.stderr.strip() or done.stdout.strip()}"
        )
    return done.stdout.strip().splitlines()[-1]
