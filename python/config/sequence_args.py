"""What `model.args` may hold of the models of histories."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import Field

from headrace.config.section import Section


class NextItemArgs(Section):
    """What models of the next item have in common (headrace.models.sequence.next_item)."""

    #: The feature that is a row's item.
    item: str
    #: The list feature with the items before it.
    history: str
    #: Which end of the history is the newest event; see `history` of features.prepare.
    newest: Literal["last", "first"] = "last"
    #: Items of a history that are looked at, the newest.
    length: int = Field(default=50, ge=1)
    #: all: each item of a history is a target, and the row's own; last: the row's own alone.
    positions: Literal["all", "last"] = "all"
    #: bce: cross-entropy of a target and of drawn items; sampled_softmax: among a target and drawn items; softmax:
    #: among all items. Items are drawn by `train.negatives` with `as: candidates`, and uniformly.
    loss: Literal["bce", "sampled_softmax", "softmax"] = "sampled_softmax"
    #: A target is compared with all drawn items of the step, with those of its row, or with one of its row's, the next
    #: at each place (`per_positive` as large as `length` gives each place one of its own).
    negatives: Literal["batch", "row", "position"] = "batch"
    #: Logits are cosines over this; null: dot products.
    temperature: float | None = Field(default=None, gt=0)
    #: Layers.
    blocks: int = Field(default=2, ge=1)
    #: Heads of the attention, which share `embedding_dim`.
    heads: int = Field(default=1, ge=1)
    #: Share of the inputs and hidden units that a training step leaves out.
    dropout: float = Field(default=0.2, ge=0, lt=1)


class SASRecArgs(NextItemArgs):
    """Causal self-attention over a history (Kang and McAuley, SASRec, 2018)."""

    #: Hidden width of a block's MLP; null: `embedding_dim`.
    mlp: int | None = Field(default=None, ge=1)


class HSTUArgs(NextItemArgs):
    """Gated pointwise attention over a history (Zhai et al., Actions Speak Louder than Words, 2024)."""

    #: Width of queries and keys of a head; null: `embedding_dim` / heads.
    attention_dim: int | None = Field(default=None, ge=1)
    #: Width of values and gates of a head; null: `embedding_dim` / heads.
    linear_dim: int | None = Field(default=None, ge=1)
    #: A padded feature of numbers with the times of the history's items, in its order, in any unit.
    times: str | None = None
    #: Learned weights of distances in time, by the logarithm of the distance.
    time_buckets: int = Field(default=64, ge=1)


class DINArgs(Section):
    """Attention of a row's item over a history (Zhou et al., Deep Interest Network, 2018)."""

    #: List features by the feature that looks at them, which has the same values: `{item: viewed_items}`.
    histories: Mapping[str, str] = Field(min_length=1)
    #: Hidden widths of the MLP that weighs an item of the history.
    attention_mlp: tuple[int, ...] = Field(default=(36,), min_length=1)
    #: Hidden widths of the MLP over all features.
    mlp: tuple[int, ...] = Field(default=(64, 32), min_length=1)
    #: Of both MLPs.
    activation: Literal["dice", "prelu"] = "dice"
    #: Whether the weights of a history sum to 1, by a softmax; the paper's keep the strength of an interest.
    softmax: bool = False
    #: Share of the hidden units that a training step leaves out.
    dropout: float = Field(default=0.0, ge=0, lt=1)
