"""Files for other programs: image, workflow, hooks and dashboard name what the repository has."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace.serve.metrics import Metrics
from headrace.workspace import checkout

DASHBOARD = checkout() / "examples" / "grafana" / "headrace.json"
#: Suffixes that Prometheus' text has behind a family's name.
SUFFIXES = ("_total", "_bucket", "_sum", "_count", "")


def panels() -> list[dict[str, Any]]:
    """Return the dashboard's panels that have queries."""
    return [panel for panel in json.loads(DASHBOARD.read_text())["panels"] if panel["type"] != "row"]


def exported() -> set[str]:
    """Return the names of all families of metrics: of pipelines, and of the server."""
    source = (checkout() / "python" / "jobs" / "observe" / "prometheus.py").read_text()
    of_pipelines = set(re.findall(r'"(headrace_\w+)"', source))
    of_server = {family.name for family in Metrics().registry.collect()}
    assert len(of_pipelines) > 20
    assert len(of_server) > 5
    return of_pipelines | of_server


@pytest.mark.parametrize("panel", panels(), ids=lambda panel: str(panel["title"]))
def test_a_panel_queries_metrics_that_are_exported(panel: dict[str, Any]) -> None:
    names = exported()
    for target in panel["targets"]:
        queried = re.findall(r"\bheadrace_\w+", target["expr"])
        assert queried
        for name in queried:
            assert any(name.removesuffix(suffix) in names for suffix in SUFFIXES if name.endswith(suffix)), name


def test_panels_do_not_overlap() -> None:
    cells = [
        (panel["gridPos"]["x"] + dx, panel["gridPos"]["y"] + dy)
        for panel in json.loads(DASHBOARD.read_text())["panels"]
        for dx in range(panel["gridPos"]["w"])
        for dy in range(panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24


def make_targets() -> set[str]:
    makefile = (checkout() / "Makefile").read_text()
    phony = {word for line in re.findall(r"^\.PHONY: (.*)$", makefile, re.MULTILINE) for word in line.split()}
    return phony | set(re.findall(r"^\$\(STAMPS\)/([\w-]+):", makefile, re.MULTILINE))


def test_the_workflow_and_the_image_call_targets_that_exist() -> None:
    workflow = yaml.safe_load((checkout() / ".github" / "workflows" / "test.yml").read_text())
    runs = [step["run"] for step in workflow["jobs"]["test"]["steps"] if "run" in step]
    called = {target for run in runs for target in re.findall(r"'(test[\w-]*)'", run)}
    assert called == {"test", "test-all"}
    dockerfile = (checkout() / "Dockerfile").read_text()
    for line in re.findall(r"RUN make ([^&\n]*)", dockerfile):
        words = [word.removeprefix("build/stamps/") for word in line.split() if "=" not in word]
        assert {word.partition(".")[0] for word in words} <= make_targets() | {"horovod"}
    for line in re.findall(r"^COPY (?!--from)(.*) \S+$", dockerfile, re.MULTILINE):
        for source in line.split():
            assert (checkout() / source).exists(), source


def test_the_image_file_is_clean() -> None:
    linter = Path(sys.executable).with_name("hadolint")
    completed = subprocess.run([linter, checkout() / "Dockerfile"], capture_output=True, text=True, check=False)
    assert (completed.returncode, completed.stdout) == (0, "")


def test_hooks_call_programs_of_the_environment() -> None:
    hooks = yaml.safe_load((checkout() / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    for hook in hooks:
        program, *words = hook["entry"].split()
        assert Path(sys.executable).with_name(Path(program).name).is_file(), program
        assert all((checkout() / word).is_file() for word in words if word.endswith(".py"))
