"""Tests of what runs on a GPU: there, or by Triton's interpreter in a process of its own (tests/unit/test_gpu.py)."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from tests.gpu.pretended import Elsewhere, pretend, unwrap, wrap

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
#: The interpreter is chosen when a kernel is defined, so only a process that begins so can have it.
collect_ignore_glob = [] if HAS_GPU or os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]


@pytest.fixture
def device() -> str:
    """Return the device on which the kernels work here."""
    return DEVICE


@pytest.fixture
def kernels_everywhere(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Let the kernels, interpreted without a GPU, take the work of tables in host memory, and count their calls."""
    from headrace.compute import native
    from headrace.embeddings.kernels import dispatch, gpu

    calls: dict[str, int] = {}
    # The interpreter keeps where it is in global variables: ranks that are threads take turns.
    lock = threading.Lock()

    def counted(name: str, work: Callable[..., Any], *args: Any, **more: Any) -> Any:
        calls[name] = calls.get(name, 0) + 1
        with lock:
            return work(*args, **more)

    launch = gpu.DeviceMap._launch

    def in_turn(*args: Any) -> None:
        with lock:
            launch(*args)

    monkeypatch.setattr(gpu.DeviceMap, "_launch", in_turn)
    for name in ("pool_sum", "rowwise_adagrad"):
        monkeypatch.setattr(gpu, name, partial(counted, name, getattr(gpu, name)))
    if not HAS_GPU:
        monkeypatch.setattr(native, "library", lambda: None)
        monkeypatch.setattr(dispatch, "usable", lambda *t: all(x.is_floating_point() for x in t))
    return calls


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels take tensors of the pretended device, and those alone; ranks that are threads all pretend it."""
    if HAS_GPU:
        return
    from headrace.comm.base import run_ranks
    from headrace.embeddings.kernels import dispatch, gpu
    from headrace.models import feature_interaction_triton as interaction
    from tests import plans_support
    from tests.unit import test_embeddings_dynamic

    lock = threading.Lock()

    class Unwrapping:
        def __init__(self, kernels: Any) -> None:
            self.kernels = kernels

        def __getattr__(self, name: str) -> Any:
            def call(*args: Any, **more: Any) -> Any:
                tensors = [x for x in (*args, *more.values()) if isinstance(x, Tensor)]
                assert all(isinstance(x, Elsewhere) for x in tensors), f"{name}: a tensor of the host"
                with lock:
                    work = getattr(self.kernels, name)
                    return tree_map(wrap, work(*map(unwrap, args), **{k: unwrap(v) for k, v in more.items()}))

            return call

    table_kernels, pairs = Unwrapping(dispatch.kernels()), Unwrapping(SimpleNamespace(**vars(interaction)))
    for name in ("products", "gradients"):
        monkeypatch.setattr(interaction, name, getattr(pairs, name))
    monkeypatch.setattr(dispatch, "kernels", lambda: table_kernels)
    monkeypatch.setattr(dispatch, "usable", lambda *t: all(isinstance(x, Elsewhere) for x in t))
    monkeypatch.setattr(dispatch, "check", lambda device: None)

    def pretending(size: int, rank_main: Any) -> list[Any]:
        def body(c: Any) -> Any:
            with pretend():
                return rank_main(c)

        return run_ranks(size, body)

    for module in (test_embeddings_dynamic, plans_support):
        monkeypatch.setattr(module, "run_ranks", pretending)

    def launch(self: Any, kernel: Any, ids: Tensor, numbers: Tensor) -> None:
        arguments = (self._keys, self._numbers, ids, numbers)
        assert all(isinstance(x, Elsewhere) for x in arguments), "a map: a tensor of the host"
        with lock:
            block = gpu._BLOCK
            kernel[(-(-len(ids) // block),)](*map(unwrap, arguments), len(ids), len(self._keys) - 1, block)

    monkeypatch.setattr(gpu.DeviceMap, "_launch", launch)
