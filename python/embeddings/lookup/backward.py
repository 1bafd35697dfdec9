"""The backward pass of a lookup: gradients of vectors become those of rows, and go to the rows' owners."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from headrace.embeddings.kernels import dispatch
from headrace.embeddings.kernels.duplicates import gather
from headrace.embeddings.lookup.handle import LookupHandle
from headrace.embeddings.lookup.local_tables import LocalTables
from headrace.embeddings.lookup.pooling import divide, max_gradient
from headrace.embeddings.optim.gradients import Gradient
from headrace.embeddings.sharding.layout import FusedTable

#: By group, the row that each bag's largest number is from, by column: `pool_max`.
Winners = dict[int, Tensor]


def route_gradients(
    embeddings: LocalTables,
    handle: LookupHandle,
    of_outputs: Sequence[Tensor],
    of_raw: Sequence[Tensor] = (),
    winners: Winners | None = None,
) -> None:
    """The backward pass of a lookup: send gradients to their rows' owners, and keep those that come. Collective.

    Args:
        embeddings: this rank's tables.
        handle: of the lookup.
        of_outputs: of the layout's outputs.
        of_raw: of the vectors of each table of raw ids.
        winners: what `pool_max` found, by group.
    """
    by_group = embeddings.layout.cut(of_outputs)
    for fused in embeddings.layout.fused_tables:
        if fused.is_local:
            embeddings.add_gradient(fused, row_gradient(embeddings, handle, winners or {}, fused, by_group))
    raw = [w.duplicates.sum_rows(g.contiguous()) for w, g in zip(handle.raw, of_raw, strict=False)]
    if handle.request is not None and embeddings.exchange is not None:
        sent = [remote_gradient(embeddings, handle, winners or {}, a, by_group) for a in embeddings.remote]
        raw = embeddings.send_gradients(handle.request, [*sent, *raw])
    if embeddings.dynamic is not None:
        embeddings.dynamic.add_gradients(handle.answers, raw)


def remote_gradient(
    embeddings: LocalTables, handle: LookupHandle, winners: Winners, fused: FusedTable, by_group: list[Tensor]
) -> Tensor:
    """The gradient of each vector that a rank got from a fused table's owners.

    Of distinct rows, or of parts of bags.
    """
    lookup = handle.lookups[fused.number]
    if lookup.bags is None:
        return row_gradient(embeddings, handle, winners, fused, by_group).sums()
    number = lookup.groups[0][0]
    return divide(gather(by_group[number], lookup.bags.bag_ids), handle.jagged[number], lookup.bags.bag_ids)


def row_gradient(
    embeddings: LocalTables, handle: LookupHandle, winners: Winners, fused: FusedTable, by_group: list[Tensor]
) -> Gradient:
    """The gradient of the rows of one fused table that a rank looked up."""
    groups, lookup = embeddings.layout.groups, handle.lookups[fused.number]
    found = lookup.sorted()
    if len(lookup.groups) == 1 and groups[lookup.groups[0][0]].mode == "sum":
        number = lookup.groups[0][0]
        return Gradient.of_bags(found, by_group[number], handle.jagged[number])
    total = torch.zeros(found.unique.numel(), fused.width)
    for number, start, end in lookup.groups:
        if groups[number].mode == "sum":
            one = Gradient.of_bags(found.part(start, end), by_group[number], handle.jagged[number])
            total += one.sums()
            continue
        winner = winners[number]
        if fused.is_local and not fused.cached and dispatch.reads_directly(embeddings.weights[fused.number]):
            # Looked up by index, not by distinct row.
            winner = torch.where(winner < 0, winner, torch.searchsorted(found.unique, winner.to(found.unique.dtype)))
        total += max_gradient(by_group[number], winner, found.unique.numel())
    return Gradient.of_sums(found.unique, total)
