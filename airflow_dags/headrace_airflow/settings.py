"""Place of the pipelines' environment: variables of the environment of Airflow's processes (README.md)."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Settings:
    """The other environment's places."""

    checkout: Path
    #: The interpreter; the command `headrace` is beside it.
    python: Path
    #: The workspace as the jobs are told it. Airflow never looks there: it may be on another machine.
    home: str
    spark_submit: Path
    #: The folder of the pipelines' YAML files.
    pipelines: Path
    #: What a report's address begins with.
    reports_url: str
    #: When daily runs start, as cron, UTC; None: by hand alone.
    schedule: str | None
    #: The most days that one backfill may have.
    backfill_days: int
    #: Seconds between two looks at a day that is not complete, and before a busy pipeline is tried again.
    wait_seconds: float
    #: Seconds between two looks at an application of a cluster.
    poll_seconds: float
    #: Seconds before the second try of what has failed; three times as long before the third.
    retry_seconds: float
    #: Of what messages are sent: failed, refused, done.
    notify: tuple[str, ...]

    @property
    def spark_home(self) -> Path:
        """The pyspark package of the pipelines' environment."""
        return _pyspark(self.python)

    @property
    def headrace(self) -> Path:
        """The command."""
        return self.python.with_name("headrace")

    @property
    def program(self) -> Path:
        """The program of the stages."""
        return self.checkout / "python" / "jobs" / "run_stage.py"

    @property
    def command_program(self) -> Path:
        """The program that runs a command as a driver of a standalone cluster."""
        return self.checkout / "python" / "jobs" / "run_command.py"


def settings(environ: Mapping[str, str] = os.environ) -> Settings:
    """Read the variables HEADRACE_*; all have defaults."""
    checkout = Path(environ.get("HEADRACE_CHECKOUT") or Path(__file__).resolve().parent.parent.parent)
    # Not resolved: the link is what makes it the virtual environment's interpreter.
    python = Path(environ.get("HEADRACE_PYTHON") or checkout / ".venv" / "bin" / "python")
    home = environ.get("HEADRACE_HOME") or str(checkout / "var")
    schedule = environ.get("HEADRACE_SCHEDULE") or "0 0 * * *"
    return Settings(
        checkout=checkout,
        python=python,
        home=home,
        spark_submit=Path(environ.get("HEADRACE_SPARK_SUBMIT") or _pyspark(python) / "bin" / "spark-submit"),
        pipelines=Path(environ.get("HEADRACE_PIPELINES") or checkout / "conf" / "pipelines"),
        reports_url=(environ.get("HEADRACE_REPORTS_URL") or f"{home.rstrip('/')}/reports").rstrip("/"),
        schedule=None if schedule == "none" else schedule,
        backfill_days=int(environ.get("HEADRACE_BACKFILL_DAYS") or 31),
        wait_seconds=float(environ.get("HEADRACE_WAIT_SECONDS") or 300),
        poll_seconds=float(environ.get("HEADRACE_POLL_SECONDS") or 15),
        retry_seconds=float(environ.get("HEADRACE_RETRY_SECONDS") or 300),
        notify=tuple((environ.get("HEADRACE_NOTIFY") or "failed,refused").split(",")),
    )


def _pyspark(python: Path) -> Path:
    installed = sorted((python.parent.parent / "lib").glob("python3*/site-packages/pyspark"))
    return installed[0] if installed else python.parent.parent / "pyspark-is-not-installed"


SETTINGS = settings()


#: None of the jobs' business.
_PRIVATE = ("AIRFLOW_CONN_", "AIRFLOW_VAR_", "AIRFLOW__", "_AIRFLOW")


def private_variables() -> list[str]:
    """Return the names of the variables of this process that no job gets."""
    return [name for name in os.environ if name.startswith(_PRIVATE)]


def _by_path(name: str) -> Any:
    """Load a module of the package `headrace` that imports nothing but the standard library and PyYAML."""
    spec = spec_from_file_location(
        f"headrace_by_path_{name.replace('/', '_')}", SETTINGS.checkout / "python" / f"{name}.py"
    )
    assert spec is not None, "a path that ends in .py"
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


_STAGES = _by_path("config/stages")
#: `STAGES` and `StageEntry` of `headrace.config.stages`, `headrace.errors` and `headrace.jobs.process`.
STAGES, STAGE_ENTRY = _STAGES.STAGES, _STAGES.StageEntry
ERRORS = _by_path("errors/__init__")
APPLICATION_PROCESS = _by_path("jobs/process")
#: `headrace.config.yaml_text`: how the files of pipelines are read.
YAML_TEXT = _by_path("config/yaml_text")
