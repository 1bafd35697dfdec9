"""Faults of pipelines' specs, found by a process of the pipelines' environment.

A DAG file is read every few seconds, so answers are kept in a file of AIRFLOW_HOME, by the content of the pipelines'
files: one process answers for all that are new, and none is started where there are none. Where the pipelines'
environment is not, as where drivers or pods have it, nothing is known of specs, and the jobs refuse them.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from headrace_airflow.settings import SETTINGS, private_variables

log = logging.getLogger(__name__)

#: Airflow ends the reading of a DAG file after 30 s (its setting dagbag_import_timeout).
_SECONDS = 20
#: How long an answer holds. It may change although the file does not: somebody mends a class that the file names.
_REFUSED_SECONDS, _TAKEN_SECONDS = 600, 86_400


def spec_faults(files: Mapping[Path, bytes]) -> dict[Path, str]:
    """Return the faults of pipelines' files that have some.

    Args:
        files: the files with their content.
    """
    if not SETTINGS.python.exists():
        return {}
    keys = {path: _key(path, content) for path, content in files.items()}
    now, known = time.time(), _read()
    held = {key: known[key] for key in keys.values() if key in known and known[key]["until"] > now}
    if new := {path: key for path, key in keys.items() if key not in held}:
        answers = _check(list(new))
        # Where time was short, the next reading asks about the others. A process that fails is not tried again at once.
        for path, key in new.items():
            if answers and str(path) not in answers:
                continue
            fault = answers.get(str(path))
            is_taken = bool(answers) and fault is None
            held[key] = {"fault": fault, "until": now + (_TAKEN_SECONDS if is_taken else _REFUSED_SECONDS)}
        # Of files that are gone or have changed nothing is kept; a second reader that writes at once does it again.
        _write(held)
    faults = {path: held[key]["fault"] for path, key in keys.items() if key in held and held[key]["fault"]}
    return {path: fault if str(path) in fault else f"{path}: {fault}" for path, fault in faults.items()}


def _key(path: Path, content: bytes) -> str:
    environment = [SETTINGS.python, SETTINGS.checkout / "python" / "jobs" / "spec_check.py"]
    stamps = [p.stat().st_mtime_ns for p in environment if p.exists()]
    return hashlib.sha256(json.dumps([str(path), *map(str, environment), stamps]).encode() + content).hexdigest()


def _check(paths: list[Path]) -> dict[str, str | None]:
    """Return each file's fault, or None, by path; fewer files where time was short."""
    program = SETTINGS.checkout / "python" / "jobs" / "check_specs.py"
    private = {*private_variables(), "PYTHONPATH"}
    environment = {name: value for name, value in os.environ.items() if name not in private}
    try:
        done = subprocess.run(
            [SETTINGS.python, program, *paths], capture_output=True, check=False, env=environment, timeout=_SECONDS
        )
        output, message = done.stdout, done.stderr
    except subprocess.TimeoutExpired as e:
        output, message = e.stdout or b"", f"not done in {_SECONDS} s".encode()
    except OSError as e:
        output, message = b"", str(e).encode()
    answers: dict[str, str | None] = {}
    for line in output.splitlines():
        with suppress(ValueError, TypeError):  # what a class of the user's prints, half a line
            answers |= json.loads(line)
    if len(answers) < len(paths):
        reason = message.decode(errors="replace").strip().splitlines()[-1:]
        log.warning(
            "%d of %d specs were not checked, jobs check them: %s", len(paths) - len(answers), len(paths), reason
        )
    return answers


def _file() -> Path:
    return Path(os.environ.get("AIRFLOW_HOME") or "~/airflow").expanduser() / "headrace-spec-faults.json"


def _read() -> dict[str, Any]:
    try:
        faults = json.loads(_file().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return faults if isinstance(faults, dict) else {}


def _write(held: Mapping[str, Any]) -> None:
    file = _file()
    part = file.with_name(f"{file.name}.{os.getpid()}")
    try:
        part.write_text(json.dumps(held), encoding="utf-8")
        part.replace(file)
    except OSError as e:
        log.warning("%s cannot be written, so each reading of the DAGs checks specs anew: %s", file, e.strerror)
        with suppress(OSError):
            part.unlink()
