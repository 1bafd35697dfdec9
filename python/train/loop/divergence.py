"""What a step that must not be taken is refused for: the tensor or table whose numbers are not finite, on any rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from headrace.comm.base import Collective
from headrace.config import Train
from headrace.embeddings.lookup.local_tables import bad_gradients
from headrace.train.result import Diverged
from headrace.train.setup.state import TrainState


def bad_step(
    step: int, local_loss: float, state: TrainState, collective: Collective, train: Train, tables: Sequence[str] = ()
) -> Diverged:
    """The error of a step whose loss or gradient is NaN or infinite on some rank. Collective: the same on all ranks.

    Args:
        step: its number.
        local_loss: this rank's part of the loss.
        state: with the gradients of the step, the dense ones reduced.
        collective: the ranks.
        train: the settings that the message names.
        tables: those that are known to be to blame, on this rank.
    """
    loss = float(collective.all_gather(torch.tensor([local_loss], dtype=torch.float64)).sum())
    parameters = [
        n for n, p in state.model.named_dense_parameters() if p.grad is not None and not p.grad.isfinite().all()
    ]
    of_tables = sorted({*tables, *bad_gradients(state.model.embeddings)})
    named = [f"table '{t}'" for t in _of_all_ranks(of_tables, collective)] + [f"'{n}'" for n in parameters]
    if not torch.tensor(loss).isfinite():
        what = f"the loss is {loss}"
    else:
        what = f"the gradient of {', '.join(named) or 'the interaction'} is not finite"
    return Diverged(
        f"training diverged: {what} at step {step}. Lower train.embeddings.learning_rate "
        f"({train.embeddings.learning_rate}) or train.dense.learning_rate ({train.dense.learning_rate}), or tame "
        f"extreme values of continuous features with clip, log and normalize in features.workflow",
        step,
    )


def _of_all_ranks(names: Sequence[str], collective: Collective) -> list[str]:
    text = "".join(f"{name}\n" for name in names).encode()
    gathered = collective.all_gather(torch.tensor(list(text), dtype=torch.int64))
    return sorted(set(bytes(gathered.tolist()).decode().splitlines()))
