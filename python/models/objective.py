"""Objective of a spec: the loss that `model.loss` names, and tasks (`train.tasks`) with their losses and products."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from headrace import config
from headrace.errors import UserError
from headrace.models.inputs import Inputs
from headrace.models.losses import (
    binary_cross_entropy,
    bpr,
    cosine_contrastive,
    focal,
    in_batch_softmax,
    lambda_rank,
    rank_net,
    sampled_softmax,
    squared_error,
)


def spec_loss(settings: config.Loss, outputs: Mapping[str, Tensor], inputs: Inputs, item: str | None = None) -> Tensor:
    """Return the sum over the batch's rows, []. Rows have the weights of `Inputs.weights`.

    Args:
        settings: `model.loss`.
        outputs: `logits` float32 [B] of each row's item. Losses over drawn items also need `negatives`, float32 [B, n]:
            the logits (cosine_contrastive: cosines) of `Inputs.negatives`. in_batch_softmax needs `queries` and
            `items`, float32 [B, D].
        inputs: the batch. A row with a label of 0 or less is not a positive; only its item counts.
        item: the feature whose values are drawn or are compared within the batch.

    Raises:
        UserError: the network lacks an output.
    """
    logits, labels, weights = outputs["logits"], inputs.labels, inputs.weights
    if settings.is_of_rows:
        return row_loss(settings, logits, labels, weights)
    if settings.kind in ("rank_net", "lambda_rank"):
        return _listwise(settings, outputs, inputs)
    positive = (labels > 0).to(logits.dtype)
    if weights is not None:
        positive = positive * weights
    if settings.kind == "in_batch_softmax":
        return _in_batch(settings, outputs, inputs, positive, _item(settings, item))
    negatives, ids = _negatives(settings, outputs), inputs.negatives
    if settings.hardest is not None:
        item_ids = None if item is None else _ids(inputs, item)
        negatives, ids = hardest(negatives, ids, settings.hardest, item_ids)
    if settings.kind == "bpr":
        return bpr(logits, negatives, positive)
    if settings.kind == "cosine_contrastive":
        margin, weight = settings.margin, settings.negative_weight
        return cosine_contrastive(logits, negatives, positive, margin=margin, negative_weight=weight)
    name = _item(settings, item)
    item_ids = _ids(inputs, name)
    log_q = None
    if settings.log_q:
        log_q = inputs.log_q(name, item_ids, "negatives"), inputs.log_q(name, ids, "negatives")
    scale = 1 / settings.temperature
    hits = ids == item_ids.unsqueeze(1)
    return sampled_softmax(logits * scale, negatives * scale, positive, log_q=log_q, hits=hits)


def row_loss(settings: config.Loss, logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return a loss of each row alone (`Loss.is_of_rows`), summed: float32 [B], [B] -> [].

    Args:
        labels: in [0, 1]; for squared_error any numbers.
        weights: of the rows, [B].
    """
    if settings.kind == "squared_error":
        return squared_error(logits, labels, weights)
    if settings.kind == "focal":
        return focal(logits, labels, weights, gamma=settings.gamma, alpha=settings.alpha)
    return binary_cross_entropy(logits, labels, weights)


def hardest(scores: Tensor, ids: Tensor, k: int, item_ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Select each row's k candidates with the highest scores (dynamic negative sampling: Zhang et al., 2013).

    No gradient flows through the selection. Of equal scores the first is taken.

    Args:
        scores: float32 [B, n].
        ids: int64 [B, n], or [n] for all rows.
        k: number of candidates to select; n at most.
        item_ids: the rows' items, int64 [B], which rank after all other ids; None: unknown.

    Returns:
        Their scores float32 [B, min(k, n)], highest first, and their ids, int64.
    """
    ids, by = ids.expand(scores.shape), scores.detach()
    if item_ids is not None:  # ids that are drawn for all rows may include a row's item, which would be the hardest
        by = by.masked_fill(ids == item_ids.unsqueeze(1), -torch.inf)
    order = torch.argsort(by, dim=1, descending=True, stable=True)[:, :k]
    return scores.gather(1, order), ids.gather(1, order)


def _listwise(settings: config.Loss, outputs: Mapping[str, Tensor], inputs: Inputs) -> Tensor:
    logits, labels, weights = outputs["logits"], inputs.labels, inputs.weights
    if settings.group is not None:
        order = torch.argsort(inputs.lists, stable=True)
        logits, labels = logits[order], labels[order]
        lengths = torch.unique_consecutive(inputs.lists[order], return_counts=True)[1]
        offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        if weights is not None:  # a list's weight is the mean of its rows' weights
            weights = torch.segment_reduce(weights[order], "mean", offsets=offsets)
    else:
        negatives = _negatives(settings, outputs)
        zero_labels = torch.zeros_like(negatives)
        logits = torch.cat([logits.unsqueeze(1), negatives], dim=1).reshape(-1)
        labels = torch.cat([labels.unsqueeze(1), zero_labels], dim=1).reshape(-1)
        offsets = torch.arange(inputs.rows + 1, device=logits.device) * (1 + negatives.shape[1])
    if settings.kind == "rank_net":
        return rank_net(logits, labels, offsets, weights)
    return lambda_rank(logits, labels, offsets, weights, k=settings.k)


def _in_batch(
    settings: config.Loss, outputs: Mapping[str, Tensor], inputs: Inputs, weights: Tensor, item: str
) -> Tensor:
    """Return the loss over the items of all ranks' rows: the same for any number of ranks, except with
    `train.accumulate`.
    """
    for name in ("queries", "items"):
        if name not in outputs:
            raise UserError(f"model.loss: in_batch_softmax is of the outputs queries and items; there is no '{name}'")
    item_ids = _ids(inputs, item)
    rows = inputs.all_gather(torch.full((1,), inputs.rows, device=item_ids.device))
    ids, vectors = inputs.all_gather(item_ids), inputs.all_gather(outputs["items"])
    targets = int(rows[: inputs.rank].sum()) + torch.arange(inputs.rows, device=item_ids.device)
    log_q = inputs.log_q(item, ids, "rows") if settings.log_q else None
    return in_batch_softmax(
        outputs["queries"], vectors, targets, weights, log_q=log_q, item_ids=ids, temperature=settings.temperature
    )


def _negatives(settings: config.Loss, outputs: Mapping[str, Tensor]) -> Tensor:
    if "negatives" not in outputs:
        raise UserError(
            f"model.loss: {settings.kind} compares a row's item with drawn ones, and the model gives no output "
            f"'negatives', but: {', '.join(outputs)}; take a class that scores train.negatives, or a loss of rows"
        )
    return outputs["negatives"]


def _item(settings: config.Loss, item: str | None) -> str:
    if item is None:
        raise UserError(
            f"model.loss: {settings.kind} asks which feature is the item; the class has no attribute `item`"
        )
    return item


def _ids(inputs: Inputs, item: str) -> Tensor:
    ids = inputs.ids(item)
    if not isinstance(ids, Tensor):
        raise UserError(f"model.loss: the item '{item}' is a list; a row has one item")
    return ids


class Tasks:
    """Tasks of a model. Without tasks, outputs are not changed and there is no loss."""

    def __init__(self, tasks: Mapping[str, config.Task]) -> None:
        self.specs = dict(tasks)
        #: Tasks of the network's outputs, in order: the first one's output ranks.
        self.names = tuple(name for name, task in tasks.items() if not task.product)
        #: Tasks that are products of others.
        self.products = {name: task.product for name, task in tasks.items() if task.product}

    def complete(self, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Add the outputs of products, and the first task's as `logits`, to a network's outputs. Each is float32 [B].

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
        completed = {**outputs, "logits": outputs[self.names[0]]}
        return completed | {
            name: product_logits([completed[t] for t in factors]) for name, factors in self.products.items()
        }

    def loss(self, outputs: Mapping[str, Tensor], inputs: Inputs) -> Tensor:
        """Return the sum over tasks of weight x the sum of the losses of its rows, []."""
        total = torch.zeros((), device=outputs["logits"].device)
        for name, task in self.specs.items():
            if task.weight:
                output, target = outputs[name], inputs.target(name)
                # No selection of rows by a mask: the host would have to wait for their number.
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
        """Return the prediction of an output: the probability, or the label's expected value. float32 [B]."""
        return output.sigmoid() if self.specs[task].is_probability else output


def product_logits(logits: list[Tensor]) -> Tensor:
    """Return the logit of the product of probabilities, from their logits, [B] each.

    The probability that not all events happen is the sum, over the events, of the probability that it is the first that
    does not happen. That sum avoids a difference of nearly equal numbers.
    """
    so_far, misses = torch.zeros_like(logits[0]), []
    for x in logits:
        misses.append(so_far + logsigmoid(-x))
        so_far = so_far + logsigmoid(x)
    return so_far - torch.stack(misses).logsumexp(0)
