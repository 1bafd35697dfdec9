"""The search space: spec fields as Optuna's distributions, and values as overrides of the spec."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import yaml
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

from headrace.config import Parameter, Search, Spec
from headrace.config.load import flow
from headrace.config.paths import annotation_at, number_type
from headrace.errors import UserError

#: Digits that count: a trial's rates are those that its overlay says.
_DIGITS = 4


def distributions(search: Search) -> dict[str, BaseDistribution]:
    """One for each parameter, by field path. Choices are YAML texts: Optuna's are numbers and texts only."""
    return {path: _distribution(path, p) for path, p in search.parameters.items()}


def _distribution(path: str, p: Parameter) -> BaseDistribution:
    if p.choices is not None:
        return CategoricalDistribution([flow(c) for c in p.choices])
    assert p.low is not None
    assert p.high is not None
    if number_type(annotation_at(Spec, path)) is int:
        return IntDistribution(int(p.low), int(p.high), log=p.log, step=int(p.step or 1))
    return FloatDistribution(p.low, p.high, log=p.log, step=p.step)


def values_of(search: Search, drawn: Mapping[str, Any]) -> dict[str, Any]:
    """What Optuna drew, as values of the fields."""
    return {path: _value(p, drawn[path]) for path, p in search.parameters.items()}


def _value(p: Parameter, drawn: Any) -> Any:
    if p.choices is not None:
        return yaml.safe_load(drawn)
    if isinstance(drawn, float) and p.step is None:
        assert p.low is not None
        assert p.high is not None
        return min(max(float(f"{drawn:.{_DIGITS}g}"), p.low), p.high)
    return drawn


def overrides_of(values: Mapping[str, Any]) -> list[str]:
    """Values by field path, as overrides of the spec."""
    return [f"{path}={flow(value)}" for path, value in values.items()]


def overlay_of(values: Mapping[str, Any]) -> str:
    """Values by field path, as a YAML file that has only them."""
    data: dict[str, Any] = {}
    for path, value in values.items():
        *parents, leaf = path.split(".")
        node = data
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value
    return yaml.safe_dump(data, sort_keys=False)


def check_values(search: Search, spec_of: Callable[[Mapping[str, Any]], Spec]) -> None:
    """Try the ends of each range and each choice on the spec, one parameter at a time.

    Raises:
        UserError: the spec refuses one; names the parameter and the value.
    """
    for path, p in search.parameters.items():
        for value in p.choices if p.choices is not None else (p.low, p.high):
            if p.choices is None and number_type(annotation_at(Spec, path)) is int:
                value = int(value)
            try:
                spec_of({path: value})
            except UserError as e:
                raise UserError(f"train.search.parameters: {path} cannot be {flow(value)}: {e}") from None
