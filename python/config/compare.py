"""The section `compare`: models that are trained over one dataset and tested against each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import Field, ValidationError, field_validator, model_validator

from headrace.config.model import with_class
from headrace.config.score import RegisteredModel
from headrace.config.section import NAME, Section
from headrace.errors import nearest

_S = TypeVar("_S", bound=Section)
#: Of `train`: what must be the same for all models, or is for one run alone.
_NOT_OF_ONE = ("evaluation", "rank_group", "rank_k", "search", "ranks", "device")


class ModelVariant(Section):
    """A model beside others: what differs from the pipeline's own settings. `{}`: nothing does."""

    #: Keys that are put over the section `model`; another `class` than the pipeline's keeps embedding_dim and pooling.
    model: Mapping[str, Any] = Field(default={})
    #: Keys that are put over the section `train`, but for those that say how models are measured and where they run.
    train: Mapping[str, Any] = Field(default={})
    #: XGBoost in place of the neural model: keys that are put over the section `baseline`.
    baseline: Mapping[str, Any] | None = None

    @field_validator("train")
    @classmethod
    def _same_measure(cls, value: Mapping[str, Any]) -> Mapping[str, Any]:
        for key in _NOT_OF_ONE:
            if key in value:
                raise ValueError(f"'{key}' is of all models: write it into the pipeline's own section")
        return value

    @model_validator(mode="after")
    def _one_kind(self) -> ModelVariant:
        if self.baseline is not None and (self.model or self.train):
            raise ValueError("`baseline` stands for XGBoost, which has no `model` and no `train`")
        return self


class Compare(Section):
    """Models that the stage `compare` trains over the day's dataset, those left out that are there already.

    Or registered ones, that are held against each other on rows of the day.
    """

    #: By name; in this order in tables.
    models: Mapping[str, ModelVariant] = Field(default={})
    #: Versions of the registry, or `@` and an alias, two at least: `headrace compare PIPELINE 7 @champion`.
    versions: tuple[RegisteredModel, ...] = ()
    #: The model that the others are tested against; null: the first.
    against: str | None = None

    @field_validator("models")
    @classmethod
    def _names(cls, value: Mapping[str, ModelVariant]) -> Mapping[str, ModelVariant]:
        for name in value:
            if not NAME.fullmatch(name):
                raise ValueError(f"'{name}' must match {NAME.pattern}")
        return value

    @model_validator(mode="after")
    def _something_to_compare(self) -> Compare:
        if not self.models and not self.versions:
            raise ValueError("models: name one at least")
        if self.versions and len(set(self.versions)) < max(2, len(self.versions)):
            raise ValueError("versions: name two at least, each once")
        return self

    @model_validator(mode="after")
    def _reference_is_there(self) -> Compare:
        if self.against is not None and self.against not in self.models:
            raise ValueError(f"against: no model '{self.against}'{nearest(self.against, list(self.models))}")
        return self

    @property
    def reference(self) -> str:
        """The model that the others are tested against."""
        return self.against or next(iter(self.models))


def with_keys(section: _S, keys: Mapping[str, Any], *, over_defaults: bool = False) -> _S:
    """A section with keys put over its own, as an overlay puts them.

    Args:
        section: the section.
        keys: nested as in YAML.
        over_defaults: a nested section that was not given keeps its other keys as they are in `section`; else it has
            those of a section that is written with these keys alone.

    Raises:
        ValueError: the section does not take them.
    """
    given = section.model_dump(mode="json", by_alias=True, exclude_unset=not over_defaults)
    if "class" in keys:
        given = with_class(given, str(keys["class"]))
    try:
        return type(section).model_validate(_over(given, keys))
    except ValidationError as e:
        faults = [(".".join(map(str, f["loc"])), str(f["msg"]).removeprefix("Value error, ")) for f in e.errors()]
        raise ValueError("; ".join(f"{key}: {said}" if key else said for key, said in faults)) from None


def _over(given: Mapping[str, Any], keys: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(given)
    for key, value in keys.items():
        inner = found.get(key)
        found[key] = _over(inner, value) if isinstance(inner, Mapping) and isinstance(value, Mapping) else value
    return found
