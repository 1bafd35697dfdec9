"""Classes that packages and users add: by the name of an entry point, or as `module:Class`.

An installed package offers a class under a name by an entry point of its group:

    [project.entry-points."headrace.warehouses"]
    lakehouse = "my_package.kind:Lakehouse"

The groups are `headrace.operators`, `headrace.table_operators`, `headrace.warehouses`, `headrace.sources`,
`headrace.table_sources` and `headrace.stores`. Installed packages are searched once a process, and only for a name
that headrace does not have itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ValidationError

from headrace.errors import UserError, nearest
from headrace.redaction import redact

T = TypeVar("T")


@cache
def offered(group: str) -> Mapping[str, str]:
    """Return the `module:Class` that installed packages offer in a group of entry points, by name."""
    return {point.name: point.value for point in entry_points(group=group)}


def resolve(reference: str, where: str, what: str) -> Any:
    """Import what `module:name` refers to. Importing runs the module's code.

    Args:
        reference: `package.module:name`, or `package.module:Outer.name`.
        where: its place in the spec, for messages.
        what: what it is there, for messages: `operator`, `model`.

    Raises:
        UserError: it cannot be imported.
    """
    module, _, path = reference.partition(":")
    try:
        value: Any = import_module(module)
        for part in path.split("."):
            value = getattr(value, part)
    except (ImportError, AttributeError, ValueError) as e:
        raise UserError(
            f"{where}: {what} '{reference}' cannot be imported: {e}. Install the package in this environment (on a "
            f"cluster also in that of the executors), or set PYTHONPATH to the folder of its module"
        ) from None
    return value


def import_class(reference: str, base: type[T], where: str, what: str) -> type[T]:
    """Import the class `module:Class`; nothing is called before the class was checked.

    Args:
        reference: `package.module:Class`, or `package.module:Outer.Class`.
        base: what the class must extend.
        where: its place in the spec, for messages.
        what: what it is there, for messages: `operator`, `model`.

    Raises:
        UserError: it cannot be imported, or extends something else.
    """
    value = resolve(reference, where, what)
    if not (isinstance(value, type) and issubclass(value, base)):
        raise UserError(
            f"{where}: '{reference}' is no {what}: it does not extend {base.__module__}:{base.__qualname__}"
        )
    return value


@dataclass(frozen=True, eq=False)
class Seam(Generic[T]):
    """A kind of class that a spec names: headrace's own, those of installed packages, and `module:Class`."""

    #: The group of entry points: `headrace.warehouses`.
    group: str
    #: One of them, for messages: `warehouse`.
    what: str
    #: What each class extends.
    base: type[T]
    #: `module:Class` of headrace's own, by name.
    own: Mapping[str, str]
    #: Packages of this repository that offer further names: name -> the package to install.
    packages: Mapping[str, str] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        """The names that are documented: headrace's own, and those of its packages, installed or not."""
        return (*self.own, *(name for name in self.packages if name not in self.own))

    def known(self) -> tuple[str, ...]:
        """Return the documented names and those that other installed packages offer."""
        return tuple(dict.fromkeys((*self.names, *offered(self.group))))

    def is_name(self, name: str) -> bool:
        """Return whether a name is documented or offered."""
        return name in self.names or name in offered(self.group)

    def find(self, name: str, where: str) -> type[T]:
        """Import the class of a name, or `module:Class`.

        Args:
            name: as the spec has it.
            where: its place in the spec, for messages.

        Raises:
            UserError: no such name, a package that is not installed, a class that cannot be imported or is of another
                kind.
        """
        reference = self.own.get(name) or offered(self.group).get(name, name)
        if ":" in reference:
            return import_class(reference, self.base, where, self.what)
        if name in self.packages:
            package = self.packages[name]
            raise UserError(f"{where}: {self.what} '{name}' is in a package of its own: pip install {package}")
        known = self.known()
        raise UserError(
            f"{where}: no {self.what} '{name}'{nearest(name, known)} (known: {', '.join(known)}; one of your own: "
            f"MODULE:CLASS)"
        )


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
