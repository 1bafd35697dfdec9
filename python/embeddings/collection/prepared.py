"""Inputs of a collection whose lookup has begun."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from headrace.embeddings.input.jagged import JaggedTensor
from headrace.embeddings.lookup.handle import LookupHandle


class PreparedInputs(Mapping[str, Any]):
    """The inputs by name, as they were given, and their lookup. For one forward pass."""

    def __init__(self, inputs: Mapping[str, Any], handle: LookupHandle, raw: Mapping[str, JaggedTensor]) -> None:
        self._inputs, self.handle = inputs, handle
        #: By feature of raw ids, those that are looked up.
        self.raw = raw
        self.is_used = False

    def use(self) -> None:
        """Raise RuntimeError where the lookup was made before."""
        if self.is_used:
            raise RuntimeError("prepared inputs are for one forward pass: prepare them again")
        self.is_used = True

    def __getitem__(self, name: str) -> Any:
        return self._inputs[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._inputs)

    def __len__(self) -> int:
        return len(self._inputs)
