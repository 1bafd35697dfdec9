"""Commands of headrace for scripts."""

from __future__ import annotations

import subprocess
import sys


def headrace(*words: str, check: bool = True) -> None:
    """Run `headrace WORDS...`; what it prints is shown where it fails.

    Args:
        words: the command and its arguments.
        check: end this process where it fails.

    Raises:
        SystemExit: it failed.
    """
    command = [sys.executable, "-m", "headrace.cli", *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if check and done.returncode:
        sys.exit(f"headrace {' '.join(words)} ended with {done.returncode}:\n{done.stdout[-4000:]}")
