"""The categorical features of a batch, as models take them."""

from __future__ import annotations

from collections.abc import Sequence
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
        return CategoricalBatch(self.codes[start:end], [x.rows(start, end) for x in self.lists])

    def to(self, device: torch.device) -> CategoricalBatch:
        """On a device; from pinned memory without waiting."""
        return CategoricalBatch(
            self.codes.to(device, non_blocking=True), [x.to(device, non_blocking=True) for x in self.lists]
        )

    def pin_memory(self) -> CategoricalBatch:
        """In pinned memory."""
        return CategoricalBatch(self.codes.pin_memory(), [x.pin_memory() for x in self.lists])
