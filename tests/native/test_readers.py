"""Readers of foreign files (Parquet's pages, JSON lines, times) under AddressSanitizer and UBSan."""

from __future__ import annotations

import pytest

from tests.native import sanitized

pytestmark = pytest.mark.extra

PROGRAM = ("tests.native.fuzz_readers", "libheadrace_readers_asan.so")


def test_nothing_outside_a_damaged_file_is_read() -> None:
    ran = sanitized.run(*PROGRAM, "2000")
    assert (ran.returncode, ran.stdout) == (0, "done\n"), ran.stderr[-3000:]


def test_the_sanitizer_would_see_it() -> None:
    ran = sanitized.run(*PROGRAM, "break")
    assert ran.returncode != 0
    assert "heap-buffer-overflow" in ran.stderr
