"""The Triton kernels against float64 torch, by Triton's interpreter where there is no GPU (a process of its own: the
choice is made when a kernel is defined)."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from headrace.workspace import checkout

INSIDE = os.environ.get("HEADRACE_KERNELS_INSIDE") == "1"


@pytest.mark.skipif(INSIDE, reason="this is the process")
def test_in_a_process_of_its_own() -> None:
    more = {"HEADRACE_KERNELS_INSIDE": "1"} | ({} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"})
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-n0", __file__],
        cwd=checkout(), env=os.environ | more, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout[-4000:]
    assert "4 passed, 3 skipped" in ran.stdout


@pytest.mark.skipif(INSIDE or torch.cuda.is_available(), reason="there is a GPU, or this is the process")
def test_the_bench_of_a_gpu_says_that_there_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    from bench.gpu import run

    assert run.main([]) == 3
    assert "no GPU here: these figures are missing" in capsys.readouterr().err


@pytest.mark.skipif(INSIDE, reason="runs beside the process")
def test_the_bench_of_a_gpu_runs_through() -> None:
    ran = subprocess.run(
        [sys.executable, "bench/gpu/run.py", "--rehearse"],
        cwd=checkout(), env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-4000:]
    figures = json.loads(ran.stdout.splitlines()[-1])["figures"]
    assert {"gather TB/s", "embedding step, zipf, 4", "dlrm step, uniform, 4", "dcn step, zipf, 4"} <= {
        f["what"] for f in figures
    }


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
only_inside = pytest.mark.skipif(not INSIDE, reason="runs in a process of its own")


def duplicates(addresses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    values, order = torch.sort(addresses, stable=True)
    unique, counts = torch.unique_consecutive(values, return_counts=True)
    return unique, counts.cumsum(0) - counts, order


@only_inside
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lookup(dtype: torch.dtype) -> None:
    from headrace.embeddings import kernels

    torch.manual_seed(0)
    table = torch.randn(50, 12, device=DEVICE).to(dtype)
    index = torch.randint(0, 50, (40,), device=DEVICE, dtype=torch.int32)
    assert torch.equal(kernels.pool_sum(table, index, 40), table[index.long()].float())
    starts = torch.tensor([0, 0, 3, 3, 17, 40], device=DEVICE)  # empty bags in front, between and behind
    weights = torch.randn(40, device=DEVICE)
    bag = torch.bucketize(torch.arange(40, device=DEVICE), starts, right=True) - 1
    for w in (None, weights):
        rows = table[index.long()].double() * (1.0 if w is None else w.double()[:, None])
        expected = torch.zeros(6, 12, dtype=torch.float64, device=DEVICE).index_add_(0, bag, rows)
        got = kernels.pool_sum(table, index, 6, starts, w)
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)
    assert kernels.pool_sum(table, index[:0], 0).shape == (0, 12)


@only_inside
@pytest.mark.parametrize("bags", [False, True])
def test_rowwise_adagrad_with_a_very_popular_row(bags: bool) -> None:
    from headrace.embeddings import kernels

    torch.manual_seed(1)
    n, dim, lr, decay = 700, 12, 0.1, 0.01
    addresses = torch.randint(0, 40, (n,), device=DEVICE)
    addresses[::3] = 7  # more than two parts; others less than one
    addresses[1 : 2 * kernels.PART : 2] = 9
    table = torch.randn(60, dim, device=DEVICE)
    state = torch.rand(60, 1, device=DEVICE)
    unique, starts, order = duplicates(addresses)
    counts = torch.bincount(addresses)
    assert counts[7] > 3 * kernels.PART
    assert (counts[unique] < kernels.PART).any()

    occurrences = torch.arange(n, device=DEVICE)
    bag = occurrences // 4 if bags else None
    weights = torch.rand(n, device=DEVICE) if bags else None
    divisor = torch.randint(1, 5, (n // 4, 1), device=DEVICE).float() if bags else None
    grad = torch.randn(n // 4 if bags else n, dim, device=DEVICE)
    each = grad.double()
    if bag is not None and weights is not None and divisor is not None:
        each = (grad.double() / divisor.double())[bag] * weights.double()[:, None]
    total = torch.zeros(60, dim, dtype=torch.float64, device=DEVICE).index_add_(0, addresses, each)
    touched = counts.new_zeros(60).index_add_(0, addresses, torch.ones_like(addresses)) > 0
    total = torch.where(touched[:, None], total + decay * table.double(), 0.0)
    wanted_state = state.double() + total.square().mean(1, keepdim=True)
    wanted = table.double() - lr * total / (wanted_state.sqrt() + 1e-10)

    before, runs = table.clone(), []
    for _ in range(2):
        table.copy_(before)
        again = state.clone()
        kernels.rowwise_adagrad(table, again, unique, starts, order, grad, lr=lr, decay=decay, bag=bag,
                                weights=weights, divisor=divisor)  # fmt: skip
        runs.append((table.clone(), again))
    assert all(torch.equal(x, y) for x, y in zip(*runs, strict=True))
    torch.testing.assert_close(table.double(), wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(again.double(), wanted_state, rtol=1e-5, atol=1e-5)
    assert torch.equal(table[~touched], before[~touched])
