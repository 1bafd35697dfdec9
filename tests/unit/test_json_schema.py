"""The JSON schema for editors takes what headrace takes, and marks unknown keys and wrong types."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable
from copy import deepcopy
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml
from jsonschema import Draft202012Validator
from typer.testing import CliRunner

from headrace.cli import app
from headrace.cli.json_schema import COMMAND, SCHEMA_FILE, editor_line, json_schema
from headrace.config import build_spec
from headrace.config.installation import checkout
from headrace.errors import UserError
from headrace.jobs.gpu_plan.cases import ROW_CASES, TABLE_CASES

PIPELINES = sorted((checkout() / "conf" / "pipelines").glob("*.yaml"))
Change = Callable[[dict[str, Any]], Any]


class EditorLoader(yaml.SafeLoader):
    """YAML 1.2's core schema, as editors read it: dates are text, 1e-3 is a number."""

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {
        first: [pair for pair in pairs if pair[0] not in ("tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:float")]
        for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


EditorLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$"),
    list("-+.0123456789"),
)


@cache
def validator(section: str | None = None) -> Draft202012Validator:
    """Return the validator of a pipeline, or of one section by its class."""
    schema = json.loads(SCHEMA_FILE.read_text(encoding="utf-8"))
    return Draft202012Validator(schema if section is None else {**schema["$defs"][section], "$defs": schema["$defs"]})


def faults(data: Any, section: str | None = None) -> list[str]:
    """Return the key paths of what the schema marks."""
    return sorted(".".join(map(str, error.absolute_path)) for error in validator(section).iter_errors(data))


@cache
def parsed(name: str) -> Any:
    text = (checkout() / "conf" / "pipelines" / f"{name}.yaml").read_text(encoding="utf-8")
    return yaml.load(text, EditorLoader)


def pipeline(name: str = "clicks") -> dict[str, Any]:
    data = deepcopy(parsed(name))
    assert isinstance(data, dict)
    return data


def test_the_file_is_up_to_date() -> None:
    assert SCHEMA_FILE.read_text(encoding="utf-8") == json_schema(), f"{SCHEMA_FILE} is out of date; run: {COMMAND}"


def test_the_command_prints_it() -> None:
    result = CliRunner().invoke(app, ["reference", "--json-schema"])
    assert json.loads(result.stdout) == json.loads(SCHEMA_FILE.read_text(encoding="utf-8"))


def test_it_is_a_schema_with_descriptions() -> None:
    schema = json.loads(SCHEMA_FILE.read_text(encoding="utf-8"))
    Draft202012Validator.check_schema(schema)
    assert (
        schema["properties"]["publish"]["description"]
        == "Scores to a warehouse; without it there is no stage `publish`."
    )
    clip = schema["$defs"]["Clip"]
    assert set(clip["properties"]) == {"min", "max"}


def test_the_package_has_the_file() -> None:
    project = tomllib.loads((checkout() / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = project["tool"]["setuptools"]["package-data"]["headrace.config"]
    assert any(fnmatch(SCHEMA_FILE.name, pattern) for pattern in patterns)


@pytest.mark.parametrize("file", PIPELINES, ids=lambda file: file.stem)
def test_shipped_pipelines_are_valid(file: Path) -> None:
    assert faults(pipeline(file.stem)) == []


@pytest.mark.parametrize(
    ("operator", "chain"), [(name, chain) for name, chains in ROW_CASES.items() for chain in chains]
)
def test_uses_of_row_operators_are_valid(operator: str, chain: dict[str, Any]) -> None:
    assert faults(dict(chain), "Chain") == []


@pytest.mark.parametrize(("operator", "case"), [(name, case) for name, cases in TABLE_CASES.items() for case in cases])
def test_uses_of_table_operators_are_valid(operator: str, case: Any) -> None:
    features = {**pipeline()["features"], "prepare": [{operator: case}]}
    assert faults(features, "Features") == []


@pytest.mark.parametrize(
    "change",
    [
        lambda p: p["features"].update(append=True),
        lambda p: p["model"].update(loss="focal"),
        lambda p: p["model"].update(loss={"kind": "focal", "gamma": 1}),
        lambda p: p["model"].update({"class": "my_package.models:Net", "args": {"width": 3}}),
        lambda p: p["source"].update(format="my_package.formats:Lines"),
        lambda p: p.update(source={"format": "delta", "path": "/lake/events", "day": {"partition": "ds"}}),
        lambda p: p.update(source={"table": "db.events"}),
        lambda p: p["features"]["workflow"][0].update(ops=[{"my_package.operators:Halve": {"by": 4}}]),
        lambda p: p["features"]["workflow"][0].update(ops=["categorify", {"add_tags": ["user"]}]),
        lambda p: p["train"].update(evaluation={"slices": {"new": "is_new = 1"}, "full_ranking": {"k": 10}}),
        lambda p: p["score"].update(model=12),
    ],
)
def test_short_forms_and_own_classes_are_valid(change: Change) -> None:
    data = pipeline()
    change(data)
    assert faults(data) == []


@pytest.mark.parametrize(
    ("change", "key"),
    [
        (lambda p: p.update(sorce={}), ""),
        (lambda p: p["train"].update(epoch=2), "train"),
        (lambda p: p["source"].update(formt="csv"), "source"),
        (lambda p: p["source"].update(format="cvs"), "source"),
        (lambda p: p["features"]["workflow"][0].update(ops=["categorfy"]), "features.workflow.0.ops.0"),
        (lambda p: p["features"]["workflow"][0].update(ops=[{"clip": {"mn": 0}}]), "features.workflow.0.ops.0"),
        (lambda p: p["features"].update(prepare=[{"joinasof": {}}]), "features.prepare.0"),
        (
            lambda p: p["model"].update({"class": "sasrec", "args": {"item": "i", "history": "h", "lenght": 3}}),
            "model.args",
        ),
        (lambda p: p["model"].update({"class": "dlmr"}), "model.class"),
        (lambda p: p["model"].update(loss="focl"), "model.loss"),
        (lambda p: p.pop("table"), ""),
        # Wrong types and values.
        (lambda p: p["train"].update(epochs="two"), "train.epochs"),
        (lambda p: p["train"].update(epochs=0), "train.epochs"),
        (lambda p: p["features"].update(label=["clicked"]), "features.label"),
        (lambda p: p["table"].update(columns="user_id"), "table.columns"),
        (lambda p: p["features"]["split"].update(by="tme"), "features.split.by"),
        (lambda p: p["features"]["workflow"][0].update(ops=[{"clip": {"min": "low"}}]), "features.workflow.0.ops.0"),
    ],
)
def test_unknown_keys_and_wrong_types_are_marked(change: Change, key: str) -> None:
    data = pipeline()
    change(data)
    assert faults(data) == [key]
    # headrace itself refuses it, too. Operators are looked at where the features are built.
    if "ops" not in key and "prepare" not in key:
        with pytest.raises(UserError):
            build_spec(data)


@pytest.mark.parametrize("inside", [True, False])
def test_the_line_for_editors_leads_to_the_file(inside: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    schema = tmp_path / ".venv" / "headrace" / "config" / SCHEMA_FILE.name
    schema.parent.mkdir(parents=True)
    schema.write_text("{}")
    monkeypatch.setattr("headrace.cli.json_schema.SCHEMA_FILE", schema)
    folder = tmp_path if inside else tmp_path / "elsewhere"
    line = editor_line(folder / "p.yaml")
    path = line.removeprefix("# yaml-language-server: $schema=")
    assert Path(path).is_absolute() is not inside
    assert (folder / path).resolve() == schema
