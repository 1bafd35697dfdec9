"""A day appended to yesterday's dataset, beside the same day's dataset written whole.

    make bench-append                        # 8 days of 0.2 M generated clicks
    python -m bench.bench_append 0.05        # millions of rows a day

Both find the days before decoded, as on any day. Transform and write are what appending spares; the fit counts the
vocabularies over the whole window either way. Each is one run of the stage in a process of its own.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.report import Figure, publish

FIRST, DS = "2026-01-07", "2026-01-08"
_FIT, _WRITE = re.compile(r"fit took ([\d.]+) s"), re.compile(r"wrote [\d,]+ rows (?:of \d+ days )?in ([\d.]+) s")


def headrace(home: Path, *words: str) -> str:
    """Run a command of headrace and return its output.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    command = [sys.executable, "-m", "headrace.cli", *words, "--home", str(home)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return done.stdout + done.stderr


def features(home: Path, ds: str, *settings: str) -> tuple[float, float]:
    """Run a day up to its dataset; seconds of the fit, and of transform and write."""
    output = headrace(home, "run", "clicks", "--ds", ds, "--to", "features", *settings)
    fit, write = (pattern.findall(output) for pattern in (_FIT, _WRITE))
    return float(fit[-1]), float(write[-1])


def main(millions: float) -> None:
    """Measure one size."""
    rows = ("--set", f"generate.rows_per_day={int(millions * 1e6)}")
    append = ("--set", "features.append=true")
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as name:
        home = Path(name)
        headrace(home, "generate", "clicks", "--until", DS, *rows)
        features(home, FIRST, *rows, *append)
        fit, write = features(home, DS, *rows, *append)
        whole_fit, whole_write = features(home, DS, *rows)
    size = f"8 days of {millions:g} M rows"
    publish(
        "append",
        [
            Figure(f"transform and write, appended, {size}; peer: written whole", write, "s", peer=whole_write),
            Figure(f"fit, appended, {size}; peer: written whole", fit, "s", peer=whole_fit),
        ],
    )


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 0.2)
