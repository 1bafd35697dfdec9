"""GPU code without a GPU: run by Triton's interpreter in a process of its own, and compiled to machine code."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from headrace.config.installation import checkout


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU tests/gpu are tests like all others")
def test_by_the_interpreter() -> None:
    """The interpreter is chosen when a kernel is defined, hence a process of its own."""
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n0", "--durations", "5", "--confcutdir=tests/gpu", "tests/gpu"],
        cwd=checkout(),
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ran.returncode == 0, ran.stdout[-6000:]
    assert " passed" in ran.stdout
    assert "skipped" not in ran.stdout.splitlines()[-1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_bench_of_a_gpu_says_that_there_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    from bench.gpu import run

    assert run.main([]) == 3
    assert "no GPU here: these figures are missing" in capsys.readouterr().err


#: What each argument of a kernel is, by its name.
TYPES = {
    "table": "*bf16",
    "index": "*i32",
    "starts": "*i64",
    "weights": "*fp32",
    "out": "*fp32",
    "n": "i32",
    "bags": "i32",
    "dim": "i32",
    "state": "*fp32",
    "unique": "*i64",
    "names": "*i64",
    "order": "*i64",
    "bag": "*i64",
    "divisor": "*fp32",
    "grad": "*fp32",
    "sums": "*fp32",
    "first_part": "*i64",
    "rows": "i32",
    "lr": "fp32",
    "decay": "fp32",
    "eps": "fp32",
    "seed": "i32",
    "part_row": "*i64",
    "parts": "*i64",
    "keys": "*i64",
    "numbers": "*i64",
    "ids": "*i64",
    "new_numbers": "*i64",
    "last": "i32",
    "x": "*bf16",
    "features": "i32",
    "of_x": "*bf16",
    "width": "i32",
}
CONSTANTS = {
    "BAGS": True,
    "WEIGHTED": True,
    "DIVIDED": True,
    "STOCHASTIC": True,
    "PART": 64,
    "DIM": 128,
    "ROWS": 32,
    "BLOCK": 256,
    "ALL": 32,
    "PRECISION": "ieee",
}


def kernels_and_types() -> list[tuple[Any, dict[str, str]]]:
    from headrace.embeddings.kernels import gpu
    from headrace.models import feature_interaction_triton as interaction

    kernels: list[tuple[Any, dict[str, str]]] = [(k, {}) for k in (gpu._pool, gpu._gather, gpu._parts)]
    kernels += [(gpu._rowwise_adagrad, {"table": t}) for t in ("*fp32", "*fp16", "*bf16")]
    kernels += [(gpu._find, {"out": "*i64"}), (gpu._put, {})]
    # As autocast gives them: the bottom vector of 16 bits, the tables' vectors float32.
    wide = {"vectors": "*fp32", "of_vectors": "*fp32", "out": "*bf16", "grad": "*bf16"}
    full = dict.fromkeys(("x", "of_x", "vectors", "of_vectors", "out", "grad"), "*fp32")
    interactions = interaction._interact, interaction._interact_back
    return [*kernels, *((k, types) for k in interactions for types in (wide, full))]


class Launches:
    """A stand-in for a kernel: records by which key Triton would look its machine code up, launch by launch."""

    def __init__(self, kernel: Any) -> None:
        from triton.backends.compiler import GPUTarget
        from triton.compiler import make_backend
        from triton.runtime.jit import create_function_from_signature

        backend = make_backend(GPUTarget("cuda", 90, 32))
        self.specialize = create_function_from_signature(kernel.signature, kernel.params, backend)
        self.keys: set[str] = set()

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any) -> None:
            self.keys.add(str(self.specialize(*args)[1]))

        return launch


def test_batches_of_other_sizes_compile_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers that are 1 or multiples of 16, and addresses that are multiples of 16 bytes, have code of their own."""
    from headrace.embeddings.kernels import gpu

    names = ("_pool", "_gather", "_parts", "_rowwise_adagrad", "_find", "_put")
    launches = {name: Launches(getattr(gpu, name)) for name in names}
    for name, recorder in launches.items():
        monkeypatch.setattr(gpu, name, recorder)
    table, state = torch.zeros(64, 16, dtype=torch.bfloat16), torch.zeros(64, 1)
    known = gpu.DeviceMap(torch.device("cpu"))
    for step, n in enumerate((1, 2, 15, 16, 17, 32, 33, 48, 160, 161), start=1):
        for shift in (0, 1):  # a part of a larger batch begins anywhere
            places = torch.arange(n + shift)[shift:]
            index, weights = places.int(), torch.ones(n + shift)[shift:]
            gpu.pool_sum(table, torch.zeros(n + shift, dtype=torch.int32)[shift:], n)
            gpu.pool_sum(table, index, n, places, weights)
            grad = torch.zeros(n, 16)
            more: dict[str, Any] = {"bag": places, "weights": weights, "divisor": torch.ones(n, 1)}
            gpu.rowwise_adagrad(table, state, places, places, places, grad, lr=0.1, seed=step, **more)
            known.find(places)
            known.add(places + 1_000 * step + 500 * shift)
    assert {name: len(recorder.keys) for name, recorder in launches.items()} == dict.fromkeys(names, 1)


@pytest.mark.parametrize("capability", [80, 90])
def test_the_kernels_compile_for_both_generations(capability: int) -> None:
    """The assembler is the one that Triton brings; no GPU is needed."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    for kernel, special in kernels_and_types():
        constants = {n: CONSTANTS[n] for n in kernel.arg_names if n in CONSTANTS}
        if special.get("table") == "*fp32":
            constants["STOCHASTIC"] = False
        signature = {n: "constexpr" if n in constants else (TYPES | special)[n] for n in kernel.arg_names}
        compiled = compile(ASTSource(kernel, signature, constants), target=GPUTarget("cuda", capability, 32))
        assert f".target sm_{capability}" in compiled.asm["ptx"]
        assert compiled.asm["cubin"][:4] == b"\x7fELF"
