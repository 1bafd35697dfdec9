"""An application as a process: its output copied, its whole family stopped with it, nobody left behind.

And what it is given: Spark properties as Java reads them, and secrets. A secret is never a Spark property: the history
server, the web page of the application and ps show those. On YARN it travels in a file that is its owner's alone, by
`spark.yarn.dist.files`, and lies in the containers' own folders.

Airflow loads this module by its path, in an environment without headrace: it imports the standard library alone.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    import psutil

    from headrace.jobs.output import OnEvent, Sink


#: The program of every stage.
PROGRAM = Path(__file__).with_name("run_stage.py")

#: Seconds for a stopped application to end before it is killed.
_GRACE_SECONDS = 10.0
#: Seconds for its Python program to end before the JVM is stopped: training writes a checkpoint (train.stop_seconds).
_PROGRAM_SECONDS = 60.0


class StopSignal(KeyboardInterrupt):
    """SIGTERM or SIGHUP arrived; the application has been stopped. `signum` says which."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


def run_logged(
    line: Sequence[str], env: Mapping[str, str], sink: Sink, echo: TextIO, on_event: OnEvent | None = None
) -> int:
    """Run a command; copy its output (`copy_output`). Signals stop its whole family.

    Returns:
        Its exit code; 128 + N where signal N killed it.

    Raises:
        KeyboardInterrupt: Ctrl-C (`StopSignal`: SIGTERM, SIGHUP); the process and all that it started are gone.
    """
    from headrace.jobs.output import copy_output, ignore

    with _signals_raise():
        process = subprocess.Popen(  # no `with`: the code below reads the pipe to its end and waits for the process
            [*_dies_with_parent(), *line],
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            # A group of its own: Ctrl-C reaches this process, which then stops the group in order.
            start_new_session=True,
        )
        try:
            assert process.stdout is not None
            with process.stdout as pipe:
                copy_output(pipe.fileno(), sink, echo, on_event or ignore)
            code = process.wait()
        except BaseException:
            stop_process_tree(process)
            raise
    # Killed by a signal: the shell's convention, never a small code that means something else.
    return code if code >= 0 else 128 - code


#: Asks the kernel for SIGTERM when the parent ends (PR_SET_PDEATHSIG, see prctl(2)), then becomes the command. A parent
#: that has ended before that is not waited for.
_EXEC = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
if os.getppid() != int(sys.argv[1]):
    sys.exit(128 + signal.SIGTERM)
try:
    os.execvp(sys.argv[2], sys.argv[2:])
except OSError as e:
    sys.exit(f"error: {sys.argv[2]}: {e.strerror}")
"""


def _dies_with_parent() -> list[str]:
    """Return what begins a command line that the kernel stops when this process is killed (Linux; elsewhere: nothing).

    Without it a SIGKILLed `headrace run` would leave a JVM at work that holds the pipeline's lock. It is a program of
    its own, not a function between fork and exec: that may wait for ever for a lock of another thread.
    """
    if sys.platform != "linux":
        return []
    return [sys.executable, "-I", "-S", "-c", _EXEC, str(os.getpid())]


@contextmanager
def _signals_raise() -> Iterator[None]:
    """SIGTERM and SIGHUP raise `StopSignal` in the main thread while the block runs."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(signum: int, _frame: FrameType | None) -> None:
        raise StopSignal(signum)

    # Signals that the caller ignores stay ignored, as under nohup.
    heard = [s for s in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(s) is not signal.SIG_IGN]
    handlers = {s: signal.signal(s, stop) for s in heard}
    try:
        yield
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)


def stop_process_tree(process: subprocess.Popen[bytes]) -> None:
    """Stop a process, its group, and its descendants in other groups (Horovod's ranks lead groups of their own).

    Asks first (SIGTERM), kills what is left after a grace period. Returns when all of them are gone. The Python program
    is asked before the JVM, which would take its tasks down with it.
    """
    import psutil

    try:
        root = psutil.Process(process.pid)
        family = root.children(recursive=True)
    except psutil.NoSuchProcess:
        root, family = None, []
    try:
        programs = [member for member in (root, *family) if member is not None and _is_job(member)]
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
        psutil.wait_procs(family, timeout=_GRACE_SECONDS)


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


_CHECK_SECONDS = 2.0


def when_parent_ends(act: Callable[[], object]) -> None:
    """Call `act` once, on a thread of its own, when this process has another parent than now: its own has ended."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_CHECK_SECONDS)
        act()

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


#: Variable of an application's environment: the file of secrets, relative to its working folder.
VARIABLE = "HEADRACE_SECRETS"
#: JSON object of variables and values. The program of the stages reads it before anything else.
_SECRETS = "headrace-secrets.json"
#: AWS credentials: JVMs and Python read it by `AWS_SHARED_CREDENTIALS_FILE`, on the driver and on executors.
_AWS_FILE = "headrace-aws-credentials"
_AWS = {
    "AWS_ACCESS_KEY_ID": "aws_access_key_id",
    "AWS_SECRET_ACCESS_KEY": "aws_secret_access_key",
    "AWS_SESSION_TOKEN": "aws_session_token",
}
_DIST_FILES = "spark.yarn.dist.files"
#: Characters that `java.util.Properties` would change -> their escapes.
_ESCAPES = {"\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t", "\f": "\\f"}


def property_line(key: str, value: str) -> str:
    r"""Return a line of a properties file that `java.util.Properties` reads back as this key and value.

    Blanks before a value would be skipped, and `=`, `:`, blanks, `#` and `!` in a key end it or begin a comment.
    """
    escaped = "".join(_ESCAPES.get(c, c) for c in value)
    written_key = re.sub(r"[\s=:#!\\]", lambda c: _ESCAPES.get(c[0], "\\" + c[0]), key)
    return f"{written_key}=" + ("\\" if escaped.startswith(" ") else "") + escaped


def with_secrets(properties: str, folder: Path, secrets: Mapping[str, str], variables: Mapping[str, str]) -> str:
    """Return the text of a properties file for an application of YARN in cluster mode, its secrets in files.

    Args:
        properties: the text of a pipeline's properties file.
        folder: of its owner alone; the files with secrets are made there.
        secrets: variables that nobody else may see.
        variables: of the application master, which are no secrets.
    """
    public, files, places = dict(variables), list[Path](), ("spark.yarn.appMasterEnv", "spark.executorEnv")
    lines = [line for line in properties.splitlines() if line]
    of_aws = {key: secrets[name] for name, key in _AWS.items() if name in secrets}
    if of_aws:
        text = "".join(f"{key} = {value}\n" for key, value in of_aws.items())
        files.append(_private_file(folder / _AWS_FILE, f"[default]\n{text}"))
        lines += [property_line(f"{place}.AWS_SHARED_CREDENTIALS_FILE", _AWS_FILE) for place in places]
    if other_secrets := {name: value for name, value in secrets.items() if name not in _AWS}:
        files.append(_private_file(folder / _SECRETS, json.dumps(other_secrets)))
        public[VARIABLE] = _SECRETS
    if files:
        dist_lines = [line for line in lines if line.startswith(f"{_DIST_FILES}=")]
        lines = [line for line in lines if line not in dist_lines]
        listed = [*(line.partition("=")[2] for line in dist_lines), *(file.as_uri() for file in files)]
        lines.append(f"{_DIST_FILES}={','.join(listed)}")
    lines += [property_line(f"spark.yarn.appMasterEnv.{name}", value) for name, value in public.items()]
    return "\n".join(lines) + "\n"


def take_secrets(environ: MutableMapping[str, str]) -> dict[str, str]:
    """Put the variables of the file that `with_secrets` has made into an environment; the variables.

    Raises:
        OSError: it is not there.
        ValueError: it is damaged.
    """
    name = environ.pop(VARIABLE, None)
    if name is None:
        return {}
    secrets: dict[str, str] = json.loads(Path(name).read_text(encoding="utf-8"))
    environ.update(secrets)
    return secrets


def _private_file(path: Path, text: str) -> Path:
    with open(path, "x", encoding="utf-8", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        file.write(text)
    return path
