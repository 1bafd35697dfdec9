"""Kernels of GPUs against torch: lookups, updates and the fused interaction."""

from __future__ import annotations

import json

import pytest
import torch

from headrace.models.feature_interaction_triton import interact, interaction_width
from headrace.models.layers import pairwise_dots
from tests.gpu.conftest import DEVICE


def test_the_bench_of_a_gpu_runs_through(capsys: pytest.CaptureFixture[str]) -> None:
    if DEVICE == "cuda":
        pytest.skip("a rehearsal is for the interpreter")
    from bench.gpu import run

    parts = ["floors", "embedding zipf", "step dlrm zipf", "step dcn uniform", "map", "cache", "product zipf"]
    assert run.main(["--tiny", "--parts", *parts]) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])["figures"]
    assert {
        "gather TB/s",
        "embedding step, zipf, 4",
        "dlrm step, zipf, 4",
        "dcn step, uniform, 4",
        "cached table, zipf, 8",
        "training's own step, zipf, 4",
    } <= {f["what"] for f in figures}


def test_a_part_that_fails_costs_no_other_its_figures(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if DEVICE == "cuda":
        pytest.skip("a rehearsal is for the interpreter")
    from bench.gpu import run, workloads

    def fails(*_: object) -> None:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(workloads, "map_rows", fails)
    assert run.main(["--tiny", "--parts", "map", "cache"]) == 1
    out = capsys.readouterr().out
    assert "FAILED: RuntimeError: out of luck" in out
    assert "cached table" in out


def duplicates(addresses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    values, order = torch.sort(addresses, stable=True)
    unique, counts = torch.unique_consecutive(values, return_counts=True)
    return unique, counts.cumsum(0) - counts, order


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lookup(dtype: torch.dtype) -> None:
    from headrace.embeddings.kernels import gpu

    torch.manual_seed(0)
    table = torch.randn(50, 12, device=DEVICE).to(dtype)
    index = torch.randint(0, 50, (40,), device=DEVICE, dtype=torch.int32)
    assert torch.equal(gpu.pool_sum(table, index, 40), table[index.long()].float())
    starts = torch.tensor([0, 0, 3, 3, 17, 40], device=DEVICE)  # empty bags in front, between and behind
    weights = torch.randn(40, device=DEVICE)
    bag = torch.bucketize(torch.arange(40, device=DEVICE), starts, right=True) - 1
    for w in (None, weights):
        rows = table[index.long()].double() * (1.0 if w is None else w.double()[:, None])
        expected = torch.zeros(6, 12, dtype=torch.float64, device=DEVICE).index_add_(0, bag, rows)
        actual = gpu.pool_sum(table, index, 6, starts, w)
        torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)
    assert gpu.pool_sum(table, index[:0], 0).shape == (0, 12)


@pytest.mark.parametrize("bags", [False, True])
def test_rowwise_adagrad_with_a_very_popular_row(bags: bool) -> None:
    from headrace.embeddings.kernels import gpu

    torch.manual_seed(1)
    n, dim, lr, decay = 700, 12, 0.1, 0.01
    addresses = torch.randint(0, 40, (n,), device=DEVICE)
    addresses[::3] = 7  # more than two parts; others less than one
    addresses[1 : 2 * gpu.PART : 2] = 9
    table = torch.randn(60, dim, device=DEVICE)
    state = torch.rand(60, 1, device=DEVICE)
    unique, starts, order = duplicates(addresses)
    counts = torch.bincount(addresses)
    assert counts[7] > 3 * gpu.PART
    assert (counts[unique] < gpu.PART).any()

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
    expected_state = state.double() + total.square().mean(1, keepdim=True)
    expected = table.double() - lr * total / (expected_state.sqrt() + 1e-10)

    initial, runs = table.clone(), []
    for _ in range(2):
        table.copy_(initial)
        state_copy = state.clone()
        gpu.rowwise_adagrad(
            table,
            state_copy,
            unique,
            starts,
            order,
            grad,
            lr=lr,
            decay=decay,
            bag=bag,
            weights=weights,
            divisor=divisor,
        )
        runs.append((table.clone(), state_copy))
    assert all(torch.equal(x, y) for x, y in zip(*runs, strict=True))
    torch.testing.assert_close(table.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state_copy.double(), expected_state, rtol=1e-5, atol=1e-5)
    assert torch.equal(table[~touched], initial[~touched])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_by_chance_is_right_on_average(dtype: torch.dtype) -> None:
    from headrace.embeddings.kernels import gpu

    rows, dim, lr = 16, 256, 0.1
    step_below_1 = 2.0**-8 if dtype is torch.bfloat16 else 2.0**-11
    start = torch.full((rows, dim), 1.0, device=DEVICE).to(dtype)
    every = torch.arange(rows, device=DEVICE)
    # The state is so large that a step is a quarter of that to the next number below 1.
    grad = torch.full((rows, dim), 1.0, device=DEVICE)
    root = lr / (step_below_1 / 4)
    state = torch.full((rows, 1), root**2 - 1, device=DEVICE)

    def stepped(seed: int | None) -> torch.Tensor:
        table = start.clone()
        gpu.rowwise_adagrad(table, state.clone(), every, every, every, grad, lr=lr, seed=seed)
        return table.float()

    if DEVICE == "cuda":  # the interpreter cuts off
        assert (stepped(None) == 1.0).all()  # to nearest, the step is lost
    once = stepped(3)
    assert set(once.unique().tolist()) == {1.0, 1.0 - step_below_1}
    share = 0.25
    deviation = (share * (1 - share) / (rows * dim)) ** 0.5
    assert abs(float((once < 1).double().mean()) - share) < 4 * deviation
    assert torch.equal(once, stepped(3))
    assert not torch.equal(once, stepped(4))
    with pytest.raises(ValueError, match="are not rounded"):
        gpu.rowwise_adagrad(start.float(), state, every, every, every, grad, lr=lr, seed=1)


def test_small_halves_are_rounded_by_chance_too() -> None:
    """Below 2^-14 the numbers of float16 are all 2^-24 apart."""
    from headrace.embeddings.kernels import gpu

    place = 2.0**-24
    start = torch.tensor([[3.0, -5.0, 0.0, 900.0]], device=DEVICE).mul(place).half().repeat(60, 32)
    every = torch.arange(len(start), device=DEVICE)
    grad = torch.ones(start.shape, device=DEVICE)
    table = start.clone()
    # A step of three tenths of a place: lr * 1 / sqrt(1).
    gpu.rowwise_adagrad(
        table, torch.zeros(len(start), 1, device=DEVICE), every, every, every, grad, lr=0.3 * place, seed=5
    )
    moved = (start.float() - table.float()) / place
    assert set(moved.unique().tolist()) == {0.0, 1.0}
    shares = moved.view(60, 32, 4).mean((0, 1))
    assert (shares - 0.3).abs().max() < 4 * (0.21 / (60 * 32)) ** 0.5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", [0x7FFFFFFF, -1, 0x7FC00000, 0x7F800001])
def test_rounding_by_chance_keeps_what_is_not_a_number(dtype: torch.dtype, bits: int) -> None:
    """Also the NaN that a GPU computes, all ones: what is added to its bits must not carry it to a zero."""
    from headrace.embeddings.kernels import gpu

    rows, dim = 8, 32
    every = torch.arange(rows, device=DEVICE)
    grad = torch.ones(rows, dim, device=DEVICE)
    grad[3] = torch.tensor([bits], dtype=torch.int32, device=DEVICE).view(torch.float32)
    table = torch.ones(rows, dim, device=DEVICE).to(dtype)
    state = torch.zeros(rows, 1, device=DEVICE)
    gpu.rowwise_adagrad(table, state, every, every, every, grad, lr=0.1, seed=7)
    assert table[3].isnan().all()
    assert state[3].isnan().all()
    assert torch.cat([table[:3], table[4:]]).isfinite().all()


@pytest.mark.parametrize(("samples", "features", "dim"), [(3, 26, 20), (2, 1, 16), (0, 3, 8)])
def test_products_and_gradients_equal_torch(samples: int, features: int, dim: int) -> None:
    torch.manual_seed(1)
    # On a card float32 would be multiplied as TF32.
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    near = {"rtol": 2e-2, "atol": 5e-2} if DEVICE == "cuda" else {"rtol": 1e-5, "atol": 1e-5}
    x = torch.randn(samples, dim, device=DEVICE, dtype=dtype, requires_grad=True)
    vectors = torch.randn(samples, features, dim, device=DEVICE, dtype=dtype, requires_grad=True)
    out = interact(x, vectors)
    a, b = (t.detach().double().requires_grad_() for t in (x, vectors))
    expected = torch.cat([a, pairwise_dots(torch.cat([a.unsqueeze(1), b], dim=1))], dim=1)
    assert out.shape == (samples, interaction_width(features, dim))
    assert not out[:, expected.shape[1] :].any()
    torch.testing.assert_close(out[:, : expected.shape[1]].double(), expected, **near)
    weight = torch.randn(out.shape, device=DEVICE, dtype=dtype)
    (out * weight).sum().backward()
    (expected * weight[:, : expected.shape[1]].double()).sum().backward()
    assert x.grad is not None
    assert vectors.grad is not None
    torch.testing.assert_close(x.grad.double(), a.grad, **near)
    torch.testing.assert_close(vectors.grad.double(), b.grad, **near)
