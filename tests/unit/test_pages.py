"""Pages of the documentation name files, commands, options, targets, modules, keys and other names that exist."""

from __future__ import annotations

from pathlib import Path

import pytest

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
