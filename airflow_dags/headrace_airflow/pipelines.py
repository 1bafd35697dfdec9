"""The pipelines of a folder, as far as their DAGs need to know them: the plain mapping of each YAML file.

A file that cannot be read, or whose spec headrace refuses, gives a pipeline with a fault: its DAG of the daily
retraining stays, and says so. An import error of Airflow would take the DAGs of all other pipelines with it, as they
are of the same DAG file.

Faults of specs, and stages of other packages, are found by a process of the pipelines' environment. A DAG file is read
every few seconds, so answers are kept in a file of AIRFLOW_HOME, by the content of the pipelines' files: one process
answers for all that are new, and none is started where there are none. Where the pipelines' environment is not, as
where drivers or pods have it, nothing is known of specs, and the jobs refuse them.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from headrace_airflow.settings import SETTINGS, STAGE_ENTRY, STAGES, YAML_TEXT, private_variables

log = logging.getLogger(__name__)

#: Airflow ends the reading of a DAG file after 30 s (its setting dagbag_import_timeout).
_CHECK_SECONDS = 20
#: How long an answer holds. It may change although the file does not: somebody mends a class that the file names.
_REFUSED_SECONDS, _TAKEN_SECONDS = 600, 86_400


def spec_answers(files: Mapping[Path, bytes]) -> dict[Path, dict[str, Any]]:
    """Return what the pipelines' environment says of pipelines' files; files of which it has said nothing are left out.

    Args:
        files: the files with their content.

    Returns:
        by file its `fault`, None where there is none, and `stages`: see `python/jobs/check_specs.py`.
    """
    if not SETTINGS.python.exists():
        return {}
    keys = {path: _answer_key(path, content) for path, content in files.items()}
    now, known = time.time(), _read_answers()
    # Those of other folders' pipelines stay, too: a file of DAGs each.
    held = {key: answer for key, answer in known.items() if answer["until"] > now}
    if new := {path: key for path, key in keys.items() if key not in held}:
        checked = _check_specs(list(new))
        # Where time was short, the next reading asks about the others. A process that fails is not tried again at once.
        for path, key in new.items():
            if checked and str(path) not in checked:
                continue
            answer = checked.get(str(path))
            # A package may describe its stages otherwise tomorrow.
            is_taken = answer is not None and answer["fault"] is None and not answer["stages"]
            held[key] = {"answer": answer, "until": now + (_TAKEN_SECONDS if is_taken else _REFUSED_SECONDS)}
        # Answers on files that are gone or have changed run out; a second reader that writes at once asks again.
        _write_answers(held)
    # Where time was short, an answer that has expired is better than none.
    answers = {path: (held.get(key) or known.get(key) or {}).get("answer") for path, key in keys.items()}
    return {path: a | {"fault": _with_path(path, a["fault"])} for path, a in answers.items() if a is not None}


def _with_path(path: Path, fault: str | None) -> str | None:
    return fault if fault is None or str(path) in fault else f"{path}: {fault}"


def _answer_key(path: Path, content: bytes) -> str:
    environment = [SETTINGS.python, SETTINGS.checkout / "python" / "jobs" / "check_specs.py"]
    stamps = [p.stat().st_mtime_ns for p in environment if p.exists()]
    return hashlib.sha256(json.dumps([str(path), *map(str, environment), stamps]).encode() + content).hexdigest()


def _check_specs(paths: list[Path]) -> dict[str, dict[str, Any]]:
    """Return the answer about each file by path; fewer files where time was short."""
    program = SETTINGS.checkout / "python" / "jobs" / "check_specs.py"
    private = {*private_variables(), "PYTHONPATH"}
    environment = {name: value for name, value in os.environ.items() if name not in private}
    try:
        done = subprocess.run(
            [SETTINGS.python, program, *paths],
            capture_output=True,
            check=False,
            env=environment,
            timeout=_CHECK_SECONDS,
        )
        output, message = done.stdout, done.stderr
    except subprocess.TimeoutExpired as e:
        output, message = e.stdout or b"", f"not done in {_CHECK_SECONDS} s".encode()
    except OSError as e:
        output, message = b"", str(e).encode()
    answers: dict[str, dict[str, Any]] = {}
    for line in output.splitlines():
        with suppress(ValueError, TypeError):  # what a class of the user's prints, half a line
            answers |= json.loads(line)
    if len(answers) < len(paths):
        reason = message.decode(errors="replace").strip().splitlines()[-1:]
        log.warning(
            "%d of %d specs were not checked, jobs check them: %s", len(paths) - len(answers), len(paths), reason
        )
    return answers


def _answers_file() -> Path:
    return Path(os.environ.get("AIRFLOW_HOME") or "~/airflow").expanduser() / "headrace-spec-faults.json"


def _read_answers() -> dict[str, Any]:
    try:
        faults = json.loads(_answers_file().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return faults if isinstance(faults, dict) else {}


def _write_answers(held: Mapping[str, Any]) -> None:
    file = _answers_file()
    part = file.with_name(f"{file.name}.{os.getpid()}")
    try:
        part.write_text(json.dumps(held), encoding="utf-8")
        part.replace(file)
    except OSError as e:
        log.warning("%s cannot be written, so each reading of the DAGs checks specs anew: %s", file, e.strerror)
        with suppress(OSError):
            part.unlink()


#: As headrace wants a pipeline's own name.
_NAME = "[a-z][a-z0-9_]*"

GPU_POOL = "headrace_gpu"
POOL = "headrace"


@dataclass(frozen=True)
class Pipeline:
    """One file."""

    name: str
    path: Path
    spec: dict[str, Any] = field(default_factory=dict)
    #: Why its jobs cannot be known.
    fault: str | None = None
    #: Its stages, where some are of other packages, as the pipelines' environment describes them; else empty.
    described_stages: tuple[Any, ...] = ()

    def dag_id(self, kind: str) -> str:
        """Return the id of its DAG of a kind: retrain, score, backfill, maintain."""
        return f"headrace_{self.name}_{kind}"

    def stages(self, kind: str) -> list[Any]:
        """Return its stages of a kind of DAG, in order: entries of `headrace.config.stages`."""
        entries = [entry for entry in self.described_stages or STAGES.values() if entry.dag == kind]
        return [e for e in entries if e.section is None or self.spec.get(e.section) is not None]

    def stage(self, name: str) -> Any:
        """Return the entry of one of its stages."""
        return next((entry for entry in self.described_stages if entry.name == name), None) or STAGES[name]

    def value(self, path: str, default: Any = None) -> Any:
        """Return the value at a key path of the file."""
        node: Any = self.spec
        for key in path.split("."):
            node = node.get(key) if isinstance(node, dict) else None
        return default if node is None else node

    @property
    def daily(self) -> bool:
        """Return whether its source has new data every day: its files' path has the day, or its table has days."""
        return "{ds}" in str(self.value("source.path", "")) or self.value("source.day") is not None

    def pool(self, stage: Any) -> str:
        """Return the pool of a stage's job: one job at a time has the GPU."""
        on_gpu = stage.spark and self.value("spark.profile") == "gpu"
        trains = stage.lease == "train" and self.value("train.device") == "cuda"
        return GPU_POOL if on_gpu or trains else POOL


def pipelines(folder: Path | None = None, with_specs: bool = True) -> Iterator[Pipeline]:
    """Return the pipelines of a folder, each name once.

    Args:
        folder: of the pipelines' files; None: that of the settings.
        with_specs: tell specs that headrace refuses; the process of a task need not, its job does.
    """
    contents = {path: _content(path) for path in sorted((folder or SETTINGS.pipelines).glob("*.yaml"))}
    parsed = [_read(path, content) for path, content in contents.items()]
    valid_contents = {
        p.path: content for p in parsed if p.fault is None and isinstance(content := contents[p.path], bytes)
    }
    with_stages = {p.path for p in parsed if p.spec.get("stages")}
    answers = spec_answers({p: content for p, content in valid_contents.items() if with_specs or p in with_stages})
    seen: dict[str, Path] = {}
    for pipeline in parsed:
        path, entry = pipeline.path, pipeline
        if (answer := answers.get(path)) is not None:
            described = tuple(STAGE_ENTRY(**fields) for fields in answer["stages"])
            entry = replace(pipeline, fault=answer["fault"], described_stages=described)
        elif path in with_stages and pipeline.fault is None:
            fault = f"{path}: its `stages` are of other packages, and {SETTINGS.python} has not said what they are"
            entry = replace(pipeline, fault=fault)
        if entry.name in seen:
            entry = Pipeline(path.stem, path, fault=f"{path} and {seen[entry.name]} are both named '{entry.name}'")
            if entry.name in seen:
                continue
        seen[entry.name] = path
        yield entry


def _content(path: Path) -> bytes | OSError:
    try:
        return path.read_bytes()
    except OSError as e:
        return e


def _read(path: Path, content: bytes | OSError) -> Pipeline:
    stem = re.sub("[^a-z0-9_]", "_", path.stem.lower())
    try:
        if isinstance(content, OSError):
            raise content
        data = YAML_TEXT.parse_yaml(content.decode("utf-8"))
    except YAML_TEXT.YamlFault as e:
        return Pipeline(stem, path, fault=f"{path}: {'; '.join(str(e).splitlines())}")
    except (OSError, yaml.YAMLError, ValueError) as e:
        return Pipeline(stem, path, fault=f"{path} is not YAML: {' '.join(str(e).split())}")
    name = data.get("pipeline") if isinstance(data, dict) else None
    if not isinstance(name, str) or not re.fullmatch(_NAME, name):
        return Pipeline(stem, path, fault=f"{path}: 'pipeline' must be a name of small letters, digits and _")
    return Pipeline(name, path, data)
