"""Classes that users name in a spec, `module:Class` of any installed package, and faults of their parameters."""

from __future__ import annotations

from importlib import import_module
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from headrace.errors import UserError, nearest
from headrace.redaction import redact

T = TypeVar("T")


def import_class(reference: str, base: type[T], where: str, what: str) -> type[T]:
    """The class `module:Class`. Importing runs the module's code; nothing is called before the class was checked.

    Args:
        reference: `package.module:Class`, or `package.module:Outer.Class`.
        base: what the class must extend.
        where: its place in the spec, for messages.
        what: what it is there, for messages: `operator`, `model`.

    Raises:
        UserError: it cannot be imported, or extends something else.
    """
    module, _, path = reference.partition(":")
    try:
        found: Any = import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as e:
        raise UserError(
            f"{where}: {what} '{reference}' cannot be imported: {e}. Install the package in this environment (on a "
            f"cluster also in that of the executors), or set PYTHONPATH to the folder of its module"
        ) from None
    if not (isinstance(found, type) and issubclass(found, base)):
        raise UserError(
            f"{where}: '{reference}' is no {what}: it does not extend {base.__module__}:{base.__qualname__}"
        )
    return found


def faults_of(kind: type[BaseModel], error: ValidationError) -> str:
    """What is wrong with the parameters of a class, each by its name, with the nearest valid ones."""
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
            faults.append(f"parameter '{key}': {said} (got {redact(repr(fault['input']))})" if key else said)
    return "; ".join(dict.fromkeys(faults))
