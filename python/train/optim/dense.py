"""The dense part's optimizer: one fused all-reduce, then plain torch on every rank."""

from __future__ import annotations

import inspect
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from headrace import config
from headrace.comm.base import Collective
from headrace.errors import UserError

_MARK = "__dynamo_disable"


class DenseOptimizer:
    """torch's optimizer over parameters that every rank holds alike.

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
            loss: this rank's.
            flag: this rank's.
            finite: a number [] that, where it is NaN or infinite, makes the global loss NaN: so all ranks hear of it
                without a message more.

        Returns:
            The global loss, which is the sum of the ranks' local ones, and whether any rank raised its flag: both the
            same on all ranks.
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
        """Whether all elements are: after `reduce` the same on all ranks."""
        sums = [p.grad.sum() for p in self._parameters if p.grad is not None]
        return not sums or bool(torch.stack(sums).sum().isfinite())

    def step(self, lr: float | None = None) -> None:
        """Apply the (summed) gradients and forget them.

        Args:
            lr: the learning rate of this step; default the last one, at first the configured.
        """
        if lr is not None:
            for group in self._optimizer.param_groups:
                group["lr"] = lr
        _step(self._optimizer)
        self._optimizer.zero_grad(set_to_none=False)

    def state(self) -> dict[str, Tensor]:
        """The optimizer's states as flat names `<parameter number>/<state>`."""
        return _flat(self._optimizer)

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        """Take over what `state` gave.

        Raises:
            UserError: it belongs to another optimizer or other parameters.
        """
        wanted = self.state() or _after_one_step(self._optimizer, self._parameters)
        if {k: v.shape for k, v in wanted.items()} != {k: v.shape for k, v in tensors.items()}:
            raise UserError("the saved states of the dense optimizer do not fit train.dense and model")
        states: dict[int, dict[str, Tensor]] = {}
        for key, value in tensors.items():
            number, _, name = key.partition("/")
            states.setdefault(int(number), {})[name] = value
        packed = self._optimizer.state_dict()
        self._optimizer.load_state_dict({"state": states, "param_groups": packed["param_groups"]})


def _after_one_step(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> dict[str, Tensor]:
    """The names and shapes of states that torch makes in the first step, from a step on copies."""
    copies = [nn.Parameter(p.detach().clone()) for p in parameters]
    for c in copies:
        c.grad = torch.zeros_like(c)
    twin = type(optimizer)(
        [{"params": copies}], **{k: v for k, v in optimizer.defaults.items() if k in ("lr", "weight_decay")}
    )
    _step(twin)
    return _flat(twin)


def _leave_compiler_out() -> None:
    """Let torch's optimizers work without torch.compile, which nothing here uses; see also `_step`.

    They mark some methods as not to be compiled, and the mark imports the compiler at their first call: 3 s of a core
    in each rank (torch._compile._disable_dynamo keeps what it made in this attribute; torch 2.13).
    """
    for name in ("add_param_group", "zero_grad", "state_dict", "load_state_dict"):
        plain = getattr(getattr(torch.optim.Optimizer, name), "__wrapped__", None)
        if plain is not None and not hasattr(plain, _MARK):
            setattr(plain, _MARK, plain)


def _step(optimizer: torch.optim.Optimizer) -> None:
    """`optimizer.step()` below its wrappers, which look for hooks, and for a compiler to tell it of this place."""
    plain = inspect.unwrap(type(optimizer).step)
    with torch.no_grad():
        plain(optimizer)


def _flat(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    states = optimizer.state_dict()["state"]
    return {f"{i}/{name}": v for i, group in states.items() for name, v in group.items() if torch.is_tensor(v)}


def _make(parameters: list[nn.Parameter], conf: config.Optimizer) -> torch.optim.Optimizer:
    group = [{"params": parameters}]  # of a network that is embeddings alone there are none, which torch takes so only
    if conf.kind == "sgd":
        return torch.optim.SGD(group, lr=conf.learning_rate, weight_decay=conf.weight_decay)
    if conf.kind == "adagrad":
        return torch.optim.Adagrad(group, lr=conf.learning_rate, weight_decay=conf.weight_decay)
    return torch.optim.Adam(group, lr=conf.learning_rate, weight_decay=conf.weight_decay)
