"""Operators of a spec, by name and parameters, with faults in words.

Three kinds of names: those of headrace's own operators; `module:Class`, a class of the user's; and the name of an entry
point, by which an installed package offers one (group `headrace.operators`, or `headrace.table_operators`):

    [project.entry-points."headrace.operators"]
    halve = "my_package.operators:Halve"
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from headrace.errors import UserError
from headrace.plugins import Seam, faults_of

T = TypeVar("T", bound=BaseModel)


def build(operators: Seam[T], name: str, params: Mapping[str, Any], place: str) -> T:
    """Return the operator of a name or a `module:Class`, with its parameters.

    Args:
        operators: the kind of operators.
        name: as the spec has it.
        params: its parameters.
        place: its place in the spec, for messages.

    Raises:
        UserError: no such operator, a class that cannot be imported or is no operator, no such parameter, a wrong
            value; with the place and the nearest valid name.
    """
    operator_class = operators.find(name, place)
    if not isinstance(params, Mapping):
        raise UserError(
            f"{place} ({name}): write its parameters as a mapping, for example {name}: {{PARAMETER: VALUE}}"
        )
    try:
        return operator_class.model_validate(dict(params))
    except ValidationError as e:
        raise UserError(f"{place} ({name}): {faults_of(operator_class, e)}") from None
