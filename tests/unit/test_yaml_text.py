"""YAML that people write: repeated keys are refused with their lines, and aliases cost what the text costs."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.config import load_overlay, load_spec
from headrace.config.installation import checkout
from headrace.config.yaml_text import Nodes, YamlFault, parse_yaml
from headrace.embeddings.planner.tables import load_tables
from headrace.errors import UserError

KEYS = st.sampled_from(["a", "b", "c", "d", "2", "yes", "'x y'"])


@st.composite
def documents(draw: Any) -> str:
    """Anchored lists and mappings, each of scalars and aliases to those before it; some bombs among them."""
    lines = []
    for i in range(draw(st.integers(1, 12))):
        aliases = [f"*n{j}" for j in range(max(0, i - 3), i)]
        value = st.sampled_from(["1", "x", "'y z'", "2026-01-02", "[]", "{}", *aliases, *aliases])
        if draw(st.booleans()):
            text = f"[{', '.join(draw(st.lists(value, max_size=9)))}]"
        else:
            pairs = draw(st.dictionaries(KEYS, value, max_size=5))
            text = f"{{{', '.join(f'{key}: {value}' for key, value in pairs.items())}}}"
        lines.append(f"k{i}: &n{i} {text}")
    return "\n".join(lines) + "\n"


def expanded(value: Any) -> int:
    """Nodes of a value with all aliases written out; independent of the walk. Mappings count their keys."""
    if isinstance(value, dict):
        return 1 + sum(1 + expanded(item) for item in value.values())
    return 1 + (sum(map(expanded, value)) if isinstance(value, list) else 0)


@settings(max_examples=100, deadline=None)
@given(documents())
def test_work_is_that_of_the_text(text: str) -> None:
    """Each node is visited once, however often aliases repeat it; what is parsed is what PyYAML parses."""
    spelt = sum(isinstance(e, (yaml.ScalarEvent, yaml.CollectionStartEvent)) for e in yaml.parse(text, yaml.SafeLoader))
    loader = yaml.SafeLoader(text)
    nodes = Nodes(loader)
    size = nodes.visit(loader.get_single_node(), "")
    assert nodes.visited == spelt
    if size > 100_000 + spelt:
        with pytest.raises(YamlFault, match=f"its aliases stand for {size:,} values, and it spells out {spelt}"):
            parse_yaml(text)
        return
    parsed = parse_yaml(text)
    assert parsed == yaml.safe_load(text)
    assert size == expanded(parsed)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.dictionaries(KEYS, st.integers(0, 9), min_size=1, max_size=5), min_size=1, max_size=5), st.data())
def test_a_key_that_is_given_twice_is_refused_with_both_lines(mappings: list[dict[str, int]], data: Any) -> None:
    lines: list[tuple[str, str]] = []
    for i, mapping in enumerate(mappings):
        lines.append((f"m{i}", f"m{i}:"))
        lines += [(f"m{i}.{key}", f"  {key}: {value}") for key, value in mapping.items()]
    assert parse_yaml("\n".join(text for _, text in lines)) is not None
    nested = [k for k, (path, _) in enumerate(lines) if "." in path]
    first = data.draw(st.sampled_from(nested))
    last = max(k for k in nested if lines[k][0].split(".")[0] == lines[first][0].split(".")[0])
    place = data.draw(st.integers(first + 1, last + 1))
    lines.insert(place, lines[first])
    with pytest.raises(YamlFault) as raised:
        parse_yaml("\n".join(text for _, text in lines))
    path = lines[first][0].replace("'", "")
    assert str(raised.value) == f"key '{path}' is given twice, in lines {first + 1} and {place + 1}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1: a\n0x1: b\n", "key '0x1' is given twice, in lines 1 and 2"),
        ("yes: 1\ntrue: 2\n", "key 'true' is given twice, in lines 1 and 2"),
        ("a: {b: 1, b: 2}\n", "key 'a.b' is given twice, in lines 1 and 1"),
        ("a:\n- {b: 1}\n- {c: 1,\n   c: 2}\n", r"key 'a\[1\].c' is given twice, in lines 3 and 4"),
        ("x: &x {k: 1}\n<<: *x\n<<: *x\n", "key '<<' is given twice, in lines 2 and 3"),
        ("a: &a [*a]\n", "line 1: an alias stands within what it repeats"),
        ("a: " + "[" * 20_000, "nested too deeply"),
    ],
)
def test_what_is_refused(text: str, message: str) -> None:
    with pytest.raises(YamlFault, match=message):
        parse_yaml(text)


def test_a_merged_key_may_be_given_again() -> None:
    assert parse_yaml("x: &x {k: 1, l: 2}\ny: {<<: *x, k: 3}\n")["y"] == {"k": 3, "l": 2}


def test_each_file_that_is_read_refuses_repeated_keys(tmp_path: Path) -> None:
    shipped = (checkout() / "conf/pipelines/clicks.yaml").read_text()
    path = tmp_path / "mine.yaml"
    path.write_text(f"{shipped}\ntrain: {{epochs: 1}}\n")
    with pytest.raises(UserError, match=rf"^{path}: key 'train' is given twice, in lines \d+ and \d+$"):
        load_spec(path)
    path.write_text("train:\n  epochs: 1\n  epochs: 2\n")
    with pytest.raises(UserError, match=r"key 'train.epochs' is given twice, in lines 2 and 3$"):
        load_overlay(path)
    with pytest.raises(UserError, match=r"--set train: key 'epochs' is given twice, in lines 1 and 1"):
        load_spec("clicks", ["train={epochs: 1, epochs: 2}"])
    path.write_text("embedding_dim: 8\nembedding_dim: 16\ntables: []\n")
    with pytest.raises(UserError, match=r"key 'embedding_dim' is given twice, in lines 1 and 2"):
        load_tables(str(path))


def test_a_bomb_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bomb.yaml"
    levels = "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 8))
    path.write_text(f"a0: &a0 [{', '.join('x' * 10)}]\n{levels}pipeline: bomb\n")
    with pytest.raises(UserError, match=rf"^{path}: its aliases stand for [\d,]+ values, and it spells out \d+$"):
        load_spec(path)


def test_airflow_reads_the_module_by_its_path() -> None:
    """Airflow does so without the package: the module imports PyYAML and the standard library alone."""
    spec = importlib.util.spec_from_file_location("by_path", checkout() / "python" / "config" / "yaml_text.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.parse_yaml("a: 1") == {"a": 1}
