"""Inputs of a model: the dataset's features at construction, and one batch at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from headrace.config import Task
from headrace.config.schema import DatasetSchema, Kind
from headrace.embeddings.jagged import JaggedTensor
from headrace.embeddings.lookup.zero_copy import ZeroCopyVectors
from headrace.errors import UserError, nearest

#: Population of which a share is measured: all rows of the split train, its positive rows, or draws of
#: `train.negatives`.
ShareOf = Literal["rows", "positives", "negatives"]
#: Vectors by the name of a lookup: pooled, or a sequence.
LookupResults = Mapping[str, Tensor | JaggedTensor]


@dataclass(frozen=True)
class InputFeatures:
    """The features of a dataset, in its order: the first argument of a model's class.

    Attributes:
        continuous: number of columns of each continuous feature, by name.
        categorical: features with an embedding.
        embedding_dim: width D of each embedding.
        lists: categorical features with any number of ids a row.
        cardinality: number of codes of a categorical feature, 0 .. cardinality - 1; None for raw ids.
        first_code: the code of the first known value; lower codes are null (0) and values outside the vocabulary.
        vocabulary: name of a feature's vocabulary, which several features may share.
        tasks: names of the outputs of a model of several labels (`train.tasks`); the first one is scored.
        products: tasks that are products of others, computed from their outputs.
        tags: tags of each feature.
    """

    continuous: Mapping[str, int]
    categorical: tuple[str, ...]
    embedding_dim: int
    lists: tuple[str, ...] = ()
    cardinality: Mapping[str, int | None] = field(default_factory=dict)
    first_code: Mapping[str, int] = field(default_factory=dict)
    vocabulary: Mapping[str, str] = field(default_factory=dict)
    tasks: tuple[str, ...] = ("label",)
    products: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    tags: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @classmethod
    def from_schema(
        cls, schema: DatasetSchema, embedding_dim: int, tasks: Mapping[str, Task] | None = None
    ) -> InputFeatures:
        """Create from a dataset's schema and `train.tasks`; without tasks there is one, `label`."""
        continuous = {f.name: f.length for f in schema.of(Kind.CONTINUOUS)}
        categorical = schema.of(Kind.CATEGORICAL)
        return cls(
            continuous,
            tuple(f.name for f in categorical),
            embedding_dim,
            tuple(f.name for f in categorical if f.is_list),
            {f.name: f.cardinality for f in categorical},
            {f.name: f.first_code for f in categorical},
            {f.name: f.vocabulary or f.name for f in categorical},
            tuple(name for name, task in (tasks or {}).items() if not task.product) or ("label",),
            {name: task.product for name, task in (tasks or {}).items() if task.product},
            {f.name: f.tags for f in (*schema.of(Kind.CONTINUOUS), *categorical)},
        )

    def tagged(self, tag: str) -> tuple[str, ...]:
        """Return the features that have a tag (`tags` in features.workflow)."""
        return tuple(name for name in (*self.continuous, *self.categorical) if tag in self.tags.get(name, ()))

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
        features: the dataset's features.
        continuous: float32 [B, C], on the model's device.
        vectors: the categorical features' embeddings, [B, F, D], with lists pooled; or a function that returns them,
            called with whether they may stay in place. The function may wait for other ranks, so compute first what
            does not need them.
        labels: float32 [B]; None where they are unknown.
        weights: weights of the rows in the loss, float32 [B]; None: 1 each.
        watch: called with the gradients of `vectors`, or of the output that `Inputs.watch` is called with.
        embeddings: results of the model's own lookups (headrace.models.lookups), by name.
        ids: by categorical feature, int64 [B], or for a list a JaggedTensor without nulls.
        negatives: ids drawn for each row, int64 [B, n], or for all rows of the step together, [n].
        targets: labels by task, float32 [B], NaN where a row has none or is not in the task's sample space.
        all_gather: concatenates the ranks' tensors [B_r, ...] in their order, with gradients; None: there is one rank.
        rank: number of this rank in `all_gather`.
        log_share: for a feature and a population, `log_q` of all codes: float32 [cardinality].
        lists: number of each row's list, int64 [B].
        drop: receives the results of `embeddings` and discards them.
    """

    def __init__(
        self,
        features: InputFeatures,
        continuous: Tensor,
        vectors: Tensor | Callable[[bool], Tensor | ZeroCopyVectors],
        labels: Tensor | None = None,
        weights: Tensor | None = None,
        watch: Callable[[Tensor], None] | None = None,
        *,
        embeddings: Mapping[str, Tensor | JaggedTensor]
        | Callable[[], Mapping[str, Tensor | JaggedTensor]]
        | None = None,
        ids: Mapping[str, Tensor | JaggedTensor] | None = None,
        negatives: Tensor | None = None,
        targets: Mapping[str, Tensor] | None = None,
        all_gather: Callable[[Tensor], Tensor] | None = None,
        rank: int = 0,
        log_share: Callable[[str, ShareOf], Tensor] | None = None,
        lists: Tensor | None = None,
        drop: Callable[[], None] | None = None,
    ) -> None:
        self.features = features
        self.continuous = continuous
        self._vectors = vectors
        self._labels = labels
        self.weights = weights
        self._watch = watch
        self._embeddings = embeddings
        self._ids = {} if ids is None else ids
        self._negatives = negatives
        self._targets = targets or {}
        self._all_gather = all_gather
        self._log_share = log_share
        self._lists = lists
        self._drop = drop
        #: This rank, among those whose rows `all_gather` concatenates.
        self.rank = rank

    @property
    def rows(self) -> int:
        """Number of rows, B."""
        return len(self.continuous)

    @property
    def labels(self) -> Tensor:
        """Labels, float32 [B].

        Raises:
            ValueError: the labels are not known, as in scoring.
        """
        if self._labels is None:
            raise ValueError("there are no labels: a model may look at them in its loss alone")
        return self._labels

    def target(self, task: str) -> Tensor:
        """Return a task's label: float32 [B], NaN where a row has none or is not in the task's sample space.

        Raises:
            ValueError: it is not known, as in scoring.
        """
        if task not in self._targets:
            if task == self.features.tasks[0]:
                return self.labels
            raise ValueError(f"there is no label of '{task}' here: a model may look at labels in its loss alone")
        return self._targets[task]

    def ids(self, feature: str) -> Tensor | JaggedTensor:
        """Return a categorical feature's ids: int64 [B], or of a list a JaggedTensor without nulls.

        Raises:
            UserError: the dataset has no such feature.
        """
        if feature not in self._ids:
            raise UserError(
                f"the model asks for feature '{feature}', which the dataset does not have"
                f"{nearest(feature, list(self._ids))}; it has: {', '.join(self._ids)}"
            )
        return self._ids[feature]

    @property
    def negatives(self) -> Tensor:
        """Drawn ids of `train.negatives.column` (`as: candidates`): int64 [B, n], n for each row.

        With `shared: true` they are drawn once for all rows of the step, int64 [n], and a lookup of them returns
        [n, D]. Only then they may include a row's own id. Outside training they are [B, 0].

        Raises:
            UserError: the training draws no candidates.
        """
        if self._negatives is None:
            raise UserError("the model's loss compares with drawn items: set train.negatives with `as: candidates`")
        return self._negatives

    @property
    def lists(self) -> Tensor:
        """List of each row (`model.loss.group`): int64 [B], equal for rows of one list.

        Raises:
            ValueError: it is not known, as in scoring.
        """
        if self._lists is None:
            raise ValueError("there are no lists: a model may look at them in its loss alone")
        return self._lists

    def log_q(self, feature: str, ids: Tensor, of: ShareOf = "rows") -> Tensor:
        """Return the log probability of ids, float32 of their shape, which logQ correction subtracts from logits.

        Collective at the first call for a feature, whose values are then counted.

        Args:
            feature: a feature of one code a row.
            ids: codes of the feature, int64 of any shape.
            of: `rows`: share of the id among the rows of the split train, as for items of a batch; `positives`: among
                the rows with a label above 0; `negatives`: probability of one draw of `train.negatives`. An id that
                never occurs has the share of one that occurs once.

        Raises:
            ValueError: the shares are not known, as in scoring.
            UserError: the feature has no codes, or candidates are drawn from another feature.
        """
        if self._log_share is None:
            raise ValueError("how likely ids are is known in training: a model may look at it in its loss alone")
        return self._log_share(feature, of).to(ids.device)[ids]

    @cached_property
    def _lookup_results(self) -> LookupResults:
        results = self._embeddings() if callable(self._embeddings) else self._embeddings or {}
        for x in results.values():
            values = x.values if isinstance(x, JaggedTensor) else x
            if self._watch is not None and values.requires_grad:
                values.register_hook(self._watch)  # type: ignore[no-untyped-call]
        return results

    def drop_embeddings(self) -> None:
        """Discard lookup results that are in flight and that the model does not need. Collective.

        Without this call, messages of other ranks would stay in memory.
        """
        if "_lookup_results" not in self.__dict__ and self._drop is not None:
            self._drop()
        self._drop = None

    def embedding(self, lookup: str) -> Tensor:
        """Return the vectors of a lookup by its name; see EmbeddingLookup. Collective at the first use.

        Raises:
            KeyError: the model has no such lookup; its vectors are a sequence.
        """
        vectors = self._lookup_results[lookup]
        if isinstance(vectors, JaggedTensor):
            raise KeyError(f"'{lookup}' is a sequence")
        return vectors

    def sequence(self, lookup: str) -> JaggedTensor:
        """Return the vectors of a lookup with `pooling="none"`: values float32 [N, D]. Collective at the first use.

        Raises:
            KeyError: the model has no such lookup; it is pooled.
        """
        vectors = self._lookup_results[lookup]
        if not isinstance(vectors, JaggedTensor):
            raise KeyError(f"'{lookup}' is no sequence")
        return vectors

    def all_gather(self, x: Tensor) -> Tensor:
        """Concatenate the rows of all ranks in their order: [B_r, ...] -> [sum of B_r, ...]. Collective, with
        gradients.

        Each rank's loss is a sum over its own rows; gradients of other ranks' losses flow back to this rank's `x`.
        """
        return x if self._all_gather is None else self._all_gather(x)

    @cached_property
    def vectors(self) -> Tensor:
        """Embeddings, float32 [B, F, D]. Collective at the first use."""
        vectors = self._vectors if isinstance(self._vectors, Tensor) else self._vectors(False)
        assert isinstance(vectors, Tensor)
        if self._watch is not None and vectors.requires_grad:
            vectors.register_hook(self._watch)  # type: ignore[no-untyped-call]
        return vectors

    def vectors_in_place(self, dtype: torch.dtype) -> Tensor | ZeroCopyVectors:
        """Return `vectors`, or their addresses for a kernel that reads them in place. Call it once.

        `dtype` is the type of the kernel's other inputs. Pass the kernel's output to `watch`, since vectors that are
        read in place have no gradient tensor.
        """
        if isinstance(self._vectors, Tensor) or dtype is not torch.float32:
            return self.vectors
        vectors = self._vectors(True)
        if isinstance(vectors, Tensor):
            self._vectors = vectors
            return self.vectors
        return vectors

    def watch(self, output: Tensor) -> Tensor:
        """Watch the gradient of `output` in place of the gradient of vectors that are read in place."""
        seen = "vectors" in self.__dict__
        if not seen and self._watch is not None and output.requires_grad:
            output.register_hook(self._watch)  # type: ignore[no-untyped-call]
        return output

    @cached_property
    def flat(self) -> Tensor:
        """Continuous columns and all embeddings side by side, [B, C + F D]."""
        return torch.cat([self.continuous, self.vectors.flatten(1)], dim=1)

    def __getitem__(self, name: str) -> Tensor:
        """Return a continuous feature, [B, its columns], or the embedding of a categorical one, [B, D].

        Raises:
            UserError: the dataset has no feature of that name.
        """
        if name in self.features.categorical:
            return self.vectors[:, self.features.categorical.index(name)]
        first = 0
        for feature, columns in self.features.continuous.items():
            if feature == name:
                return self.continuous[:, first : first + columns]
            first += columns
        known = ", ".join((*self.features.continuous, *self.features.categorical))
        raise UserError(f"the model asks for feature '{name}', which the dataset does not have; it has: {known}")


def check_feature(features: InputFeatures, key: str, name: str, *, is_list: bool) -> None:
    """Check that `name` is a categorical feature, with a list of ids or with one id a row.

    Args:
        features: the dataset's features.
        key: key of the spec that names the feature, for the message.
        name: the feature.
        is_list: whether it must have a list of ids.

    Raises:
        UserError: the dataset has no such feature.
    """
    known = [f for f in features.categorical if (f in features.lists) is is_list]
    if name not in known:
        kind = "a list of ids" if is_list else "of one id a row"
        raise UserError(
            f"{key}: '{name}' is no categorical feature, {kind}{nearest(name, known)}; there are: {', '.join(known)}"
        )
