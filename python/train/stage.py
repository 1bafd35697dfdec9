"""The train stage: launch the ranks, and register the model that they have trained."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from headrace.config import Spec
from headrace.config.operations import with_slots
from headrace.config.section import OF_RUNS, keys_with
from headrace.config.workspace import Workspace
from headrace.dataset.layout import TEST, check_streams, open_split
from headrace.errors import UserError
from headrace.models import registry
from headrace.models.predictor import damaged_model
from headrace.models.registry.client import missing_version
from headrace.models.registry.versions import lineage_of, preload
from headrace.stage import Context, Result, Stage, identity
from headrace.stage.manifest import Input, Manifest, Output, fingerprint
from headrace.train.callbacks.progress import ProgressEvent
from headrace.train.carried_columns import DayDecay, TaskLabels
from headrace.train.job import Job, TrainingReport, driver_phase_ends, end_phase, show_metrics
from headrace.train.requirements import check_requirements
from headrace.train.setup.earlier_days import (
    PRETRAINED,
    REPLAY,
    find_forgetting_dataset,
    find_pretrained,
    find_replay,
    find_warm_start,
    forgetting_day,
)

log = logging.getLogger("headrace.train")


class Train(Stage):
    """Training by Horovod on Spark from Petastorm: a model with sharded embeddings, its evaluation and registration."""

    name = "train"
    version = 1
    needs = ("features",)

    def spec_part(self, spec: Spec) -> Mapping[str, Any]:
        train = keys_with(spec.train, OF_RUNS)
        if spec.retrain is not None:
            # These keys change how a model is saved, or what it is measured on, but not its weights.
            train["retrain"] = spec.retrain.model_dump(mode="json", exclude={"full_copy_days", "forgetting_day"})
        return {"model": keys_with(spec.model, OF_RUNS), "train": train}

    def inputs(self, ctx: Context) -> tuple[Input, ...]:
        """Return the models that training starts from, and the datasets of older days whose rows it replays.

        It starts from the model of an earlier day, or from models of other pipelines.
        """
        schema = ctx.upstream["features"].dataset_schema
        if schema is None:
            return find_pretrained(ctx.ws, ctx.spec, ctx.ds)
        earlier_inputs = self._inputs_of_finished_run(ctx)
        start = find_warm_start(ctx.ws, ctx.spec, ctx.ds, schema, earlier_inputs) if ctx.spec.train.warm_start else None
        starts = find_pretrained(ctx.ws, ctx.spec, ctx.ds) if start is None else (start.input,)
        return (*starts, *find_replay(ctx.ws, ctx.spec, ctx.ds, schema, earlier_inputs))

    def _inputs_of_finished_run(self, ctx: Context) -> tuple[Input, ...]:
        """Return the inputs of this day's finished run with the same spec and dataset; empty without such a run."""
        done = Manifest.load(ctx.ws.manifest(ctx.spec.pipeline, ctx.ds, self.name))
        dataset = Input(kind="stage", name="features", version=identity(ctx.upstream["features"]))
        if done is None or done.removed or done.spec_hash != fingerprint(self.spec_part(ctx.spec)):
            return ()
        return done.inputs if dataset in done.inputs else ()

    def verify(self, ctx: Context, manifest: Manifest) -> str | None:
        damaged = damaged_model(ctx.ws.locate(manifest.output("model").name))
        return damaged or missing_version(ctx.ws, manifest.facts.get("registered"))

    def run(self, ctx: Context) -> Result:
        phase_ends = driver_phase_ends(ctx.turn_start)
        job = make_job(ctx)
        check_dataset(job)
        spec = ctx.spec
        report = self.train(ctx, job, phase_ends)
        version = _register(ctx, job, report) if ctx.registers else None
        log.info("%s", summary(report))
        name = ctx.ws.name_of(job.saved_model)
        return Result(
            outputs=(Output(kind="model", name=name, version=ctx.key, rows=report.rows["train"]),),
            rows=report.rows,
            facts={
                **report.model_dump(
                    include={
                        "metrics",
                        "curve",
                        "evals",
                        "calibration_bins",
                        "evaluation",
                        "steps",
                        "steps_per_epoch",
                        "best_step",
                        "resumed_from_step",
                        "data_wait_seconds",
                        "checkpoint_wait_seconds",
                        "profile",
                        "dynamic",
                        "cached",
                        "startup_seconds",
                    }
                ),
                **({} if spec.train.monitor == "log_loss" else {"monitor": spec.train.monitor}),
                # A name relative to the workspace, as in the inputs: manifests move with their workspace.
                "warm_start": next((i.name for i in ctx.inputs if i.kind == "model"), None),
                **_forgetting_facts(ctx, report),
                **({"saved": report.saved} if report.saved else {}),
                **({"replayed": list(job.replayed)} if job.replayed else {}),
                **({"pretrained": dict(job.pretrained)} if job.pretrained else {}),
                "registered": {"name": spec.pipeline, "version": version} if version else None,
                "ranks": spec.train.ranks,
            },
            peak_memory_mib=report.peak_memory_mib,
            core_seconds=sum(report.core_seconds.values()),
        )

    def train(self, ctx: Context, job: Job, phase_ends: dict[str, float]) -> TrainingReport:
        """Train by the ranks on Spark; a subclass may run them elsewhere."""
        # Imported here, since Horovod loads pyspark's pickling of functions: a dry run needs neither.
        from headrace.lake.spark.session import session
        from headrace.train.launch.horovod_spark import launch

        spec = ctx.spec
        end_phase(phase_ends, "driver")
        with session(with_slots(spec.spark, spec.train.ranks), ctx.ws, f"headrace {spec.pipeline} train {ctx.ds}") as s:
            end_phase(phase_ends, "session")
            return launch(
                job,
                s,
                ranks=spec.train.ranks,
                retries=spec.train.retries,
                on_progress=_preload_registry(ctx.ws) if ctx.registers else lambda event: None,
                phase_ends=phase_ends,
                check_lease=ctx.check_lease,
            )


def _register(ctx: Context, job: Job, report: TrainingReport) -> str:
    spec = ctx.spec
    return registry.register(
        ctx.ws,
        spec.pipeline,
        job.saved_model,
        report.metrics,
        ctx.key,
        params=run_parameters(spec),
        ds=ctx.ds,
        lineage={**lineage_of(ctx), "warm_start": next((i.version for i in ctx.inputs if i.kind == "model"), None)},
        history=[*report.curve, *report.evals],
    )


def make_job(ctx: Context) -> Job:
    """Return the job of the ranks."""
    warm = [i.name for i in ctx.inputs if i.kind == "model"]
    pretrained = [i.name for i in ctx.inputs if i.kind == PRETRAINED]
    retrain, schema = ctx.spec.retrain, ctx.upstream["features"].dataset_schema
    job = Job(
        home=ctx.ws.home,
        lake=ctx.ws.lake_uri,
        store=ctx.ws.store_uri,
        scratch=ctx.ws.scratch_folder,
        pipeline=ctx.spec.pipeline,
        ds=ctx.ds,
        key=ctx.key,
        features=ctx.upstream["features"],
        model=ctx.spec.model,
        train=ctx.spec.train_of_warm_start() if warm else ctx.spec.train,
        warm_start=warm[0] if warm else None,
        pretrained=dict(zip(sorted(ctx.spec.train.pretrained), pretrained, strict=False)),
        threads=ctx.spec.train.threads,
        forgetting=find_forgetting_dataset(ctx.ws, ctx.spec, ctx.ds, schema) if ctx.registers else None,
        decay=DayDecay.from_spec(ctx.spec, ctx.ds),
        new_rows="random" if retrain is None else retrain.new_rows,
        full_copy_days=None if retrain is None else retrain.full_copy_days,
        replay=None if retrain is None else retrain.replay,
        replayed=tuple(i.name for i in ctx.inputs if i.kind == REPLAY),
    )
    job.folder.make_dir()
    return job


def check_dataset(job: Job) -> None:
    """Check the dataset before ranks are started.

    Raises:
        UserError: a split is missing or damaged, a split has too few row groups, or the dataset lacks something that
            the sections `model` and `train` need.
    """
    # Imported here: a day that is trained already does not need it.
    from headrace.train.evaluation.request import Request

    schema = job.features.dataset_schema
    if schema is None:
        raise UserError("the manifest of stage 'features' describes no dataset; run that stage again")
    dataset = job.ws.locate(job.features.output("dataset").name)
    if not (dataset / "workflow").is_dir():
        raise UserError(f"dataset {dataset} has no folder 'workflow'; run the features stage again")
    new_rows = job.new_rows if job.warm_start is not None else "random"
    carried = check_requirements(job.model, job.train, schema, job.ds, job.decay, new_rows)
    check_streams(open_split(dataset, "train", schema, carried), job.train.streams)
    if job.pretrained:
        # Imported here, since it imports torch, which most drivers do not need.
        from headrace.train.setup.initial_weights import check_pretrained

        check_pretrained({part: job.ws.locate(name) for part, name in job.pretrained.items()}, dataset, schema)
    labels, request = TaskLabels(job.train, schema, job.ds), Request(job.train, schema)
    if open_split(dataset, "valid", schema, labels.with_label_columns(request.carried())).rows == 0:
        raise UserError(f"{dataset / 'valid'} holds no rows to evaluate on: widen features.split")
    if (dataset / TEST).is_dir():
        open_split(dataset, TEST, schema, labels.with_label_columns(request.carried()))
    if job.train.rank_group is not None:
        open_split(dataset, "rank", schema, request.carried(lists=True))


def summary(report: TrainingReport) -> str:
    """Return one line about the result."""
    return f"{report.steps} steps: {show_metrics(report.metrics)} on {report.rows['valid']:,} rows"


def _preload_registry(ws: Workspace) -> Any:
    """Return a callback that imports the registry, which is slow, while the ranks evaluate and save.

    It hides errors of the import: registering the model raises them again.
    """

    def load() -> None:
        with suppress(UserError):
            preload(ws)

    started: list[threading.Thread] = []

    def on_progress(event: ProgressEvent) -> None:
        if event.phase in ("evaluate", "save") and not started:
            started.append(threading.Thread(target=load, name="preload", daemon=True))
            started[0].start()

    return on_progress


def _forgetting_facts(ctx: Context, report: TrainingReport) -> dict[str, Any]:
    """Return the fact `forgetting`: null where the spec requests it and it could not be measured."""
    day = forgetting_day(ctx.spec, ctx.ds)
    if day is None or not ctx.registers:
        return {}
    return {"forgetting": {"ds": day, **report.forgetting} if report.forgetting else None}


def run_parameters(spec: Spec) -> dict[str, Any]:
    """Return the parameters of a run for the registry: `model.*` and `train.*`, flat."""
    return {
        **_flat("model", spec.model.model_dump(mode="json")),
        **_flat("train", spec.train.model_dump(mode="json", exclude={"search"})),
    }


def _flat(prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(f"{prefix}.{key}", value) if isinstance(value, Mapping) else {f"{prefix}.{key}": value}
    return flat
