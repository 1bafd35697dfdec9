"""What a model is told of its features when it is made, and what it sees of a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from headrace.embeddings.lookup.zero_copy import ZeroCopyVectors
from headrace.errors import UserError
from headrace.schema import DatasetSchema, Kind


@dataclass(frozen=True)
class InputFeatures:
    """The features of a dataset, in its order: the first argument of a model's class.

    continuous: how many columns each has, by name; categorical: those that have an embedding; embedding_dim: the width
    D of each embedding.
    """

    continuous: Mapping[str, int]
    categorical: tuple[str, ...]
    embedding_dim: int

    @classmethod
    def of(cls, schema: DatasetSchema, embedding_dim: int) -> InputFeatures:
        """Those of a dataset."""
        continuous = {f.name: f.length for f in schema.of(Kind.CONTINUOUS)}
        return cls(continuous, tuple(f.name for f in schema.of(Kind.CATEGORICAL)), embedding_dim)

    @property
    def continuous_columns(self) -> int:
        """Columns of all continuous features, C."""
        return sum(self.continuous.values())

    @property
    def flat_columns(self) -> int:
        """Columns of `Inputs.flat`: C + F D."""
        return self.continuous_columns + len(self.categorical) * self.embedding_dim


class Inputs:
    """One batch: the argument of a model's `forward` and `loss`.

    Args:
        features: their names and widths.
        continuous: float32 [B, C], on the model's device.
        vectors: the categorical features' embeddings, [B, F, D], pooled where the feature is a list; or what gives
            them: asked whether they may stay where they are. They may be under way between ranks, and asking waits, so
            what does not need them comes before.
        labels: float32 [B], where they are known.
        weights: of the rows in the loss, float32 [B]; None: 1 each.
        watch: is given the gradients of `vectors`, or of what `watch` is called with.
    """

    def __init__(
        self,
        features: InputFeatures,
        continuous: Tensor,
        vectors: Tensor | Callable[[bool], Tensor | ZeroCopyVectors],
        labels: Tensor | None = None,
        weights: Tensor | None = None,
        watch: Callable[[Tensor], None] | None = None,
    ) -> None:
        self.features = features
        self.continuous = continuous
        self._vectors = vectors
        self._labels = labels
        self.weights = weights
        self._watch = watch

    @property
    def rows(self) -> int:
        """B."""
        return len(self.continuous)

    @property
    def labels(self) -> Tensor:
        """float32 [B].

        Raises:
            ValueError: they are not known, as in scoring.
        """
        if self._labels is None:
            raise ValueError("there are no labels: a model may look at them in its loss alone")
        return self._labels

    @cached_property
    def vectors(self) -> Tensor:
        """float32 [B, F, D]. Collective where it is the first use."""
        found = self._vectors if isinstance(self._vectors, Tensor) else self._vectors(False)
        assert isinstance(found, Tensor)
        if self._watch is not None and found.requires_grad:
            found.register_hook(self._watch)  # type: ignore[no-untyped-call]
        return found

    def vectors_in_place(self, dtype: torch.dtype) -> Tensor | ZeroCopyVectors:
        """`vectors`, or where they are, for a kernel that reads them there, once.

        `dtype` is that of what it reads beside them. Give what the kernel makes to `watch`: vectors that are read in
        place have no gradient that could be looked at.
        """
        if isinstance(self._vectors, Tensor) or dtype is not torch.float32:
            return self.vectors
        found = self._vectors(True)
        if isinstance(found, Tensor):
            self._vectors = found
            return self.vectors
        return found

    def watch(self, made: Tensor) -> Tensor:
        """`made`, whose gradient is looked at in place of the vectors' where these are read in place."""
        seen = "vectors" in self.__dict__
        if not seen and self._watch is not None and made.requires_grad:
            made.register_hook(self._watch)  # type: ignore[no-untyped-call]
        return made

    @cached_property
    def flat(self) -> Tensor:
        """The continuous columns and all embeddings side by side, [B, C + F D]."""
        return torch.cat([self.continuous, self.vectors.flatten(1)], dim=1)

    def __getitem__(self, name: str) -> Tensor:
        """A continuous feature, [B, its columns], or the embedding of a categorical one, [B, D].

        Raises:
            UserError: the dataset has no feature of that name.
        """
        if name in self.features.categorical:
            return self.vectors[:, self.features.categorical.index(name)]
        first = 0
        for other, columns in self.features.continuous.items():
            if other == name:
                return self.continuous[:, first : first + columns]
            first += columns
        known = ", ".join((*self.features.continuous, *self.features.categorical))
        raise UserError(f"the model asks for feature '{name}', which the dataset does not have; it has: {known}")
