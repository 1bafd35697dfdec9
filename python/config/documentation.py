"""Documentation of the spec's sections: keys, types, defaults, and the `#:` comments above their fields."""

from __future__ import annotations

import ast
import inspect
import textwrap
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from headrace.plugins import Seam

#: Python's types as YAML's readers know them.
_WORDS = {str: "text", int: "integer", float: "number", bool: "true or false", type(None): "null", Any: "any"}
#: Bounds as pydantic keeps them, and how they are read.
_BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


@dataclass(frozen=True)
class Key:
    """One key of a section."""

    name: str
    #: What it takes, for a person.
    accepts: str
    #: As YAML writes it; empty where the key must be given.
    default: str
    meaning: str
    #: Models that its value is made of, which have keys of their own.
    models: tuple[type[BaseModel], ...]


def keys_of(model: type[BaseModel]) -> list[Key]:
    """Return the keys of a section, in the order of the file."""
    comments = _comments(model)
    return [
        Key(
            info.alias or name,
            _type(info.annotation, info.metadata),
            _default(info),
            comments.get(name, ""),
            tuple(dict.fromkeys(_models(info.annotation))),
        )
        for name, info in model.model_fields.items()
    ]


def meaning_of(model: type[BaseModel]) -> str:
    """Return the model's docstring; empty where it has none of its own."""
    return inspect.cleandoc(model.__dict__.get("__doc__") or "")


@cache
def _comments(model: type[BaseModel]) -> Mapping[str, str]:
    """Return the lines that begin with `#:` right above each field, by its name; bases' fields too."""
    comments: dict[str, str] = {}
    for cls in reversed(model.__mro__):
        if not (issubclass(cls, BaseModel) and cls is not BaseModel):
            continue
        lines = textwrap.dedent(inspect.getsource(cls)).splitlines()
        (tree,) = ast.parse("\n".join(lines)).body
        assert isinstance(tree, ast.ClassDef)
        for node in tree.body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                above: list[str] = []
                line = node.lineno - 2
                while line >= 0 and lines[line].strip().startswith("#:"):
                    above.insert(0, lines[line].strip()[2:].strip())
                    line -= 1
                if above or node.target.id not in comments:
                    comments[node.target.id] = " ".join(above)
    return comments


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation) if get_origin(annotation) is not Literal else ():
        yield from _models(inner)


def _type(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(inner[0], inner[1:])
    if origin is Literal:
        text = ", ".join(f"`{value}`" for value in inner)
    elif origin in (Union, types.UnionType):
        text = " or ".join(dict.fromkeys(_type(i) for i in inner))
    elif origin is tuple and not (len(inner) == 2 and inner[1] is Ellipsis):
        text = f"[{', '.join(_type(i) for i in inner)}]"
    elif origin in (tuple, list) or (isinstance(origin, type) and issubclass(origin, Sequence)):
        text = f"list of {_type(inner[0])}"
    elif isinstance(origin, type) and issubclass(origin, Mapping):
        text = f"mapping of {_type(inner[1])}"
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        text = f"[{annotation.__name__}](#{annotation.__name__.lower()})"
    elif (seam := next((entry for entry in metadata if isinstance(entry, Seam)), None)) is not None:
        text = ", ".join(f"`{name}`" for name in (*seam.names, "MODULE:CLASS"))
    else:
        text = _WORDS.get(annotation, str(getattr(annotation, "__name__", annotation)))
    return ", ".join([text, *_constraints(metadata)])


def _constraints(metadata: Sequence[Any]) -> list[str]:
    constraints = []
    for entry in metadata:
        constraints += [f"{sign} {getattr(entry, name):,}" for name, sign in _BOUNDS.items() if hasattr(entry, name)]
        for inner in getattr(entry, "metadata", ()):  # a FieldInfo within Annotated
            constraints += _constraints([inner])
    return constraints


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return ""
    value = info.get_default(call_default_factory=True, validated_data={})
    assert value is not PydanticUndefined
    return _yaml(value)


def _yaml(value: Any) -> str:
    """Return a default on one line of YAML; of a section the keys that differ from its own defaults."""
    if isinstance(value, BaseModel):
        return _yaml(value.model_dump(exclude_defaults=True, by_alias=True))
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{k}: {_yaml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_yaml, value)) + "]"
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, str):
        return value if value and value[0].isalnum() and ": " not in value else f"'{value}'"
    return str(value)
