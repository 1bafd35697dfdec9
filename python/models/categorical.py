"""The categorical features of a batch, as models take them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.embeddings.input.jagged import JaggedTensor
from headrace.schema import NULL_CODE, DatasetSchema, Kind


@dataclass(frozen=True, eq=False)
class CategoricalBatch:
    """Codes and raw ids of B rows."""

    #: Of the features of one value a row, in the schema's order: int64 [B, S].
    codes: Tensor
    #: Of the features of lists, in the schema's order: int32 or int64, any number a row; 0 stands for a null.
    lists: Sequence[JaggedTensor] = ()
    #: Ids that are drawn for each row, int64 [B, n], or for all of the step's together, [n]; None: there are none.
    negatives: Tensor | None = None

    @staticmethod
    def of_padded(codes: Tensor, schema: DatasetSchema) -> CategoricalBatch:
        """From all features side by side, int64 [B, S]: a list of length k has k columns, in which 0 is padding."""
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
        """Rows, B."""
        return len(self.codes)

    def rows(self, start: int, end: int) -> CategoricalBatch:
        """Consecutive rows: views."""
        drawn = self.negatives
        if drawn is not None and drawn.ndim == 2:
            drawn = drawn[start:end]
        return CategoricalBatch(self.codes[start:end], [x.rows(start, end) for x in self.lists], drawn)

    def to(self, device: torch.device) -> CategoricalBatch:
        """On a device; from pinned memory without waiting."""
        return CategoricalBatch(
            self.codes.to(device, non_blocking=True),
            [x.to(device, non_blocking=True) for x in self.lists],
            None if self.negatives is None else self.negatives.to(device, non_blocking=True),
        )

    def pin_memory(self) -> CategoricalBatch:
        """In pinned memory."""
        return CategoricalBatch(
            self.codes.pin_memory(),
            [x.pin_memory() for x in self.lists],
            None if self.negatives is None else self.negatives.pin_memory(),
        )


class BatchIds(Mapping[str, Tensor | JaggedTensor]):
    """A batch's ids by categorical feature: int64 [B], or of a list a JaggedTensor of int64 without nulls.

    Those of a list are made when they are first asked for.

    Args:
        batch: the features' ids.
        places: by feature, whether it is a list, and where the batch has it: `places_of`.
    """

    def __init__(self, batch: CategoricalBatch, places: Mapping[str, tuple[bool, int]]) -> None:
        self._batch, self._places = batch, places
        self._lists: dict[str, JaggedTensor] = {}

    @staticmethod
    def places_of(schema: DatasetSchema) -> dict[str, tuple[bool, int]]:
        """By categorical feature, whether it is a list, and its number among those that are, or are not."""
        found: dict[str, tuple[bool, int]] = {}
        for f in schema.of(Kind.CATEGORICAL):
            found[f.name] = f.is_list, sum(is_list == f.is_list for is_list, _ in found.values())
        return found

    @property
    def samples(self) -> int:
        """Rows, B."""
        return self._batch.samples

    @property
    def device(self) -> torch.device:
        """Where the ids are."""
        return self._batch.codes.device

    @property
    def are_drawn(self) -> bool:
        """Whether there are negatives."""
        return self._batch.negatives is not None

    @property
    def negatives(self) -> Tensor:
        """Those that are drawn, int64 [B, n] or [n]; of a batch without any [B, 0]."""
        found = self._batch.negatives
        return self._batch.codes.new_empty((self.samples, 0)) if found is None else found

    def __getitem__(self, name: str) -> Tensor | JaggedTensor:
        is_list, place = self._places[name]
        if not is_list:
            return self._batch.codes[:, place]
        if name not in self._lists:
            found = self._batch.lists[place].without(NULL_CODE)
            self._lists[name] = JaggedTensor(found.values.long(), found.offsets)
        return self._lists[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)
