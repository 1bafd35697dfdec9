"""Each multi-task model beside its paper's formulas, written row by row in float64: all outputs and all gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headrace.config.model_args import ESMMArgs, MMoEArgs, PLEArgs, SharedBottomArgs
from headrace.errors import UserError
from headrace.models.inputs import InputFeatures, Inputs
from headrace.models.multitask import ESMM, PLE, MMoE, SharedBottom

TASKS = ("click", "items", "value")  # `items` is a word of torch's containers, too
FEATURES = InputFeatures(
    {"age": 1, "scores": 2}, ("user", "item"), 4, tasks=TASKS, products={"both": ("click", "items")}
)
ROWS = 6
Weights = dict[str, Tensor]


def _mlp(w: Weights, name: str, x: Tensor, widths: tuple[int, ...], out: int | None = None) -> Tensor:
    """Hidden layers with ReLU, and a linear layer behind them where there is an output."""
    for i in range(len(widths) + (out is not None)):
        x = w[f"{name}.{2 * i}.weight"] @ x + w[f"{name}.{2 * i}.bias"]
        if i < len(widths):
            x = torch.clamp(x, min=0)
    return x


def _mixed(w: Weights, name: str, x: Tensor, experts: list[Tensor]) -> Tensor:
    shares = torch.exp(w[f"{name}.linear.weight"] @ x)
    total = torch.zeros_like(experts[0])
    for share, expert in zip(shares / shares.sum(), experts, strict=True):
        total = total + share * expert
    return total


def _towers(w: Weights, xs: list[Tensor], widths: tuple[int, ...]) -> list[Tensor]:
    return [_mlp(w, f"towers.towers.{k}", x, widths, 1)[0] for k, x in enumerate(xs)]


def _shared_bottom(args: SharedBottomArgs) -> Callable[[Weights, Tensor], list[Tensor]]:
    return lambda w, x: _towers(w, [_mlp(w, "bottom", x, args.bottom_mlp)] * 3, args.tower_mlp)


def _mmoe(args: MMoEArgs) -> Callable[[Weights, Tensor], list[Tensor]]:
    def row(w: Weights, x: Tensor) -> list[Tensor]:
        experts = [_mlp(w, f"experts.experts.{e}", x, args.expert_mlp) for e in range(args.experts)]
        return _towers(w, [_mixed(w, f"gates.{k}", x, experts) for k in range(3)], args.tower_mlp)

    return row


def _ple(args: PLEArgs) -> Callable[[Weights, Tensor], list[Tensor]]:
    def row(w: Weights, x: Tensor) -> list[Tensor]:
        task_states, shared = [x, x, x], x
        for level in range(args.levels):
            prefix = f"levels.{level}"
            task_experts = [
                [
                    _mlp(w, f"{prefix}.own.{k}.experts.{e}", task_states[k], args.expert_mlp)
                    for e in range(args.task_experts)
                ]
                for k in range(3)
            ]
            common = [
                _mlp(w, f"{prefix}.shared.experts.{e}", shared, args.expert_mlp) for e in range(args.shared_experts)
            ]
            task_states = [_mixed(w, f"{prefix}.gates.{k}", task_states[k], task_experts[k] + common) for k in range(3)]
            if level + 1 < args.levels:
                shared = _mixed(
                    w, f"{prefix}.shared_gate", shared, [*task_experts[0], *task_experts[1], *task_experts[2], *common]
                )
        return _towers(w, task_states, args.tower_mlp)

    return row


_BOTTOM = SharedBottomArgs(bottom_mlp=(7, 5), tower_mlp=(4,))
_MMOE = MMoEArgs(experts=3, expert_mlp=(6, 5), tower_mlp=(4,))
_ONE_LEVEL = PLEArgs(levels=1, shared_experts=1, task_experts=2, expert_mlp=(5,), tower_mlp=())
_PLE = PLEArgs(levels=3, shared_experts=2, task_experts=1, expert_mlp=(8, 6), tower_mlp=(5,))
_ESMM = ESMMArgs(tower_mlp=(5, 4))

CASES: dict[str, tuple[Any, Any, Callable[[Weights, Tensor], list[Tensor]]]] = {
    "shared bottom": (SharedBottom, _BOTTOM, _shared_bottom(_BOTTOM)),
    "mmoe": (MMoE, _MMOE, _mmoe(_MMOE)),
    "cgc": (PLE, _ONE_LEVEL, _ple(_ONE_LEVEL)),
    "ple": (PLE, _PLE, _ple(_PLE)),
    "esmm": (ESMM, _ESMM, lambda w, x: _towers(w, [x] * 3, _ESMM.tower_mlp)),
}


@pytest.mark.parametrize("case", CASES)
def test_outputs_and_gradients_are_the_papers(case: str) -> None:
    made_of, args, row = CASES[case]
    torch.manual_seed(11)
    model: nn.Module = made_of(FEATURES, args).double()
    with torch.no_grad():  # starts near zero would leave the ReLUs of small layers dead
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.5 + 0.1)
    numbers = torch.randn(ROWS, FEATURES.continuous_columns, dtype=torch.float64)
    vectors = torch.randn(ROWS, len(FEATURES.categorical), FEATURES.embedding_dim, dtype=torch.float64)
    shares = torch.randn(len(TASKS), ROWS, dtype=torch.float64)  # so that each output's gradient counts differently

    model_vectors = vectors.clone().requires_grad_()
    outputs = model(Inputs(FEATURES, numbers, model_vectors))
    logits = torch.stack([outputs[task] for task in TASKS])
    (logits * shares).sum().backward()
    assert outputs.keys() == {"logits", *TASKS}
    assert outputs["logits"] is outputs["click"]

    weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    reference_vectors = vectors.clone().requires_grad_()
    flat = [torch.cat([numbers[b], *reference_vectors[b]]) for b in range(ROWS)]
    expected = torch.stack([torch.stack(row(weights, x)) for x in flat], dim=1)
    (expected * shares).sum().backward()

    torch.testing.assert_close(logits, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(model_vectors.grad, reference_vectors.grad, rtol=1e-9, atol=1e-9)
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        assert p.grad.abs().sum() > 0, name
        torch.testing.assert_close(p.grad, weights[name].grad, rtol=1e-9, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("made_of", [SharedBottom, MMoE, PLE, ESMM])
def test_one_task_and_features_of_one_kind_are_enough(made_of: Any) -> None:
    products = {"twice": ("label", "label")}
    for features in (
        InputFeatures({}, ("user",), 5, products=products),
        InputFeatures({"age": 1}, (), 5, products=products),
    ):
        networks = []
        for _ in range(2):
            torch.manual_seed(3)
            networks.append(made_of(features, made_of.Args(dropout=0.1)).eval())
        a, b = (m.state_dict() for m in networks)
        assert all(torch.equal(a[k], b[k]) for k in a)
        numbers = torch.randn(ROWS, features.continuous_columns)
        vectors = torch.randn(ROWS, len(features.categorical), features.embedding_dim)
        outputs = networks[0](Inputs(features, numbers, vectors))
        assert torch.equal(outputs["logits"], outputs["label"])
        assert torch.isfinite(outputs["logits"]).all()
        assert networks[0](Inputs(features, numbers[:0], vectors[:0]))["logits"].shape == (0,)


def test_esmm_wants_a_product() -> None:
    with pytest.raises(UserError, match=r"train.tasks has none: write click_and_purchase: \{product:"):
        ESMM(InputFeatures({"age": 1}, (), 5, tasks=("click", "purchase")), ESMMArgs())


def test_targets_are_those_of_tasks() -> None:
    labels, later = torch.tensor([0.0, 1.0]), torch.tensor([torch.nan, 1.0])
    inputs = Inputs(FEATURES, torch.zeros(2, 3), torch.zeros(2, 2, 4), labels, targets={"value": later})
    assert inputs.target("click") is labels
    assert inputs.target("value") is later
    with pytest.raises(ValueError, match="no label of 'items' here"):
        inputs.target("items")
