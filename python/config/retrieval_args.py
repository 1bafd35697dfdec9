"""What `model.args` may hold of retrieval models."""

from __future__ import annotations

from pydantic import Field, model_validator

from headrace.config.section import Section


class TwoTowerArgs(Section):
    """A tower over a user's features and one over an item's, by in-batch softmax (Yi et al., 2019).

    Monitor a metric of rankings (`train.monitor`): logits are no probabilities.
    """

    #: The feature of items.
    item: str = "item_id"
    #: Features of users; none: those with the tag `user`.
    user_features: tuple[str, ...] = ()
    #: Features of items besides `item`; none: those with the tag `item`.
    item_features: tuple[str, ...] = ()
    #: Hidden widths of the user's tower.
    user_mlp: tuple[int, ...] = (128, 64)
    #: Hidden widths of the item's tower.
    item_mlp: tuple[int, ...] = (128, 64)
    #: Width of the vectors; null: embedding_dim.
    dim: int | None = Field(default=None, ge=1)
    #: Whether vectors have length 1.
    normalize: bool = True
    #: Dot products are divided by it.
    temperature: float = Field(default=0.1, gt=0)
    #: Whether a row is compared with the items of the step's other positive rows, those of all ranks.
    in_batch: bool = True
    #: Whether it is compared with drawn items, those of `train.negatives` with `as: candidates` (Yang et al., 2020:
    #: `shared: true`). Then items have no further features.
    drawn: bool = False
    #: Of a row's drawn items only so many count, those of the greatest logits now (Zhang et al., 2013); null: all.
    hard: int | None = Field(default=None, ge=1)
    #: Whether logits are corrected for how often items are met or drawn.
    log_q: bool = True
    #: Share of the hidden units that a training step leaves out.
    dropout: float = Field(default=0.0, ge=0, lt=1)

    @model_validator(mode="after")
    def _compares(self) -> TwoTowerArgs:
        if not (self.in_batch or self.drawn):
            raise ValueError("without `in_batch` and `drawn` there is nothing to compare a row's item with")
        if self.hard is not None and not self.drawn:
            raise ValueError("`hard` is of drawn items: set `drawn`")
        return self
