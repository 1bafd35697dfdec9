"""What both DAGs share: where the pipeline's environment is, which day a run is for, and the operator of a job.

Imported by the scheduler's processes each time they read a DAG file, so nothing heavy comes in here: no pyspark, no
torch, nothing of the package `headrace`, which lives in another environment. Its settings are variables of the
scheduler's and workers' environment; see README.md beside this file.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from airflow.providers.apache.spark.operators.spark_submit import SparkSubmitOperator
from airflow.sdk import Asset, Param
from airflow.sdk.bases.hook import BaseHook
from airflow.sdk.exceptions import AirflowException, AirflowFailException, AirflowSkipException

if TYPE_CHECKING:
    from airflow.sdk import Context

#: Emitted when the day's models are trained, registered and evaluated; its events carry {"pipeline", "ds"}.
MODEL = Asset(name="headrace_model", uri="headrace://models")

CONN_ID = "spark_default"

# The day of a run, one expression for all tasks: the one asked for, else that of the model whose training triggered
# the run, else the start of the data interval, else (a run by hand has no interval) the day on which it was started.
_EVENT = "model_event(triggering_asset_events | default(none))"
DS = "{{ params.ds or " + _EVENT + ".ds or (((data_interval_start | default(none)) or dag_run.run_after) | ds) }}"
PIPELINE = "{{ " + _EVENT + ".pipeline or params.pipeline }}"


@dataclass(frozen=True)
class Settings:
    """The other environment's places."""

    checkout: Path
    python: Path
    home: Path
    spark_submit: Path
    pipeline: str

    @property
    def spark_home(self) -> Path:
        """The pyspark package of the pipeline's environment."""
        return _pyspark(self.python)

    def pipeline_file(self, pipeline: str) -> Path:
        """The YAML of a pipeline, given by name or by path."""
        if pipeline.endswith((".yaml", ".yml")):
            return Path(pipeline)
        return self.checkout / "conf" / "pipelines" / f"{pipeline}.yaml"


def settings(environ: Mapping[str, str] = os.environ) -> Settings:
    """Read HEADRACE_CHECKOUT, _PYTHON, _HOME, _SPARK_SUBMIT and _PIPELINE; all have defaults."""
    checkout = Path(environ.get("HEADRACE_CHECKOUT") or Path(__file__).resolve().parent.parent)
    # Not resolved: the link is what makes it the virtual environment's interpreter.
    python = Path(environ.get("HEADRACE_PYTHON") or checkout / ".venv" / "bin" / "python")
    return Settings(
        checkout=checkout,
        python=python,
        home=Path(environ.get("HEADRACE_HOME") or checkout / "var"),
        spark_submit=Path(environ.get("HEADRACE_SPARK_SUBMIT") or _pyspark(python) / "bin" / "spark-submit"),
        pipeline=environ.get("HEADRACE_PIPELINE") or "clicks",
    )


def _pyspark(python: Path) -> Path:
    found = sorted((python.parent.parent / "lib").glob("python3*/site-packages/pyspark"))
    return found[0] if found else python.parent.parent / "pyspark-is-not-installed"


SETTINGS = settings()


def params() -> dict[str, Param]:
    """What may be given when a run is started by hand."""
    return {
        "pipeline": Param(
            SETTINGS.pipeline,
            type="string",
            pattern=r"^[A-Za-z0-9_/][^\n]*$",
            description="A shipped pipeline's name or the path of a YAML file",
        ),
        "ds": Param(
            None,
            type=["null", "string"],
            format="date",
            description="The day, YYYY-MM-DD; empty: the one that the run is for",
        ),
    }


def model_event(events: Mapping[Any, Any] | None) -> dict[str, Any]:
    """What the newest day's event of MODEL says; empty where no event triggered the run.

    Events that arrive while a scoring run is at work trigger one run together. It scores the newest day.
    """
    extras = [dict(event.extra or {}) for found in (events or {}).values() for event in found]
    return max((e for e in extras if e.get("ds")), key=lambda e: str(e["ds"]), default={"ds": None, "pipeline": None})


#: For the DAGs' `user_defined_macros`.
MACROS = {"model_event": model_event}

DEFAULT_ARGS: dict[str, Any] = {
    "owner": "headrace",
    "retries": 1,
    # Also the wait for another run of the same pipeline: a job refuses to start beside it.
    "retry_delay": timedelta(minutes=5),
}


class HeadraceJob(SparkSubmitOperator):
    """`spark-submit python/jobs/STAGE.py PIPELINE --ds DS --home HOME`, one stage for one day.

    Before it submits, it has the pipeline's environment write the Spark properties of the pipeline, so that a change
    of its YAML needs no further step; and it is skipped where the pipeline has no such stage.
    """

    #: Sections of a pipeline's YAML without which the stage of that name does not exist.
    OPTIONAL = ("drift", "baseline", "score", "publish")

    def __init__(self, *, stage: str, hours: float = 2, **kwargs: Any) -> None:
        self.stage = stage
        super().__init__(
            task_id=stage,
            application=str(SETTINGS.checkout / "python" / "jobs" / f"{stage}.py"),
            application_args=[PIPELINE, "--ds", DS, "--home", str(SETTINGS.home)],
            name=f"headrace {stage} {DS}",
            conn_id=CONN_ID,
            spark_binary=str(SETTINGS.spark_submit),
            env_vars={
                "SPARK_HOME": str(SETTINGS.spark_home),
                "PYSPARK_PYTHON": str(SETTINGS.python),
                "PYSPARK_DRIVER_PYTHON": str(SETTINGS.python),
                "SPARK_LOCAL_IP": "127.0.0.1",
                # Airflow's own modules must not get in the way of the other environment's.
                "PYTHONPATH": "",
                "PYTHONUNBUFFERED": "1",
            },
            execution_timeout=timedelta(hours=hours),
            # A skipped stage does not hold up those after it.
            trigger_rule="none_failed",
            **kwargs,
        )

    def execute(self, context: Context) -> None:
        """Submit and wait.

        Raises:
            AirflowSkipException: the pipeline has no such stage.
            AirflowFailException: something is not set up: trying again would not help.
        """
        pipeline, _, ds, _, home = self.application_args
        if self.stage in self.OPTIONAL and not _has_section(SETTINGS.pipeline_file(pipeline), self.stage):
            raise AirflowSkipException(f"pipeline '{pipeline}' has no '{self.stage}' section")
        _require_connection(CONN_ID)
        self.properties_file = _spark_properties(pipeline, home)
        # The jobs' processes inherit Airflow's environment; connections and variables are none of their business.
        private = [k for k in os.environ if k.startswith(("AIRFLOW_CONN_", "AIRFLOW_VAR_", "AIRFLOW__"))]
        self.env_vars = {**dict.fromkeys(private, ""), **(self.env_vars or {})}
        super().execute(context)
        for outlet in self.outlets:
            context["outlet_events"][outlet].extra = {"pipeline": pipeline, "ds": ds}


def _has_section(path: Path, name: str) -> bool:
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError):
        return True  # the job will say what is wrong with the file
    return not isinstance(data, dict) or data.get(name) is not None


def _require_connection(conn_id: str) -> None:
    """Without this, a missing connection would silently mean the master `yarn`."""
    advice = (
        f"define the connection '{conn_id}' as JSON, for example "
        f"""AIRFLOW_CONN_{conn_id.upper()}='{{"conn_type":"spark","host":"local[2]"}}'"""
    )
    try:
        host = BaseHook.get_connection(conn_id).host
    except (AirflowException, ValueError) as e:
        raise AirflowFailException(f"{advice} ({e})") from e
    if not host:
        raise AirflowFailException(f"the connection '{conn_id}' has no host (Spark's master): {advice}")


def _spark_properties(pipeline: str, home: str) -> str:
    """Have the pipeline's environment write its Spark properties; returns the file's path."""
    headrace = SETTINGS.python.with_name("headrace")
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    try:
        done = subprocess.run(
            [str(headrace), "spark-properties", pipeline, "--home", home],
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
