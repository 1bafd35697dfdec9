"""Categorical features of a batch, and the copy of a batch to a device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.config.schema import NULL_CODE, DatasetSchema, Kind
from headrace.embeddings.jagged import JaggedTensor


@dataclass(frozen=True, eq=False)
class CategoricalBatch:
    """Codes and raw ids of B rows."""

    #: Codes of features of one value a row, in the schema's order: int64 [B, S].
    codes: Tensor
    #: Codes of list features, in the schema's order: int32 or int64, any number a row; 0 stands for a null.
    lists: Sequence[JaggedTensor] = ()
    #: Ids drawn for each row, int64 [B, n], or for all rows of the step together, [n]; None: no ids are drawn.
    negatives: Tensor | None = None

    @staticmethod
    def of_padded(codes: Tensor, schema: DatasetSchema) -> CategoricalBatch:
        """Create from all features side by side, int64 [B, S]: a list of length k has k columns, in which 0 is
        padding.
        """
        scalars, lists, column = [], [], 0
        for f in schema.of(Kind.CATEGORICAL):
            part = codes[:, column : column + f.length]
            if f.is_list:
                lists.append(JaggedTensor.of_padded(part, NULL_CODE))
            else:
                scalars.append(part)
            column += f.length
        return CategoricalBatch(torch.cat(scalars, dim=1) if scalars else codes[:, :0], lists)

    @property
    def samples(self) -> int:
        """Number of rows, B."""
        return len(self.codes)

    def rows(self, start: int, end: int) -> CategoricalBatch:
        """Return consecutive rows: views."""
        drawn = self.negatives
        if drawn is not None and drawn.ndim == 2:
            drawn = drawn[start:end]
        return CategoricalBatch(self.codes[start:end], [x.rows(start, end) for x in self.lists], drawn)

    def to(self, device: torch.device) -> CategoricalBatch:
        """Copy to a device; from pinned memory without waiting."""
        return CategoricalBatch(
            self.codes.to(device, non_blocking=True),
            [x.to(device, non_blocking=True) for x in self.lists],
            None if self.negatives is None else self.negatives.to(device, non_blocking=True),
        )

    def pin_memory(self) -> CategoricalBatch:
        """Copy to pinned memory."""
        return CategoricalBatch(
            self.codes.pin_memory(),
            [x.pin_memory() for x in self.lists],
            None if self.negatives is None else self.negatives.pin_memory(),
        )


class BatchIds(Mapping[str, Tensor | JaggedTensor]):
    """Ids of a batch by categorical feature: int64 [B], or for a list a JaggedTensor of int64 without nulls.

    The ids of a list are converted at their first use.

    Args:
        batch: the features' ids.
        places: result of `places_of`: for each feature, whether it is a list, and its position in the batch.
    """

    def __init__(self, batch: CategoricalBatch, places: Mapping[str, tuple[bool, int]]) -> None:
        self._batch, self._places = batch, places
        self._lists: dict[str, JaggedTensor] = {}

    @staticmethod
    def places_of(schema: DatasetSchema) -> dict[str, tuple[bool, int]]:
        """Return (is list, position among the lists or the other features) by categorical feature."""
        places: dict[str, tuple[bool, int]] = {}
        for f in schema.of(Kind.CATEGORICAL):
            places[f.name] = f.is_list, sum(is_list == f.is_list for is_list, _ in places.values())
        return places

    @property
    def samples(self) -> int:
        """Number of rows, B."""
        return self._batch.samples

    @property
    def device(self) -> torch.device:
        """Device of the ids."""
        return self._batch.codes.device

    @property
    def are_drawn(self) -> bool:
        """True if the batch has negatives."""
        return self._batch.negatives is not None

    @property
    def negatives(self) -> Tensor:
        """Drawn ids, int64 [B, n] or [n]; [B, 0] for a batch without any."""
        negatives = self._batch.negatives
        return self._batch.codes.new_empty((self.samples, 0)) if negatives is None else negatives

    def __getitem__(self, name: str) -> Tensor | JaggedTensor:
        is_list, place = self._places[name]
        if not is_list:
            return self._batch.codes[:, place]
        if name not in self._lists:
            ids = self._batch.lists[place].without(NULL_CODE)
            self._lists[name] = JaggedTensor(ids.values.long(), ids.offsets)
        return self._lists[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


#: Alignment of a tensor in bytes, for kernels.
_ALIGNED = 64


def moved_in_one_copy(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Copy tensors to a device in one copy: return views of one block of bytes.

    A GPU copies from pinned memory directly. Each copy is a call to the driver, which takes about ten microseconds for
    any size, and a batch has two tensors, and two more for each list.
    """
    begins, total = [], 0
    for x in tensors:
        begins.append(total)
        total += -(-x.numel() * x.element_size() // _ALIGNED) * _ALIGNED
    block = torch.empty(total, dtype=torch.uint8, pin_memory=device.type == "cuda")
    for x, begin in zip(tensors, begins, strict=True):
        _view(block, begin, x).copy_(x)
    moved = block.to(device, non_blocking=True)
    return [_view(moved, begin, x) for x, begin in zip(tensors, begins, strict=True)]


def _view(block: Tensor, begin: int, like: Tensor) -> Tensor:
    """View bytes from `begin` on as a tensor of the shape and type of another."""
    return block[begin : begin + like.numel() * like.element_size()].view(like.dtype).view(like.shape)
