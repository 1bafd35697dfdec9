"""Jagged tensors: any number of values for each sample, without padding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag, pad


@dataclass(frozen=True, eq=False)
class JaggedTensor:
    """Values of B samples, any number of each: those of sample i are values[offsets[i]:offsets[i + 1]].

    The form of TorchRec's JaggedTensor, and of torch.nn.EmbeddingBag's `input` and `offsets` (include_last_offset).

        JaggedTensor.of_lengths(torch.tensor([3, 1, 4]), torch.tensor([2, 0, 1]))     # [3, 1], [], [4]
    """

    #: [N, ...]: ids int32 or int64 [N], or what was looked up, float32 [N, D].
    values: Tensor
    #: int64 [B + 1], ascending, within `values`; need not begin at 0.
    offsets: Tensor
    #: float32 [N]: factor of each value's row, where a lookup is weighted.
    weights: Tensor | None = None

    @staticmethod
    def of_lengths(values: Tensor, lengths: Tensor, weights: Tensor | None = None) -> JaggedTensor:
        """Create from the number of values of each sample, int32 or int64 [B].

        Raises:
            ValueError: a length is negative, or they do not sum to the number of values.
        """
        offsets = torch.zeros(lengths.numel() + 1, dtype=torch.int64, device=lengths.device)
        torch.cumsum(lengths, 0, out=offsets[1:])
        if bool((lengths < 0).any()) or int(offsets[-1]) != len(values):
            raise ValueError(f"lengths sum to {int(offsets[-1])}, not to the {len(values)} values")
        return JaggedTensor(values, offsets, weights)

    @staticmethod
    def of_starts(values: Tensor, starts: Tensor, weights: Tensor | None = None) -> JaggedTensor:
        """Create from the first position of each sample, int64 [B]: `offsets` of torch.nn.EmbeddingBag."""
        return JaggedTensor(values, torch.cat([starts, starts.new_tensor([len(values)])]), weights)

    @staticmethod
    def of_padded(padded: Tensor, padding: int) -> JaggedTensor:
        """Create from a matrix [B, L], without the values that are `padding`."""
        is_value = padded != padding
        return JaggedTensor(padded[is_value], pad(is_value.sum(1).cumsum(0), (1, 0)))

    def without(self, value: int) -> JaggedTensor:
        """Remove the values [N] that are `value`; offsets begin at 0."""
        flat = self.flat()
        is_retained = flat.values != value
        weights = None if flat.weights is None else flat.weights[is_retained]
        return JaggedTensor(flat.values[is_retained], pad(is_retained.cumsum(0), (1, 0))[flat.offsets], weights)

    def flat(self) -> JaggedTensor:
        """Return offsets from 0 and only values of samples: views."""
        if torch.compiler.is_exporting():  # they begin at 0: offsets are not known in a graph
            return self
        first, last = torch.stack([self.offsets[0], self.offsets[-1]]).tolist()
        if not first and last == len(self.values):
            return self
        weights = None if self.weights is None else self.weights[first:last]
        return JaggedTensor(self.values[first:last], self.offsets - first, weights)

    @property
    def samples(self) -> int:
        """Number of samples, B."""
        return self.offsets.numel() - 1

    @property
    def lengths(self) -> Tensor:
        """Number of values of each sample: int64 [B]."""
        return self.offsets.diff()

    @property
    def owners(self) -> Tensor:
        """Sample of each value: int64 [N]. Offsets begin at 0 and end with the values."""
        if not torch.compiler.is_exporting():
            each = torch.arange(self.samples, device=self.offsets.device)
            return torch.repeat_interleave(each, self.lengths)
        # The number of values is known by their shape alone: count the samples that have begun at each value.
        begun = torch.zeros(self.values.shape[0] + 1, dtype=torch.int64, device=self.offsets.device)
        starts = self.offsets[:-1]
        return begun.scatter_add(0, starts, torch.ones_like(starts)).cumsum(0)[:-1] - 1

    @property
    def places(self) -> Tensor:
        """Position of each value in its sample, from 0: int64 [N]. Offsets begin at 0 and end with the values."""
        each = torch.arange(self.values.shape[0], device=self.offsets.device)
        return each - self.offsets.index_select(0, self.owners)

    def rows(self, start: int, end: int) -> JaggedTensor:
        """Return consecutive samples: views."""
        return JaggedTensor(self.values, self.offsets[start : end + 1], self.weights)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> JaggedTensor:
        """Copy to a device."""
        moved = (None if x is None else x.to(device, non_blocking=non_blocking) for x in self._tensors())
        return JaggedTensor(*moved)  # type: ignore[arg-type]

    def pin_memory(self) -> JaggedTensor:
        """Copy to pinned memory."""
        return JaggedTensor(*(None if x is None else x.pin_memory() for x in self._tensors()))  # type: ignore[arg-type]

    def pooled(self, pooling: Literal["sum", "mean", "max"]) -> Tensor:
        """Pool each sample's values float32 [N, D] into one vector: [B, D]; zeros for an empty sample.

        Offsets begin at 0 and end with the values. Of equal numbers the first is the largest, and has the gradient.
        """
        if torch.compiler.is_exporting():
            return self._pooled_by_scatter(pooling)
        if pooling == "max" and len(self.values):  # segment_reduce gives equal numbers too much of a gradient
            each = torch.arange(len(self.values), device=self.values.device)
            return embedding_bag(each, self.values, self.offsets[:-1], mode="max")
        total = torch.segment_reduce(self.values, "sum", offsets=self.offsets, initial=0.0)
        return total / self.lengths.clamp(min=1).unsqueeze(1) if pooling == "mean" else total

    def to_padded(self, length: int, padding: float = 0) -> Tensor:
        """Return [B, length, ...], `padding` after each sample's values; values beyond `length` are cut off."""
        out = self.values.new_full((self.samples, length, *self.values.shape[1:]), padding)
        position = torch.arange(length, device=self.offsets.device)
        is_value = position < self.lengths.unsqueeze(1)
        return out.masked_scatter_(
            is_value.view(*is_value.shape, *[1] * (self.values.ndim - 1)),
            self.values[(self.offsets[:-1].unsqueeze(1) + position)[is_value]],
        )

    def _pooled_by_scatter(self, pooling: Literal["sum", "mean", "max"]) -> Tensor:
        """Pool by operators that exported graphs support; see `pooled`."""
        to = self.owners.unsqueeze(1).expand_as(self.values)
        shape = (self.samples, self.values.shape[1])
        if pooling == "max":
            most = self.values.new_full(shape, -torch.inf).scatter_reduce(0, to, self.values, "amax")
            return torch.where((self.lengths > 0).unsqueeze(1), most, 0.0)
        total = self.values.new_zeros(shape).scatter_add(0, to, self.values)
        return total / self.lengths.clamp(min=1).unsqueeze(1) if pooling == "mean" else total

    def _tensors(self) -> tuple[Tensor, Tensor, Tensor | None]:
        return self.values, self.offsets, self.weights
