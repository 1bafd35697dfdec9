"""Programs that call a library built with sanitizers, in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from headrace.config.installation import checkout


def run(module: str, library: str, *args: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m MODULE LIBRARY ARGS`, the library being one of build/native; skips the test where it is not."""
    built = checkout() / "build" / "native" / library
    if not built.is_file():
        pytest.skip("the sanitizer build is not here: make native-cuda")
    asan = subprocess.run(["g++", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    return subprocess.run(
        [sys.executable, "-m", module, str(built), *args],
        cwd=checkout(),
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"LD_PRELOAD": asan.stdout.strip(), "ASAN_OPTIONS": "detect_leaks=0"},
    )
