"""Specs from YAML and mappings, with messages that name the key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from headrace.config.spec import Spec
from headrace.errors import UserError, nearest
from headrace.workspace import pipeline_file


def load_spec(path_or_name: str | Path, overrides: Sequence[str] = ()) -> Spec:
    """Build the spec of a YAML file, or of a shipped pipeline by name.

    Args:
        path_or_name: a path, or a name below conf/pipelines.
        overrides: `key.path=value`, the value read as YAML.

    Raises:
        UserError: no such file, not YAML, an unknown key, a wrong type; all faults at once, each with its key path.
    """
    path = Path(path_or_name)
    if not (path.suffix in (".yaml", ".yml") or path.is_file()):
        path = pipeline_file(str(path_or_name))
        if not path.is_file():
            shipped = sorted(p.stem for p in path.parent.glob("*.yaml"))
            raise UserError(
                f"no pipeline '{path_or_name}'{nearest(str(path_or_name), shipped)}; shipped: {', '.join(shipped)}; "
                f"or give the path of a .yaml file"
            )
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"no such pipeline file: {path}") from None
    except (yaml.YAMLError, ValueError) as e:  # ValueError: bytes that are no text, or a date like 2026-02-30
        raise UserError(f"{path} is not YAML: {' '.join(str(e).split())}") from None
    if not isinstance(data, dict):
        raise UserError(f"{path}: a pipeline is a mapping of sections, not a {type(data).__name__}")
    for override in overrides:
        _apply(data, override)
    return build_spec(data, where=str(path))


def build_spec(data: Mapping[str, Any], where: str = "spec") -> Spec:
    """Validate a mapping. Raises UserError that lists every fault."""
    try:
        return Spec.model_validate(data)
    except ValidationError as e:
        raise UserError("\n".join(_explain(error, where) for error in e.errors())) from None


def _apply(data: dict[str, Any], override: str) -> None:
    key, equals, value = override.partition("=")
    if not equals or not key.strip():
        raise UserError(f"--set {override}: write key=value, for example --set train.epochs=2")
    *parents, leaf = key.strip().split(".")
    node: Any = data
    for parent in parents:
        if node.get(parent) is None:
            node[parent] = {}
        node = node[parent]
        if not isinstance(node, dict):
            raise UserError(f"--set {override}: '{parent}' is not a section")
    try:
        node[leaf] = yaml.safe_load(value)
    except (yaml.YAMLError, ValueError) as e:
        raise UserError(f"--set {override}: the value is not YAML: {' '.join(str(e).split())}") from None


def _explain(error: Any, where: str) -> str:
    path = ".".join(str(p) for p in error["loc"])
    if error["type"] == "extra_forbidden":
        return f"{where}: unknown key '{path}'{nearest(str(error['loc'][-1]), _fields_at(error['loc'][:-1]))}"
    if error["type"] == "missing":
        return f"{where}: key '{path}' is missing"
    message = str(error["msg"]).removeprefix("Value error, ")
    quiet = error["type"] == "value_error" or isinstance(error["input"], (dict, list))
    shown = "" if quiet else f" (got {error['input']!r})"
    return f"{where}: {path + ': ' if path else ''}{message}{shown}"


def _fields_at(loc: Sequence[Any]) -> list[str]:
    """Valid keys of the section at a key path."""
    model: Any = Spec
    for part in loc:
        if isinstance(part, int):
            continue
        field = model.model_fields.get(part) if isinstance(model, type) and issubclass(model, BaseModel) else None
        if field is None:
            return []
        model = _section_of(field.annotation)
    if not (isinstance(model, type) and issubclass(model, BaseModel)):
        return []
    return [field.alias or name for name, field in model.model_fields.items()]


def _section_of(annotation: Any) -> Any:
    """The pydantic model inside `X | None`, `tuple[X, ...]`, `Annotated[X, ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for inner in getattr(annotation, "__args__", ()):
        found = _section_of(inner)
        if found is not None:
            return found
    return None
