"""The GPU-plan gate: does everything that the Spark engine runs stay on the GPU?

For people `headrace plan --gpu`, for builds `make gpu-check`. Two things are looked at, both under the RAPIDS plugin's
explain-only mode and the settings of conf/spark/gpu.conf:

- each registered operator by itself, in the cases of headrace.jobs.gpu_plan.cases, so that a fault has a name;
- each pipeline whole: the stage `features` as it is, over a small Delta table with the declared schema: scan, prepare,
  fit, count values, transform, write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from headrace.config import Chain, OpSpec, Spec, Table
from headrace.config.schema import TableColumn, quoted
from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.features.build.stage import BuildFeatures
from headrace.features.functions.timestamps import spark_micros
from headrace.features.layout.files import split_ranges
from headrace.features.ops import OPERATORS
from headrace.features.spark.fit import fit
from headrace.features.spark.transform import transform
from headrace.features.table_ops import TABLE_OPERATORS
from headrace.features.table_ops.attribution import Attribution
from headrace.features.table_ops.base import SourceRead, SourceTable, TrainRange
from headrace.features.table_ops.preparation import ExternalReader, Preparation
from headrace.features.table_ops.spark_windows import EVENT_MICROS
from headrace.features.types import ValueType, declared
from headrace.features.vocabulary.delta_table import VocabularyTable
from headrace.features.workflow.fitted import FittedWorkflow
from headrace.features.workflow.workflow import Workflow
from headrace.jobs.gpu_plan import cases as gpu_cases
from headrace.jobs.gpu_plan.explain import Explainer, PhysicalPlan, PlanNode
from headrace.quality.drift.count_day import count_day
from headrace.stage import run_stage
from headrace.stage.manifest import Manifest, Output
from headrace.storage import Location

ROWS = 240


def made_rows(
    columns: Sequence[TableColumn], label: str, first: str, days: int, time: str | None = None, split: str | None = None
) -> pa.Table:
    """`ROWS` rows: every 11th value is missing where it may be, labels are 0 and 1, times go over `days` days.

    Args:
        first: the first day; times begin there and end `days` days later.
        time: the column of the event's time, never missing.
        split: a column that holds `train`, `valid` and `rank`.
    """
    start = datetime.fromisoformat(first).replace(tzinfo=UTC)
    times = [start + timedelta(days=days) * i / ROWS for i in range(ROWS)]
    out = {}
    for place, column in enumerate(columns):
        type_ = declared(column)
        values = [None if (i + place) % 11 == 0 else _value(type_, i, place, times) for i in range(ROWS)]
        if column.name == label:
            values = [type_.arrow.to_pandas_dtype()(i % 2) for i in range(ROWS)]
        elif column.name == time or column.required:
            values = [_value(type_, i, place if column.name != time else 0, times) for i in range(ROWS)]
        if column.name == split:
            values = [("train", "train", "valid", "rank")[i % 4] for i in range(ROWS)]
        out[column.name] = pa.array(values, type_.arrow)
    out["_source_file"] = pa.array([f"rows/part-{i % 3}" for i in range(ROWS)])
    out["_source_line"] = pa.array([i // 3 for i in range(ROWS)], pa.int64())
    return pa.table(out)


def _value(type_: ValueType, i: int, place: int, times: list[datetime]) -> Any:
    if type_.is_list:
        element = ValueType(type_.element)
        return [_value(element, i + j, place, times) for j in range((i + place) % 4)]
    number = (7 * i + place) % 23
    if type_.element == "string":
        return f"v{number}"
    if type_.element == "boolean":
        return number % 2 == 0
    if type_.element in ("float", "double"):
        return number / 2
    if type_.element == "timestamp":
        return times[i % ROWS] - timedelta(hours=place)
    if type_.element == "date":
        moment: date = times[i % ROWS].date()
        return moment
    return number


_EXTERNAL = (
    TableColumn(name="key", type="bigint"),
    TableColumn(name="brand", type="string"),
    TableColumn(name="stock", type="bigint"),
    TableColumn(name="price", type="double"),
    TableColumn(name="since", type="timestamp"),
    TableColumn(name="label", type="int"),
)


#: Errors of Spark and the plugin for a plan that they cannot make, and of headrace for a spec: reported as faults.
_FAILURES = (Py4JError, PySparkException, UserError)


@dataclass(frozen=True)
class StepPlans:
    """Plans of one step, as the plugin judges them."""

    #: Subject of the plans: `operator log`, `table operator lag`, `pipeline clicks`.
    subject: str
    step: str
    plans: tuple[PhysicalPlan, ...]
    #: Reason why the gate is red, other than a plan; empty: none.
    fault: str = ""

    @property
    def leaving(self) -> tuple[PlanNode, ...]:
        """Return the nodes that leave the GPU."""
        return tuple(n for p in self.plans for n in p.leaving)

    @property
    def green(self) -> bool:
        """Return whether all of it stays on the GPU."""
        return not self.leaving and not self.fault

    def faults(self) -> list[str]:
        """Each fault once: operator and the plugin's reason."""
        faults = [f"{n.name}: {n.reason or 'does not run on the GPU'}" for n in self.leaving]
        return list(dict.fromkeys([*([self.fault] if self.fault else []), *faults]))


def check_operators(explainer: Explainer, ws: Workspace, only: Sequence[str] = ()) -> Iterator[StepPlans]:
    """Each registered operator in its cases.

    Args:
        ws: an empty folder for the small tables.
        only: names of operators; none: all.
    """
    frame = _table(explainer.spark, ws.scratch / "rows", gpu_cases.COLUMNS)
    _table(explainer.spark, ws.scratch / "external", _EXTERNAL, delta=True)
    explainer.ran()
    for name in OPERATORS.builtin:
        if not only or name in only:
            yield from _check(f"operator {name}", gpu_cases.ROW_CASES.get(name, ()), explainer, ws, frame, _row_case)
    for name in TABLE_OPERATORS.builtin:
        if not only or name in only:
            cases = [{name: case} for case in gpu_cases.TABLE_CASES.get(name, ())]
            yield from _check(f"table operator {name}", cases, explainer, ws, frame, _table_case)


Case = Callable[[Explainer, Workspace, DataFrame, Mapping[str, Any]], Iterator[tuple[str, list[PhysicalPlan]]]]


def _check(
    subject: str, cases: Sequence[Mapping[str, Any]], explainer: Explainer, ws: Workspace, frame: DataFrame, case: Case
) -> Iterator[StepPlans]:
    if not cases:
        yield StepPlans(subject, "-", (), "has no case in headrace.jobs.gpu_plan.cases")
    for number, inputs in enumerate(cases):
        try:
            for step, plans in case(explainer, ws, frame, inputs):
                label = step if len(cases) == 1 else f"{step} ({number + 1})"
                reads = any(n.name == "FileSourceScanExec" for p in plans for n in p.nodes)
                yield StepPlans(
                    subject, label, tuple(plans), "" if reads else "no plan reads the rows: nothing was seen"
                )
        except _FAILURES as e:
            yield StepPlans(subject, f"case {number + 1}", (), _first_line(e))


def _row_case(
    explainer: Explainer, ws: Workspace, frame: DataFrame, chain: Mapping[str, Any]
) -> Iterator[tuple[str, list[PhysicalPlan]]]:
    w = Workflow([Chain.model_validate(chain)], gpu_cases.COLUMNS, label=gpu_cases.LABEL)
    folder = _fresh(ws, "workflow")
    fitted = fit(w, frame, VocabularyTable(explainer.spark, folder / "vocabulary", "2026-01-01"))
    if ran := explainer.ran():
        yield "fit", ran
    fitted.save(folder / "saved")
    loaded = FittedWorkflow.load(folder / "saved")
    yield "transform", [explainer.explain(transform(loaded, frame))]
    if loaded.vocabularies:
        # A vocabulary that is too large to broadcast.
        with _setting(explainer.spark, "spark.sql.autoBroadcastJoinThreshold", "-1"):
            shuffled = transform(loaded, frame, {}, folder / "saved", broadcast_rows=0)
            yield "transform, shuffled", [explainer.explain(shuffled)]
    explainer.ran()


def _table_case(
    explainer: Explainer, ws: Workspace, frame: DataFrame, op: Mapping[str, Any]
) -> Iterator[tuple[str, list[PhysicalPlan]]]:
    ops = [OpSpec(op=name, params=params) for name, params in op.items()]
    label = gpu_cases.LABEL
    makes_label = Attribution.name in op
    columns = [c for c in gpu_cases.COLUMNS if not (makes_label and c.name == label)]
    external = SourceTable({c.name: declared(c) for c in _EXTERNAL}, "since")
    p = Preparation(ops, columns, label, gpu_cases.TIME, knows_train=True, sources={"other": external})

    def source(read: SourceRead) -> DataFrame:
        rows = explainer.spark.read.format("delta").load(str(ws.scratch / "external"))
        return rows.withColumn(EVENT_MICROS, spark_micros(F.col("since"), external.types["since"]))

    rows = frame.drop(label) if makes_label else frame
    prepared = p.spark(rows, ExternalReader(ws), TrainRange(0, 2**60), sources=source, seen_until=2**60)
    if ran := explainer.ran():
        yield "jobs", ran
    yield "rows", [explainer.explain(prepared)]
    explainer.ran()


def check_pipeline(explainer: Explainer, ws: Workspace, spec: Spec) -> Iterator[StepPlans]:
    """Plan a pipeline's features stage over a small table with its schema, in the workspace `ws`.

    One that asks for the Arrow engine has no plans: its features are made on CPUs.
    """
    subject = f"pipeline {spec.pipeline}"
    if spec.features.engine == "arrow":
        yield StepPlans(subject, ON_CPUS, ())
        return
    ds = spec.ds or "2026-01-08"
    _land(explainer.spark, ws, spec, ds)
    explainer.ran()
    seen: list[StepPlans] = []

    def after(step: str) -> None:
        seen.extend(StepPlans(subject, fine, plans) for fine, plans in _by_step(step, explainer.ran()))

    try:
        run_stage(BuildFeatures(count_day, after), spec, ws, ds)
        after("statistics")
    except _FAILURES as e:
        after("the step that failed")
        seen.append(StepPlans(subject, "-", (), _first_line(e)))
    steps = {s.step for s in seen}
    for required in ({"scan and prepare"}, {"fit", "count values"}, {"transform and write"}):
        if not required & steps:
            seen.append(StepPlans(subject, " or ".join(sorted(required)), (), "was not seen in the plugin's log"))
    yield from _merged(seen)


def _merged(seen: Sequence[StepPlans]) -> Iterator[StepPlans]:
    """One for each step, in the order in which steps began; the log's at the end."""
    steps = list(dict.fromkeys(s.step for s in seen))
    for step in sorted(steps, key=lambda s: s == LOG):
        of_step = [s for s in seen if s.step == step]
        faults = [s.fault for s in of_step if s.fault]
        yield StepPlans(of_step[0].subject, step, tuple(p for s in of_step for p in s.plans), "; ".join(faults))


#: Plans of Delta's own, over a table's log.
LOG = "_delta_log"
#: The step of a pipeline that has none of Spark's plans.
ON_CPUS = "features.engine: arrow, on CPUs"
#: Steps of the stage -> their names in messages.
_STEPS = {"rows": "scan and prepare", "fit": "fit", "write": "transform and write"}


def _by_step(name: str, plans: Sequence[PhysicalPlan]) -> list[tuple[str, tuple[PhysicalPlan, ...]]]:
    """Sort the plans of a step of the stage into finer steps by what they do."""
    by_step: dict[str, list[PhysicalPlan]] = {}
    for plan in plans:
        execs = [n.name for n in plan.execs]
        writes = any(n.name == "InsertIntoHadoopFsRelationCommand" for n in plan.nodes)
        if plan.is_bookkeeping:
            fine = LOG
        elif plan.is_from_driver or "ExecutedCommandExec" in execs:
            fine = "append to tables"
        elif name == "fit" and "GenerateExec" in execs:
            fine = "count values"
        elif name == "write" and not writes:
            fine = "count what is missing and unknown"
        else:
            fine = _STEPS.get(name, name)
        by_step.setdefault(fine, []).append(plan)
    return [(fine, tuple(some)) for fine, some in by_step.items()]


def _first_line(e: Exception) -> str:
    cause = getattr(e, "java_exception", None)
    text = str(cause.toString() if cause is not None else e)
    return f"{type(e).__name__}: {text.splitlines()[0][:300]}"


def _land(spark: SparkSession, ws: Workspace, spec: Spec, ds: str) -> None:
    """Write what ingest leaves: the tables of events, and a manifest that pins them."""
    outputs = [_land_source(spark, ws, spec, ds, None, spec.table)]
    outputs += [_land_source(spark, ws, spec, ds, name, s.table) for name, s in spec.sources.items()]
    Manifest(
        stage="ingest", pipeline=spec.pipeline, ds=ds, key="gpu-check", spec_hash="gpu-check", outputs=tuple(outputs)
    ).save(ws.manifest(spec.pipeline, ds, "ingest"))


def _land_source(spark: SparkSession, ws: Workspace, spec: Spec, ds: str, name: str | None, table: Table) -> Output:
    f = spec.features
    days = 2
    if f.split.by == "time":
        # Up to ds, which is after the range's end where labels ripen late.
        days = (date.fromisoformat(ds) - date.fromisoformat(split_ranges(spec, ds)[0][0])).days + 1
    first = (date.fromisoformat(ds) - timedelta(days=days - 1)).isoformat()
    rows = made_rows(table.columns, f.label, first, days, table.event_time, f.split.column)
    file = _fresh(ws, "landed") / "rows.parquet"
    with file.new_file() as local_path:
        pq.write_table(rows, local_path)
    ddl = ", ".join(
        [*(f"{quoted(c.name)} {c.type}" for c in table.columns), "_source_file string", "_source_line bigint"]
    )
    frame = spark.read.schema(ddl).parquet(str(file)).selectExpr("*", f"'{ds}' AS ds")
    path = ws.events(spec.pipeline, name)
    frame.write.format("delta").mode("overwrite").partitionBy("ds").save(str(path))
    return Output(kind="delta", name=ws.name_of(path), version="0", rows=rows.num_rows)


def _table(spark: SparkSession, path: Location, columns: Sequence[TableColumn], delta: bool = False) -> DataFrame:
    """Write a small table to the disk."""
    rows = made_rows(columns, gpu_cases.LABEL, "2026-01-01", 10, gpu_cases.TIME)
    if columns is _EXTERNAL:
        # Join tables have each key once.
        rows = rows.set_column(0, "key", [list(range(rows.num_rows))])
    rows_file = path.parent / f"{path.name}.parquet" if delta else path / "rows.parquet"
    with rows_file.new_file() as local_path:
        pq.write_table(rows, local_path)
    ddl = ", ".join([*(f"{quoted(c.name)} {c.type}" for c in columns), "_source_file string", "_source_line bigint"])
    frame = spark.read.schema(ddl).parquet(str(rows_file))
    if delta:
        frame.write.format("delta").save(str(path))
        return spark.read.format("delta").load(str(path))
    return frame


def _fresh(ws: Workspace, name: str) -> Location:
    """Make a new folder."""
    path = ws.scratch / f"{name}-{sum(p.name.startswith(f'{name}-') for p in ws.scratch.entries())}"
    path.make_dir()
    return path


@contextmanager
def _setting(spark: SparkSession, key: str, value: str) -> Iterator[None]:
    previous = spark.conf.get(key)
    spark.conf.set(key, value)
    try:
        yield
    finally:
        if previous is not None:
            spark.conf.set(key, previous)
