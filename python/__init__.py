"""headrace: from clicks in a lake to a recommender retrained every day and scores in a warehouse.

As a library (docs/library.md):

    import headrace as hr

    fitted = hr.Workflow(["user", "item"] >> hr.Categorify(), label="click").fit(frame)
    fitted.write_dataset(frame, "dataset")
    for features, labels in hr.load_dataset("dataset"): ...

Names are imported when they are asked for: `import headrace` costs nothing.
"""

import sys as _sys
from collections.abc import Callable as _Callable
from collections.abc import Mapping as _Mapping
from collections.abc import Sequence as _Sequence
from importlib import import_module as _import_module
from typing import Any as _Any

__version__ = "0.1.0"

_LIBRARY = {
    "FittedWorkflow": "headrace.library.workflow",
    "Predictor": "headrace.library.predictor",
    "UserError": "headrace.errors",
    "Workflow": "headrace.library.workflow",
    "load_dataset": "headrace.library.dataset",
}
#: Of headrace.features: the operators, and what they are written with.
_FEATURES = "headrace.features"


def lazy_names(package: str, names: _Mapping[str, _Sequence[str]]) -> _Callable[[str], _Any]:
    """Return the `__getattr__` of a package whose public names are imported when they are read for the first time.

    Args:
        package: its `__name__`.
        names: its public names by module: one of the package's own with a dot before it, or a full name.
    """
    modules = {name: module for module, module_names in names.items() for name in module_names}

    def import_name(name: str) -> _Any:
        if name not in modules:
            raise AttributeError(f"module '{package}' has no attribute '{name}'")
        value = getattr(_import_module(modules[name], package), name)
        setattr(_sys.modules[package], name, value)
        return value

    return import_name


class LazyModule:
    """A module of another package, which is imported when one of its names is read for the first time."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> _Any:
        """Return a name of the module, which is an attribute of this object from then on."""
        value = getattr(_import_module(self._name), name)
        setattr(self, name, value)
        return value


def __getattr__(name: str) -> _Any:
    if name in _LIBRARY:
        try:
            return getattr(_import_module(_LIBRARY[name]), name)
        except ModuleNotFoundError as e:
            from headrace.errors import UserError
            from headrace.errors.translate import missing_package

            if (message := missing_package(e)) is None:
                raise
            raise UserError(f"headrace.{name}: {message}") from None
    # An operator, by its class name.
    if name[:1].isupper():
        try:
            return getattr(_import_module(_FEATURES), name)
        except AttributeError:
            pass
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({"__version__", *_LIBRARY, *dir(_import_module(_FEATURES))})
