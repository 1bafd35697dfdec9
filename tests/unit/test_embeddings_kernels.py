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
    # On a GPU the rehearsal is left out.
    assert ("6 passed" if more.get("TRITON_INTERPRET") else "5 passed") in ran.stdout


@pytest.mark.skipif(INSIDE or torch.cuda.is_available(), reason="there is a GPU, or this is the process")
def test_the_bench_of_a_gpu_says_that_there_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    from bench.gpu import run

    assert run.main([]) == 3
    assert "no GPU here: these figures are missing" in capsys.readouterr().err


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
only_inside = pytest.mark.skipif(not INSIDE, reason="runs in a process of its own")


@only_inside
def test_the_bench_of_a_gpu_runs_through(capsys: pytest.CaptureFixture[str]) -> None:
    if DEVICE == "cuda":
        pytest.skip("a rehearsal is for the interpreter")
    from bench.gpu import run

    assert run.main(["--rehearse"]) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])["figures"]
    assert {"gather TB/s", "embedding step, zipf, 4", "dlrm step, uniform, 4", "dcn step, zipf, 4"} <= {
        f["what"] for f in figures
    }


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


@only_inside
def test_rounding_by_chance_is_right_on_average() -> None:
    from headrace.embeddings import kernels

    rows, dim, lr = 64, 64, 0.1
    start = torch.full((rows, dim), 1.0, device=DEVICE).bfloat16()
    every = torch.arange(rows, device=DEVICE)
    grad = torch.full((rows, dim), 1.0, device=DEVICE)
    # The state makes each step lr / sqrt(9999 + 1) = 0.001: a quarter of the 2**-8 to the next number below 1.
    wanted = 1.0 - lr / 100
    state = torch.full((rows, 1), 9999.0, device=DEVICE)

    def stepped(seed: int | None) -> torch.Tensor:
        table = start.clone()
        kernels.rowwise_adagrad(table, state.clone(), every, every, every, grad, lr=lr, seed=seed)
        return table.float()

    if DEVICE == "cuda":  # the interpreter cuts off
        assert (stepped(None) == 1.0).all()  # to nearest, the step is lost
    once = stepped(3)
    assert set(once.unique().tolist()) == {1.0, 1.0 - 2.0**-8}
    share = (1.0 - wanted) * 2**8
    deviation = (share * (1 - share) / (rows * dim)) ** 0.5
    assert abs(float((once < 1).double().mean()) - share) < 4 * deviation
    assert torch.equal(once, stepped(3))
    assert not torch.equal(once, stepped(4))
    with pytest.raises(ValueError, match="only bfloat16"):
        kernels.rowwise_adagrad(start.float(), state, every, every, every, grad, lr=lr, seed=1)


@pytest.mark.skipif(INSIDE, reason="the interpreter's kernels are not compiled")
@pytest.mark.parametrize("capability", [80, 90])
def test_the_kernels_compile_for_both_generations(capability: int) -> None:
    """With the assembler that Triton brings; no GPU."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from headrace.embeddings import kernels

    types = {
        "table": "*bf16", "index": "*i32", "starts": "*i64", "weights": "*fp32", "out": "*fp32", "n": "i32",
        "bags": "i32", "dim": "i32", "state": "*fp32", "unique": "*i64", "order": "*i64", "bag": "*i64",
        "divisor": "*fp32", "grad": "*fp32", "sums": "*fp32", "first_part": "*i64", "rows": "i32", "lr": "fp32",
        "decay": "fp32", "eps": "fp32", "seed": "i32", "part_row": "*i64", "parts": "*i64",
    }  # fmt: skip
    flags = {"BAGS": True, "WEIGHTED": True, "DIVIDED": True, "STOCHASTIC": True, "PART": 64, "DIM": 128, "ROWS": 32}
    for kernel in (kernels._pool, kernels._gather, kernels._parts, kernels._rowwise_adagrad):
        constants = {n: flags[n] for n in kernel.arg_names if n in flags}
        given = {n: "constexpr" if n in constants else types[n] for n in kernel.arg_names}
        made = compile(ASTSource(kernel, given, constants), target=GPUTarget("cuda", capability, 32))
        assert f".target sm_{capability}" in made.asm["ptx"]
        assert made.asm["cubin"][:4] == b"\x7fELF"
