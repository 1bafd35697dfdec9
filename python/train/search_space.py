"""The search space: fields of the spec as Optuna's distributions, and drawn values as overrides of the spec."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import yaml
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import Trial

from headrace.config import Parameter, Search, Spec
from headrace.config.load import flatten, flow
from headrace.config.variants import parameter_type
from headrace.errors import UserError

#: Significant digits of drawn numbers, so that a trial's numbers are exactly those in its overlay.
_DIGITS = 4
#: Parameter that names a trial's model in `search.models`.
_MODEL = "model"


def draw(trial: Trial, search: Search, kind_of: Callable[[str | None], str]) -> None:
    """Draw a trial's model, if there are several, and the parameters that only this model has.

    Args:
        trial: trial with the parameters of `distributions`.
        search: the search space.
        kind_of: returns the class of one of `search.models`.
    """
    if not search.models:
        return
    model = trial.suggest_categorical(_MODEL, list(search.models))
    for path, p in search.models[model].parameters.items():
        # Prefix the names by the model, since models may have different ranges.
        name, distribution = f"{model}: {path}", _distribution(path, p, kind_of(model))
        if isinstance(distribution, CategoricalDistribution):
            trial.suggest_categorical(name, list(distribution.choices))
        elif isinstance(distribution, IntDistribution):
            trial.suggest_int(name, distribution.low, distribution.high, step=distribution.step, log=distribution.log)
        else:
            assert isinstance(distribution, FloatDistribution)
            trial.suggest_float(name, distribution.low, distribution.high, step=distribution.step, log=distribution.log)


def distributions(search: Search, kind: str) -> dict[str, BaseDistribution]:
    """Return the distribution of each parameter that all models share, by field path.

    Choices are YAML texts, since Optuna's choices can only be numbers and texts.

    Args:
        search: the search space.
        kind: the pipeline's `model.class`.
    """
    return {path: _distribution(path, p, kind) for path, p in search.parameters.items()}


def _distribution(path: str, p: Parameter, kind: str) -> BaseDistribution:
    if p.choices is not None:
        return CategoricalDistribution([flow(c) for c in p.choices])
    assert p.low is not None
    assert p.high is not None
    if parameter_type(Spec, path, p, kind) is int:
        return IntDistribution(int(p.low), int(p.high), log=p.log, step=int(p.step or 1))
    return FloatDistribution(p.low, p.high, log=p.log, step=p.step)


def model_of(parameters: Mapping[str, Any]) -> str | None:
    """Return the name in `search.models` that Optuna drew; None without such a section."""
    return parameters.get(_MODEL)


def values_of(search: Search, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the drawn values of the fields: those of the model, then those of all, then the model's parameters."""
    model = model_of(parameters)
    values = dict(keys_of(search, model))
    values |= {path: _value(p, parameters[path]) for path, p in search.parameters.items()}
    if model is not None:
        values |= {
            path: _value(p, parameters[f"{model}: {path}"]) for path, p in search.models[model].parameters.items()
        }
    return values


def keys_of(search: Search, model: str | None) -> Iterator[tuple[str, Any]]:
    """Yield the key paths and values by which one of `search.models` differs from the pipeline's own."""
    if model is not None:
        variant = search.models[model]
        sections = {"model": variant.model, "train": variant.train}
        yield from flatten({section: keys for section, keys in sections.items() if keys})


def _value(p: Parameter, value: Any) -> Any:
    if p.choices is not None:
        return yaml.safe_load(value)
    if isinstance(value, float) and p.step is None:
        assert p.low is not None
        assert p.high is not None
        return min(max(float(f"{value:.{_DIGITS}g}"), p.low), p.high)
    return value


def overrides_of(values: Mapping[str, Any]) -> list[str]:
    """Return values by field path as overrides of the spec."""
    return [f"{path}={flow(value)}" for path, value in values.items()]


def overlay_of(values: Mapping[str, Any]) -> str:
    """Return values by field path as a YAML file that has only them."""
    data: dict[str, Any] = {}
    for path, value in values.items():
        *parents, leaf = path.split(".")
        node = data
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value
    return yaml.safe_dump(data, sort_keys=False)


def check_values(search: Search, spec_of: Callable[[Mapping[str, Any]], Spec]) -> None:
    """Check the ends of each range, and each choice, on the spec: one parameter at a time, for each model.

    Raises:
        UserError: the spec refuses a value; the message names it and the parameter.
    """
    for model in (None, *search.models):
        base = dict(keys_of(search, model))
        parameters = search.parameters if model is None else search.models[model].parameters
        kind = spec_of(base).model.kind
        for path, p in parameters.items():
            for value in p.choices if p.choices is not None else (p.low, p.high):
                if p.choices is None and parameter_type(Spec, path, p, kind) is int:
                    value = int(value)
                try:
                    spec_of({**base, path: value})
                except UserError as e:
                    prefix = "train.search.parameters" if model is None else f"train.search.models.{model}.parameters"
                    raise UserError(f"{prefix}: {path} cannot be {flow(value)}: {e}") from None
