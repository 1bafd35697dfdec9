"""`--json`: documents whose fields are promised in docs/commands.md; the same facts as for people."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from headrace.cli import doctor, plan
from headrace.jobs.gpu_plan.gate import LOG, StepPlans
from headrace.manifest import Manifest
from headrace.stage import run_lock
from headrace.workspace import Workspace, checkout
from tests.cli_support import DS, Yard, make_yard
from tests.clicks_stages import CLICKS_STAGES

PAGE = (checkout() / "docs" / "commands.md").read_text()


@pytest.fixture
def yard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Yard:
    return make_yard(tmp_path, monkeypatch)


def document(result: Any) -> Any:
    assert result.exit_code in (0, 1), result.output
    return json.loads(result.output)


def promised(heading: str) -> set[str]:
    """Return the fields in backquotes of the page's table below a heading."""
    section = PAGE.split(f"### {heading}\n", 1)[1].split("\n#", 1)[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    return {name for cell in rows for name in re.findall(r"`([^`]+)`", cell)}


def fields(value: Any, prefix: str = "") -> set[str]:
    """Return the paths of a document's fields; a list's entries are `name[]`, a mapping by data has no fields."""
    paths: set[str] = set()
    for name, inner in value.items() if isinstance(value, dict) else ():
        path = f"{prefix}{name}"
        if isinstance(inner, list) and inner and isinstance(inner[0], dict):
            paths.add(f"{path}[]")
            for entry in inner:
                paths |= fields(entry, f"{path}[].")
        else:
            paths.add(path)
    return paths


def test_status(yard: Yard) -> None:
    yard.run("--to", "train")
    yard.fakes["ingest"].source = "v2"
    with run_lock(Workspace(yard.home), "clicks"):
        status = document(yard("status", "clicks", "--json"))
    assert fields(status) == promised("status")
    assert status["home"] == str(yard.home)
    assert [s["stage"] for s in status["stages"]] == list(CLICKS_STAGES)
    ingest, *_, report = status["stages"]
    manifest = Manifest.load(Workspace(yard.home).manifest("clicks", DS, "ingest"))
    assert manifest is not None
    assert (ingest["state"], ingest["key"], ingest["rows"]) == ("stale", manifest.key, {"kept": 1234})
    assert (report["state"], report["key"], report["started"]) == ("missing", None, None)
    assert [a["pipeline"] for a in status["at_work"]] == ["clicks"]


def test_lineage(yard: Yard) -> None:
    yard.run("--to", "train")
    lineage = document(yard("lineage", "clicks", "--json"))
    nodes: dict[str, Any] = {}

    def walk(node: dict[str, Any]) -> None:
        assert node.keys() <= promised("lineage"), node
        nodes[node.get("stage") or node["kind"]] = node
        for inner in node["inputs"]:
            walk(inner)

    walk(lineage)
    assert {"model", "train", "features", "ingest", "landing"} <= nodes.keys()
    manifest = Manifest.load(Workspace(yard.home).manifest("clicks", DS, "train"))
    assert manifest is not None
    assert (lineage["kind"], lineage["version"]) == ("model", manifest.key)
    assert nodes["train"]["outputs"] == [o.model_dump() for o in manifest.outputs]
    assert nodes["landing"]["version"] == "v1"


def test_sharding_plan(yard: Yard) -> None:
    sharding = document(yard("plan", "--sharding", "--tables", "mlperf", "--world", "8", "--json"))
    assert fields(sharding) == promised("plan --sharding")
    assert len(sharding["by_rank"]) == sharding["ranks"] == 8
    assert sharding["step_ms"] == max(r["ms"] for r in sharding["by_rank"])
    assert sum(t["rows"] for t in sharding["tables"]) > 10**8


def test_gpu_plan() -> None:
    steps = [StepPlans("operator log", "transform", ()), StepPlans("x", "fit", (), "no plan"), StepPlans("x", LOG, ())]
    report = {"on_gpu": False, "steps": [plan.step_record(s) for s in steps]}
    assert fields(report) == promised("plan --gpu")
    assert [s["on_gpu"] for s in report["steps"]] == [True, False, None]  # type: ignore[index]
    assert report["steps"][1]["faults"] == ["no plan"]  # type: ignore[index]


def test_doctor(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    findings = [doctor.Finding("Python", "ok", "3.11"), doctor.Finding("Java", "missing", "none", "install a JDK")]
    monkeypatch.setattr(doctor, "examine", lambda ws, pipeline: iter(findings))
    result = yard("doctor", "--json")
    report = document(result)
    assert result.exit_code == 1
    assert fields(report) == promised("doctor")
    assert report == {"findings": [asdict(f) for f in findings], "missing": ["Java"]}


def test_errors_are_text_on_the_other_stream(tmp_path: Path, yard: Yard) -> None:
    result = yard("status", "--json")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "nothing has run" in result.stderr
