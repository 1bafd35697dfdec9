"""Operators of a spec, by name and parameters, and what is wrong with those in words.

Three kinds of names: those of the operators that headrace has; `module:Class`, a class of the user's; and the name of
an entry point, by which an installed package offers one (group `headrace.operators`, or `headrace.table_operators`):

    [project.entry-points."headrace.operators"]
    halve = "my_package.operators:Halve"
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from headrace.errors import UserError, nearest
from headrace.plugins import faults_of, import_class, offered

T = TypeVar("T", bound=BaseModel)


def build(
    registry: Mapping[str, type[T]], name: str, params: Mapping[str, Any], where: str, what: str, base: type[T]
) -> T:
    """An operator of a registry, or of the user's, with its parameters.

    Args:
        where: its place in the spec, for messages.
        what: what the registry holds: `operator`, `table operator`.
        base: the class that operators of the kind extend.

    Raises:
        UserError: no such operator, a class that cannot be imported or is no operator, no such parameter, a wrong
            value; with the place and the nearest valid name.
    """
    kind = registry.get(name) or _plugin(registry, name, where, what, base)
    if not isinstance(params, Mapping):
        raise UserError(
            f"{where} ({name}): write its parameters as a mapping, for example {name}: {{PARAMETER: VALUE}}"
        )
    try:
        return kind.model_validate(dict(params))
    except ValidationError as e:
        raise UserError(f"{where} ({name}): {faults_of(kind, e)}") from None


def _plugin(registry: Mapping[str, type[T]], name: str, where: str, what: str, base: type[T]) -> type[T]:
    others = offered(f"headrace.{what.replace(' ', '_')}s")
    reference = others.get(name, name)
    if ":" not in reference:
        known = sorted({*registry, *others})
        raise UserError(
            f"{where}: no {what} '{name}'{nearest(name, known)} (known: {', '.join(known)}; one of your own: "
            f"MODULE:CLASS)"
        )
    return import_class(reference, base, where, what)
