"""From a batch of codes, padded or ragged, to the rows that each part of the output is pooled from."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace import native
from headrace.embeddings.kernels import index_cpu
from headrace.embeddings.sharding.layout import Group, Layout
from headrace.errors import UserError


@dataclass(frozen=True)
class KeyedJagged:
    """Codes of any number for each sample and feature, without padding: code 0 is a row like any other.

    The form of TorchRec's KeyedJaggedTensor: feature by feature in the plan's order, sample by sample.
    """

    #: int64 [N].
    values: Tensor
    #: Codes of each feature and sample: int64 [F, B], summing to N.
    lengths: Tensor
    #: float32 [N], where a lookup is weighted.
    weights: Tensor | None = None


@dataclass(frozen=True)
class JaggedIndices:
    """What a group of output pieces is pooled from, in the form of embedding_bag.

    Bags are the rows of [B * pieces, width], samples in order.
    """

    #: Indices into the fused table, bag by bag: [N].
    indices: Tensor
    #: How many bags there are.
    num_bags: int
    #: Bag of each index, ascending: int64 [N]; None: index i is bag i.
    bag_ids: Tensor | None = None
    #: First index of each bag: int64 [bags].
    offsets: Tensor | None = None
    #: float32 [N]: a weighted sum.
    weights: Tensor | None = None
    #: What each bag's sum is divided by: float32 [bags, 1]; None: nothing.
    divisor: Tensor | None = None


def batch_to_device(
    batch: Tensor | KeyedJagged, weights: Tensor | None, device: torch.device
) -> tuple[Tensor | KeyedJagged, Tensor | None]:
    """A batch on a device; from pinned memory without waiting."""

    def move(x: Tensor) -> Tensor:
        return x.to(device, non_blocking=True)

    if isinstance(batch, KeyedJagged):
        given = None if batch.weights is None else move(batch.weights)
        return KeyedJagged(move(batch.values), move(batch.lengths), given), None if weights is None else move(weights)
    return move(batch), None if weights is None else move(weights)


class BatchIndexer:
    """Makes `JaggedIndices`, one a group of the layout."""

    def __init__(self, layout: Layout) -> None:
        plan = layout.plan
        self._layout = layout
        self._plan = plan
        self._features = [x.feature for x in plan.lookups for _ in range(x.length)]
        #: Rows of the table of each slot, [S].
        self._rows = torch.tensor(
            [plan.by_name[x.table].rows for x in plan.lookups for _ in range(x.length)], dtype=torch.int64
        )
        self._weighted = any(x.weighted for x in plan.lookups)
        self._groups = [_PaddedIndexer(layout, g) for g in layout.groups]

    def check_weights(self, weights: Tensor | None, codes: Tensor) -> None:
        """Raise ValueError unless there are weights of the codes' shape exactly where a lookup is weighted."""
        if self._weighted != (weights is not None):
            raise ValueError("weights are given exactly where a lookup is weighted")
        if weights is not None and (weights.shape != codes.shape or weights.dtype != torch.float32):
            raise ValueError(f"weights must be float32 {list(codes.shape)}, not {weights.dtype} {list(weights.shape)}")

    def padded(self, codes: Tensor, weights: Tensor | None) -> list[JaggedIndices]:
        """Occurrences of codes int64 [B, S].

        Raises:
            UserError: a code is outside its table.
        """
        if codes.ndim != 2 or codes.shape[1] != self._plan.slots or codes.dtype != torch.int64:
            raise ValueError(f"codes must be int64 [B, {self._plan.slots}], not {codes.dtype} {list(codes.shape)}")
        self.check_weights(weights, codes)
        if codes.device.type == "cpu" and native.library() is not None and weights is None:
            found = [g.by_loop(codes) for g in self._groups]
            if all(f is not None for f in found):
                return [f for f in found if f is not None]
        if codes.numel():
            wrong = (codes < 0) | (codes >= self._rows)
            if bool(wrong.any()):
                row, slot = wrong.nonzero()[0].tolist()
                raise _outside(self._features[slot], int(codes[row, slot]), int(self._rows[slot]), int(wrong.sum()))
        return [g.jagged(codes, weights) for g in self._groups]

    def ragged(self, batch: KeyedJagged) -> list[JaggedIndices]:
        """Occurrences of a ragged batch.

        Raises:
            UserError: a code is outside its table, or a sequence is longer than the lookup's `length`.
        """
        lengths = batch.lengths
        if lengths.ndim != 2 or lengths.shape[0] != len(self._plan.lookups) or batch.values.dtype != torch.int64:
            raise ValueError(f"lengths must be int64 [{len(self._plan.lookups)}, B] and values int64")
        ends = lengths.sum(1).cumsum(0).tolist()
        if (ends[-1] if ends else 0) != batch.values.numel() or bool((lengths < 0).any()):
            raise ValueError(f"lengths sum to {ends[-1] if ends else 0}, not to the {batch.values.numel()} values")
        self.check_weights(batch.weights, batch.values)
        samples = [torch.repeat_interleave(torch.arange(lengths.shape[1]), n) for n in lengths]
        for x, n, start, end in zip(self._plan.lookups, lengths, [0, *ends], ends, strict=False):
            rows, values = self._plan.by_name[x.table].rows, batch.values[start:end]
            wrong = (values < 0) | (values >= rows)
            if bool(wrong.any()):
                raise _outside(x.feature, int(values[wrong][0]), rows, int(wrong.sum()))
            if x.pooling == "none" and n.numel() and int(n.max()) > x.length:
                raise UserError(
                    f"feature '{x.feature}': a sequence of {int(n.max())} codes, but its length is {x.length}: cut it"
                )
        return [self._ragged_group(g, batch, samples, [0, *ends]) for g in self._layout.groups]

    def _ragged_group(self, group: Group, batch: KeyedJagged, samples: list[Tensor], ends: list[int]) -> JaggedIndices:
        fused = self._layout.fused_tables[group.fused]
        indices, bags, weights = [], [], []
        divisor = torch.ones(batch.lengths.shape[1], group.pieces)
        for e in group.entries:
            x = self._plan.lookups[e.lookup]
            values, sample = batch.values[ends[e.lookup] : ends[e.lookup + 1]], samples[e.lookup]
            lengths = batch.lengths[e.lookup]
            piece = torch.full_like(sample, e.piece)
            if e.stride:
                piece += (torch.arange(sample.numel()) - (lengths.cumsum(0) - lengths)[sample]) * e.stride
            if x.pooling == "mean":
                divisor[:, e.piece] = lengths.clamp(min=1)
            indices.append(fused.indices(values, e.block))
            bags.append(sample * group.pieces + piece)
            if batch.weights is not None:
                given = batch.weights[ends[e.lookup] : ends[e.lookup + 1]]
                weights.append(given if x.weighted else torch.ones_like(given))
        bag, order = torch.sort(torch.cat(bags), stable=True)
        total = batch.lengths.shape[1] * group.pieces
        counts = torch.bincount(bag, minlength=total)
        lookups = [self._plan.lookups[e.lookup] for e in group.entries]
        return JaggedIndices(
            indices=torch.cat(indices)[order],
            num_bags=total,
            bag_ids=bag,
            offsets=counts.cumsum(0) - counts,
            weights=torch.cat(weights)[order] if any(x.weighted for x in lookups) else None,
            divisor=divisor.view(-1, 1) if any(x.pooling == "mean" for x in lookups) else None,
        )


class _PaddedIndexer:
    """A group's columns of padded codes, worked out once."""

    def __init__(self, layout: Layout, group: Group) -> None:
        self._fused = layout.fused_tables[group.fused]
        self._pieces = group.pieces
        lookups = layout.plan.lookups
        # (piece, slot, block, entry) of each column that is looked up, by piece: bags ascend along a row.
        columns = sorted(
            (e.piece + i * e.stride, e.slot + i, e.block, number)
            for number, e in enumerate(group.entries)
            for i in range(lookups[e.lookup].length)
        )
        owners = [lookups[group.entries[number].lookup] for *_, number in columns]
        slots = [slot for _, slot, _, _ in columns]
        self._slots = None if slots == list(range(layout.plan.slots)) else torch.tensor(slots, dtype=torch.int64)
        self._blocks = torch.tensor([block for _, _, block, _ in columns], dtype=torch.int64)
        self._piece = torch.tensor([piece for piece, *_ in columns], dtype=torch.int64)
        #: Columns whose code 0 is padding; None: there are none, and bag i is occurrence i.
        self._is_list = torch.tensor([x.is_list for x in owners]) if any(x.is_list for x in owners) else None
        self._weighted = torch.tensor([x.weighted for x in owners]) if any(x.weighted for x in owners) else None
        self._columns = torch.tensor(
            [
                (slot, piece, int(x.is_list), layout.plan.by_name[x.table].rows, *self._fused.shards_of(block))
                for (piece, slot, block, _), x in zip(columns, owners, strict=True)
            ],
            dtype=torch.int64,
        )
        self._mean = torch.zeros(group.pieces, dtype=torch.bool)
        for e in group.entries:
            self._mean[e.piece] = lookups[e.lookup].pooling == "mean"
        self._has_mean = bool(self._mean.any())

    def by_loop(self, codes: Tensor) -> JaggedIndices | None:
        """`jagged` in one pass of C++; None where a code is outside its table."""
        has_bags = self._is_list is not None
        fused, bags = self._fused, codes.shape[0] * self._pieces
        found = index_cpu.jagged_indices(
            codes, self._columns, fused.shard_offsets, self._pieces, fused.index_dtype, has_bags
        )
        if found is None:
            return None
        indices, bag, starts = found
        divisor = None
        if starts is not None and self._has_mean:
            counts = torch.diff(starts, append=torch.tensor([indices.numel()]))
            divisor = torch.where(self._mean, counts.view(-1, self._pieces).clamp(min=1), 1).float().view(-1, 1)
        return JaggedIndices(indices, bags, bag, starts, None, divisor)

    def jagged(self, codes: Tensor, weights: Tensor | None) -> JaggedIndices:
        if self._slots is not None:
            codes = codes.index_select(1, self._slots)
        indices = self._fused.indices(codes, self._blocks)
        bags = codes.shape[0] * self._pieces
        used = None
        if weights is not None and self._weighted is not None:
            used = weights if self._slots is None else weights.index_select(1, self._slots)
            used = torch.where(self._weighted, used, 1.0)
        if self._is_list is None:
            # Scalars: one code a piece.
            everything = None if used is None else torch.arange(bags)
            return JaggedIndices(
                indices.reshape(-1), bags, everything, everything, None if used is None else used.reshape(-1)
            )
        kept = ~(self._is_list & (codes == 0))
        bag = (self._piece + torch.arange(codes.shape[0]).unsqueeze(1) * self._pieces)[kept]
        counts = torch.bincount(bag, minlength=bags)
        divisor = None
        if self._has_mean:
            divisor = torch.where(self._mean, counts.view(-1, self._pieces).clamp(min=1), 1).float().view(-1, 1)
        return JaggedIndices(
            indices[kept], bags, bag, counts.cumsum(0) - counts, None if used is None else used[kept], divisor
        )


def _outside(feature: str, code: int, rows: int, count: int) -> UserError:
    return UserError(
        f"feature '{feature}': code {code} is outside its embedding table of {rows} rows ({count} such codes in the "
        f"batch): the data were coded with a newer vocabulary than the model's; use the workflow that is saved with "
        f"the model"
    )
