"""Reading what the RAPIDS plugin says of plans; no Spark."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.config import Spark
from headrace.config.installation import checkout
from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.features.ops import OPERATORS
from headrace.features.table_ops import TABLE_OPERATORS
from headrace.jobs.gpu_plan import cases as gpu_cases
from headrace.jobs.gpu_plan.explain import PhysicalPlan
from headrace.lake.spark import session

NTILE = """
!Exec <WindowExec> cannot run on GPU because not all expressions can be replaced
  @Expression <Alias> ntile(4) windowspecdefinition(k#1, id#0L ASC) AS n#9 could run on GPU
    ! <NTile> ntile(4) cannot run on GPU because GPU does not currently support the operator class org.apache.NTile
  *Exec <SortExec> will run on GPU
    *Exec <FileSourceScanExec> will run on GPU
"""
UDF = """
*Exec <ProjectExec> will run on GPU
  *Exec <ArrowEvalPythonExec> will run on GPU
    *Exec <FileSourceScanExec> will run on GPU
"""
APPEND = """
*Exec <CoalesceExec> will run on GPU
  ! <LocalTableScanExec> cannot run on GPU because GPU does not currently support the operator class LocalTableScanExec
    @Expression <AttributeReference> name#4 could run on GPU
"""
LOG = """
*Exec <FilterExec> will run on GPU
  *Expression <IsNotNull> isnotnull(add#376) will run on GPU
  ! <RDDScanExec> cannot run on GPU because GPU does not currently support the operator class RDDScanExec
""" + "\n".join(
    f"    @Expression <AttributeReference> {a}#{i} could run on GPU"
    for i, a in enumerate(("txn", "add", "remove", "metaData", "protocol", "cdc", "domainMetadata", "commitInfo"))
)


def test_the_cause_is_named_not_what_follows_from_it() -> None:
    (cause,) = PhysicalPlan(NTILE).leaving
    assert (cause.name, cause.depth) == ("NTile", 2)
    assert cause.reason.startswith("GPU does not currently support the operator class")


def test_data_that_goes_to_python_has_left_whatever_the_plugin_says() -> None:
    (cause,) = PhysicalPlan(UDF).leaving
    assert cause.name == "ArrowEvalPythonExec"


def test_rows_from_the_driver_may_go_into_a_table_and_no_further() -> None:
    assert PhysicalPlan(APPEND).is_from_driver
    assert PhysicalPlan(APPEND).leaving == ()
    counted = "*Exec <HashAggregateExec> will run on GPU\n" + "\n".join("  " + x for x in APPEND.splitlines() if x)
    assert [n.name for n in PhysicalPlan(counted).leaving] == ["LocalTableScanExec"]


def test_a_delta_log_is_bookkeeping_another_rdd_is_not() -> None:
    assert PhysicalPlan(LOG).is_bookkeeping
    assert PhysicalPlan(LOG).leaving == ()
    renamed_log = LOG.replace("protocol#", "price#")
    assert not PhysicalPlan(renamed_log).is_bookkeeping
    assert [n.name for n in PhysicalPlan(renamed_log).leaving] == ["RDDScanExec"]


def test_an_expression_on_a_bridge_to_the_host_has_left() -> None:
    text = "*Exec <ProjectExec> will run on GPU\n  $Expression <Crc32> crc32(s#1) will run via the CPU bridge\n"
    assert [n.name for n in PhysicalPlan(text).leaving] == ["Crc32"]


def test_every_operator_has_a_case_that_uses_it() -> None:
    assert set(gpu_cases.ROW_CASES) == set(OPERATORS.builtin)
    assert set(gpu_cases.TABLE_CASES) == set(TABLE_OPERATORS.builtin)
    for name, chains in gpu_cases.ROW_CASES.items():
        for chain in chains:
            assert name in [op if isinstance(op, str) else next(iter(op)) for op in chain["ops"]], name


def test_the_page_lists_every_operator_with_its_gpu_column() -> None:
    page = (checkout() / "docs" / "features.md").read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| `")]
    listed = [(row[0].strip("`"), row[3]) for row in rows if len(row) == 5 and "," not in row[0]]
    # Not what may run there: `make gpu-check` is red when one of them does not.
    assert sorted(name for name, _ in listed) == sorted([*OPERATORS.builtin, *TABLE_OPERATORS.builtin])
    assert [name for name, gpu in listed if not gpu.startswith("yes")] == []


def test_the_gpu_profile_needs_the_jar_and_puts_it_on_all_class_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "rapids_dir", lambda: tmp_path)
    ws = Workspace(tmp_path / "home")
    with pytest.raises(UserError, match="run `make rapids`"):
        session.properties(Spark(profile="gpu"), ws)
    jar = tmp_path / "rapids-4-spark_2.13-26.08.1.jar"
    jar.touch()
    cluster = session.properties(Spark(profile="gpu", master="spark://host:7077"), ws)
    assert cluster["spark.executor.extraClassPath"] == str(jar)
    assert str(jar) in cluster["spark.driver.extraClassPath"].split(":")
    assert cluster["spark.jars"].split(",")[-1] == str(jar)
    assert Path(cluster["spark.executor.resource.gpu.discoveryScript"]).is_file()
    assert float(cluster["spark.task.resource.gpu.amount"]) * int(cluster["spark.executor.cores"]) == 1
    # A local master has no executors of its own to give GPUs to: its tasks would wait for ever.
    assert not [k for k in session.properties(Spark(profile="gpu"), ws) if ".resource.gpu." in k]
    assert not [v for v in session.properties(Spark(), ws).values() if "rapids" in v]
