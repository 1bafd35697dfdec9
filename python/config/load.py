"""Specs from YAML and mappings, with messages that name the key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from headrace.config.embeddings import Sharding
from headrace.config.installation import pipeline_file
from headrace.config.model import with_class
from headrace.config.source import TableSource
from headrace.config.spec import Spec
from headrace.config.variants import entry_at, fields_at, section_of, without_tags
from headrace.config.yaml_text import YamlFault, parse_yaml
from headrace.errors import UserError, nearest
from headrace.logs import hide_variable

#: The key of the model's class, by either name.
_CLASS_KEYS = ("model.class", "model.kind")


def load_spec(path_or_name: str | Path, overrides: Sequence[str] = ()) -> Spec:
    """Build the spec of a YAML file, or of a shipped pipeline by name.

    Args:
        path_or_name: a path, or a name below conf/pipelines.
        overrides: `key.path=value`, the value read as YAML. Below a mapping of plain values (`spark.properties`) the
            rest of the path is one key, dots and all. Another `model.class` drops what is of the class before it.

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
    data = read_mapping(path)
    # The class first: what stands beside it in an overlay is of this class.
    for override in sorted(overrides, key=lambda o: not o.lstrip().startswith(_CLASS_KEYS)):
        _apply(data, override)
    return build_spec(data, origin=str(path), argument=str(path_or_name))


def load_overlay(path: Path) -> list[str]:
    """Return the keys of a YAML file that has some of a pipeline's, as overrides for `load_spec`.

    Raises:
        UserError: no such file, not YAML, not a mapping.
    """
    return [f"{key}={flow(value)}" for key, value in flatten(read_mapping(path))]


def flow(value: Any) -> str:
    """Return a value as YAML on one line."""
    return yaml.safe_dump(value, default_flow_style=True, width=1 << 30).removesuffix("\n").removesuffix("\n...")


def flatten(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested mappings by key path."""
    for key, value in data.items():
        # A key with a dot in it is no path: its mapping is taken whole.
        if isinstance(value, Mapping) and value and not any("." in str(k) for k in value):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def read_mapping(path: Path) -> dict[str, Any]:
    """Read a YAML file that is a mapping. What an alias repeats is one object: change none in place.

    Raises:
        UserError: no such file, not YAML, a key that is given twice, aliases that stand for too much, not a mapping.
    """
    try:
        data = parse_yaml(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"no such pipeline file: {path}") from None
    except YamlFault as e:
        raise UserError("\n".join(f"{path}: {fault}" for fault in str(e).splitlines())) from None
    except (yaml.YAMLError, ValueError) as e:  # ValueError: bytes that are no text, or a date like 2026-02-30
        raise UserError(f"{path} is not YAML: {' '.join(str(e).split())}") from None
    if not isinstance(data, dict):
        raise UserError(f"{path}: a pipeline is a mapping of sections, not a {type(data).__name__}")
    return data


def build_spec(data: Mapping[str, Any], origin: str = "spec", argument: str | None = None) -> Spec:
    """Validate a mapping. Raises UserError that lists every fault. `argument`: how commands are given the pipeline."""
    try:
        spec = Spec.model_validate(data).given_as(argument)
    except ValidationError as e:
        raise UserError("\n".join(_explain(error, origin) for error in e.errors())) from None
    if spec.publish is not None:
        for section in (spec.publish.warehouse, spec.publish.online):
            if section is not None and section.password_env:
                hide_variable(section.password_env)
    return _with_properties_of_formats(spec)


def load_sharding(overrides: Sequence[str]) -> Sharding:
    """Return `train.sharding` without a pipeline: its defaults with `key=value` settings.

    Raises:
        UserError: a setting is of another section, or not valid.
    """
    data: dict[str, Any] = {}
    for override in overrides:
        _apply(data, override)
    other_keys = [key for key, _ in flatten(data) if not key.startswith("train.sharding.")]
    if other_keys:
        raise UserError(f"--set {other_keys[0]}: without a pipeline only keys of train.sharding count")
    try:
        return Sharding.model_validate(data.get("train", {}).get("sharding", {}))
    except ValidationError as e:
        faults = [{**error, "loc": ("train", "sharding", *error["loc"])} for error in e.errors()]
        raise UserError("\n".join(_explain(fault, "--set") for fault in faults)) from None


def _with_properties_of_formats(spec: Spec) -> Spec:
    """Return the spec with the Spark properties that its sources' formats need, such as Iceberg's catalog."""
    sources = [spec.source, *(named.source for named in spec.sources.values())]
    formats = [s.table_format for s in sources if isinstance(s, TableSource) and s.table_format is not None]
    needed = {key: value for table_format in formats for key, value in table_format.properties.items()}
    if not needed:
        return spec
    properties = {**needed, **spec.spark.properties}
    return spec.model_copy(update={"spark": spec.spark.model_copy(update={"properties": properties})})


def _apply(data: dict[str, Any], override: str) -> None:
    # Messages name the key alone: who knows what the value is.
    key, equals, text = override.partition("=")
    key = key.strip()
    if not equals or not key:
        raise UserError(f"--set {key}: write key=value, for example --set train.epochs=2")
    *parents, leaf = _split_key(key)
    node: Any = data
    for parent in parents:
        existing = node.get(parent)
        if existing is not None and not isinstance(existing, dict):
            raise UserError(f"--set {key}: '{parent}' is not a section")
        # Its own: by an alias the section may stand elsewhere, too, and is not changed there.
        node[parent] = node = dict(existing or {})
    try:
        value = parse_yaml(text)
    except YamlFault as e:
        raise UserError(f"--set {key}: {'; '.join(str(e).splitlines())}") from None
    except (yaml.YAMLError, ValueError) as e:
        # A YAML error's own text quotes the line.
        reason = getattr(e, "problem", None) or e
        raise UserError(f"--set {key}: the value is not YAML: {reason}") from None
    if entry_at(Spec, parents) is str and isinstance(value, (bool, int, float)):
        value = text.strip()  # a property is text: 4 and true, too
    if key in _CLASS_KEYS and isinstance(value, str):
        data["model"] = with_class(node, value)
        return
    node[leaf] = value


#: Mappings of keys that are put over the section `train`.
_OVER_TRAIN = ("retrain.warm", "challenger.train")


def _split_key(key: str) -> list[str]:
    """Return the parts of a key path.

    Below a mapping of plain values the rest of the path is one part; below a mapping of `train`'s keys it is nested.
    """
    parts = key.split(".")
    for n in range(1, len(parts)):
        entry = entry_at(Spec, parts[:n])
        if entry is not None and section_of(entry) is None and ".".join(parts[:n]) not in _OVER_TRAIN:
            return [*parts[:n], ".".join(parts[n:])]
    return parts


def _explain(error: Any, origin: str) -> str:
    path = ".".join(str(p) for p in without_tags(Spec, error["loc"]))
    if error["type"] == "extra_forbidden":
        return f"{origin}: unknown key '{path}'{nearest(str(error['loc'][-1]), fields_at(Spec, error['loc'][:-1]))}"
    if error["type"] == "missing":
        return f"{origin}: key '{path}' is missing"
    message = str(error["msg"]).removeprefix("Value error, ")
    quiet = error["type"] == "value_error" or isinstance(error["input"], (dict, list))
    shown_value = "" if quiet else f" (got {error['input']!r})"
    return f"{origin}: {path + ': ' if path else ''}{message}{shown_value}"
