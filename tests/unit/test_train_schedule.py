"""Learning rates beside torch's own schedulers."""

from __future__ import annotations

import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import lr_scheduler

from headrace.config import Schedule, build_spec
from headrace.errors import UserError
from headrace.train.optim import CURVES, schedule_factor

BASE = 0.4


def torchs(make: object, steps: int) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=BASE)
    scheduler = make(optimizer)  # type: ignore[operator]
    rates = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the order of calls is of no matter without gradients
        for _ in range(steps):
            rates.append(optimizer.param_groups[0]["lr"])
            scheduler.step()
    return rates


def rates_of(schedule: Schedule, total: int) -> list[float]:
    return [BASE * schedule_factor(schedule, step, total) for step in range(1, total + 1)]


def test_curves_are_torchs() -> None:
    total = 50
    expected = torchs(lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=total - 1, eta_min=0.1 * BASE), total)
    assert rates_of(Schedule(kind="cosine", final=0.1), total) == pytest.approx(expected)
    expected = torchs(lambda o: lr_scheduler.LinearLR(o, 1.0, 0.2, total_iters=total - 1), total)
    assert rates_of(Schedule(kind="linear", final=0.2), total) == pytest.approx(expected)
    expected = torchs(lambda o: lr_scheduler.StepLR(o, step_size=7, gamma=0.5), total)
    assert rates_of(Schedule(kind="step", every_steps=7, factor=0.5), total) == pytest.approx(expected)


def test_a_warm_up_comes_before_the_curve() -> None:
    warmed = rates_of(Schedule(kind="cosine", warmup_steps=10), 50)
    assert warmed[:10] == pytest.approx([BASE * (i + 1) / 10 for i in range(10)])
    assert warmed[10:] == pytest.approx(rates_of(Schedule(kind="cosine"), 40))


@given(st.sampled_from(sorted(CURVES)), st.integers(1, 300), st.integers(0, 400), st.floats(0, 1), st.integers(1, 50))
def test_rates_stay_within_bounds(kind: str, total: int, warmup: int, final: float, every_steps: int) -> None:
    schedule = Schedule.model_validate(
        {"kind": kind, "warmup_steps": warmup, "final": final, "every_steps": every_steps if kind == "step" else None}
    )
    shares = [schedule_factor(schedule, step, total) for step in range(1, total + 1)]
    assert all(0 <= s <= 1 + 1e-12 for s in shares)
    assert all(a >= b - 1e-12 for a, b in zip(shares[warmup:], shares[warmup + 1 :], strict=False))
    if kind in ("linear", "cosine") and total - warmup > 1:
        assert shares[-1] == pytest.approx(final)


def test_a_step_schedule_without_a_length_is_refused() -> None:
    with pytest.raises(UserError, match=r"train\.dense.schedule: `every_steps` is needed with `kind: step`"):
        build_spec(
            {
                "pipeline": "x",
                "source": {"format": "clicks", "path": "x"},
                "table": {"columns": [{"name": "y", "type": "int"}]},
                "features": {"label": "y", "workflow": [], "split": {"by": "position"}},
                "train": {"dense": {"schedule": {"kind": "step"}}},
            }
        )
