"""Runs a stage as an application of its own: `spark-submit run_stage.py`, output live and in a log.

The applications are separate because each stage wants the machine's memory for itself, and because a stage that is
killed must not take the others with it. `spark-submit` is that of the installed pyspark package.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, BinaryIO, TextIO

from headrace.config import LOOPBACK, Spark, Spec
from headrace.errors import UserError
from headrace.stages import STAGES
from headrace.storage import Location
from headrace.workspace import Workspace

if TYPE_CHECKING:
    import psutil

#: The program of every stage.
PROGRAM = Path(__file__).with_name("run_stage.py")

#: What a stopped application gets to end by itself before it is killed.
_GRACE_SECONDS = 10.0
#: The same for its Python program, before the JVM below it is asked: training writes a checkpoint (train.stop_seconds).
_PROGRAM_SECONDS = 60.0

#: Lines that say nothing to the user; they stay in the log.
_NOISE = re.compile(
    r"WARNING: Using incubator modules"
    r"|Unable to load native-hadoop library"
    r"|Using Spark's default log4j profile|Setting default log level to|To adjust logging level use sc\.setLogLevel"
    r"|Note that spark\.local\.dir will be overridden"
    r"|Picked up (JAVA_TOOL_OPTIONS|_JAVA_OPTIONS)"
    r"|^WARNING: (A terminally deprecated|An illegal reflective|Please consider reporting|Use --illegal-access|"
    r"All illegal access|sun\.misc\.Unsafe|.* has been called by )"
)


class Stopped(KeyboardInterrupt):
    """SIGTERM or SIGHUP arrived; the application has been stopped. `signum` says which."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


def spark_home() -> Path:
    """The installed pyspark package, without importing it.

    Raises:
        UserError: it is not installed.
    """
    found = find_spec("pyspark")
    if found is None or found.origin is None:
        raise UserError(f"pyspark is not installed for {sys.executable}: run `make env`, then `headrace doctor`")
    return Path(found.origin).parent


def properties_file(ws: Workspace, pipeline: str) -> Location:
    """Where a pipeline's Spark properties file is by default."""
    return ws.spark_local / f"{pipeline}.properties"


def write_properties(spec: Spec, ws: Workspace, file: Location) -> None:
    """Write the Spark properties file of a pipeline in one step; headrace's own submitter and Airflow both use it.

    Java's format, UTF-8, sorted: the same spec gives the same bytes. It holds no secrets: `Spark` refuses them.

    Raises:
        UserError: a profile or the jars are missing.
    """
    from headrace.lake.session import properties

    lines = [f"{key}={_java_value(value)}" for key, value in sorted(properties(spec.spark, ws).items())]
    header = f"# Spark properties of pipeline '{spec.pipeline}', written by headrace; edit its YAML instead."
    file.put_text("\n".join([header, *lines]) + "\n")


def _java_value(value: str) -> str:
    """A value as `java.util.Properties` reads it back."""
    text = value.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r").replace("\t", "\\t")
    return "\\" + text if text.startswith(" ") else text


def command(
    stage: str, pipeline: str, ds: str, ws: Workspace, overrides: Sequence[str] = (), properties: Location | None = None
) -> list[str]:
    """The command line of a stage: by spark-submit with `properties`, by this interpreter without.

    Args:
        stage: one of headrace.stages.ORDER.
        pipeline: a shipped pipeline's name or a YAML file, as the user gave it.
        ds: the day.
        ws: the workspace.
        overrides: `key=value` for the spec.
        properties: the file of `write_properties`.
    """
    launcher = [sys.executable]
    if properties is not None:
        launcher = [str(spark_home() / "bin" / "spark-submit"), "--properties-file", str(properties)]
        launcher += ["--name", f"headrace {stage} {ds}"]
    arguments = [stage, pipeline, "--ds", ds, "--home", str(ws.home)]
    for override in overrides:
        arguments += ["--set", override]
    return [*launcher, str(PROGRAM), *arguments]


def environment(conf: Spark, base: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables of a stage's application: the caller's, and Spark's folder, interpreter and address."""
    found = {
        **(os.environ if base is None else base),
        "SPARK_HOME": str(spark_home()),
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        # Lines appear when they are written, not when a pipe's buffer is full.
        "PYTHONUNBUFFERED": "1",
    }
    if conf.is_local:
        # A cluster's executors must reach the driver at the address that the user gave it.
        found["SPARK_LOCAL_IP"] = LOOPBACK
    return found


def submit(
    stage: str,
    pipeline: str,
    spec: Spec,
    ws: Workspace,
    ds: str,
    overrides: Sequence[str] = (),
    echo: TextIO | None = None,
) -> int:
    """Run one stage as an application and wait for it.

    What it prints goes to `ws.log(...)` byte for byte, and to `echo` (default: standard output) as it comes, without
    the JVM's chatter. Progress that rewrites its line (carriage returns) is shown only where `echo` is a terminal.

    Returns:
        Its exit code: 0 done or nothing to do, 2 user error, 69 another run is at work, 75 the day is not complete yet,
        anything else a failure.

    Raises:
        KeyboardInterrupt: Ctrl-C (`Stopped`: SIGTERM, SIGHUP); the application and all that it started are gone.
        UserError: see `write_properties`.
    """
    properties = None
    if STAGES[stage].spark:
        properties = properties_file(ws, spec.pipeline)
        write_properties(spec, ws, properties)
        (ws.spark_local / "local").make_dir()
    line = command(stage, pipeline, ds, ws, overrides, properties)
    log = ws.log(spec.pipeline, ds, stage)
    log.parent.make_dir()
    with open(log.local_path(), "ab") as sink:
        sink.write(f"# {datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC: {' '.join(_without_values(line))}\n".encode())
        return run_logged(line, environment(spec.spark), sink, echo or sys.stdout)


def _without_values(line: Sequence[str]) -> list[str]:
    """A command line for the log: of `--set` the keys alone. What a value is, only its owner knows."""
    before = ["", *line]
    return [f"{word.partition('=')[0]}=..." if b == "--set" else word for b, word in zip(before, line, strict=False)]


def run_logged(line: Sequence[str], env: Mapping[str, str], sink: BinaryIO, echo: TextIO) -> int:
    """Run a command; copy its output to `sink` whole and to `echo` without noise. Signals stop its whole family."""
    with _signals_raise():
        process = subprocess.Popen(  # the pipe is read to its end below, and the process waited for
            list(line),
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            # A group of its own: Ctrl-C reaches this process, which then stops the group in order.
            start_new_session=True,
            preexec_fn=_die_with_parent(),
        )
        try:
            assert process.stdout is not None
            with process.stdout as pipe:
                _tee(pipe.fileno(), sink, echo)
            code = process.wait()
        except BaseException:
            stop_process_tree(process)
            raise
    # Killed by a signal: the shell's convention, never a small code that means something else.
    return code if code >= 0 else 128 - code


def _tee(source: int, sink: BinaryIO, echo: TextIO) -> None:
    live = echo.isatty()
    partial = b""
    while chunk := os.read(source, 65_536):
        sink.write(chunk)
        sink.flush()
        *pieces, partial = re.split(rb"(?<=[\n\r])", partial + chunk)
        _show(pieces, echo, live)
    _show([partial] if partial else [], echo, live)


def _show(pieces: Sequence[bytes], echo: TextIO, live: bool) -> None:
    for piece in pieces:
        text = piece.decode("utf-8", errors="replace")
        if text in ("\n", "\r") or _NOISE.search(text):
            continue
        if text.endswith("\r"):
            if live:
                echo.write("\r\x1b[2K" + text[:-1])
        else:
            # A line that ends what a progress bar left half-written starts from the left.
            echo.write(("\r\x1b[2K" if live else "") + text.rstrip("\n") + "\n")
    echo.flush()


def _die_with_parent() -> Callable[[], None] | None:
    """Make the kernel stop the application when this process is killed outright (Linux; elsewhere: nothing).

    Without it a SIGKILLed `headrace run` would leave a JVM at work that holds the pipeline's lock.
    """
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None, use_errno=True)

    def ask() -> None:
        libc.prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG, see prctl(2)

    return ask


@contextmanager
def _signals_raise() -> Iterator[None]:
    """SIGTERM and SIGHUP raise `Stopped` in the main thread while the block runs."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(signum: int, _frame: FrameType | None) -> None:
        raise Stopped(signum)

    # What the caller ignores stays ignored: nohup.
    heard = [s for s in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(s) is not signal.SIG_IGN]
    before = {s: signal.signal(s, stop) for s in heard}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def stop_process_tree(process: subprocess.Popen[bytes]) -> None:
    """Stop a process, its group, and its descendants in other groups (Horovod's ranks lead groups of their own).

    Asks first (SIGTERM), kills what is left after a grace period. Returns when all of them are gone. The Python program
    that spark-submit started is asked before the JVM, which would take its tasks down with it.
    """
    import psutil

    try:
        family = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        family = []
    try:
        programs = [member for member in family if _is_job(member)]
        for member in programs:
            _quietly(member.terminate)
        psutil.wait_procs(programs, timeout=_PROGRAM_SECONDS)
        _signal_group(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_SECONDS)
        for member in family:
            _quietly(member.terminate)
        psutil.wait_procs(family, timeout=_GRACE_SECONDS / 2)
    finally:
        # Also when a second Ctrl-C cuts the waiting short: nothing stays behind.
        _signal_group(process.pid, signal.SIGKILL)
        for member in family:
            _quietly(member.kill)
        process.wait()


def _is_job(process: psutil.Process) -> bool:
    import psutil

    try:
        words = process.cmdline()
    except psutil.Error:
        return False
    return str(PROGRAM) in words


def _signal_group(group: int, signum: int) -> None:
    # The group is gone; on macOS a group of zombies refuses instead.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signum)


def _quietly(act: Callable[[], object]) -> None:
    import psutil

    with suppress(psutil.NoSuchProcess):  # it ended by itself
        act()
