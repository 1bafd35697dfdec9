"""What a model is told of its features when it is made, and what it sees of a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from headrace.config import Task
from headrace.embeddings.input.jagged import JaggedTensor
from headrace.embeddings.lookup.zero_copy import ZeroCopyVectors
from headrace.errors import UserError, nearest
from headrace.schema import DatasetSchema, Kind

#: Among what an item has a share: all rows of the split train, its positive ones, or what `train.negatives` draws.
ShareOf = Literal["rows", "positives", "negatives"]
#: By a lookup's name, what it found: pooled, or a sequence.
Found = Mapping[str, Tensor | JaggedTensor]


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
    def of(cls, schema: DatasetSchema, embedding_dim: int, tasks: Mapping[str, Task] | None = None) -> InputFeatures:
        """Those of a dataset, and the tasks of `train.tasks`; without any there is one, `label`."""
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
        """The features that have a tag (`tags` in features.workflow)."""
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
        #: This rank, of those whose rows `all_gather` puts together.
        self.rank = rank

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

    def target(self, task: str) -> Tensor:
        """A task's label: float32 [B], NaN where a row has none or is not in the task's sample space.

        Raises:
            ValueError: it is not known, as in scoring.
        """
        if task not in self._targets:
            if task == self.features.tasks[0]:
                return self.labels
            raise ValueError(f"there is no label of '{task}' here: a model may look at labels in its loss alone")
        return self._targets[task]

    def ids(self, feature: str) -> Tensor | JaggedTensor:
        """A categorical feature's ids: int64 [B], or of a list a JaggedTensor without nulls.

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
        """Which list each row is of (`model.loss.group`): int64 [B], equal of the rows of one.

        Raises:
            ValueError: it is not known, as in scoring.
        """
        if self._lists is None:
            raise ValueError("there are no lists: a model may look at them in its loss alone")
        return self._lists

    def log_q(self, feature: str, ids: Tensor, of: ShareOf = "rows") -> Tensor:
        """The logarithm of how likely ids are, float32 of their shape: what logQ correction subtracts from logits.

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
    def _found(self) -> Found:
        found = self._embeddings() if callable(self._embeddings) else self._embeddings or {}
        for x in found.values():
            values = x.values if isinstance(x, JaggedTensor) else x
            if self._watch is not None and values.requires_grad:
                values.register_hook(self._watch)  # type: ignore[no-untyped-call]
        return found

    def drop_embeddings(self) -> None:
        """Say that nobody will ask for what was looked up, which is on its way all the same. Collective.

        Of a model that knows without: what other ranks sent would stay in memory.
        """
        if "_found" not in self.__dict__ and self._drop is not None:
            self._drop()
        self._drop = None

    def embedding(self, lookup: str) -> Tensor:
        """What a lookup of the model's found, by its name; see EmbeddingLookup. Collective where it is the first use.

        Raises:
            KeyError: the model has no such lookup; its vectors are a sequence.
        """
        found = self._found[lookup]
        if isinstance(found, JaggedTensor):
            raise KeyError(f"'{lookup}' is a sequence")
        return found

    def sequence(self, lookup: str) -> JaggedTensor:
        """What a lookup with `pooling="none"` found: values float32 [N, D]. Collective where it is the first use.

        Raises:
            KeyError: the model has no such lookup; it is pooled.
        """
        found = self._found[lookup]
        if not isinstance(found, JaggedTensor):
            raise KeyError(f"'{lookup}' is no sequence")
        return found

    def all_gather(self, x: Tensor) -> Tensor:
        """The rows of all ranks in their order: [B_r, ...] of each -> [sum of B_r, ...]. Collective, with gradients.

        Each rank's loss is a sum over its own rows: what others compute from this rank's `x` comes back to it.
        """
        return x if self._all_gather is None else self._all_gather(x)

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
