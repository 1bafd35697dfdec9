"""The notebooks in examples/ run from top to bottom."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from headrace.config.installation import checkout

NOTEBOOKS = sorted((checkout() / "examples").glob("*.ipynb"))


def test_there_are_three() -> None:
    assert len(NOTEBOOKS) == 3


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_a_notebook_runs(path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    # The session of the tests serves `getOrCreate`.
    monkeypatch.syspath_prepend("")
    namespace: dict[str, object] = {"__name__": "__main__"}
    for number, cell in enumerate(json.loads(path.read_text(encoding="utf-8"))["cells"]):
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"{path.name}[{number}]", "exec"), namespace)
