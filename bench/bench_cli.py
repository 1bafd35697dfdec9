"""Seconds of commands that have little to do, beside an interpreter that does nothing.

    make bench-cli                     # the median of 7 calls each, on a quiet machine

Floor: `python -c pass`. Peer: the same with an import of pydantic and PyYAML, which read a spec. Stages are those of a
day of few generated clicks that is done; as Airflow's task asks is what it runs before it would submit.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from bench.report import Figure, publish
from headrace.config.installation import checkout

DS = "2026-01-08"
#: Misspelt, and bound to columns.
FAULTS = {"a key": "train.epocs=1", "a column": "features.workflow=[{columns: [usr], ops: [categorify]}]"}
STAGES = ("ingest", "features", "train", "score", "publish", "report")


def seconds(words: Sequence[str], code: int = 0, calls: int = 7) -> float:
    """Return the median time of a command that ends with an exit code."""
    taken = []
    for _ in range(calls):
        tick = time.perf_counter()
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        taken.append(time.perf_counter() - tick)
        if done.returncode != code:
            raise RuntimeError(f"{' '.join(words)} ended with {done.returncode}: {done.stderr[-2000:]}")
    return median(taken)


def main() -> None:
    """Measure all commands."""
    python, headrace = sys.executable, str(Path(sys.executable).with_name("headrace"))
    floor = seconds([python, "-c", "pass"])
    peer = seconds([python, "-c", "import pydantic, yaml"])
    figures = [Figure("headrace --help", seconds([headrace, "--help"]), "s", floor, peer)]
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as home:
        day = ["--ds", DS, "--home", home]
        run = [headrace, "run", "clicks", *day]
        small = ["--set", "generate.rows_per_day=5000"]
        for name, fault in FAULTS.items():
            for command in ([*run, "--set", fault], [*run, "--dry-run", "--set", fault]):
                title = f"{name} that is misspelt, headrace run{' --dry-run' if '--dry-run' in command else ''}"
                figures.append(Figure(title, seconds(command, code=2), "s", floor, peer))
        pipeline = str(checkout() / "conf" / "pipelines" / "clicks.yaml")
        program = str(checkout() / "python" / "jobs" / "check_specs.py")
        parsed = seconds([python, program, pipeline])
        figures.append(Figure("the DAG parser's look at a spec", parsed, "s", floor, peer))
        subprocess.run(
            [headrace, "generate", "clicks", "--until", DS, "--home", home, *small], check=True, capture_output=True
        )
        subprocess.run([*run, *small], check=True, capture_output=True)
        for stage in STAGES:
            elapsed = seconds([*run, *small, "--from", stage, "--to", stage])
            figures.append(Figure(f"{stage} with nothing to do, headrace run", elapsed, "s", floor, peer))
            words = [headrace, "spark-properties", "clicks", "--unless-done", stage, *day, *small]
            figures.append(Figure(f"{stage} with nothing to do, as Airflow asks", seconds(words), "s", floor, peer))
        figures.append(Figure("a day with nothing to do, headrace run", seconds([*run, *small]), "s", floor, peer))
    publish("cli", figures)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    main()
