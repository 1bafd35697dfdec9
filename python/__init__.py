"""headrace: from clicks in a lake to a recommender retrained every day and scores in a warehouse.

As a library (docs/library.md):

    import headrace as hr

    fitted = hr.Workflow(["user", "item"] >> hr.Categorify(), label="click").fit(frame)
    fitted.write_dataset(frame, "dataset")
    for features, labels in hr.load_dataset("dataset"): ...

Names are imported when they are asked for: `import headrace` costs nothing.
"""

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
