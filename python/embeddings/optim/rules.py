"""Optimizers fused with the update: only rows that a step touched are read or written.

Each is one pure function on the touched rows, chosen from a dict. The first three equal their torch counterpart:

- `sgd`: torch.optim.SGD. Exact: an untouched row has gradient 0.
- `adagrad`: torch.optim.Adagrad, one accumulator a weight (Duchi et al., 2011). Exact, for the same reason.
- `adam`: torch.optim.SparseAdam, the lazy Adam: moments of untouched rows stay, they do not decay; the bias
  correction counts steps of the whole table. (torch.optim.Adam would also move rows that no sample mentions.)
- `rowwise_adagrad`: one accumulator a row, of the mean square of its gradient (FBGEMM's EXACT_ROWWISE_ADAGRAD, the
  usual one for DLRM): the state of a table is 1 / dim of its size.

Weight decay is L2 (added to the gradient, as torch.optim does), on touched rows only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

ADAGRAD_EPS = 1e-10
ADAM_BETAS = (0.9, 0.999)
ADAM_EPS = 1e-8


@dataclass(frozen=True)
class RowUpdate:
    """The rows of a step, to be changed in place. All float32."""

    #: [U, D].
    weight: Tensor
    #: [U, D], of any use to the rule.
    grad: Tensor
    #: By name: [U, D], or [U, 1].
    state: Mapping[str, Tensor]
    #: Steps of the table, this one included.
    step: int
    #: Only where the rule is by row: mean of the squared gradient over all columns of the table, [U, 1].
    mean_square: Tensor | None = None


@dataclass(frozen=True)
class Rule:
    """How an optimizer changes rows."""

    #: Names of its float32 states, starting at zero.
    state: tuple[str, ...]
    #: (rows, learning rate): changes weight and states in place.
    update: Callable[[RowUpdate, float], None]
    #: Those of the states that never shrink.
    growing: tuple[str, ...] = ()
    #: Its states are one number a row, not one a weight, and it asks for `RowUpdate.mean_square`.
    by_row: bool = False
    #: Its number in the C++ loop of a step (native/cpp/embeddings.cpp); None: torch does its steps on CPUs.
    cpu_kernel: int | None = None
    #: Whether kernels.gpu has it; else torch does its steps on GPUs.
    gpu_kernel: bool = False
    #: What keeps the kernels' division from zero.
    eps: float = 0.0
    #: (learning rate, step from 1) -> what the kernels multiply by.
    step_size: Callable[[float, int], float] = lambda lr, step: lr


def sgd(rows: RowUpdate, lr: float) -> None:
    """w -= lr * g."""
    rows.weight.add_(rows.grad, alpha=-lr)


def adagrad(rows: RowUpdate, lr: float) -> None:
    """s += g^2; w -= lr * g / (sqrt(s) + eps)."""
    total = rows.state["sum"].addcmul_(rows.grad, rows.grad)
    rows.weight.addcdiv_(rows.grad, total.sqrt().add_(ADAGRAD_EPS), value=-lr)


def rowwise_adagrad(rows: RowUpdate, lr: float) -> None:
    """s += mean(g^2); w -= lr * g / (sqrt(s) + eps), s one number a row."""
    assert rows.mean_square is not None
    total = rows.state["sum"].add_(rows.mean_square)
    rows.weight.addcdiv_(rows.grad, total.sqrt().add_(ADAGRAD_EPS), value=-lr)


def adam_step_size(lr: float, step: int) -> float:
    """The learning rate with the correction of both moments' bias."""
    beta1, beta2 = ADAM_BETAS
    corrected: float = lr * (1 - beta2**step) ** 0.5 / (1 - beta1**step)
    return corrected


def adam(rows: RowUpdate, lr: float) -> None:
    """Kingma and Ba (2015), on touched rows."""
    beta1, beta2 = ADAM_BETAS
    mean = rows.state["exp_avg"].lerp_(rows.grad, 1 - beta1)
    square = rows.state["exp_avg_sq"].mul_(beta2).addcmul_(rows.grad, rows.grad, value=1 - beta2)
    rows.weight.addcdiv_(mean, square.sqrt().add_(ADAM_EPS), value=-adam_step_size(lr, rows.step))


RULES: Mapping[str, Rule] = {
    "sgd": Rule(state=(), update=sgd, cpu_kernel=0),
    "adagrad": Rule(state=("sum",), update=adagrad, growing=("sum",), cpu_kernel=1, eps=ADAGRAD_EPS),
    "rowwise_adagrad": Rule(
        state=("sum",),
        update=rowwise_adagrad,
        growing=("sum",),
        by_row=True,
        cpu_kernel=2,
        gpu_kernel=True,
        eps=ADAGRAD_EPS,
    ),
    "adam": Rule(state=("exp_avg", "exp_avg_sq"), update=adam, cpu_kernel=3, eps=ADAM_EPS, step_size=adam_step_size),
}


def state_bytes_per_row(kind: str, dim: int) -> int:
    """Bytes of an optimizer's states for one row of `dim` weights."""
    rule = RULES[kind]
    return 4 * len(rule.state) * (1 if rule.by_row else dim)
