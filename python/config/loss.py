"""`model.loss`: what training minimises."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from headrace.config.section import Section

#: By setting, the losses that have it.
_SETTINGS = {
    "gamma": ("focal",),
    "alpha": ("focal",),
    "margin": ("cosine_contrastive",),
    "negative_weight": ("cosine_contrastive",),
    "temperature": ("sampled_softmax", "in_batch_softmax"),
    "log_q": ("sampled_softmax", "in_batch_softmax"),
    "hardest": ("bpr", "sampled_softmax", "cosine_contrastive"),
    "group": ("rank_net", "lambda_rank"),
    "k": ("lambda_rank",),
}


class Loss(Section):
    """What training minimises, of a class without a loss of its own; written `loss: focal` for the defaults.

    Of each row: bce, focal (a probability of the label), squared_error (the label is any number, the model predicts
    it). Of a positive row and the candidates that `train.negatives` draws for it: bpr, sampled_softmax,
    cosine_contrastive. Of a positive row and the items of all rows of the step: in_batch_softmax. Of the pairs of a
    list: rank_net, lambda_rank.
    """

    #: The loss.
    kind: Literal[
        "bce",
        "focal",
        "squared_error",
        "bpr",
        "sampled_softmax",
        "cosine_contrastive",
        "in_batch_softmax",
        "rank_net",
        "lambda_rank",
    ] = "bce"
    #: focal: how little rows count that are predicted well; 0 is bce.
    gamma: float = Field(default=2.0, ge=0)
    #: focal: the weight of positive rows, that of the others being 1 - alpha; null: both count alike.
    alpha: float | None = Field(default=None, ge=0, le=1)
    #: cosine_contrastive: candidates whose cosine is below add nothing.
    margin: float = Field(default=0.8, ge=-1, le=1)
    #: cosine_contrastive: what a row's candidates count together.
    negative_weight: float = Field(default=1.0, ge=0)
    #: Softmaxes: logits are divided by it.
    temperature: float = Field(default=1.0, gt=0)
    #: Softmaxes: subtract from each logit the logarithm of how likely its item is drawn, or in a batch.
    log_q: bool = True
    #: Of the candidates of a row, only so many with the highest scores count; null: all.
    hardest: int | None = Field(default=None, ge=1)
    #: rank_net, lambda_rank: a carried column; a stream's rows of a step (of a micro-batch) with one value are a list,
    #: so that a list whose rows come in several steps is several lists. null: a positive row and its candidates are.
    group: str | None = None
    #: lambda_rank: places of a list that count; null: all.
    k: int | None = Field(default=None, ge=1)

    @model_validator(mode="before")
    @classmethod
    def _by_name(cls, value: Any) -> Any:
        return {"kind": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _settings_of_the_kind(self) -> Loss:
        for name in sorted(self.model_fields_set - {"kind"}):
            is_default = getattr(self, name) == type(self).model_fields[name].default
            if self.kind not in _SETTINGS[name] and not is_default:
                raise ValueError(f"`{name}` is for {' and '.join(_SETTINGS[name])}, not for `{self.kind}`")
        return self

    @property
    def is_of_rows(self) -> bool:
        """Whether it compares each row's output with its label, and with nothing else."""
        return self.kind in ("bce", "focal", "squared_error")

    @property
    def predicts(self) -> Literal["probability", "number", "order"]:
        """What logits mean: the logit of a probability, the label's value, or no more than an order."""
        by_kind: dict[str, Literal["probability", "number"]] = {
            "bce": "probability",
            "focal": "probability",
            "squared_error": "number",
        }
        return by_kind.get(self.kind, "order")
