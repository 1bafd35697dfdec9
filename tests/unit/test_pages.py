"""Pages of the documentation name files, commands, options, targets, modules, keys and other names that exist."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from headrace.config.spec import Spec
from scripts import check_pages


@pytest.mark.parametrize("page", check_pages.pages(), ids=lambda page: str(page.relative_to(check_pages.ROOT)))
def test_what_a_page_names_exists(page: Path) -> None:
    assert [str(refusal) for refusal in check_pages.refusals(page)] == []


PLAIN = """# A page

    headrace run clicks --ds 2026-01-08 --set train.epochs=2    # a day
    make bench-etl quality
    python -m bench.bench_etl 1

`train/loop/run.py` has `Trainer`; `train.dense.schedule` names a schedule. `headrace gc PIPELINE --delete` cleans up.

```yaml
train: {epochs: 2, dense: {learning_rate: 0.1}}
features:
  workflow:
    - {columns: [price], ops: [{fill_missing: {indicator: true}}, log, "my_package.operators:Halve": {by: 4}]}
sources: {users: {source: {format: csv, path: users.csv}}}
```
"""


def test_a_plain_page_passes(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PLAIN)
    assert list(check_pages.refusals(page)) == []


@pytest.mark.parametrize(
    ("original", "replacement", "refused"),
    [
        ("headrace run clicks", "headrace walk clicks", "page.md:3: command: headrace walk"),
        ("--ds 2026", "--day 2026", "page.md:3: option: headrace run --day"),
        ("PIPELINE --delete", "PIPELINE --remove", "page.md:7: option: headrace gc --remove"),
        ("bench-etl quality", "bench-etl qualities", "page.md:4: make: make qualities"),
        ("bench.bench_etl", "bench.bench_tle", "page.md:5: module: bench.bench_tle"),
        ("train/loop/run.py", "train/loop/runner.py", "page.md:7: file: train/loop/runner.py"),
        ("`Trainer`", f"`Trainer{'OfOld'}`", f"page.md:7: name: Trainer{'OfOld'}"),
        ("train.dense.schedule", "train.dense.scheduler", "page.md:7: key: train.dense.scheduler"),
        ("{learning_rate: 0.1}", "{rate: 0.1}", "page.md:10: key: train.dense.rate"),
        ("fill_missing", "fill_gaps", "page.md:10: key: features.workflow.ops.fill_gaps"),
        ("path: users", "place: users", "page.md:10: key: sources.source.place"),
    ],
)
def test_a_name_that_does_not_exist_is_refused(tmp_path: Path, original: str, replacement: str, refused: str) -> None:
    assert PLAIN.count(original) == 1
    page = tmp_path / "page.md"
    page.write_text(PLAIN.replace(original, replacement))
    assert refused in [str(refusal) for refusal in check_pages.refusals(page)]


def _without_ellipses(value: Any) -> Any:
    """Return a block's value without what it leaves out by `...`, and with days as the text that a pipeline has.

    A mapping or a list of nothing else is left out, too: None.
    """
    if isinstance(value, dict):
        entries = {key: _without_ellipses(inner) for key, inner in value.items() if key != "..."}
        return {key: inner for key, inner in entries.items() if inner is not None} if entries or not value else None
    if isinstance(value, list):
        items = [_without_ellipses(inner) for inner in value if inner != "..."]
        return items if items or not value else None
    return value.isoformat() if isinstance(value, date) else value


def refused_settings(text: str) -> list[str]:
    """Return what a pipeline would refuse of the YAML of a page, without keys that a block leaves out."""
    refused = []
    for _, block in check_pages.yaml_blocks(text):
        for key, value in _without_ellipses(block).items():
            try:
                TypeAdapter(Spec.model_fields[key].rebuild_annotation()).validate_python(value)
            except ValidationError as e:
                refused += [f"{key}: {fault['msg']}" for fault in e.errors() if fault["type"] != "missing"]
    return refused


@pytest.mark.parametrize("page", check_pages.pages(), ids=lambda page: str(page.relative_to(check_pages.ROOT)))
def test_the_settings_that_a_page_shows_are_accepted(page: Path) -> None:
    """Names of packages of the reader begin with acme."""
    refused = refused_settings(page.read_text(encoding="utf-8"))
    assert [message for message in refused if "'acme_" not in message] == []


def test_a_setting_that_a_pipeline_would_not_take() -> None:
    (refused,) = refused_settings("# A page\n\n```yaml\ntrain: {ranks: 8, threads: 4}\n```\n")
    assert refused.startswith("train: Value error, ranks (8) must divide streams")
