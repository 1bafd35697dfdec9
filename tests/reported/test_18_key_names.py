"""Input 18: `score.item.key: rank` was refused after training and promotion, and --dry-run said that all is well.

What the spec alone decides is told when it is read: by `--dry-run`, by `run` before anything is submitted.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace.cli.run import dry_run, run_stages
from headrace.config import build_spec
from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.jobs.check_specs import check_spec

DAY = "2026-01-08"


def spec(key: str = "item") -> dict[str, Any]:
    """A pipeline that scores items by the column `key`."""
    return {
        "pipeline": "keys",
        "ds": DAY,
        "source": {"format": "parquet", "path": "data"},
        "table": {
            "event_time": "ts",
            "columns": [
                {"name": "ts", "type": "timestamp", "path": "Event Time"},
                {"name": "user", "type": "bigint", "path": "USER"},
                {"name": key, "type": "bigint", "path": "Order"},
                {"name": "price", "type": "double"},
                {"name": "clicked", "type": "int", "path": "CLICKED"},
            ],
        },
        "features": {
            "label": "clicked",
            "split": {"by": "time", "valid_days": 1},
            "window_days": 2,
            "workflow": [{"columns": ["user", key], "ops": [{"categorify": {"min_count": 2}}]}],
        },
        "train": {"ranks": 1},
        "score": {"user": {"key": "user"}, "item": {"key": key}, "top_k": 5},
        "publish": {},
    }


def changed(path: str, value: Any) -> dict[str, Any]:
    """The pipeline with another value at a key path."""
    data = spec()
    node = data
    *parents, leaf = path.split(".")
    for parent in parents:
        node = node[parent]
    node[leaf] = value
    return data


REFUSED = {
    **{f"key {k}": (spec(k), rf"item\.key: '{k}' is the name of another col") for k in ("rank", "score", "Rank")},
    "key model_version": (spec("model_version"), r"item\.key: 'model_version' is the name of another column"),
    "key ds": (spec("ds"), r"table.*'ds' is a reserved name"),
    "reserved column": (spec("_line"), r"table.*'_line' is a reserved name"),
    "no such parameter": (
        changed("features.workflow", [{"columns": ["user"], "ops": [{"categorify": {"min_cuont": 2}}]}]),
        r"features\.workflow\[0\]\.ops\[0\] \(categorify\): .*min_cuont.*min_count",
    ),
    "parameter missing": (
        changed("features.workflow", [{"columns": ["user"], "ops": ["hash_bucket"]}]),
        r"features\.workflow\[0\]\.ops\[0\] \(hash_bucket\): parameter '\w+' is missing",
    ),
    "no such operator": (
        changed("features.workflow", [{"columns": ["user"], "ops": ["categorfy"]}]),
        r"no operator 'categorfy'.*did you mean 'categorify'",
    ),
    "unknown column of a chain": (
        changed("features.workflow", [{"columns": ["usr"], "ops": ["categorify"]}]),
        r"features\.workflow\[0\]\.columns: column 'usr' is not declared.*did you mean 'user'",
    ),
    "unknown column of prepare": (
        changed("features.prepare", [{"filter": {"where": "prize > 3"}}]),
        r"features\.prepare\[0\] \(filter\).*prize",
    ),
    "unknown column of a table operator": (
        changed("features.prepare", [{"dropna": {"subset": ["prize"]}}]),
        r"features\.prepare\[0\] \(dropna\).*prize",
    ),
    "two features of one name": (
        changed("features.workflow", [{"columns": ["user"], "ops": [op]} for op in ("categorify", "log")]),
        r"'user' is already a feature of features\.workflow\[0\]",
    ),
    "a feature made of the label": (
        changed("features.workflow", [{"columns": ["clicked"], "ops": ["categorify"]}]),
        r"'clicked' is the label; a feature made of it would leak it",
    ),
    "a column that a pair has from nowhere": (
        changed("features.workflow", [{"columns": ["price"], "ops": ["normalize"]}]),
        r"score: the features read 'price', which a pair has from nowhere",
    ),
    "a range of times": (
        changed("table.expectations", {"ranges": {"ts": [0, 1]}}),
        r"ranges: column 'ts' is timestamp",
    ),
    "an event time of numbers": (changed("table.event_time", "price"), r"event_time: column 'price' is double"),
    "a watermark of numbers": (
        changed("source.complete", {"watermark": {"column": "price", "at_least": "end_of_day"}}),
        r"source\.complete\.watermark: column 'price' is double; declare it timestamp or date",
    ),
}


@pytest.fixture(scope="module", autouse=True)
def nothing_runs() -> Any:
    """No case gets as far as an application."""
    from headrace.jobs import submit

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(submit, "submit", lambda *a, **k: pytest.fail("a stage was submitted"))
        yield


@pytest.mark.parametrize("case", REFUSED)
def test_a_dry_run_refuses_what_the_run_refuses(tmp_path: Path, case: str) -> None:
    data, message = REFUSED[case]
    path = tmp_path / "pipeline.yaml"
    path.write_text(yaml.safe_dump(data))
    for command in (dry_run, run_stages):
        with pytest.raises(UserError, match=message):
            command(str(path), Workspace(tmp_path), DAY, [], "ingest", "publish")


@pytest.mark.parametrize("key", ["item", "position", "scores", "Ranks"])
def test_what_is_in_order_passes(key: str) -> None:
    check_spec(build_spec(spec(key)))


def test_the_check_needs_neither_spark_nor_torch() -> None:
    program = (
        "import sys, headrace.config, headrace.jobs.check_specs as s\n"
        "s.check_spec(headrace.config.load_spec('clicks'))\n"
        "print([m for m in ('pyspark', 'torch', 'py4j') if m in sys.modules])"
    )
    completed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert completed.stdout == "[]\n"
