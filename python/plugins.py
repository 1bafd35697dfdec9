"""Classes that packages and users add: by the name of an entry point, or as `module:Class`.

An installed package offers a class under a name by an entry point of its group:

    [project.entry-points."headrace.warehouses"]
    lakehouse = "my_package.kind:Lakehouse"

The groups are `headrace.operators`, `headrace.table_operators`, `headrace.warehouses`, `headrace.sources`,
`headrace.table_sources`, `headrace.stores`, `headrace.models` and `headrace.stages`. Installed packages are searched
once a process, for a name that headrace does not have itself. A package that offers one of headrace's own is refused
when a spec is checked (`check_not_taken`).
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from pydantic import BaseModel, GetJsonSchemaHandler, ValidationError
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from headrace.errors import UserError, nearest
from headrace.logs import redact

if TYPE_CHECKING:
    from importlib.metadata import EntryPoints, SelectableGroups

T = TypeVar("T")


@cache
def installed_entry_points() -> SelectableGroups | EntryPoints:
    """Return what all installed packages offer: their metadata is read once a process."""
    return entry_points()


def offered(group: str) -> Mapping[str, str]:
    """Return the `module:Class` that installed packages offer in a group of entry points, by name.

    Raises:
        UserError: two packages offer different classes under one name.
    """
    classes: dict[str, str] = {}
    for point in installed_entry_points().select(group=group):
        if classes.setdefault(point.name, point.value) != point.value:
            raise UserError(
                f"two installed packages offer '{point.name}' in {group}: {classes[point.name]} and {point.value}. "
                f"Uninstall one of them, or name the class as MODULE:CLASS"
            )
    return classes


def check_not_taken(group: str, noun: str, names: Collection[str]) -> None:
    """Check that no installed package offers a name that headrace has itself: the package would never be asked.

    Args:
        group: of entry points.
        noun: the kind of class, for the message: `warehouse`.
        names: headrace's own.

    Raises:
        UserError: one does; the message names it.
    """
    if taken := offered(group).keys() & set(names):
        name = min(taken)
        points = installed_entry_points().select(group=group, name=name)
        packages = {point.dist.name for point in points if point.dist is not None}
        named = " and ".join(sorted(packages)) or offered(group)[name]
        raise UserError(
            f"the installed package {named} offers the {noun} '{name}' ({group}), which is a name of headrace's own: "
            f"uninstall it, or have it offer another name"
        )


def check_reference(reference: str, key: str, noun: str) -> None:
    """Check, as far as files tell, that the object that `module:name` refers to can be imported. Imports no module.

    Args:
        reference: `package.module:name`.
        key: the key of the spec that has the reference, for messages.
        noun: the kind of object, for messages: `model`.

    Raises:
        UserError: there is no such module, or its source defines no such name.
    """
    module, _, path = reference.partition(":")
    if (fault := _fault_of(module, path.partition(".")[0])) is not None:
        raise _not_imported(reference, key, noun, fault)


def _fault_of(module: str, name: str) -> str | None:
    """Return why a module has no object of a name, or None where only an import can tell."""
    module_spec: ModuleSpec | None = None
    locations = None
    for depth, part in enumerate(parts := module.split(".")):
        package = ".".join(parts[: depth + 1])
        if not part:
            return f"'{module}' is no name of a module"
        finders = (finder for finder in sys.meta_path if hasattr(finder, "find_spec"))
        specs = (finder.find_spec(package, locations) for finder in finders)
        module_spec = next((spec for spec in specs if spec is not None), None)
        if module_spec is None:
            return f"No module named '{package}'"
        locations = module_spec.submodule_search_locations
    if module_spec is None or module_spec.origin is None or not module_spec.origin.endswith(".py"):
        return None
    try:
        tree = ast.parse(Path(module_spec.origin).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None  # importing it says more
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            names.add(node.name)
        elif isinstance(node, ast.alias):
            names.add(node.asname or node.name.partition(".")[0])
        elif isinstance(node, ast.Name):
            names.add(node.id)
    # A star's names, and those that a module makes when it is asked, are known to Python alone.
    if not names.isdisjoint({name, "*", "__getattr__", "globals", "setattr"}):
        return None
    return f"module '{module}' has no attribute '{name}'"


def _not_imported(reference: str, key: str, noun: str, reason: object) -> UserError:
    return UserError(
        f"{key}: {noun} '{reference}' cannot be imported: {reason}. Install the package in this environment (on a "
        f"cluster also in that of the executors), or set PYTHONPATH to the folder of its module"
    )


def resolve(reference: str, key: str, noun: str) -> Any:
    """Import the object that `module:name` refers to. Importing runs the module's code.

    Args:
        reference: `package.module:name`, or `package.module:Outer.name`.
        key: the key of the spec that has the reference, for messages.
        noun: the kind of object, for messages: `operator`, `model`.

    Raises:
        UserError: it cannot be imported.
    """
    module, _, path = reference.partition(":")
    try:
        value: Any = import_module(module)
        for part in path.split("."):
            value = getattr(value, part)
    except (ImportError, AttributeError, ValueError) as e:
        raise _not_imported(reference, key, noun, e) from None
    return value


def import_class(reference: str, base: type[T], key: str, noun: str) -> type[T]:
    """Import the class `module:Class` and check its base class.

    Args:
        reference: `package.module:Class`, or `package.module:Outer.Class`.
        base: the class that it must extend.
        key: the key of the spec that has the reference, for messages.
        noun: the kind of class, for messages: `operator`, `model`.

    Raises:
        UserError: it cannot be imported, or extends something else.
    """
    value = resolve(reference, key, noun)
    if not (isinstance(value, type) and issubclass(value, base)):
        raise UserError(f"{key}: '{reference}' is no {noun}: it does not extend {base.__module__}:{base.__qualname__}")
    return value


@dataclass(frozen=True, eq=False)
class Seam(Generic[T]):
    """An extension point: classes that a spec names, built in, from installed packages, or as `module:Class`."""

    #: The group of entry points: `headrace.warehouses`.
    group: str
    #: A class of this kind in messages: `warehouse`.
    noun: str
    #: The class that each of them extends.
    base: type[T]
    #: `module:Class` of headrace's own classes, by name.
    builtin: Mapping[str, str]
    #: Packages of this repository that offer further names: name -> the package to install.
    packages: Mapping[str, str] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        """Documented names: built-in ones, and those of this repository's packages, installed or not."""
        return (*self.builtin, *(name for name in self.packages if name not in self.builtin))

    def known(self) -> tuple[str, ...]:
        """Return the documented names and those that other installed packages offer."""
        return tuple(dict.fromkeys((*self.names, *offered(self.group))))

    def is_name(self, name: str) -> bool:
        """Return whether a name is documented or offered."""
        return name in self.names or name in offered(self.group)

    def __get_pydantic_json_schema__(self, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Return the schema of a key whose annotation has this: a known name, or `module:Class`."""
        return {**handler(core_schema), "anyOf": [{"enum": list(self.known())}, {"pattern": ":"}]}

    def own_classes(self) -> dict[str, type[T]]:
        """Import headrace's own classes, by name."""
        return {name: self.find(name, name) for name in self.builtin}

    def find(self, name: str, key: str) -> type[T]:
        """Import the class of a name, or `module:Class`.

        Args:
            name: the name in the spec, or `module:Class`.
            key: the key of the spec that has the name, for messages.

        Raises:
            UserError: an unknown name, a package that is not installed, a class that cannot be imported or extends
                another class.
        """
        reference = self.builtin.get(name) or offered(self.group).get(name, name)
        if ":" in reference:
            return import_class(reference, self.base, key, self.noun)
        if name in self.packages:
            package = self.packages[name]
            raise UserError(f"{key}: {self.noun} '{name}' is in a package of its own: pip install {package}")
        known = self.known()
        raise UserError(
            f"{key}: no {self.noun} '{name}'{nearest(name, known)} (known: {', '.join(known)}; one of your own: "
            f"MODULE:CLASS)"
        )


def faults_of(kind: type[BaseModel], error: ValidationError) -> str:
    """Describe the invalid parameters of a class in one line, each by its name, with the nearest valid ones."""
    faults = []
    for fault in error.errors():
        key = ".".join(str(p) for p in fault["loc"])
        known = [field.alias or name for name, field in kind.model_fields.items()]
        if fault["type"] == "extra_forbidden":
            faults.append(f"unknown parameter '{key}'{nearest(key, known)} (known: {', '.join(known) or 'none'})")
        elif fault["type"] == "missing":
            faults.append(f"parameter '{key}' is missing")
        else:
            message = str(fault["msg"]).removeprefix("Value error, ")
            faults.append(f"parameter '{key}': {message} (got {redact(repr(fault['input']))})" if key else message)
    return "; ".join(dict.fromkeys(faults))
