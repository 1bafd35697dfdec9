"""The backward pass of a lookup: gradients of vectors become those of rows, and go to the rows' owners."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from headrace.embeddings.kernels import dispatch
from headrace.embeddings.kernels.duplicates import gather
from headrace.embeddings.lookup.handle import Prepared
from headrace.embeddings.lookup.local_tables import LocalTables
from headrace.embeddings.lookup.pooling import divide, max_gradient
from headrace.embeddings.optim.gradients import Gradient
from headrace.embeddings.sharding.layout import Arena

#: By group, the row that each bag's largest number is from, by column: `pool_max`.
Winners = dict[int, Tensor]


def take_gradients(
    embeddings: LocalTables,
    prepared: Prepared,
    of_vectors: Tensor,
    of_raw: Sequence[Tensor] = (),
    winners: Winners | None = None,
) -> None:
    """The backward pass of a lookup: send gradients to their rows' owners, and keep those that come. Collective.

    Args:
        embeddings: this rank's tables.
        prepared: of the lookup.
        of_vectors: float32 [B, width].
        of_raw: of the vectors of each table of raw ids.
        winners: what `pool_max` found, by group.
    """
    by_group = embeddings.layout.cut(of_vectors)
    for arena in embeddings.layout.arenas:
        if arena.local:
            embeddings.add_gradient(arena, row_gradient(embeddings, prepared, winners or {}, arena, by_group))
    raw = [w.duplicates.sum_rows(g.contiguous()) for w, g in zip(prepared.raw, of_raw, strict=False)]
    if prepared.request is not None and embeddings.mail is not None:
        sent = [sent_gradient(embeddings, prepared, winners or {}, a, by_group) for a in embeddings.remote]
        raw = embeddings.send_gradients(prepared.request, [*sent, *raw])
    if embeddings.dynamic is not None:
        embeddings.dynamic.add_gradients(prepared.answers, raw)


def sent_gradient(
    embeddings: LocalTables, prepared: Prepared, winners: Winners, arena: Arena, by_group: list[Tensor]
) -> Tensor:
    """The gradient of each vector that a rank got from an arena's owners: of distinct rows, or of parts of bags."""
    part = prepared.parts[arena.number]
    if part.bags is None:
        return row_gradient(embeddings, prepared, winners, arena, by_group).sums()
    number = part.groups[0][0]
    return divide(gather(by_group[number], part.bags.bag), prepared.occurrences[number], part.bags.bag)


def row_gradient(
    embeddings: LocalTables, prepared: Prepared, winners: Winners, arena: Arena, by_group: list[Tensor]
) -> Gradient:
    """The gradient of the rows of one arena that a rank looked up."""
    groups, part = embeddings.layout.groups, prepared.parts[arena.number]
    found = part.sorted()
    if len(part.groups) == 1 and groups[part.groups[0][0]].mode == "sum":
        number = part.groups[0][0]
        return Gradient.of_bags(found, by_group[number], prepared.occurrences[number])
    total = torch.zeros(found.unique.numel(), arena.width)
    for number, start, end in part.groups:
        if groups[number].mode == "sum":
            one = Gradient.of_bags(found.part(start, end), by_group[number], prepared.occurrences[number])
            total += one.sums()
            continue
        winner = winners[number]
        if arena.local and not arena.cached and dispatch.by_address(embeddings.weights[arena.number]):
            # Looked up by address, not by distinct row.
            winner = torch.where(winner < 0, winner, torch.searchsorted(found.unique, winner.to(found.unique.dtype)))
        total += max_gradient(by_group[number], winner, found.unique.numel())
    return Gradient.of_sums(found.unique, total)
