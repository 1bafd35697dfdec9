"""The step of an optimizer in one pass: gradients are summed by row and applied, by a C++ loop or a Triton kernel."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.embeddings.kernels import cpu, dispatch
from headrace.embeddings.optim.rules import ADAM_BETAS, RULES, Rule


@dataclass(frozen=True)
class FusedStep:
    """Calls the kernel of a rule."""

    rule: Rule
    #: Whether it is a GPU's.
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
        """By the contract of kernels.cpu.update. On a GPU rows of 16 bits are rounded stochastically.

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
    """The one pass of an optimizer on rows of a table; None: there is none, and torch does the step."""
    rule = RULES[kind]
    if cpu.usable(table):
        return None if rule.cpu_kernel is None else FusedStep(rule, on_gpu=False)
    return FusedStep(rule, on_gpu=True) if rule.gpu_kernel and dispatch.usable(table) else None
