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

#: Population of an item's share: all rows of the split train, its positive ones, or draws of `train.negatives`.
ShareOf = Literal["rows", "positives", "negatives"]
#: Vectors by the name of a lookup: pooled, or a sequence.
LookupResults = Mapping[str, Tensor | JaggedTensor]


@dataclass(frozen=True)
class InputFeatures:
    """The features of a dataset, in its order: the first argument of a model's class.

    continuous: how many columns each has, by name; categorical: those that have an embedding; embedding_dim: the width
    D of each embedding; lists: the categorical features that have any number of ids a row; cardinality: codes of a
    categorical feature, 0 .. cardinality - 1, None of raw ids; first_code: the first code that a known value has (below
    it are null, 0, and the values that the vocabulary lacks); vocabulary: the name of each one's codes, which several
    features may share; tasks: the names of the outputs that a model of several labels gives (`train.tasks`), the first
    of which is scored; products: tasks that are products of such, which are made of their outputs; tags: of each
    feature.
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
        features: their names and widths.
        continuous: float32 [B, C], on the model's device.
        vectors: the categorical features' embeddings, [B, F, D], pooled where the feature is a list; or what gives
            them: asked whether they may stay where they are. They may be under way between ranks, and asking waits, so
            what does not need them comes before.
        labels: float32 [B], where they are known.
        weights: of the rows in the loss, float32 [B]; None: 1 each.
        watch: is given the gradients of `vectors`, or of what `watch` is called with.
        embeddings: of a model that says what it looks up (headrace.models.lookups): by lookup, what was found.
        ids: by categorical feature, int64 [B], or of a list a JaggedTensor without nulls.
        negatives: ids drawn for each row, int64 [B, n], or for all rows of the step together, [n].
        targets: labels by task, float32 [B], NaN where a row has none or is not in the task's sample space.
        all_gather: concatenates the ranks' tensors [B_r, ...] in their order, with gradients; None: there is one rank.
        rank: of all_gather's ranks, this one.
        log_share: by feature and among what: `log_q` of all codes, float32 [cardinality].
        lists: which list each row is of, int64 [B].
        drop: receives for nothing what `embeddings` would give.
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
            ValueError: they are not known, as in scoring.
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
        """Ids of `train.negatives.column` that are drawn (`as: candidates`): for each row, int64 [B, n].

        With `shared: true` they are drawn once for all rows of the step: int64 [n], and a lookup of them gives [n, D].
        A row's own id is then among them at times; else never. Outside training they are [B, 0].

        Raises:
            UserError: none are drawn.
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

        Collective where a feature is asked for the first time: its values are counted.

        Args:
            feature: of one code a row.
            ids: codes of it, int64 of any shape.
            of: `rows`, the share of the rows of the split train that have it, as of the items of a batch; `positives`,
                of those whose label is above 0; `negatives`, the chance of one draw of `train.negatives`. An id that
                never comes has the share of one that comes once.

        Raises:
            ValueError: it is not known, as in scoring.
            UserError: the feature has no codes, or no candidates are drawn of it.
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
        """Discard the lookup results that are in flight, where the model does not need them. Collective.

        Of a model that knows without: what other ranks sent would stay in memory.
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

        Each rank's loss is a sum over its own rows: what others compute from this rank's `x` comes back to it.
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
        """Return `vectors`, or their places in memory, for a kernel that reads them there, once.

        `dtype` is that of what it reads beside them. Give what the kernel makes to `watch`: vectors that are read in
        place have no gradient that could be looked at.
        """
        if isinstance(self._vectors, Tensor) or dtype is not torch.float32:
            return self.vectors
        vectors = self._vectors(True)
        if isinstance(vectors, Tensor):
            self._vectors = vectors
            return self.vectors
        return vectors

    def watch(self, output: Tensor) -> Tensor:
        """Watch the gradient of `output` in place of the vectors' where these are read in place."""
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
    """Raise UserError unless `name` is a categorical feature, a list of ids or of one id a row.

    Args:
        features: the dataset's.
        key: where the spec has the name, for the message.
        name: the feature.
        is_list: which of the two it must be.

    Raises:
        UserError: there is no such feature.
    """
    known = [f for f in features.categorical if (f in features.lists) is is_list]
    if name not in known:
        kind = "a list of ids" if is_list else "of one id a row"
        raise UserError(
            f"{key}: '{name}' is no categorical feature, {kind}{nearest(name, known)}; there are: {', '.join(known)}"
        )
