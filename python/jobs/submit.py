"""Runs stages as applications: `python run_stage.py`, output live and in a log for each stage.

Which stages share an application: headrace.jobs.stages.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import BinaryIO, TextIO

from headrace.config import LOOPBACK, Spark, Spec
from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.jobs.output import JsonLines, OnEvent, StageEvent, ignore
from headrace.jobs.process import PROGRAM, property_line, run_logged
from headrace.lake.spark.requirements import require_java
from headrace.logs import VARIABLE, is_json, json_line, log_format
from headrace.stage import stage_entry
from headrace.storage import Location


def spark_home() -> Path:
    """Return the folder of the installed pyspark package, without importing it.

    Raises:
        UserError: it is not installed.
    """
    spec = find_spec("pyspark")
    if spec is None or spec.origin is None:
        raise UserError(
            f"pyspark is not installed for {sys.executable}: pip install 'headrace[spark]', or run `make env` in a "
            "checkout"
        )
    return Path(spec.origin).parent


def properties_file(ws: Workspace, pipeline: str) -> Location:
    """Return the default place of a pipeline's Spark properties file."""
    return ws.spark_local / f"{pipeline}.properties"


def write_properties(spec: Spec, ws: Workspace, file: Location) -> None:
    """Write the Spark properties file of a pipeline in one step; headrace's own submitter and Airflow both use it.

    Java's format, UTF-8, sorted: the same spec gives the same bytes. What is known as a secret `Spark` refuses; since
    a name may hide one, nobody but the owner may read the file.

    Raises:
        UserError: a profile or the jars are missing.
    """
    from headrace.lake.spark.session import properties

    lines = [property_line(key, value) for key, value in sorted(properties(spec.spark, ws).items())]
    header = f"# Spark properties of pipeline '{spec.pipeline}', written by headrace; edit its YAML instead."
    with file.new_file() as path, open(path, "x", encoding="utf-8", opener=_private) as out:
        out.write("\n".join([header, *lines]) + "\n")


def _private(path: str, flags: int) -> int:
    """Open a file that only its owner can read from the beginning; an opener of `open`."""
    return os.open(path, flags, 0o600)


def command(
    stages: Sequence[str],
    pipeline: str,
    ds: str,
    ws: Workspace,
    overrides: Sequence[str] = (),
    events: bool = False,
    until: str | None = None,
) -> list[str]:
    """Return the command line of an application.

    Args:
        stages: of a day, in its order; those of one application (headrace.jobs.stages).
        pipeline: a shipped pipeline's name or a YAML file, as the user gave it.
        ds: the day.
        ws: the workspace.
        overrides: `key=value` for the spec.
        events: have it send `StageEvent`s.
        until: the last day of a range that begins with `ds`; None: that day alone.
    """
    line = [sys.executable, str(PROGRAM), ",".join(stages), pipeline, "--ds", ds, "--home", str(ws.home)]
    if until is not None:
        line += ["--until", until]
    for override in overrides:
        line += ["--set", override]
    return [*line, "--events"] if events else line


def environment(
    conf: Spark, base: Mapping[str, str] | None = None, properties: Location | None = None
) -> dict[str, str]:
    """Return the variables of an application: the caller's, and Spark's folder, interpreter and address.

    Args:
        conf: the section `spark`.
        base: the caller's; None: this process's.
        properties: the file of `write_properties`; None: the application needs no JVM.
    """
    variables = {
        **(os.environ if base is None else base),
        "SPARK_HOME": str(spark_home()),
        # What executors run, which obeys this variable before the property.
        "PYSPARK_PYTHON": conf.properties.get("spark.pyspark.python", sys.executable),
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        # Lines appear when they are written, not when a pipe's buffer is full.
        "PYTHONUNBUFFERED": "1",
        # The JVM's own lines go by it, too.
        VARIABLE: log_format(),
    }
    if properties is not None:
        # What pyspark starts the JVM with, by spark-submit.
        variables["PYSPARK_SUBMIT_ARGS"] = f"--properties-file {shlex.quote(str(properties))} pyspark-shell"
    if conf.is_local:
        # A cluster's executors must reach the driver at the address that the user gave it.
        variables["SPARK_LOCAL_IP"] = LOOPBACK
    return variables


class _StageLogs:
    """The logs of the stages of an application; each is opened when something is written to it.

    Args:
        place: where the log of a stage and day is.
        header: the first line of what the application adds to each.
        stage: at work until another is said to be.
        ds: the day of its turn.
    """

    def __init__(self, place: Callable[[str, str], Location], header: bytes, stage: str, ds: str) -> None:
        self._place, self._header, self._current = place, header, (ds, stage)
        self._file: BinaryIO | None = None

    def switch(self, stage: str, ds: str) -> None:
        """Direct the following output to another stage or day."""
        if (ds, stage) != self._current:
            self.close()
            self._current = (ds, stage)

    def write(self, data: bytes) -> None:
        if self._file is None:
            log = self._place(*self._current)
            log.parent.make_dir()
            self._file = open(log.local_path(), "ab")  # noqa: SIM115  (closed by `close`)
            self._file.write(self._header)
        self._file.write(data)

    def flush(self) -> None:
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None


def submit(
    stages: Sequence[str],
    pipeline: str,
    spec: Spec,
    ws: Workspace,
    ds: str,
    overrides: Sequence[str] = (),
    on_event: OnEvent = ignore,
    echo: TextIO | None = None,
    until: str | None = None,
) -> int:
    """Run stages as one application and wait for it.

    What it prints while it is a stage's turn goes to `ws.log(...)` of that stage, and to `echo` (default: standard
    output) as it comes; see `headrace.jobs.output.copy_output`.

    Args:
        stages: as for `command`; the first has work to do.
        pipeline: as for `command`.
        spec: what that is, with `overrides`.
        ws: the workspace.
        ds: the day.
        overrides: `key=value` for the spec.
        on_event: called when it is a stage's turn, when it begins to work or has nothing to do, and when it is done.
        echo: the screen.
        until: as for `command`.

    Returns:
        Its exit code: 0 done or nothing to do, 2 user error, 3 refused by an audit, 69 another run is at work, 75 the
        day is not complete yet, anything else a failure: of the stage whose turn it was.

    Raises:
        KeyboardInterrupt: Ctrl-C (`StopSignal`: SIGTERM, SIGHUP); the application and all that it started are gone.
        UserError: see `write_properties`, `Workspace.make_scratch` and `require_java`.
    """
    ws.make_scratch()
    properties = None
    if any(stage_entry(spec, stage).spark for stage in stages):
        require_java()
        properties = properties_file(ws, spec.pipeline)
        write_properties(spec, ws, properties)
        (ws.spark_local / "local").make_dir()
    line = command(stages, pipeline, ds, ws, overrides, events=True, until=until)
    words = " ".join(_without_values(line))
    header = f"# {datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC: {words}"
    if is_json():
        header = json_line(words, "INFO", "headrace.jobs")

    at_work = {"pipeline": spec.pipeline, "ds": ds, "stage": stages[0]}

    def on_stage_event(event: StageEvent) -> None:
        if event.kind == "check":
            logs.switch(event.stage, event.ds or ds)
            at_work.update(ds=event.ds or ds, stage=event.stage, run_id=event.run_id)
        on_event(event)

    screen = echo or sys.stdout
    env = environment(spec.spark, properties=properties)
    with closing(
        _StageLogs(lambda day, stage: ws.log(spec.pipeline, day, stage), f"{header}\n".encode(), stages[0], ds)
    ) as logs:
        logs.write(b"")
        if not is_json():
            return run_logged(line, env, logs, screen, on_stage_event)
        with closing(JsonLines(logs, screen, lambda: at_work)) as sink, open(os.devnull, "w") as nowhere:
            return run_logged(line, env, sink, nowhere, on_stage_event)


def _without_values(line: Sequence[str]) -> list[str]:
    """Return a command line for the log, with the keys of `--set` alone: a value may be a secret."""
    previous = ["", *line]
    return [f"{word.partition('=')[0]}=..." if b == "--set" else word for b, word in zip(previous, line, strict=False)]
