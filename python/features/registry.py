"""Operators of a spec, by name and parameters, and what is wrong with those in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from headrace.errors import UserError, nearest

T = TypeVar("T", bound=BaseModel)


def build(registry: Mapping[str, type[T]], name: str, params: Mapping[str, Any], where: str, what: str) -> T:
    """An operator of a registry with its parameters.

    Args:
        where: its place in the spec, for messages.
        what: what the registry holds: `operator`, `table operator`.

    Raises:
        UserError: no such operator, no such parameter, a wrong value; with the place and the nearest valid name.
    """
    kind = registry.get(name)
    if kind is None:
        raise UserError(f"{where}: no {what} '{name}'{nearest(name, registry)} (known: {', '.join(sorted(registry))})")
    if not isinstance(params, Mapping):
        raise UserError(
            f"{where} ({name}): write its parameters as a mapping, for example {name}: {{PARAMETER: VALUE}}"
        )
    try:
        return kind.model_validate(dict(params))
    except ValidationError as e:
        raise UserError(f"{where} ({name}): {_faults_of(kind, e)}") from None


def _faults_of(kind: type[BaseModel], error: ValidationError) -> str:
    faults = []
    for fault in error.errors():
        key = ".".join(str(p) for p in fault["loc"])
        known = [field.alias or name for name, field in kind.model_fields.items()]
        if fault["type"] == "extra_forbidden":
            faults.append(f"unknown parameter '{key}'{nearest(key, known)} (known: {', '.join(known) or 'none'})")
        elif fault["type"] == "missing":
            faults.append(f"parameter '{key}' is missing")
        else:
            said = str(fault["msg"]).removeprefix("Value error, ")
            faults.append(f"parameter '{key}': {said} (got {fault['input']!r})" if key else said)
    return "; ".join(dict.fromkeys(faults))
