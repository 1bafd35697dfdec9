"""Tests of what runs on a GPU: there, or by Triton's interpreter in a process of its own (tests/unit/test_gpu.py)."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
#: The interpreter is chosen when a kernel is defined, so only a process that begins so can have it.
collect_ignore_glob = [] if HAS_GPU or os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]


@pytest.fixture
def device() -> str:
    """Where the kernels work here."""
    return DEVICE


@pytest.fixture
def kernels_everywhere(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Without a GPU the kernels, interpreted, take the work of tables in host memory. Counts their calls."""
    from headrace.embeddings import native
    from headrace.embeddings.gpu import dispatch, kernels

    calls: dict[str, int] = {}
    # The interpreter keeps where it is in global variables: ranks that are threads take turns.
    turn = threading.Lock()

    def counted(name: str, work: Callable[..., Any], *args: Any, **more: Any) -> Any:
        calls[name] = calls.get(name, 0) + 1
        with turn:
            return work(*args, **more)

    for name in ("pool_sum", "rowwise_adagrad"):
        monkeypatch.setattr(kernels, name, partial(counted, name, getattr(kernels, name)))
    if not HAS_GPU:
        monkeypatch.setattr(native, "library", lambda: None)
        monkeypatch.setattr(dispatch, "usable", lambda *t: all(x.is_floating_point() for x in t))
    return calls
