"""What the tasks of a spec (`train.tasks`) make of a network's outputs: products of probabilities, and the loss."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from headrace import config
from headrace.errors import UserError
from headrace.models.inputs import Inputs
from headrace.models.losses.spec import row_loss


class Tasks:
    """The tasks of a model. Without any it does nothing to outputs, and has no loss."""

    def __init__(self, tasks: Mapping[str, config.Task]) -> None:
        self.specs = dict(tasks)
        #: Those that the network gives, in order: the first one's output ranks.
        self.names = tuple(name for name, task in tasks.items() if not task.product)
        #: The others, each the product of some.
        self.products = {name: task.product for name, task in tasks.items() if task.product}

    def complete(self, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """A network's outputs with those of the products, and the first task's as `logits`. Each is float32 [B].

        Raises:
            UserError: the network has no output of a task's name.
        """
        if not self.names:
            return outputs
        missing = [name for name in self.names if name not in outputs]
        if missing:
            raise UserError(
                f"train.tasks: the model gives no output '{missing[0]}', but: {', '.join(outputs)}; choose a "
                f"model.class of several tasks (shared_bottom, mmoe, ple, esmm)"
            )
        found = {**outputs, "logits": outputs[self.names[0]]}
        return found | {name: product_logits([found[t] for t in of]) for name, of in self.products.items()}

    def loss(self, outputs: Mapping[str, Tensor], inputs: Inputs) -> Tensor:
        """The sum of each task's weight x the sum of the losses of its rows, []."""
        total = torch.zeros((), device=outputs["logits"].device)
        for name, task in self.specs.items():
            if task.weight:
                output, target = outputs[name], inputs.target(name)
                # Not chosen by a mask of rows: their number would have to be known on the host.
                known = ~target.isnan()
                weights = known.to(output.dtype)
                if inputs.weights is not None:
                    weights = weights * inputs.weights
                zero = torch.zeros_like(output)
                chosen = torch.where(known, output, zero), torch.where(known, target, zero)
                loss = row_loss(task.loss, *chosen, weights)
                total = total + task.weight * loss
        return total

    def value(self, task: str, output: Tensor) -> Tensor:
        """What an output says: the probability, or the label's expected value. float32 [B]."""
        return output.sigmoid() if self.specs[task].is_probability else output


def product_logits(logits: list[Tensor]) -> Tensor:
    """The logit of the product of probabilities, from their logits, [B] each.

    That not all happen is that one is the first that does not: a sum of probabilities, without a difference of numbers
    that are nearly equal.
    """
    so_far, misses = torch.zeros_like(logits[0]), []
    for x in logits:
        misses.append(so_far + logsigmoid(-x))
        so_far = so_far + logsigmoid(x)
    return so_far - torch.stack(misses).logsumexp(0)
