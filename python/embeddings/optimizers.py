"""Optimizers fused with the update: only rows that a step touched are read or written.

Each is one pure function on the touched rows, chosen from a dict. All equal their torch counterpart:

- `sgd`: torch.optim.SGD. Exact: an untouched row has gradient 0.
- `adagrad`: torch.optim.Adagrad, one accumulator a weight (Duchi et al., 2011). Exact, for the same reason.
- `adam`: torch.optim.SparseAdam, the lazy Adam: moments of untouched rows stay, they do not decay; the bias
  correction counts steps of the whole table. (torch.optim.Adam would also move rows that no sample mentions.)

Weight decay is L2 (added to the gradient, as torch.optim does), on touched rows only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

_ADAGRAD_EPS = 1e-10
_ADAM_BETAS = (0.9, 0.999)
_ADAM_EPS = 1e-8


@dataclass(frozen=True)
class Rule:
    """How an optimizer changes rows."""

    #: Names of its float32 states, each of the weight's shape, starting at zero.
    state: tuple[str, ...]
    #: (weight [U, D], gradient [U, D], {state: [U, D]}, learning rate, step from 1): changes them in place.
    update: Callable[[Tensor, Tensor, Mapping[str, Tensor], float, int], None]
    #: Those of the states that never shrink.
    growing: tuple[str, ...] = ()


def sgd(weight: Tensor, grad: Tensor, state: Mapping[str, Tensor], lr: float, step: int) -> None:
    """w -= lr * g."""
    weight.add_(grad, alpha=-lr)


def adagrad(weight: Tensor, grad: Tensor, state: Mapping[str, Tensor], lr: float, step: int) -> None:
    """s += g^2; w -= lr * g / (sqrt(s) + eps)."""
    total = state["sum"].addcmul_(grad, grad)
    weight.addcdiv_(grad, total.sqrt().add_(_ADAGRAD_EPS), value=-lr)


def adam(weight: Tensor, grad: Tensor, state: Mapping[str, Tensor], lr: float, step: int) -> None:
    """Kingma and Ba (2015), on touched rows."""
    beta1, beta2 = _ADAM_BETAS
    mean = state["exp_avg"].lerp_(grad, 1 - beta1)
    square = state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    step_size = lr * (1 - beta2**step) ** 0.5 / (1 - beta1**step)
    weight.addcdiv_(mean, square.sqrt().add_(_ADAM_EPS), value=-step_size)


RULES: Mapping[str, Rule] = {
    "sgd": Rule(state=(), update=sgd),
    "adagrad": Rule(state=("sum",), update=adagrad, growing=("sum",)),
    "adam": Rule(state=("exp_avg", "exp_avg_sq"), update=adam),
}
