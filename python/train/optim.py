"""The dense part's optimizer and learning-rate schedules: one fused all-reduce, then plain torch on every rank.

- `constant`: the rate. `step`: the rate, multiplied by `factor` every `every_steps` steps.
- `linear`, and `cosine` (Loshchilov and Hutter, "SGDR", 2017, without restarts): from the rate to `final` times it.

Before these, the rate rises linearly over `warmup_steps` (Goyal et al., "Accurate, Large Minibatch SGD", 2017); their
steps are counted from the end of the warm-up. The rate is a pure function of the step's number, so a resumed run needs
no state for it.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn

from headrace import config
from headrace.comm.base import Collective
from headrace.config import EmbeddingOptimizer, Optimizer, Schedule
from headrace.errors import UserError

#: (schedule, step after the warm-up, number of these steps) -> factor of the learning rate.
Curve = Callable[[Schedule, int, int], float]


def _constant(schedule: Schedule, step: int, steps: int) -> float:
    return 1.0


def _linear(schedule: Schedule, step: int, steps: int) -> float:
    return 1.0 - (1.0 - schedule.final) * step / steps


def _cosine(schedule: Schedule, step: int, steps: int) -> float:
    return schedule.final + (1.0 - schedule.final) * (1.0 + math.cos(math.pi * step / steps)) / 2.0


def _step_decay(schedule: Schedule, step: int, steps: int) -> float:
    assert schedule.every_steps is not None
    return schedule.factor ** (step // schedule.every_steps)


CURVES: Mapping[str, Curve] = {"constant": _constant, "linear": _linear, "cosine": _cosine, "step": _step_decay}


def learning_rate(optimizer: Optimizer | EmbeddingOptimizer, step: int, total: int) -> float:
    """Return the learning rate of step `step` (the first is 1) of `total`."""
    return optimizer.learning_rate * schedule_factor(optimizer.schedule, step, total)


def schedule_factor(schedule: Schedule, step: int, total: int) -> float:
    """Return the factor of the configured learning rate in step `step` (the first is 1) of `total`.

    The first step of a warm-up over n has 1/n of the rate, the n-th all of it. The last step of `linear` and `cosine`
    has `final` of it.
    """
    if step <= schedule.warmup_steps:
        return step / schedule.warmup_steps
    remaining = max(1, total - schedule.warmup_steps - 1)
    return CURVES[schedule.kind](schedule, min(step - schedule.warmup_steps - 1, remaining), remaining)


_MARK = "__dynamo_disable"


class DenseOptimizer:
    """torch's optimizer over parameters that are replicated on all ranks.

    Local losses are divided by the rows of the global batch, so gradients are summed over the ranks, not averaged.
    All gradients travel in one buffer, together with the local loss: one message a step.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], conf: config.Optimizer, collective: Collective) -> None:
        self._parameters = list(parameters)
        self._collective = collective
        _leave_compiler_out()
        self._optimizer = _make(self._parameters, conf)

    def reduce(self, loss: float, flag: bool = False, finite: Tensor | None = None) -> tuple[float, bool]:
        """Sum the gradients over the ranks, in place.

        Args:
            loss: local loss of this rank.
            flag: flag of this rank.
            finite: a number []; if it is NaN or infinite, the global loss becomes NaN, which tells all ranks without a
                further message.

        Returns:
            the global loss, which is the sum of the local ones, and whether any rank's flag is set; both are the same
            on all ranks.
        """
        total = torch.tensor([loss, float(flag)], device=self._parameters[0].device if self._parameters else None)
        if finite is not None:
            total[0] += 0.0 * finite.to(total.device)
        for p in self._parameters:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        self._collective.all_reduce_sum([total, *(p.grad for p in self._parameters if p.grad is not None)])
        return float(total[0]), bool(total[1] > 0)

    def has_finite_gradients(self) -> bool:
        """Return True if all elements are finite: after `reduce` the same on all ranks."""
        sums = [p.grad.sum() for p in self._parameters if p.grad is not None]
        return not sums or bool(torch.stack(sums).sum().isfinite())

    def step(self, lr: float | None = None) -> None:
        """Apply the (summed) gradients and forget them.

        Args:
            lr: learning rate of this step; None: the last one, at first the configured one.
        """
        if lr is not None:
            for group in self._optimizer.param_groups:
                group["lr"] = lr
        _step(self._optimizer)
        self._optimizer.zero_grad(set_to_none=False)

    def state(self) -> dict[str, Tensor]:
        """Return the optimizer's states as flat names `<parameter number>/<state>`."""
        return _flat(self._optimizer)

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        """Load the result of `state`.

        Raises:
            UserError: the states belong to another optimizer or to other parameters.
        """
        expected = self.state() or _after_one_step(self._optimizer, self._parameters)
        if {k: v.shape for k, v in expected.items()} != {k: v.shape for k, v in tensors.items()}:
            raise UserError("the saved states of the dense optimizer do not fit train.dense and model")
        states: dict[int, dict[str, Tensor]] = {}
        for key, value in tensors.items():
            number, _, name = key.partition("/")
            states.setdefault(int(number), {})[name] = value
        packed = self._optimizer.state_dict()
        self._optimizer.load_state_dict({"state": states, "param_groups": packed["param_groups"]})


def _after_one_step(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> dict[str, Tensor]:
    """Return the states that torch creates in the first step, by a step on copies of the parameters."""
    copies = [nn.Parameter(p.detach().clone()) for p in parameters]
    for c in copies:
        c.grad = torch.zeros_like(c)
    optimizer_copy = type(optimizer)(
        [{"params": copies}], **{k: v for k, v in optimizer.defaults.items() if k in ("lr", "weight_decay")}
    )
    _step(optimizer_copy)
    return _flat(optimizer_copy)


def _leave_compiler_out() -> None:
    """Keep torch's optimizers from importing torch.compile, which nothing here uses; see also `_step`.

    Some of their methods are marked as not to be compiled, and that mark imports the compiler at the first call: 3 s of
    a core in each rank (torch._compile._disable_dynamo caches its result in this attribute; torch 2.13).
    """
    for name in ("add_param_group", "zero_grad", "state_dict", "load_state_dict"):
        unwrapped = getattr(getattr(torch.optim.Optimizer, name), "__wrapped__", None)
        if unwrapped is not None and not hasattr(unwrapped, _MARK):
            setattr(unwrapped, _MARK, unwrapped)


def _step(optimizer: torch.optim.Optimizer) -> None:
    """Call `optimizer.step()` without its wrappers, which look for hooks and for the compiler."""
    unwrapped = inspect.unwrap(type(optimizer).step)
    with torch.no_grad():
        unwrapped(optimizer)


def _flat(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    states = optimizer.state_dict()["state"]
    return {f"{i}/{name}": v for i, group in states.items() for name, v in group.items() if torch.is_tensor(v)}


def _make(parameters: list[nn.Parameter], conf: config.Optimizer) -> torch.optim.Optimizer:
    group = [{"params": parameters}]  # a group, since torch accepts an empty list of parameters only so
    if conf.kind == "sgd":
        return torch.optim.SGD(group, lr=conf.learning_rate, weight_decay=conf.weight_decay)
    if conf.kind == "adagrad":
        return torch.optim.Adagrad(group, lr=conf.learning_rate, weight_decay=conf.weight_decay)
    return torch.optim.Adam(group, lr=conf.learning_rate, weight_decay=conf.weight_decay)
