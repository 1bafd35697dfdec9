"""A gate's refusal, an override, a rollback and a stopped arm, on real days: commands, and what they print.

    .venv/bin/python scripts/transcripts.py [--rows N] [--parts gate,arm]

`gate`: two days of generated clicks are ingested, trained, judged and scored; the second day's limit of the AUC is 0.02
above what the first day's model reached, so that the gate refuses its model. Printed are the commands, their output (of
`headrace run` the lines about the verdict and what follows from it) and their exit codes. `arm`: scripts/closed_loop.py
until its experiment's rule has stopped an arm, and what `headrace experiment status` then says.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import yaml

from headrace.config.installation import pipeline_file
from headrace.errors import EXIT_DONE, EXIT_REFUSED

_PIPELINE, _FIRST, _SECOND = "shop.yaml", "2026-01-04", "2026-01-05"
#: Of a day's run, what is about the verdict: these lines, and all from the last one on.
_VERDICT = ("] gate", "headrace.gate: ", "headrace.registry: ", "] promote", "] score", "headrace.score: score")
_END = f"The model of {_SECOND}"


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description="Print a refusal by the gate, a rollback and a stopped arm.")
    parser.add_argument("--rows", type=int, default=20_000, help="rows a day of the part gate (default: %(default)s)")
    parser.add_argument("--parts", default="gate,arm", help="which (default: %(default)s)")
    args = parser.parse_args()
    parts = {"gate": lambda folder: _gate(folder, args.rows), "arm": _arm}
    for part in args.parts.split(","):
        if part not in parts:
            parser.error(f"no part '{part}': gate, arm")
        with tempfile.TemporaryDirectory() as folder:
            parts[part](Path(folder))


def _gate(folder: Path, rows: int) -> None:
    spec = yaml.safe_load(pipeline_file("clicks").read_text().replace("landing/clicks/", "landing/shop/"))
    spec |= {
        "pipeline": "shop",
        "generate": {"rows_per_day": rows, "users": 1000, "items": 200},
        "drift": None,
        "baseline": None,
        "publish": None,
        "gate": {"metrics": {"auc": {"min": 0.6}}, "champion": {"auc": 0.02}},
        "spark": {"driver_memory": "1g"},
    }
    # Who the intervals' draws are of.
    spec["features"]["carried"] = ["event_id", "user_id"]
    spec["train"]["evaluation"] = {"user": "user_id"}
    (folder / _PIPELINE).write_text(yaml.safe_dump({k: v for k, v in spec.items() if v is not None}))
    _run(folder, "generate", _PIPELINE, "--until", _SECOND)
    _run(folder, "run", _PIPELINE, "--ds", _FIRST)
    [first] = json.loads(_run(folder, "models", _PIPELINE, "--json"))["versions"]
    limit = f"gate.metrics.auc.min={first['metrics']['auc'] + 0.02:.3f}"
    _show(folder, "run", _PIPELINE, "--ds", _SECOND, "--set", limit, code=EXIT_REFUSED)
    _show(folder, "models", _PIPELINE)
    _show(folder, "promote", _PIPELINE, "2", "--reason", "the limit was of another pipeline")
    _show(folder, "rollback", _PIPELINE, "--reason", "clicks fell")
    _show(folder, "compare", _PIPELINE, "1", "2", "--ds", _SECOND)
    _show(folder, "models", _PIPELINE)


def _run(folder: Path, *words: str, code: int = EXIT_DONE) -> str:
    """Run a command in a workspace of the folder; return what it prints.

    The script ends where its exit code is another.
    """
    done = subprocess.run(
        [str(Path(sys.executable).with_name("headrace")), *words, "--home", "home"],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=None if "--json" in words else subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode != code:
        raise SystemExit(f"{done.stdout}\nheadrace {shlex.join(words)}: exit code {done.returncode}, not {code}")
    return done.stdout.replace(f"{folder}/", "")


def _show(folder: Path, *words: str, code: int = EXIT_DONE) -> None:
    lines = _run(folder, *words, code=code).splitlines()
    if words[0] == "run":
        lines = _about_verdict(lines)
    print(f"$ headrace {shlex.join(words)}", *(line.rstrip() for line in lines), sep="\n")
    if code:
        print(f"exit code {code}")
    sys.stdout.flush()


def _about_verdict(lines: Sequence[str]) -> list[str]:
    end = next(i for i, line in enumerate(lines) if line.startswith(_END))
    return [line for line in lines[:end] if any(word in line for word in _VERDICT)] + list(lines[end:])


def _arm(folder: Path) -> None:
    loop = [sys.executable, str(Path(__file__).with_name("closed_loop.py")), "--home", str(folder / "home")]
    done = subprocess.run(loop, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{done.stdout}\nclosed_loop.py: exit code {done.returncode}")
    lines = done.stdout.splitlines()
    status = next(i for i, line in enumerate(lines) if line.startswith("$ headrace experiment status"))
    messages = [line for line in lines[:status] if line.startswith("arm ") or "pairs with" in line]
    print(*(line.rstrip() for line in [*messages, *lines[status:]]), sep="\n")


if __name__ == "__main__":
    main()
