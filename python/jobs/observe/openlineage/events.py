"""Events of runs with their facets: a stage's START, COMPLETE and FAIL, its inputs and outputs as datasets."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import date, datetime, timedelta
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from openlineage.client.event_v2 import InputDataset, Job, OutputDataset, Run, RunEvent, RunState
from openlineage.client.facet_v2 import (
    data_quality_assertions_dataset,
    data_quality_metrics_dataset,
    data_quality_metrics_input_dataset,
    dataset_type_dataset,
    dataset_version_dataset,
    documentation_job,
    error_message_run,
    job_type_job,
    nominal_time_run,
    output_statistics_output_dataset,
    parent_run,
    processing_engine_run,
    schema_dataset,
    storage_dataset,
)

from headrace import __version__
from headrace.config import Spec
from headrace.config.schema import DatasetSchema
from headrace.config.stages import StageEntry
from headrace.config.workspace import Workspace
from headrace.jobs.observe.openlineage import names
from headrace.jobs.observe.openlineage.names import DatasetName, job_name, name_of, of_warehouse
from headrace.jobs.observe.output_files import DELTA, size_of
from headrace.lake.delta.log import DeltaLog
from headrace.logs import redact
from headrace.quality.report import facts
from headrace.stage.manifest import Input, Manifest, Output

#: By kind, as the specification's examples write it.
_TYPES = {"landing": "FILE", "file": "FILE", "dataset": "FILE", "replay": "FILE", "model": "MODEL"}


def inputs_of(
    ws: Workspace, inputs: Iterable[Input], upstream: Mapping[str, Manifest], manifest: Manifest | None = None
) -> list[InputDataset]:
    """Return what a run reads: its pinned inputs, and the outputs of its upstream stages.

    Args:
        ws: the workspace.
        inputs: of the run.
        upstream: manifests by stage.
        manifest: of the run, at its end: with the checks of what it read.
    """
    inputs_by_name: dict[DatasetName, InputDataset] = {}

    def add(kind: str, name: str, version: str, schema: DatasetSchema | None = None) -> None:
        known = name_of(ws, kind, name)
        facets = _of_dataset(ws, kind, name, version, schema)
        inputs_by_name[known] = InputDataset(known.namespace, known.name, facets=facets)

    for upstream_manifest in upstream.values():
        for output in upstream_manifest.outputs:
            if output.kind in _PLACES and output.kind != "quarantine":  # which no stage reads
                add(output.kind, output.name, output.version, upstream_manifest.dataset_schema)
    for read in inputs:
        if read.kind != "stage":
            add(read.kind, read.name, read.version)
    datasets = list(inputs_by_name.values())
    if manifest is not None and datasets:
        # The manifest does not say which of several inputs the checks were made on.
        (datasets[-1] if manifest.stage in _CHECKS_LAST else datasets[0]).inputFacets = _checks(manifest)
    return datasets


def outputs_of(spec: Spec, ws: Workspace, manifest: Manifest) -> list[OutputDataset]:
    """Return a run's outputs."""
    return [_output(spec, ws, manifest, output) for output in manifest.outputs]


#: Outputs that are in the workspace; others are tables of a warehouse.
_PLACES = (*DELTA, "dataset", "model", "file", "table")
#: The stages that check the last of their inputs: the landing files are behind the tables of upstream stages.
_CHECKS_LAST = ("ingest",)


def _output(spec: Spec, ws: Workspace, manifest: Manifest, output: Output) -> OutputDataset:
    inside = output.kind in _PLACES
    name = name_of(ws, output.kind, output.name) if inside else of_warehouse(spec, ws, manifest)
    facets = _of_dataset(ws, output.kind, output.name, output.version, manifest.dataset_schema)
    size = size_of(ws, output) if inside else None
    statistics = output_statistics_output_dataset.OutputStatisticsOutputDatasetFacet(
        rowCount=output.rows, size=size.bytes if size else None, fileCount=size.files if size else None
    )
    if output.kind == "dataset" and (metrics := _columns(manifest)):
        facets["dataQualityMetrics"] = data_quality_metrics_dataset.DataQualityMetricsDatasetFacet(
            columnMetrics={n: data_quality_metrics_dataset.ColumnMetrics(nullCount=c) for n, c in metrics.items()},
            rowCount=output.rows,
            bytes=size.bytes if size else None,
        )
    return OutputDataset(name.namespace, name.name, facets=facets, outputFacets={"outputStatistics": statistics})


def _of_dataset(ws: Workspace, kind: str, name: str, version: str, schema: DatasetSchema | None) -> dict[str, Any]:
    facets: dict[str, Any] = {
        "version": dataset_version_dataset.DatasetVersionDatasetFacet(datasetVersion=version),
        "datasetType": dataset_type_dataset.DatasetTypeDatasetFacet(datasetType=_TYPES.get(kind, "TABLE")),
    }
    fields: list[tuple[str, str]] = []
    if kind in DELTA:
        fields = list(_delta_columns(ws, name, version).items())
        facets["storage"] = storage_dataset.StorageDatasetFacet(storageLayer="delta", fileFormat="parquet")
    elif kind == "dataset" and schema is not None:
        fields = [(f.name, f"array<{f.dtype}>" if f.is_list else f.dtype) for f in schema.features]
    if fields:
        of_field = schema_dataset.SchemaDatasetFacetFields
        facets["schema"] = schema_dataset.SchemaDatasetFacet(
            fields=[of_field(name=n, type=t, ordinal_position=i) for i, (n, t) in enumerate(fields, 1)]
        )
    return facets


def _delta_columns(ws: Workspace, name: str, version: str) -> dict[str, str]:
    if not version.isdecimal():
        return {}
    metadata = DeltaLog(ws.locate(name)).metadata(int(version))
    if metadata is None:
        return {}
    fields = json.loads(metadata["schemaString"])["fields"]
    return {f["name"]: f["type"] if isinstance(f["type"], str) else str(f["type"]["type"]) for f in fields}


def _columns(manifest: Manifest) -> dict[str, int]:
    """Missing values by feature, of all rows."""
    rows = sum(manifest.rows.get(split, 0) for split in ("train", "valid", "test"))
    rates = {
        str(r.get("name")): facts.number(r.get("missing_rate")) for r in facts.records(manifest.facts.get("columns"))
    }
    return {name: round(rate * rows) for name, rate in rates.items() if rate is not None}


def _checks(manifest: Manifest) -> dict[str, Any]:
    facets: dict[str, Any] = {}
    check = _ASSERTIONS.get(manifest.stage)
    assertions = list(check(manifest.facts)) if check else []
    if assertions:
        facets["dataQualityAssertions"] = data_quality_assertions_dataset.DataQualityAssertionsDatasetFacet(assertions)
    read = manifest.rows.get("read")
    if read is not None:
        facets["dataQualityMetrics"] = data_quality_metrics_input_dataset.DataQualityMetricsInputDatasetFacet(
            columnMetrics={}, rowCount=read
        )
    return facets


def _assertion(name: str, ok: bool, value: Any, limit: Any, column: str | None = None, severity: str = "error") -> Any:
    return data_quality_assertions_dataset.Assertion(
        assertion=name,
        success=ok,
        column=column,
        severity=severity,
        expected=None if limit is None else facts.show(limit),
        actual=None if value is None else facts.show(value),
    )


def _expectations(record: Any) -> Iterable[Any]:
    for r in facts.records(record):
        if isinstance(r.get("ok"), bool):
            yield _assertion(str(r.get("name")), r["ok"], r.get("value"), r.get("limit"))


def _drift(record: Mapping[str, Any]) -> Iterable[Any]:
    """Yield the population stability index of each column that has a limit, and every other figure over one."""
    for r in facts.records(record.get("columns")):
        broken = {str(b.get("what")): b for b in facts.records(r.get("breaches"))}
        column = str(r.get("column"))
        if r.get("psi") is not None and r.get("max_psi") is not None and "psi" not in broken:
            yield _assertion("psi", True, r["psi"], r["max_psi"], column, "warn")
        for limit, b in broken.items():
            severity = "error" if b.get("action") == "stop" else "warn"
            yield _assertion(limit, False, b.get("value"), b.get("limit"), column, severity)


def _rules(record: Mapping[str, Any]) -> Iterable[Any]:
    for r in facts.records(record.get("rules")):
        if isinstance(r.get("passed"), bool):
            yield _assertion(str(r.get("key")), r["passed"], r.get("value"), r.get("limit"))


_ASSERTIONS: Mapping[str, Callable[[Mapping[str, Any]], Iterable[Any]]] = {
    "ingest": lambda record: _expectations(record.get("expectations")),
    "publish": lambda record: _expectations(record.get("audit")),
    "drift": _drift,
    "gate": _rules,
}


#: Producer of the events: this program and its version.
PRODUCER = f"https://pypi.org/project/headrace/{__version__}"


def event(
    state: RunState,
    run: names.Run,
    entry: StageEntry | None,
    namespace: str,
    time: datetime,
    inputs: Sequence[InputDataset] = (),
    outputs: Sequence[OutputDataset] = (),
    error: str = "",
    trace: str | None = None,
) -> RunEvent:
    """Return the event of a run. Jobs are `pipeline` and `pipeline.stage`.

    Args:
        state: START, COMPLETE or FAIL.
        run: the attempt.
        entry: its stage; None: the run is a whole `headrace run`.
        namespace: of the job.
        time: of the event, UTC.
        inputs: what it reads.
        outputs: what it has made.
        error: why it has failed.
        trace: Python's, where there is one.
    """
    return RunEvent(
        eventType=state,
        eventTime=time.isoformat(timespec="milliseconds"),
        run=Run(run.run_id, facets=_run_facets(run, entry, error, trace)),
        job=Job(namespace, job_name(run.pipeline, run.stage), facets=_job_facets(entry)),
        inputs=list(inputs),
        outputs=list(outputs),
        producer=PRODUCER,
    )


def _run_facets(run: names.Run, entry: StageEntry | None, error: str, trace: str | None) -> dict[str, Any]:
    facets: dict[str, Any] = {"processing_engine": _engine(entry)}
    if run.ds:
        first = date.fromisoformat(run.ds)
        facets["nominalTime"] = nominal_time_run.NominalTimeRunFacet(
            f"{first}T00:00:00Z", f"{first + timedelta(days=1)}T00:00:00Z"
        )
    if run.parent is not None:
        root = run.root or run.parent
        facets["parent"] = parent_run.ParentRunFacet(
            run=parent_run.Run(run.parent.run_id),
            job=parent_run.Job(run.parent.namespace, run.parent.job),
            root=parent_run.Root(run=parent_run.RootRun(root.run_id), job=parent_run.RootJob(root.namespace, root.job)),
        )
    if error:
        facets["errorMessage"] = error_message_run.ErrorMessageRunFacet(
            redact(error), "PYTHON", None if trace is None else redact(trace)
        )
    return facets


def _engine(entry: StageEntry | None) -> Any:
    name, number = "headrace", __version__
    if entry is not None and entry.spark:
        with suppress(PackageNotFoundError):
            name, number = "spark", version("pyspark")
    return processing_engine_run.ProcessingEngineRunFacet(number, name, __version__)


def _job_facets(entry: StageEntry | None) -> dict[str, Any]:
    if entry is None:
        return {"jobType": job_type_job.JobTypeJobFacet("BATCH", "HEADRACE", "DAG")}
    kind = job_type_job.JobTypeJobFacet("BATCH", "HEADRACE", "TASK")
    return {"jobType": kind, "documentation": documentation_job.DocumentationJobFacet(entry.help)}
