"""The GPU-plan gate is green on plans that stay on the GPU and red on those that leave it, for the reason given."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from headrace.config.installation import checkout
from headrace.features.ops import OPERATORS
from headrace.features.table_ops import TABLE_OPERATORS
from headrace.jobs.gpu_plan.gate import ON_CPUS
from headrace.lake.spark.session import rapids_jars


@pytest.fixture(scope="module")
def explained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the plugin's report on all shipped plans, and on good and bad ones (20 s to start)."""
    if not rapids_jars():
        pytest.skip("the RAPIDS plugin is not here: make rapids")
    out = tmp_path_factory.mktemp("gpu") / "plans.json"
    ran = subprocess.run(
        [sys.executable, "tests/gpu_plan/explain_plans.py", str(out)],
        cwd=checkout(),
        capture_output=True,
        text=True,
        timeout=840,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    report: dict[str, Any] = json.loads(out.read_text())
    return report


def test_all_that_is_shipped_stays_on_the_gpu(explained: dict[str, Any]) -> None:
    """The gate: what `headrace plan --gpu` shows."""
    assert [(subject, step, faults) for subject, step, green, faults in explained["gate"] if not green] == []
    pipelines = [p.stem for p in (checkout() / "conf" / "pipelines").glob("*.yaml")]
    shipped = {f"operator {n}" for n in OPERATORS.builtin} | {f"table operator {n}" for n in TABLE_OPERATORS.builtin}
    shipped |= {f"pipeline {n}" for n in pipelines}
    assert {subject for subject, *_ in explained["gate"]} == shipped
    on_cpus = [subject for subject, step, *_ in explained["gate"] if step == ON_CPUS]
    assert on_cpus == ["pipeline beauty"]


def test_good_plans_are_green(explained: dict[str, Any]) -> None:
    assert explained["good"] == []
    for name in ("collected", "written"):
        (plans,), *leaving = explained[name]
        assert plans >= 1, name
        assert leaving == [], name


def test_native_functions_stay_on_the_gpu(explained: dict[str, Any]) -> None:
    assert explained["java udf"] == []
    assert explained["java udf: on the GPU"].count("ScalaUDF") == 2


@pytest.mark.parametrize(
    ("name", "culprit", "reason"),
    [
        ("scala udf", "ScalaUDF", "provides a GPU implementation"),
        ("ntile", "NTile", "does not currently support"),
        ("python udf", "BatchEvalPythonExec", ""),
        ("pandas udf", "ArrowEvalPythonExec", "host"),
        ("map in arrow", "MapInArrowExec", "host"),
        ("expression", "Crc32", "does not currently support"),
        ("handed over", "LocalTableScanExec", "does not currently support"),
    ],
)
def test_bad_plans_are_red_by_name_and_reason(explained: dict[str, Any], name: str, culprit: str, reason: str) -> None:
    assert culprit in [n for n, _ in explained[name]], explained[name]
    assert reason in next(r for n, r in explained[name] if n == culprit)


def test_a_write_that_leaves_is_red(explained: dict[str, Any]) -> None:
    _, *leaving = explained["written as csv"]
    assert ["InsertIntoHadoopFsRelationCommand", "CSV output is not supported"] in leaving


def test_an_operator_is_named(explained: dict[str, Any]) -> None:
    by_subject = {subject: (green, faults) for subject, _, green, faults in explained["operators"]}
    assert by_subject["operator clip"] == (True, [])
    green, faults = by_subject["operator quarter"]
    assert not green
    assert any(f.startswith("NTile: ") for f in faults)
    assert by_subject["operator unseen"] == (False, ["has no case in headrace.jobs.gpu_plan.cases"])


def test_a_pipeline_is_green_step_by_step(explained: dict[str, Any]) -> None:
    steps = [step for step, _, _ in explained["pipeline"]]
    for step in ("scan and prepare", "fit", "count values", "transform and write"):
        assert step in steps
    assert [(step, faults) for step, green, faults in explained["pipeline"] if not green] == []


def test_a_bad_pipeline_is_red_where_it_is_bad(explained: dict[str, Any]) -> None:
    red = {step: faults for step, green, faults in explained["bad pipeline"] if not green}
    assert list(red) == ["transform and write"]
    assert any(f.startswith("Crc32: ") for f in red["transform and write"])
