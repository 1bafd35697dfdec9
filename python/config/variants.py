"""Models beside the pipeline's own (the sections `compare` and `train.search`), and the key paths that vary in them.

A key path (`train.dense.learning_rate`) leads to a field of a section and its type.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, Field, Tag, ValidationError, field_validator, model_validator

from headrace.config.evaluation import HIGHER_IS_BETTER
from headrace.config.model import with_class
from headrace.config.model_args import MODEL_ARGS
from headrace.config.score import RegisteredModel
from headrace.config.section import NAME, Section
from headrace.errors import nearest


def fields_at(model: Any, loc: Sequence[Any]) -> list[str]:
    """Return the valid keys of the section at a key path below a section; none where there is no such section."""
    entry = None
    for part in loc:
        if isinstance(part, int):
            continue
        if entry is not None:
            model, entry = _sections_in(entry), None
            continue
        if tagged := tagged_sections(model):
            model = tagged.get(part)
            continue
        field = model.model_fields.get(part) if _is_section(model) else None
        if field is None:
            return []
        model, entry = _sections_in(field.annotation), _entry_of(field.annotation)
    if not _is_section(model):
        return []
    return [field.alias or name for name, field in model.model_fields.items()]


def section_of(annotation: Any) -> Any:
    """Return the section inside `X | None`, `tuple[X, ...]`, `Annotated[X, ...]`; None where there is none."""
    if _is_section(annotation):
        return annotation
    for inner in getattr(annotation, "__args__", ()):
        section = section_of(inner)
        if section is not None:
            return section
    return None


def _sections_in(annotation: Any) -> Any:
    """Return the union of sections that an annotation is, else the section inside it; None where there is none."""
    return annotation if tagged_sections(annotation) else section_of(annotation)


def tagged_sections(annotation: Any) -> dict[str, type[BaseModel]]:
    """Return the sections of a union by their tags (`Annotated[X, Tag("x")] | ...`); none where it is no such union.

    The union may be annotated itself, or the entry of a tuple.
    """
    sections: dict[str, type[BaseModel]] = {}
    for member in () if _entry_of(annotation) is not None else get_args(annotation):
        tags = [m.tag for m in getattr(member, "__metadata__", ()) if isinstance(m, Tag)]
        if tags and _is_section(get_args(member)[0]):
            sections[tags[0]] = get_args(member)[0]
        elif get_origin(annotation) in (Annotated, tuple):
            sections |= tagged_sections(member)
    return sections


def without_tags(model: Any, loc: Sequence[Any]) -> tuple[Any, ...]:
    """Return a key path as YAML has it, of one as pydantic names it, with the tags of unions in it."""
    path: list[Any] = []
    entry = None
    for part in loc:
        tagged = tagged_sections(model)
        if part in tagged:
            model = tagged[part]
            continue
        path.append(part)
        if entry is not None:
            model, entry = _sections_in(entry), None
        elif isinstance(part, str):
            field = model.model_fields.get(part) if _is_section(model) else None
            annotation = None if field is None else field.annotation
            model, entry = _sections_in(annotation), _entry_of(annotation)
    return tuple(path)


def annotation_at(model: type[BaseModel], path: str) -> Any:
    """Return the type of the field at a path below a section; the keys of mappings may be anything.

    Raises:
        KeyError: there is no such field.
    """
    annotation: Any = model
    for part in path.split("."):
        entry = _entry_of(annotation)
        if entry is not None:
            annotation = entry
            continue
        sections = [*tagged_sections(annotation).values()] or [section_of(annotation)]
        section = next((s for s in sections if s is not None and part in s.model_fields), None)
        if section is None:
            raise KeyError(path)
        annotation = section.model_fields[part].annotation
    return annotation


def entry_at(model: type[BaseModel], parts: Sequence[str]) -> Any:
    """Return the type of the values of the mapping at a path below a section; None where there is no mapping."""
    try:
        return _entry_of(annotation_at(model, ".".join(parts))) if parts else None
    except KeyError:
        return None


def leaves(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield the paths of all fields below a section that are no sections themselves."""
    for name, field in model.model_fields.items():
        inner = section_of(field.annotation)
        if inner is None or _entry_of(field.annotation) is not None:
            yield prefix + name
        else:
            yield from leaves(inner, f"{prefix}{name}.")


def number_type(annotation: Any) -> type[int] | type[float] | None:
    """Return `int` or `float` where the field takes numbers of that type (or null), else None."""
    inner = _alternatives(annotation)
    if float in inner:
        return float
    return int if int in inner else None


def _alternatives(annotation: Any) -> list[Any]:
    origin = get_origin(annotation)
    if origin is Annotated:
        return _alternatives(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        return [a for arg in get_args(annotation) for a in _alternatives(arg)]
    return [annotation]


def _entry_of(annotation: Any) -> Any:
    """Return the type of a mapping's values; None where it is no mapping."""
    for inner in _alternatives(annotation):
        if isinstance(get_origin(inner), type) and issubclass(get_origin(inner), Mapping):
            return get_args(inner)[1]
    return None


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


_S = TypeVar("_S", bound=Section)
#: Of `train`: what must be the same for all models, or is for one run alone.
_NOT_OF_ONE = ("evaluation", "rank_group", "rank_k", "search", "ranks", "device")


class ModelVariant(Section):
    """A model beside others, as its differences from the pipeline's own settings. `{}`: none."""

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

    #: Models by name; tables have them in this order.
    models: Mapping[str, ModelVariant] = Field(default={})
    #: Versions of the registry, or `@` and an alias, two at least: `headrace compare PIPELINE 7 @champion`.
    versions: tuple[RegisteredModel, ...] = ()
    #: The model with which the others are compared; null: the first.
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
        """Return the name of the model that the others are tested against."""
        return self.against or next(iter(self.models))


def with_keys(section: _S, keys: Mapping[str, Any], *, over_defaults: bool = False) -> _S:
    """Return a section with keys put over its own, as an overlay puts them.

    Args:
        section: the section.
        keys: nested as in YAML.
        over_defaults: a nested section that was not given keeps its other keys as they are in `section`; else it has
            those of a section that is written with these keys alone.

    Raises:
        ValueError: the section does not take them.
    """
    dumped = section.model_dump(mode="json", by_alias=True, exclude_unset=not over_defaults)
    if "class" in keys:
        dumped = with_class(dumped, str(keys["class"]))
    try:
        return type(section).model_validate(_over(dumped, keys))
    except ValidationError as e:
        faults = [(".".join(map(str, f["loc"])), str(f["msg"]).removeprefix("Value error, ")) for f in e.errors()]
        raise ValueError("; ".join(f"{key}: {message}" if key else message for key, message in faults)) from None


def _over(section: Mapping[str, Any], keys: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(section)
    for key, value in keys.items():
        inner = merged.get(key)
        merged[key] = _over(inner, value) if isinstance(inner, Mapping) and isinstance(value, Mapping) else value
    return merged


#: What a trial may change. The dataset is there already, and how fast or how safely a run is made changes no weight.
SEARCHABLE = (
    "model",
    "train.batch_size",
    "train.dense",
    "train.embeddings",
    "train.negatives",
    "train.unknown_rate",
    "train.warm_decay",
)
#: How long a run is, the search says.
_OF_TRIALS = ("epochs", "max_steps", "patience", "eval_steps", "accumulate")


class Parameter(Section):
    """The values of one field that are tried: `{low, high}`, both inclusive, or `{choices}`."""

    #: Least value of a range.
    low: float | None = None
    #: Greatest value of a range.
    high: float | None = None
    #: Draw evenly over the logarithm.
    log: bool = False
    #: Values are `low` plus a multiple of this.
    step: float | None = Field(default=None, gt=0)
    #: Any values that the field takes, lists and null too.
    choices: tuple[Any, ...] | None = None

    @model_validator(mode="after")
    def _one_kind(self) -> Parameter:
        ranged = self.low is not None and self.high is not None
        if ranged == (self.choices is not None) or (self.low is None) != (self.high is None):
            raise ValueError("write {low: ..., high: ...} or {choices: [...]}")
        if self.choices is not None:
            if not self.choices:
                raise ValueError("choices is empty")
            if self.log or self.step:
                raise ValueError("log and step are of ranges, not of choices")
        if self.low is not None and self.high is not None:
            if self.low >= self.high:
                raise ValueError(f"low ({self.low:g}) must be below high ({self.high:g})")
            if self.log and self.low <= 0:
                raise ValueError(f"a logarithmic range begins above 0, not at {self.low:g}")
            if self.log and self.step:
                raise ValueError("a range has log or step, not both")
        return self


def parameter_type(spec: type[BaseModel], path: str, parameter: Parameter, kind: str) -> type[int] | type[float] | None:
    """Return the type of numbers that a parameter takes; None: it takes none.

    Args:
        spec: the whole pipeline's class.
        path: of the field.
        parameter: its values. Of a class of one's own it is not known what its arguments are: whole numbers where the
            ends and the step are.
        kind: `model.class`.

    Raises:
        KeyError: there is no such field.
    """
    argument = path.removeprefix("model.args.")
    if argument == path:
        return number_type(annotation_at(spec, path))
    if kind in MODEL_ARGS:
        return number_type(annotation_at(MODEL_ARGS[kind], argument))
    if ":" not in kind:
        raise KeyError(path)
    is_whole = all(x is None or x == int(x) for x in (parameter.low, parameter.high, parameter.step))
    return int if is_whole else float


class SearchedModel(ModelVariant):
    """A model that trials may have in place of the pipeline's own."""

    #: Spec field -> its values, of this model alone, besides those of all.
    parameters: Mapping[str, Parameter] = Field(default={})

    @model_validator(mode="after")
    def _trials_of_networks(self) -> SearchedModel:
        if self.baseline is not None:
            raise ValueError("`baseline`: trials train networks; compare trees with them by the section compare")
        if misplaced := [key for key in _OF_TRIALS if key in self.train]:
            raise ValueError(f"'{misplaced[0]}' of all trials is what train.search says")
        return self


class Search(Section):
    """The search of `headrace tune`: what is tried, and for how long."""

    #: Spec field (`train.dense.learning_rate`) -> its values.
    parameters: Mapping[str, Parameter] = Field(default={})
    #: Models by name, one of which each trial has, with parameters of its own.
    models: Mapping[str, SearchedModel] = Field(default={})
    #: Trials in all, those of earlier runs of the same search included.
    trials: int = Field(default=20, ge=1)
    #: Seconds of all trials together, those of earlier runs included: none begins after them. null: not limited.
    total_seconds: float | None = Field(default=None, gt=0)
    #: The metric of a trial, at each of its evaluations: a metric of the split `valid` (auc, log_loss, gauc, ...), of
    #: the lists of `rank` (ndcg, hr_at_k, recall_at_k, ...; these need train.rank_group), or of a full ranking of
    #: `valid` (ndcg_at_20_full, ...; these need train.evaluation.full_ranking).
    objective: str = "auc"
    #: Rows of the splits that a trial sees at most: row groups evenly over the split, of each the same share of rows.
    rows: int = Field(default=500_000, ge=1)
    #: Rows of the split that judges a trial, at most.
    valid_rows: int = Field(default=200_000, ge=1)
    #: A trial's length: passes over its rows, and at most so many steps, and no further than the first evaluation after
    #: so many seconds.
    epochs: int = Field(default=1, ge=1)
    #: Steps of a trial at most; null: not limited.
    steps: int | None = Field(default=None, ge=1)
    #: Seconds of a trial, to the next evaluation; null: not limited.
    seconds: float | None = Field(default=None, gt=0)
    #: Evaluations in a trial, at equal distances, besides the ends of epochs.
    evaluations: int = Field(default=4, ge=1)
    #: End a trial whose evaluation is below the median of the earlier trials' at the same place.
    prune: bool = True
    #: Trials before the first that is pruned, and before parameters are drawn where earlier trials were good.
    warmup_trials: int = Field(default=5, ge=1)
    #: Seed of the sampler of parameters.
    seed: int = 1

    @model_validator(mode="after")
    def _something_to_try(self) -> Search:
        if not self.parameters and not self.models:
            raise ValueError("name parameters, or models")
        return self

    @property
    def metric(self) -> str:
        """Return the objective's name among the metrics."""
        return "ndcg_at_k" if self.objective == "ndcg" else self.objective

    @property
    def of_lists(self) -> bool:
        """Return whether the objective is of the lists of the split `rank`."""
        return self.metric.endswith("_at_k")

    def parameters_of(self, model: str | None) -> dict[str, Parameter]:
        """Return the parameters of a trial by path, those of one of `models` in place of those of all."""
        return {**self.parameters, **(self.models[model].parameters if model else {})}

    @property
    def maximizes(self) -> bool:
        """Return whether a higher value is better."""
        return HIGHER_IS_BETTER.get(self.metric, True)


def check_search(
    spec: type[Section],
    search: Search,
    objectives: Collection[str],
    kind: str,
    kind_of: Callable[[ModelVariant], str],
    has_lists: bool,
) -> None:
    """See that fields, models and the objective are such as the pipeline has.

    Args:
        spec: the class of a whole pipeline, whose fields are searched.
        search: `train.search`.
        objectives: metrics that the pipeline has for it (Train.objectives).
        kind: the pipeline's class of model.
        kind_of: that of a variant; raises ValueError where a section does not take what it says.
        has_lists: whether `train.rank_group` is set.

    Raises:
        ValueError: one is not.
    """
    _check_parameters(spec, search.parameters, "train.search.parameters", kind)
    for name, model in search.models.items():
        path = f"train.search.models.{name}"
        try:
            own_kind = kind_of(model)
        except ValueError as e:
            raise ValueError(f"{path}: {e}") from None
        _check_parameters(spec, model.parameters, f"{path}.parameters", own_kind)
    if search.of_lists and not has_lists:
        raise ValueError(f"train.search.objective is '{search.objective}', but train.rank_group is not set")
    if search.objective not in objectives:
        hint = nearest(search.objective, objectives)
        raise ValueError(f"train.search.objective: '{search.objective}' is none of {', '.join(objectives)}{hint}")


def _check_parameters(spec: type[Section], parameters: Mapping[str, Parameter], key: str, kind: str) -> None:
    """See that parameters of a search are fields of the spec that can be searched, of the model class `kind`."""
    known = [p for p in leaves(spec) if _is_searchable(p)]
    for path, parameter in parameters.items():
        place = f"{key}: '{path}'"
        try:
            number = parameter_type(spec, path, parameter, kind)
        except KeyError:
            hint = nearest(path, known) or f"; fields that can be searched: {', '.join(known)}"
            raise ValueError(f"{place} is no field of the spec{hint}") from None
        if not _is_searchable(path):
            raise ValueError(
                f"{place} changes nothing that a trial could tell; below these all can be searched: "
                f"{', '.join(SEARCHABLE)}"
            )
        if parameter.choices is None and number is None:
            raise ValueError(f"{place} takes no numbers, so it has no low and high: write {{choices: [...]}}")
        bounds = (parameter.low, parameter.high, parameter.step)
        if number is int and any(b is not None and b != int(b) for b in bounds):
            raise ValueError(f"{place} takes whole numbers: low, high and step must be such")


def _is_searchable(path: str) -> bool:
    return any(path == s or path.startswith(f"{s}.") for s in SEARCHABLE)
