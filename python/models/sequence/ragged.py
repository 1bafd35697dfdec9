"""Ragged batches: rows of different lengths, packed, and in groups of about equal length where attention needs them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from headrace.embeddings.input.jagged import JaggedTensor

#: Rows that are shorter share a group: less padding than smaller groups would save in calls.
_SHORTEST = 8


def newest_of(sequence: JaggedTensor, length: int, *, newest_first: bool = False) -> JaggedTensor:
    """Each row's newest `length` values, the oldest first.

    Args:
        sequence: values [N, ...].
        length: at most so many of a row.
        newest_first: whether the first value of a row of `sequence` is the newest; else it is the last.

    Returns:
        offsets begin at 0, and end with the values.
    """
    lengths = sequence.lengths
    kept = lengths.clamp(max=length)
    if torch.compiler.is_exporting():
        return _newest_by_mask(sequence, kept, newest_first)
    offsets = torch.zeros_like(sequence.offsets)
    torch.cumsum(kept, 0, out=offsets[1:])
    row = torch.repeat_interleave(torch.arange(len(kept), device=kept.device), kept)
    place = torch.arange(len(row), device=kept.device) - offsets[row]
    starts = sequence.offsets[:-1]
    first = starts + kept - 1 if newest_first else starts + lengths - kept
    chosen = first[row] - place if newest_first else first[row] + place
    return JaggedTensor(sequence.values.index_select(0, chosen), offsets)


def _newest_by_mask(sequence: JaggedTensor, kept: Tensor, newest_first: bool) -> JaggedTensor:
    """`newest_of` of operators that a graph has, of offsets that begin at 0; kept: values of each row, int64 [B]."""
    place, lengths = sequence.places, sequence.lengths.index_select(0, sequence.owners)
    of_row = kept.index_select(0, sequence.owners)
    chosen = (place < of_row if newest_first else place >= lengths - of_row).nonzero().squeeze(1)
    offsets = pad(kept.cumsum(0), (1, 0))
    found = JaggedTensor(sequence.values.index_select(0, chosen), offsets)
    if not newest_first:
        return found
    end = offsets[1:].index_select(0, found.owners)
    return JaggedTensor(found.values.index_select(0, end - 1 - found.places), offsets)


def places_of(offsets: Tensor) -> Tensor:
    """Of each value, its place in its row, from 0: int64 [N]. Offsets begin at 0."""
    return torch.arange(int(offsets[-1]), device=offsets.device) - torch.repeat_interleave(offsets[:-1], offsets.diff())


@dataclass(frozen=True)
class LengthGroups:
    """Rows of a ragged batch in groups of 8, 16, 32, ... places, each padded to that: at most half of it is padding.

    A row's group follows from its own length, so what is computed of a row does not depend on the others. Padding is
    behind a row's values, where causal attention never looks.

    Attributes:
        slots: where each value goes in the groups behind each other, int64 [N], each slot once.
        shapes: rows and places of each group.
    """

    slots: Tensor
    shapes: Sequence[tuple[int, int]]

    @staticmethod
    def of(offsets: Tensor) -> LengthGroups:
        """Of rows offsets[i]:offsets[i + 1]; offsets int64 [B + 1] from 0."""
        lengths = offsets.diff()
        longest = int(lengths.max()) if len(lengths) else 0
        begin = torch.zeros_like(lengths)
        shapes: list[tuple[int, int]] = []
        shorter, size, first = 0, _SHORTEST, 0
        while shorter < longest:
            of_group = ((lengths > shorter) & (lengths <= size)).nonzero().squeeze(1)
            if len(of_group):
                begin[of_group] = first + size * torch.arange(len(of_group), device=lengths.device)
                shapes.append((len(of_group), size))
                first += len(of_group) * size
            shorter, size = size, 2 * size
        slots = torch.repeat_interleave(begin, lengths) + places_of(offsets)
        return LengthGroups(slots, shapes)

    @staticmethod
    def of_sequence(sequence: JaggedTensor, length: int) -> LengthGroups:
        """Of a sequence's rows, at most `length` each. In a graph, where none can follow from data, there is one."""
        if not torch.compiler.is_exporting():
            return LengthGroups.of(sequence.offsets)
        return LengthGroups(sequence.owners * length + sequence.places, [(sequence.samples, length)])

    def padded(self, values: Tensor) -> list[Tensor]:
        """Values [N, ...] as [rows, places, ...] of each group, zeros behind a row's."""
        whole = values.new_zeros(sum(rows * places for rows, places in self.shapes), *values.shape[1:])
        whole = whole.index_copy(0, self.slots, values)
        parts = torch.split(whole, [rows * places for rows, places in self.shapes])
        return [part.view(shape + values.shape[1:]) for part, shape in zip(parts, self.shapes, strict=True)]

    def packed(self, groups: Sequence[Tensor]) -> Tensor:
        """The way back: [rows, places, ...] of each group -> [N, ...], without padding; there is at least one group."""
        return torch.cat([x.flatten(0, 1) for x in groups]).index_select(0, self.slots)
