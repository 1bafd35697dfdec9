"""Each ranking model beside its paper's formulas, written row by row in float64: logits and all gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm

from headrace.config.model_args import DCNv2Args, DeepFMArgs, FinalMLPArgs, MaskNetArgs, WideDeepArgs
from headrace.errors import UserError
from headrace.models.inputs import InputFeatures, Inputs
from headrace.models.ranking import DCNv2, DeepFM, FinalMLP, MaskNet, WideDeep

FEATURES = InputFeatures({"age": 1, "scores": 2}, ("user", "item", "tags"), 5)
ROWS = 7
Weights = dict[str, Tensor]


def _mlp(w: Weights, name: str, x: Tensor, layers: int, *, last_relu: bool, step: int = 2) -> Tensor:
    """`layers` linear layers of a vector, ReLU between them; `step` places a layer in the module's list."""
    for i in range(layers):
        x = w[f"{name}.{i * step}.weight"] @ x + w[f"{name}.{i * step}.bias"]
        if last_relu or i < layers - 1:
            x = torch.clamp(x, min=0)
    return x


def _first_order(w: Weights, name: str, numbers: Tensor, vectors: Tensor) -> Tensor:
    total = w[f"{name}.bias"] + w[f"{name}.continuous.bias"][0]
    for j, x in enumerate(numbers):
        total = total + w[f"{name}.continuous.weight"][0, j] * x
    for v in vectors:
        total = total + v[0]
    return total


def _wide_deep(w: Weights, numbers: Tensor, vectors: Tensor) -> Tensor:
    deep = torch.cat([numbers, *(v[1:] for v in vectors)])
    return _first_order(w, "wide", numbers, vectors) + _mlp(w, "deep", deep, 3, last_relu=False)[0]


def _deepfm(w: Weights, numbers: Tensor, vectors: Tensor) -> Tensor:
    fields = [x * field for x, field in zip(numbers, w["fields"], strict=True)] + [v[1:] for v in vectors]
    total = _first_order(w, "first_order", numbers, vectors)
    for i in range(len(fields)):
        for j in range(i):
            total = total + fields[i] @ fields[j]
    return total + _mlp(w, "deep", torch.cat(fields), 3, last_relu=False)[0]


def _dcn(args: DCNv2Args) -> Callable[[Weights, Tensor, Tensor], Tensor]:
    def cross(w: Weights, layer: str, x0: Tensor, x: Tensor) -> Tensor:
        if args.low_rank is None:
            return x0 * (w[f"{layer}.linear.weight"] @ x + w[f"{layer}.linear.bias"]) + x
        shares = torch.ones(1, dtype=x.dtype)
        if args.experts > 1:
            shares = torch.exp(w[f"{layer}.gate.weight"] @ x)
            shares = shares / shares.sum()
        total = x
        for e in range(args.experts):
            low = torch.tanh(w[f"{layer}.middle"][e] @ torch.tanh(w[f"{layer}.down"][e] @ x))
            total = total + shares[e] * (x0 * (w[f"{layer}.up"][e] @ low + w[f"{layer}.bias"]))
        return total

    def row(w: Weights, numbers: Tensor, vectors: Tensor) -> Tensor:
        x0 = x = torch.cat([numbers, *vectors])
        for i in range(args.layers):
            x = cross(w, f"cross.{i}", x0, x)
        if args.structure == "stacked":
            x = _mlp(w, "deep", x, len(args.deep_mlp), last_relu=True)
        else:
            x = torch.cat([x, _mlp(w, "deep", x0, len(args.deep_mlp), last_relu=True)])
        return (w["head.weight"] @ x + w["head.bias"])[0]

    return row


def _final_mlp(args: FinalMLPArgs) -> Callable[[Weights, Tensor, Tensor], Tensor]:
    def row(w: Weights, numbers: Tensor, vectors: Tensor) -> Tensor:
        flat = torch.cat([numbers, *vectors])
        by_name = {
            "age": numbers[:1],
            "scores": numbers[1:],
            "user": vectors[0],
            "item": vectors[1],
            "tags": vectors[2],
        }
        outputs = []
        for i, names in enumerate((args.first_gate, args.second_gate)):
            x = flat
            if args.gates:
                seen = torch.cat([by_name[n] for n in names]) if names else w[f"gates.{i}.constant"][0]
                x = flat * 2 / (1 + torch.exp(-_mlp(w, f"gates.{i}.mlp", seen, 2, last_relu=False)))
            outputs.append(_mlp(w, f"streams.{i}", x, 2, last_relu=True))
        total = (w["first.weight"] @ outputs[0] + w["first.bias"] + w["second.weight"] @ outputs[1] + w["second.bias"])[
            0
        ]
        for h, (x, y) in enumerate(zip(outputs[0].chunk(args.heads), outputs[1].chunk(args.heads), strict=True)):
            total = total + x @ w["bilinear"][h] @ y
        return total

    return row


def _masknet(args: MaskNetArgs) -> Callable[[Weights, Tensor, Tensor], Tensor]:
    def block(w: Weights, name: str, guide: Tensor, x: Tensor) -> Tensor:
        x = w[f"{name}.linear.weight"] @ (_mlp(w, f"{name}.mask", guide, 2, last_relu=False) * x)
        return torch.clamp(layer_norm(x, x.shape, w[f"{name}.norm.weight"], w[f"{name}.norm.bias"]), min=0)

    def row(w: Weights, numbers: Tensor, vectors: Tensor) -> Tensor:
        guide = torch.cat([numbers, *vectors])
        norms = [(w[f"norms.{i}.weight"], w[f"norms.{i}.bias"]) for i in range(len(vectors))]
        x = torch.cat([numbers, *(layer_norm(v, v.shape, *n) for v, n in zip(vectors, norms, strict=True))])
        if args.structure == "serial":
            for i in range(len(args.blocks)):
                x = block(w, f"blocks.{i}", guide, x)
            return _mlp(w, "head", x, 1, last_relu=False)[0]
        x = torch.cat([block(w, f"blocks.{i}", guide, x) for i in range(len(args.blocks))])
        return _mlp(w, "head", x, 2, last_relu=False)[0]

    return row


_STACKED = DCNv2Args(layers=3, deep_mlp=(6, 4))
_PARALLEL = DCNv2Args(layers=1, deep_mlp=(6,), structure="parallel", low_rank=2)
_MIXTURE = DCNv2Args(layers=2, deep_mlp=(6,), low_rank=3, experts=4)
_FUSED = FinalMLPArgs(first_mlp=(8, 4), second_mlp=(6, 2), heads=2, first_gate=("user", "scores"), gate_mlp=(3,))
_UNGATED = FinalMLPArgs(first_mlp=(8, 4), second_mlp=(6, 3), gates=False)
_SERIAL = MaskNetArgs(blocks=(6, 4))
_PARALLEL_ARGS = MaskNetArgs(blocks=(6, 4), structure="parallel", deep_mlp=(5,), reduction=0.5)

CASES: dict[str, tuple[Any, Any, Callable[[Weights, Tensor, Tensor], Tensor]]] = {
    "wide & deep": (WideDeep, WideDeepArgs(deep_mlp=(8, 4)), _wide_deep),
    "deepfm": (DeepFM, DeepFMArgs(deep_mlp=(8, 4)), _deepfm),
    "dcn-v2 stacked": (DCNv2, _STACKED, _dcn(_STACKED)),
    "dcn-v2 parallel, low rank": (DCNv2, _PARALLEL, _dcn(_PARALLEL)),
    "dcn-v2 mixture": (DCNv2, _MIXTURE, _dcn(_MIXTURE)),
    "finalmlp": (FinalMLP, _FUSED, _final_mlp(_FUSED)),
    "finalmlp without gates": (FinalMLP, _UNGATED, _final_mlp(_UNGATED)),
    "masknet serial": (MaskNet, _SERIAL, _masknet(_SERIAL)),
    "masknet parallel": (MaskNet, _PARALLEL_ARGS, _masknet(_PARALLEL_ARGS)),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients_are_the_papers(case: str) -> None:
    made_of, args, row = CASES[case]
    torch.manual_seed(11)
    model: nn.Module = made_of(FEATURES, args).double()
    with torch.no_grad():  # starts of ones and zeros would hide a weight that is not used
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.3)
    numbers = torch.randn(ROWS, FEATURES.continuous_columns, dtype=torch.float64)
    vectors = torch.randn(ROWS, len(FEATURES.categorical), FEATURES.embedding_dim, dtype=torch.float64)
    shares = torch.randn(ROWS, dtype=torch.float64)  # so that each row's gradient counts differently

    model_vectors = vectors.clone().requires_grad_()
    logits = model(Inputs(FEATURES, numbers, model_vectors))["logits"]
    (logits * shares).sum().backward()

    weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    reference_vectors = vectors.clone().requires_grad_()
    expected = torch.stack([row(weights, numbers[b], reference_vectors[b]) for b in range(ROWS)])
    (expected * shares).sum().backward()

    torch.testing.assert_close(logits, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(model_vectors.grad, reference_vectors.grad, rtol=1e-9, atol=1e-9)
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        assert p.grad.abs().sum() > 0, name
        torch.testing.assert_close(p.grad, weights[name].grad, rtol=1e-9, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("made_of", [WideDeep, DeepFM, DCNv2, FinalMLP, MaskNet])
def test_starts_follow_the_seed_and_features_of_one_kind_are_enough(made_of: Any) -> None:
    for features in (FEATURES, InputFeatures({}, ("user",), 5), InputFeatures({"age": 1}, (), 5)):
        networks = []
        for _ in range(2):
            torch.manual_seed(3)
            networks.append(made_of(features, made_of.Args()))
        a, b = (m.state_dict() for m in networks)
        assert all(torch.equal(a[k], b[k]) for k in a)
        numbers = torch.randn(ROWS, features.continuous_columns)
        vectors = torch.randn(ROWS, len(features.categorical), features.embedding_dim)
        logits = networks[0](Inputs(features, numbers, vectors))["logits"]
        assert logits.shape == (ROWS,)
        assert torch.isfinite(logits).all()
        assert networks[0](Inputs(features, numbers[:0], vectors[:0]))["logits"].shape == (0,)


def test_mistakes_name_what_is_wrong() -> None:
    with pytest.raises(UserError, match="'shoe', which is no feature; there are: age, scores, user"):
        FinalMLP(FEATURES, FinalMLPArgs(first_gate=("shoe",)))
    with pytest.raises(UserError, match="last width 3 of a stream is no multiple of heads 2"):
        FinalMLP(FEATURES, FinalMLPArgs(first_mlp=(4, 3), heads=2))
    inputs = Inputs(FEATURES, torch.randn(2, 3), torch.randn(2, 3, 5))
    assert torch.equal(inputs["scores"], inputs.continuous[:, 1:])
    assert torch.equal(inputs["item"], inputs.vectors[:, 1])
    with pytest.raises(UserError, match="asks for feature 'shoe'"):
        inputs["shoe"]
