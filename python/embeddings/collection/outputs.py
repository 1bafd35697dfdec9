"""What a lookup of a collection gives: vectors by the features' names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from headrace.embeddings.input.jagged import JaggedTensor


class EmbeddingOutputs(Mapping[str, Tensor | JaggedTensor]):
    """Vectors by feature: float32 [B, dim], or of a sequence a JaggedTensor of values [N, dim].

    A sequence whose ids came as a tensor has vectors of that shape, [..., dim].

    Args:
        pooled: of all features in order, whether they are pooled, by name.
        side_by_side: vectors of the pooled features of planned tables: [B, their dims].
        dims: of these features by name, in order.
        others: the vectors of all other features.
    """

    def __init__(
        self,
        pooled: Mapping[str, bool],
        side_by_side: Tensor,
        dims: Mapping[str, int],
        others: Mapping[str, Tensor | JaggedTensor],
    ) -> None:
        self._pooled, self._side_by_side, self._dims = dict(pooled), side_by_side, dict(dims)
        self._others = dict(others)
        self._split: dict[str, Tensor] | None = None

    def __getitem__(self, name: str) -> Tensor | JaggedTensor:
        if name in self._others:
            return self._others[name]
        if self._split is None:  # once: gradients of all are put together at once
            parts = torch.split(self._side_by_side, list(self._dims.values()), dim=1)
            self._split = dict(zip(self._dims, parts, strict=True))
        return self._split[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._pooled)

    def __len__(self) -> int:
        return len(self._pooled)

    def side_by_side(self) -> Tensor:
        """All pooled features in order: float32 [B, sum of their dims]. Without a copy where no ids are raw."""
        names = [name for name, is_pooled in self._pooled.items() if is_pooled]
        if names == list(self._dims):
            return self._side_by_side
        return torch.cat([x for x in map(self.__getitem__, names) if isinstance(x, Tensor)], dim=1)
