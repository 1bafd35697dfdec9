"""Events of runs: a stage's START, COMPLETE and FAIL, and those of a whole `headrace run`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from datetime import date, datetime, timedelta
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from openlineage.client.event_v2 import InputDataset, Job, OutputDataset, Run, RunEvent, RunState
from openlineage.client.facet_v2 import (
    documentation_job,
    error_message_run,
    job_type_job,
    nominal_time_run,
    parent_run,
    processing_engine_run,
)

from headrace import __version__
from headrace.config.stages import StageEntry
from headrace.jobs.observe.openlineage import names
from headrace.jobs.observe.openlineage.names import job_name
from headrace.logs import redact

#: What has made an event: a name of this program and its version.
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
