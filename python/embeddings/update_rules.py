"""Update rules of optimizers: only rows that a step touched are read or written.

Each rule is one pure function on the touched rows, chosen from a dict. The first three equal their torch counterpart:

- `sgd`: torch.optim.SGD. Exact: an untouched row has gradient 0.
- `adagrad`: torch.optim.Adagrad, one accumulator a weight (Duchi et al., 2011). Exact, for the same reason.
- `adam`: torch.optim.SparseAdam, the lazy Adam: moments of untouched rows stay, they do not decay; the bias
  correction counts steps of the whole table. (torch.optim.Adam would also move rows that no sample mentions.)
- `rowwise_adagrad`: one accumulator a row, of the mean square of its gradient (FBGEMM's EXACT_ROWWISE_ADAGRAD, the
  usual one for DLRM): the state of a table is 1 / dim of its size.

Weight decay is L2 (added to the gradient, as torch.optim does), on touched rows only. `fused_step` sums gradients by
row and applies a rule in one pass, by a C++ loop or a Triton kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.embeddings.kernels import cpu, dispatch

ADAGRAD_EPS = 1e-10
ADAM_BETAS = (0.9, 0.999)
ADAM_EPS = 1e-8


@dataclass(frozen=True)
class RowUpdate:
    """The rows of a step, to be changed in place. All float32."""

    #: [U, D].
    weight: Tensor
    #: [U, D]; the rule may overwrite it.
    grad: Tensor
    #: By name: [U, D], or [U, 1].
    state: Mapping[str, Tensor]
    #: Steps of the table, this one included.
    step: int
    #: Only where the rule is by row: mean of the squared gradient over all columns of the table, [U, 1].
    mean_square: Tensor | None = None


@dataclass(frozen=True)
class UpdateRule:
    """Update rule of an optimizer."""

    #: Names of its float32 states, starting at zero.
    state: tuple[str, ...]
    #: (rows, learning rate): changes weight and states in place.
    update: Callable[[RowUpdate, float], None]
    #: States that never shrink.
    growing: tuple[str, ...] = ()
    #: States are one number a row, not one a weight, and the rule uses `RowUpdate.mean_square`.
    by_row: bool = False
    #: Number in the C++ loop of a step (native/cpp/embeddings.cpp); None: torch does the steps on CPUs.
    cpu_kernel: int | None = None
    #: True if kernels.gpu has it; else torch does the steps on GPUs.
    gpu_kernel: bool = False
    #: Term that keeps the kernels' division from zero.
    eps: float = 0.0
    #: (learning rate, step from 1) -> factor in the kernels.
    step_size: Callable[[float, int], float] = lambda lr, step: lr


def sgd(rows: RowUpdate, lr: float) -> None:
    """Update w -= lr * g."""
    rows.weight.add_(rows.grad, alpha=-lr)


def adagrad(rows: RowUpdate, lr: float) -> None:
    """Update s += g^2; w -= lr * g / (sqrt(s) + eps)."""
    total = rows.state["sum"].addcmul_(rows.grad, rows.grad)
    rows.weight.addcdiv_(rows.grad, total.sqrt().add_(ADAGRAD_EPS), value=-lr)


def rowwise_adagrad(rows: RowUpdate, lr: float) -> None:
    """Update s += mean(g^2); w -= lr * g / (sqrt(s) + eps), s one number a row."""
    assert rows.mean_square is not None
    total = rows.state["sum"].add_(rows.mean_square)
    rows.weight.addcdiv_(rows.grad, total.sqrt().add_(ADAGRAD_EPS), value=-lr)


def adam_step_size(lr: float, step: int) -> float:
    """Return the learning rate with the correction of both moments' bias."""
    beta1, beta2 = ADAM_BETAS
    corrected: float = lr * (1 - beta2**step) ** 0.5 / (1 - beta1**step)
    return corrected


def adam(rows: RowUpdate, lr: float) -> None:
    """Update by Adam (Kingma and Ba, 2015), on touched rows."""
    beta1, beta2 = ADAM_BETAS
    mean = rows.state["exp_avg"].lerp_(rows.grad, 1 - beta1)
    square = rows.state["exp_avg_sq"].mul_(beta2).addcmul_(rows.grad, rows.grad, value=1 - beta2)
    rows.weight.addcdiv_(mean, square.sqrt().add_(ADAM_EPS), value=-adam_step_size(lr, rows.step))


RULES: Mapping[str, UpdateRule] = {
    "sgd": UpdateRule(state=(), update=sgd, cpu_kernel=0),
    "adagrad": UpdateRule(state=("sum",), update=adagrad, growing=("sum",), cpu_kernel=1, eps=ADAGRAD_EPS),
    "rowwise_adagrad": UpdateRule(
        state=("sum",),
        update=rowwise_adagrad,
        growing=("sum",),
        by_row=True,
        cpu_kernel=2,
        gpu_kernel=True,
        eps=ADAGRAD_EPS,
    ),
    "adam": UpdateRule(
        state=("exp_avg", "exp_avg_sq"), update=adam, cpu_kernel=3, eps=ADAM_EPS, step_size=adam_step_size
    ),
}


def state_bytes_per_row(kind: str, dim: int) -> int:
    """Return the bytes of an optimizer's states for one row of `dim` weights."""
    rule = RULES[kind]
    return 4 * len(rule.state) * (1 if rule.by_row else dim)


@dataclass(frozen=True)
class FusedStep:
    """Step of a rule in one pass, by its C++ loop or GPU kernel."""

    rule: UpdateRule
    #: True for the GPU kernel.
    on_gpu: bool

    def __call__(
        self,
        table: Tensor,
        states: list[Tensor],
        rows: Tensor,
        starts: Tensor,
        order: Tensor,
        n: int,
        grad: Tensor | None,
        *,
        bag: Tensor | None = None,
        weights: Tensor | None = None,
        divisor: Tensor | None = None,
        lr: float,
        decay: float,
        step: int,
        names: Tensor | None = None,
    ) -> None:
        """Sum gradients and step in one pass, as kernels.cpu.update. On a GPU rows of 16 bits are rounded
        stochastically.

        Args:
            table: [local rows, D].
            states: float32 [local rows, D], or [local rows, 1] where the rule works by row.
            rows: distinct rows of the table, int32 or int64 [U].
            starts: where each row's occurrences start in `order`, int64 [U].
            order: occurrences by row, int64; the last row's end before `n`.
            n: see `order`.
            grad: float32 [M, D]; None (CPU alone): `order` has the memory addresses of the occurrences' gradients.
            bag: row of `grad` of each occurrence, int64; None: occurrence i has row i.
            weights: of each occurrence.
            divisor: of each row of `grad`.
            lr: learning rate.
            decay: weight decay.
            step: from 1; what rounding is drawn by.
            names: which rows these are, where `rows` are but their slots in a cache: int64 [U]. On a GPU alone.

        Raises:
            ValueError: gradients at memory addresses on a GPU.
        """
        rate = self.rule.step_size(lr, step)
        if not self.on_gpu:
            assert self.rule.cpu_kernel is not None
            cpu.update(
                self.rule.cpu_kernel,
                table,
                states,
                rows,
                starts,
                order,
                n,
                grad,
                bag=bag,
                weights=weights,
                divisor=divisor,
                lr=rate,
                decay=decay,
                eps=self.rule.eps,
                betas=ADAM_BETAS,
            )
            return
        if grad is None:
            raise ValueError("gradients at memory addresses are for tables on the CPU")
        dispatch.kernels().rowwise_adagrad(
            table,
            states[0],
            rows,
            starts,
            order,
            grad.contiguous(),
            lr=rate,
            decay=decay,
            eps=self.rule.eps,
            bag=bag,
            weights=weights,
            divisor=divisor,
            seed=None if table.dtype is torch.float32 else step,
            end=n,
            names=names,
        )


def fused_step(kind: str, table: Tensor) -> FusedStep | None:
    """Return the one-pass step of an optimizer on rows of a table; None: torch does the step."""
    rule = RULES[kind]
    if cpu.usable(table):
        return None if rule.cpu_kernel is None else FusedStep(rule, on_gpu=False)
    return FusedStep(rule, on_gpu=True) if rule.gpu_kernel and dispatch.usable(table) else None
