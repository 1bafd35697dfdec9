"""Key paths of a spec (`train.dense.learning_rate`): the fields there, and their types."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, Tag


def fields_at(model: Any, loc: Sequence[Any]) -> list[str]:
    """Return the valid keys of the section at a key path below a section; none where there is no such section."""
    entry = None
    for part in loc:
        if isinstance(part, int):
            continue
        if entry is not None:
            model, entry = _sections_in(entry), None
            continue
        if tagged := tagged_sections(model):
            model = tagged.get(part)
            continue
        field = model.model_fields.get(part) if _is_section(model) else None
        if field is None:
            return []
        model, entry = _sections_in(field.annotation), _entry_of(field.annotation)
    if not _is_section(model):
        return []
    return [field.alias or name for name, field in model.model_fields.items()]


def section_of(annotation: Any) -> Any:
    """Return the section inside `X | None`, `tuple[X, ...]`, `Annotated[X, ...]`; None where there is none."""
    if _is_section(annotation):
        return annotation
    for inner in getattr(annotation, "__args__", ()):
        section = section_of(inner)
        if section is not None:
            return section
    return None


def _sections_in(annotation: Any) -> Any:
    """Return the union of sections that an annotation is, else the section inside it; None where there is none."""
    return annotation if tagged_sections(annotation) else section_of(annotation)


def tagged_sections(annotation: Any) -> dict[str, type[BaseModel]]:
    """Return the sections of a union by their tags (`Annotated[X, Tag("x")] | ...`); none where it is no such union.

    The union may be annotated itself, or the entry of a tuple.
    """
    sections: dict[str, type[BaseModel]] = {}
    for member in () if _entry_of(annotation) is not None else get_args(annotation):
        tags = [m.tag for m in getattr(member, "__metadata__", ()) if isinstance(m, Tag)]
        if tags and _is_section(get_args(member)[0]):
            sections[tags[0]] = get_args(member)[0]
        elif get_origin(annotation) in (Annotated, tuple):
            sections |= tagged_sections(member)
    return sections


def without_tags(model: Any, loc: Sequence[Any]) -> tuple[Any, ...]:
    """Return a key path as YAML has it, of one as pydantic names it, with the tags of unions in it."""
    path: list[Any] = []
    entry = None
    for part in loc:
        tagged = tagged_sections(model)
        if part in tagged:
            model = tagged[part]
            continue
        path.append(part)
        if entry is not None:
            model, entry = _sections_in(entry), None
        elif isinstance(part, str):
            field = model.model_fields.get(part) if _is_section(model) else None
            annotation = None if field is None else field.annotation
            model, entry = _sections_in(annotation), _entry_of(annotation)
    return tuple(path)


def annotation_at(model: type[BaseModel], path: str) -> Any:
    """Return the type of the field at a path below a section; the keys of mappings may be anything.

    Raises:
        KeyError: there is no such field.
    """
    annotation: Any = model
    for part in path.split("."):
        entry = _entry_of(annotation)
        if entry is not None:
            annotation = entry
            continue
        sections = [*tagged_sections(annotation).values()] or [section_of(annotation)]
        section = next((s for s in sections if s is not None and part in s.model_fields), None)
        if section is None:
            raise KeyError(path)
        annotation = section.model_fields[part].annotation
    return annotation


def entry_at(model: type[BaseModel], parts: Sequence[str]) -> Any:
    """Return the type of the values of the mapping at a path below a section; None where there is no mapping."""
    try:
        return _entry_of(annotation_at(model, ".".join(parts))) if parts else None
    except KeyError:
        return None


def leaves(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield the paths of all fields below a section that are no sections themselves."""
    for name, field in model.model_fields.items():
        inner = section_of(field.annotation)
        if inner is None or _entry_of(field.annotation) is not None:
            yield prefix + name
        else:
            yield from leaves(inner, f"{prefix}{name}.")


def number_type(annotation: Any) -> type[int] | type[float] | None:
    """Return `int` or `float` where the field takes numbers of that type (or null), else None."""
    inner = _alternatives(annotation)
    if float in inner:
        return float
    return int if int in inner else None


def _alternatives(annotation: Any) -> list[Any]:
    origin = get_origin(annotation)
    if origin is Annotated:
        return _alternatives(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        return [a for arg in get_args(annotation) for a in _alternatives(arg)]
    return [annotation]


def _entry_of(annotation: Any) -> Any:
    """Return the type of a mapping's values; None where it is no mapping."""
    for inner in _alternatives(annotation):
        if isinstance(get_origin(inner), type) and issubclass(get_origin(inner), Mapping):
            return get_args(inner)[1]
    return None


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)
