"""Verdicts of the RAPIDS plugin on Spark plans, on a machine without a GPU.

In its explain-only mode the plugin looks at every physical plan that Spark is about to run, logs what it would put on
the GPU and what not and why, and lets the CPU run it. That covers what its `ExplainPlan` call does not: writes,
aggregates that are collected, commits. Here the log goes into a string of the JVM's, from which plans are read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from headrace.config import Spark
from headrace.config.workspace import Workspace
from headrace.lake.spark.session import process_scratch, properties, rapids_jars

#: Logger of the plugin's reports.
_LOGGER = "com.nvidia.spark.rapids.GpuOverrides"
#: Start of each message in the string: plans have many lines.
_START = "\x01"

# `*Exec <SortExec> will run on GPU`, `!Expression <NTile> ntile(4) cannot run on GPU because ...`, `! <NTile> ...`
_LINE = re.compile(r"^(?P<indent> *)(?P<mark>[*!@#$])(?P<kind>[A-Za-z]*) *<(?P<name>[^>]+)>(?P<rest>.*)$")
_REASON = re.compile(r"cannot run on GPU because (.*)$")
#: The plugin moves such data to a Python process on the host and back, and counts that as the GPU.
_HOST = re.compile(r"Python|Pandas|MapInArrow|CogroupedMap|FlatMapGroups")
#: Columns of the rows of a Delta table's log.
_DELTA_ACTIONS = ("txn", "add", "remove", "metaData", "protocol", "cdc", "domainMetadata", "commitInfo")
#: Plan nodes that pass rows from the driver on into a table.
_PASSES_ROWS = {"CoalesceExec", "ProjectExec", "DataWritingCommandExec", "WriteFilesExec", "ShuffleExchangeExec"}


@dataclass(frozen=True)
class PlanNode:
    """An operator or expression of a plan, as the plugin judges it."""

    depth: int
    #: `*` on the GPU, `!` not, `@` could but its surroundings cannot, `#` is left out on the GPU.
    mark: str
    #: Exec, Expression, Partitioning, Output ...; empty for a node that the plugin does not know.
    kind: str
    name: str
    text: str
    reason: str

    @property
    def is_exec(self) -> bool:
        """A physical operator (the plugin gives no kind to those that it does not know)."""
        return self.kind == "Exec" or (not self.kind and self.name.endswith("Exec"))

    @property
    def leaves(self) -> bool:
        """Return whether it does not run on the GPU."""
        if self.is_exec:
            return self.mark not in "*#" or bool(_HOST.search(self.name))
        return self.mark in "!$"


@dataclass(frozen=True)
class PhysicalPlan:
    """One physical plan."""

    text: str

    @cached_property
    def nodes(self) -> tuple[PlanNode, ...]:
        """Operators and expressions from the top."""
        return tuple(_nodes(self.text))

    @property
    def execs(self) -> tuple[PlanNode, ...]:
        """Physical operators from the top."""
        return tuple(n for n in self.nodes if n.is_exec)

    @property
    def is_bookkeeping(self) -> bool:
        """Reads or writes a Delta table's `_delta_log`, which is done on CPUs by design."""
        if "org.apache.spark.sql.delta.actions." in self.text or "org.apache.spark.sql.delta.DeltaHistory" in self.text:
            return True
        scans = [n for n in self.execs if "Scan" in n.name]
        if any(n.name != "RDDScanExec" for n in scans):
            return bool(scans) and all("_delta_log" in n.text + n.reason for n in scans)
        # The state of a table, and which of its files a query needs by their statistics.
        actions = all(re.search(rf"<AttributeReference> {a}#\d+", self.text) for a in _DELTA_ACTIONS)
        return bool(scans) and (actions or "org.apache.spark.sql.delta.stats." in self.text)

    @property
    def is_from_driver(self) -> bool:
        """Rows that this process made (new vocabulary values, statistics), on their way into a table and no further."""
        names = [n.name for n in self.execs]
        return bool(names) and names[-1] == "LocalTableScanExec" and set(names[:-1]) <= _PASSES_ROWS

    @property
    def leaving(self) -> tuple[PlanNode, ...]:
        """Return the nodes that leave the GPU: the deepest causes, without nodes that leave only because of them."""
        if self.is_bookkeeping:
            return ()
        leaving = [n for n in self.nodes if n.leaves]
        if self.is_from_driver:
            leaving = [n for n in leaving if n.name != "LocalTableScanExec"]
        causes = [n for n in leaving if not _follows(n)]
        return tuple(causes or leaving)


def _follows(node: PlanNode) -> bool:
    """Return whether a node's reason is that its child or its parent cannot run on the GPU."""
    return any(
        m in node.reason
        for m in ("not all expressions can be replaced", "because parent can't", "not all data writing commands can be")
    )


def _nodes(text: str) -> Iterator[PlanNode]:
    for line in text.splitlines():
        match = _LINE.match(line)
        if match is None:
            continue
        rest = match["rest"].strip()
        reason = _REASON.search(rest)
        description = re.sub(r" ?(cannot run on GPU because .*|will run on GPU.*|could run on GPU.*)$", "", rest)
        name = match["name"].removesuffix("$")
        cause = reason[1] if reason else ""
        if _HOST.search(name) and not cause:
            cause = "rows go to a Python process on the host and back"
        yield PlanNode(len(match["indent"]) // 2, match["mark"], match["kind"], name, description, cause)


class Explainer:
    """A session's plans as the plugin sees them. Needs a session of `explain_session`."""

    def __init__(self, spark: SparkSession) -> None:
        self.spark = spark
        jvm: Any = spark.sparkContext._jvm
        self._explain = jvm.com.nvidia.spark.rapids.ExplainPlan
        self._written = jvm.java.io.StringWriter()
        log4j = jvm.org.apache.logging.log4j
        layout = log4j.core.layout.PatternLayout.newBuilder().withPattern(f"{_START}%m%n").build()
        appender = log4j.core.appender.WriterAppender.createAppender(layout, None, self._written, "gpu", False, True)
        appender.start()
        context = log4j.LogManager.getContext(False)
        # Its own logger, whose messages go nowhere else: they are thousands of lines.
        logger = log4j.core.config.LoggerConfig(_LOGGER, log4j.Level.WARN, False)
        logger.addAppender(appender, log4j.Level.WARN, None)
        context.getConfiguration().addAppender(appender)
        context.getConfiguration().addLogger(_LOGGER, logger)
        context.updateLoggers()

    def ran(self) -> list[PhysicalPlan]:
        """Return the plans that ran since the last call."""
        text = self._written.toString()
        self._written.getBuffer().setLength(0)
        plans = [PhysicalPlan(part) for part in text.split(_START)]
        return [p for p in plans if p.nodes]

    def explain(self, frame: DataFrame) -> PhysicalPlan:
        """Return the plan of a frame, without running it."""
        start = self._written.getBuffer().length()
        plan = PhysicalPlan(str(self._explain.explainPotentialGpuPlan(frame._jdf, "ALL")))
        # Drop it from the log, which would show it as a plan that ran.
        self._written.getBuffer().setLength(start)
        return plan


@contextmanager
def explain_session(ws: Workspace, master: str = "local[2]") -> Iterator[SparkSession]:
    """Give a session with the settings of conf/spark/gpu.conf in explain-only mode. No other session may be in this
    process.

    Raises:
        UserError: the plugin's jar is missing.
    """
    settings = explain_properties(properties(Spark(profile="gpu", master=master, driver_memory="2g"), ws))
    if SparkSession.getActiveSession() is not None:
        raise RuntimeError("the plugin must be there when the session starts, and one is running")
    builder = SparkSession.builder.appName("gpu plans")
    for key, value in settings.items():
        builder = builder.config(key, value)
    builder = builder.config("spark.local.dir", str(process_scratch(ws)))
    spark = builder.getOrCreate()
    try:
        yield spark
    finally:
        spark.stop()


def explain_properties(settings: dict[str, str]) -> dict[str, str]:
    """Return settings of a GPU cluster, changed so that a machine without a GPU explains what they would do."""
    assert rapids_jars(), "properties() refuses the profile without the jar"
    return settings | {
        "spark.rapids.sql.mode": "explainOnly",
        "spark.rapids.sql.explain": "ALL",
        # A bridge evaluates expressions that the GPU lacks on the host, and is reported as the GPU.
        "spark.rapids.sql.expression.cpuBridge.enabled": "false",
        # Adaptive execution plans stage by stage: the log would hold row groups of plans.
        "spark.sql.adaptive.enabled": "false",
        # The plugin replaces a reused exchange by its original, and then misses the names of its attributes.
        "spark.sql.exchange.reuse": "false",
        "spark.sql.shuffle.partitions": "2",
        "spark.databricks.delta.snapshotPartitions": "1",
        # The plugin reads a plan before code generation, which would take longer than the few rows.
        "spark.sql.codegen.wholeStage": "false",
        "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    }
