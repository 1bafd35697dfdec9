"""The section `model`: the network's class and its loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)

from headrace.config.model_args import MODEL_ARGS
from headrace.config.section import Effect, Section, TrainedSection
from headrace.plugins import faults_of, offered

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
    """The loss of a class without one of its own; written `loss: focal` for the defaults.

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
    #: focal: exponent that reduces the weight of well-predicted rows; 0 is bce.
    gamma: float = Field(default=2.0, ge=0)
    #: focal: the weight of positive rows; negative ones have 1 - alpha. null: both count alike.
    alpha: float | None = Field(default=None, ge=0, le=1)
    #: cosine_contrastive: candidates with a cosine below it add nothing to the loss.
    margin: float = Field(default=0.8, ge=-1, le=1)
    #: cosine_contrastive: total weight of a row's candidates.
    negative_weight: float = Field(default=1.0, ge=0)
    #: Softmaxes: logits are divided by it.
    temperature: float = Field(default=1.0, gt=0)
    #: Softmaxes: subtract the logarithm of the item's sampling probability from each logit.
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
        """Return whether the loss compares each row's output with its label, and with nothing else."""
        return self.kind in ("bce", "focal", "squared_error")

    @property
    def predicts(self) -> Literal["probability", "number", "order"]:
        """Return what logits mean: the logit of a probability, the label's value, or no more than an order."""
        by_kind: dict[str, Literal["probability", "number"]] = {
            "bce": "probability",
            "focal": "probability",
            "squared_error": "number",
        }
        return by_kind.get(self.kind, "order")


#: The group of entry points under which packages offer torch modules.
MODELS = "headrace.models"
#: Settings of `dlrm` that stand in `model` itself.
_OF_DLRM = ("bottom_mlp", "top_mlp", "dropout")


class Model(TrainedSection):
    """The neural model: its class, the width of embeddings, and its settings."""

    model_config = ConfigDict(populate_by_name=True)

    #: `dlrm`, `wide_deep`, `deepfm`, `dcn_v2`, `final_mlp`, `masknet`; of several tasks `shared_bottom`, `mmoe`, `ple`,
    #: `esmm`; collaborative `matrix_factorization`, `neumf`, `mult_vae`, `lightgcn`, `simplex`; of
    #: histories `sasrec`, `hstu`, `din`; or a torch module of your own: `module:Class`, or the name that an installed
    #: package offers it under.
    kind: Annotated[str, Effect.WEIGHTS] = Field(default="dlrm", alias="class")
    #: Settings of the class: see the model classes below, or what the constructor of your own takes.
    args: Annotated[Mapping[str, Any], Effect.WEIGHTS] = Field(default={})
    #: Width of every embedding; a DLRM's bottom MLP ends in it.
    embedding_dim: Annotated[int, Effect.WEIGHTS] = Field(default=16, ge=1)
    #: Of dlrm: hidden widths; the last layer of the bottom (embedding_dim) and of the top (1) is added.
    bottom_mlp: Annotated[tuple[int, ...], Effect.WEIGHTS] = (64,)
    #: Of dlrm: hidden widths of the MLP over the dots of all vectors.
    top_mlp: Annotated[tuple[int, ...], Effect.WEIGHTS] = (64, 32)
    #: Of dlrm: share of the top MLP's hidden units that a training step leaves out.
    dropout: Annotated[float, Effect.WEIGHTS] = Field(default=0.0, ge=0, lt=1)
    #: How the vectors of a list become one.
    pooling: Annotated[Literal["sum", "mean", "max"], Effect.WEIGHTS] = "sum"
    #: What training minimises, where the class has no loss of its own; null: the class's own, else bce.
    loss: Annotated[Loss | None, Effect.WEIGHTS] = None

    @model_validator(mode="after")
    def _settings_of_the_class(self) -> Model:
        if self.kind == "dlrm":
            if self.args:
                raise ValueError("dlrm has no args: write bottom_mlp, top_mlp and dropout beside 'class'")
            return self
        misplaced = [name for name in _OF_DLRM if name in self.model_fields_set]
        if misplaced:
            raise ValueError(f"'{misplaced[0]}' is a setting of dlrm: write what '{self.kind}' takes into 'args'")
        if ":" in self.kind or (self.kind not in MODEL_ARGS and self.kind in offered(MODELS)):
            return self  # the class itself looks at them, where it is imported
        if self.kind not in MODEL_ARGS:
            known = ", ".join(("dlrm", *MODEL_ARGS, *offered(MODELS)))
            raise ValueError(f"no class '{self.kind}' (known: {known}; one of your own: MODULE:CLASS)")
        try:
            MODEL_ARGS[self.kind].model_validate(dict(self.args))
        except ValidationError as e:
            raise ValueError(f"args of '{self.kind}': {faults_of(MODEL_ARGS[self.kind], e)}") from None
        if self.kind in ("wide_deep", "deepfm") and self.embedding_dim < 2:
            raise ValueError(
                f"'{self.kind}' takes the first value of an embedding as a weight: embedding_dim is at least 2"
            )
        return self

    @model_serializer(mode="wrap")
    def _of_the_class(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Return the keys that the class takes: a section with the others would be refused when it is read back."""
        dumped: dict[str, Any] = serialize(self)
        for name in ("args",) if self.kind == "dlrm" else _OF_DLRM:
            dumped.pop(name, None)
        return dumped


def with_class(model: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Return the keys of a section `model` that stay when its class becomes `kind`: all, or those of every class."""
    previous_class = model.get("class", model.get("kind", "dlrm"))
    dropped = {"kind", "class"} if previous_class == kind else {"kind", "class", "args", *_OF_DLRM}
    return {**{key: value for key, value in model.items() if key not in dropped}, "class": kind}
