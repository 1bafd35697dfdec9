"""A day appended to yesterday's dataset, beside the same day's dataset written whole.

    make bench-append                        # 8 days of 0.2 M generated clicks
    python -m bench.bench_append 0.05        # millions of rows a day

Both have the day before decoded already, as on any day. Transform and write are what append spares; the fit counts the
vocabularies over the whole window either way.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.report import Figure, publish

_HEADRACE = (sys.executable, "-m", "headrace.cli")
FIRST, DS = "2026-01-07", "2026-01-08"
_FIT, _WRITE = re.compile(r"fit took ([\d.]+) s"), re.compile(r"wrote [\d,]+ rows (?:of \d+ days )?in ([\d.]+) s")


def features(home: Path, ds: str, *settings: str) -> tuple[float, float]:
    """Run a day up to its dataset; seconds of the fit, and of transform and write."""
    command = [
        sys.executable,
        "-m",
        "headrace.cli",
        "run",
        "clicks",
        "--home",
        str(home),
        "--ds",
        ds,
        "--to",
        "features",
    ]
    done = subprocess.run([*command, *settings], check=True, capture_output=True, text=True)
    fit, write = (pattern.findall(done.stdout + done.stderr) for pattern in (_FIT, _WRITE))
    return float(fit[-1]), float(write[-1])


def main(millions: float) -> None:
    """Measure one size."""
    home = Path(tempfile.mkdtemp(prefix="headrace-bench-"))
    rows = ("--set", f"generate.rows_per_day={int(millions * 1e6)}")
    append = ("--set", "features.append=true")
    try:
        generate = [
            sys.executable,
            "-m",
            "headrace.cli",
            "generate",
            "clicks",
            "--home",
            str(home),
            "--until",
            DS,
            *rows,
        ]
        subprocess.run(generate, check=True)
        features(home, FIRST, *rows, *append)
        fit, write = features(home, DS, *rows, *append)
        whole_fit, whole_write = features(home, DS, *rows)
    finally:
        shutil.rmtree(home, ignore_errors=True)
    size = f"8 days of {millions:g} M rows"
    publish("append", [
        Figure(f"transform and write, appended, {size}; peer: written whole", write, "s", peer=whole_write),
        Figure(f"fit, appended, {size}; peer: written whole", fit, "s", peer=whole_fit),
    ])  # fmt: skip


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 0.2)
