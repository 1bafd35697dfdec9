"""docs/reference is what the models and commands say, and the models say something of each key."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import yaml
from pydantic import BaseModel, Field
from typer.testing import CliRunner

from headrace.cli import app
from headrace.cli.reference import COMMAND, pages
from headrace.config import Spec, load_spec
from headrace.config.documentation import Key, keys_of
from headrace.config.installation import checkout


class Inner(BaseModel):
    """Settings of a shelf."""

    #: How wide.
    width: int = Field(default=3, ge=1, lt=10)


class Base(BaseModel):
    #: Of the base.
    #: Second line.
    name: str


class Outer(Base):
    #: Not of kind:

    kind: Literal["a", "b"] | None = None
    #: Shelves.
    shelves: Mapping[str, Inner] = Field(default_factory=dict)
    first: Inner = Inner(width=4)
    #: Pairs.
    pairs: tuple[tuple[float | None, float], ...] = ()
    schema_name: Annotated[str, Field(min_length=1)] = Field(default="on", alias="schema")


def test_keys_types_defaults_and_comments() -> None:
    assert keys_of(Outer) == [
        Key("name", "text", "", "Of the base. Second line.", ()),
        Key("kind", "`a`, `b` or null", "null", "", ()),
        Key("shelves", "mapping of [Inner](#inner)", "{}", "Shelves.", (Inner,)),
        Key("first", "[Inner](#inner)", "{width: 4}", "", (Inner,)),
        Key("pairs", "list of [number or null, number]", "[]", "Pairs.", ()),
        Key("schema", "text", "on", "", ()),
    ]
    assert keys_of(Inner) == [Key("width", "integer, ≥ 1, < 10", "3", "How wide.", ())]


def sections(model: type[BaseModel], seen: set[type[BaseModel]]) -> Iterator[tuple[type[BaseModel], Key]]:
    seen.add(model)
    for key in keys_of(model):
        yield model, key
        for inner in key.models:
            if inner not in seen:
                yield from sections(inner, seen)


def test_every_key_says_what_it_means() -> None:
    silent = [
        f"{model.__module__}: {model.__name__}.{key.name}" for model, key in sections(Spec, set()) if not key.meaning
    ]
    assert not silent, f"write a comment that begins with `#:` above {', '.join(silent)}"


def test_defaults_are_yaml_that_the_spec_takes() -> None:
    """Each default as the page has it, put into a pipeline, changes nothing."""
    spec = load_spec("clicks")
    for name, section in (("train", spec.train), ("model", spec.model), ("spark", spec.spark)):
        defaults = {k.name: yaml.safe_load(k.default) for k in keys_of(type(section))}
        assert type(section).model_validate(defaults) == type(section)(), name


def names(data: Any, prefix: str = "") -> Iterator[str]:
    for name, value in data.items() if isinstance(data, dict) else ():
        yield name
        yield from names(value)


@pytest.mark.parametrize("pipeline", ["clicks", "criteo", "movielens", "talkingdata"])
def test_the_page_has_the_keys_of_the_shipped_pipelines(pipeline: str) -> None:
    data = yaml.safe_load((checkout() / "conf" / "pipelines" / f"{pipeline}.yaml").read_text())
    text = pages()["keys.md"]
    for name in [*data, *(n for section in ("source", "model", "train") for n in names(data[section]))]:
        if name not in data["source"].get("timestamps", {}):
            assert f"| `{name}` |" in text, name


@pytest.mark.parametrize("name", ["keys.md", "operators.md", "commands.md"])
def test_the_pages_are_up_to_date(name: str) -> None:
    current_page = (checkout() / "docs" / "reference" / name).read_text(encoding="utf-8")
    assert current_page == pages()[name], f"docs/reference/{name} is out of date; run: {COMMAND}"


def test_the_command_writes_the_pages(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["reference", "--write", str(tmp_path)])
    assert (result.exit_code, result.output) == (0, "")
    assert {file.name: file.read_text(encoding="utf-8") for file in tmp_path.iterdir()} == pages()


def test_the_commands_page_has_what_help_has() -> None:
    """Each command has its options, as `--help` prints them."""
    sections = re.split(r"^## `headrace(?: ([a-z -]+))?`$", pages()["commands.md"], flags=re.MULTILINE)
    by_command = dict(zip(sections[1::2], sections[2::2], strict=True))
    assert len(by_command) > 40
    for command in ("run", "features explain", "warehouse sample", "gc"):
        printed = CliRunner().invoke(app, [*command.split(), "--help"], terminal_width=200).stdout
        options = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", printed)) - {"--help"}
        assert options
        assert options <= set(re.findall(r"--[a-z][a-z-]+", by_command[command])), command


@pytest.mark.parametrize(
    "name", re.findall(r"^::: (\S+)$", (checkout() / "docs" / "reference" / "python.md").read_text(), re.MULTILINE)
)
def test_what_the_python_page_shows_exists(name: str) -> None:
    module, _, attribute = name.rpartition(".")
    assert getattr(import_module(module), attribute).__doc__
