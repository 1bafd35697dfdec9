"""The section `model`."""

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

from headrace.config.effects import Effect, TrainedSection
from headrace.config.loss import Loss
from headrace.config.model_args import MODEL_ARGS
from headrace.plugins import faults_of

#: Settings of `dlrm` that stand in `model` itself.
_OF_DLRM = ("bottom_mlp", "top_mlp", "dropout")


class Model(TrainedSection):
    """The neural model: what works on the embeddings, and how wide these are."""

    model_config = ConfigDict(populate_by_name=True)

    #: `dlrm`, `wide_deep`, `deepfm`, `dcn_v2`, `final_mlp`, `masknet`; of several tasks `shared_bottom`, `mmoe`, `ple`,
    #: `esmm`; collaborative `matrix_factorization`, `neumf`, `mult_vae`, `lightgcn`, `simplex`; of
    #: histories `sasrec`, `hstu`, `din`; or `module:Class`, a torch module of your own.
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
        if ":" in self.kind:
            return self  # the class itself looks at them, where it is imported
        if self.kind not in MODEL_ARGS:
            known = ", ".join(("dlrm", *MODEL_ARGS))
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
    """The keys of a section `model` that stay when its class becomes `kind`: all, or those that every class has."""
    before = model.get("class", model.get("kind", "dlrm"))
    gone = {"kind", "class"} if before == kind else {"kind", "class", "args", *_OF_DLRM}
    return {**{key: value for key, value in model.items() if key not in gone}, "class": kind}
