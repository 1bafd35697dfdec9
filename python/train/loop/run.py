"""The training run, from the restored state to the saved model; its steps are in headrace.train.loop.trainer."""

from __future__ import annotations

import logging
import resource
from typing import Any

from headrace.comm.base import Collective, LocalCollective
from headrace.config.schema import DatasetSchema
from headrace.dataset.layout import TEST, SplitLayout, open_split
from headrace.embeddings.lookup.local_tables import cache_use
from headrace.models import saved
from headrace.models.sharded_model import ShardedModel
from headrace.train.callbacks.metrics_log import MetricsLog
from headrace.train.callbacks.progress import LoopProgress, OnProgress, ProgressEvent, ProgressReporter, monitor_of
from headrace.train.callbacks.tracing import InstrumentedCollective, NoOpTracer, Tracer, collect_profile, show_profile
from headrace.train.callbacks.watchdog import Watchdog
from headrace.train.carried_columns import ListColumn, SampleWeights, TaskLabels
from headrace.train.checkpoint.read import list_steps, restore, restore_step
from headrace.train.evaluation.bootstrap import write_replicates
from headrace.train.evaluation.ranks import Ranks
from headrace.train.job import Job, TrainingReport
from headrace.train.loop.evaluation import Evaluations
from headrace.train.loop.trainer import Trainer
from headrace.train.loop.training_rows import ItemShares, observe_training_rows, training_rows
from headrace.train.setup.initial_weights import changes_of, saved_bytes, start_from_pretrained, start_new_rows
from headrace.train.setup.state import TrainState, build_state

log = logging.getLogger("headrace.train")


def train_local(job: Job, on_progress: OnProgress = lambda event: None) -> TrainingReport:
    """Train in this process, as the only rank."""
    return train(job, LocalCollective(), on_progress)


def train(
    job: Job, collective: Collective, on_progress: OnProgress = lambda event: None, watchdog: Watchdog | None = None
) -> TrainingReport:
    """Train, evaluate and save the model. Collective; every rank returns the same report, its own peak memory apart.

    Resumes from the newest whole checkpoint of the same run, so that it ends with the weights of a run that was never
    interrupted (bit for bit on as many ranks and threads).

    Raises:
        Diverged: the loss is not finite.
        Stopped: a rank was asked to stop.
        UserError: the dataset, a checkpoint or the warm-start model cannot be used.
    """
    watchdog, tracer = watchdog or Watchdog(), Tracer() if job.train.profile else NoOpTracer()
    collective = InstrumentedCollective(collective, watchdog, tracer)
    is_chief = collective.world.is_chief
    dataset, schema = job.ws.locate(job.features.output("dataset").name), job.features.dataset_schema
    assert schema is not None
    labels = TaskLabels(job.train, schema, job.ds)
    lists = ListColumn.from_spec(job.model, job.train, schema)
    weights = SampleWeights(job.train, schema, job.decay)
    read_along = labels.with_label_columns([*weights.carried, *([] if lists is None else [lists.column])])
    layout = open_split(dataset, "train", schema, read_along)
    state, progress = _restore_or_build(job, schema, layout, collective, watchdog)
    model = state.model
    resumed_from = watchdog.step = progress.step
    evaluations = Evaluations(job, model, dataset, collective)
    tracer.attach(model.embeddings)

    shares = ItemShares(Ranks(collective), layout, schema, job.train)
    model.log_share = shares.log_share

    with training_rows(
        job,
        layout,
        schema,
        collective.world,
        start_step=progress.step,
        carried=read_along,
        timed=tracer.timed,
        candidates=shares.sampler(),
    ) as source:
        total = source.steps_per_epoch * job.train.epochs
        total = min(total, job.train.max_steps or total)
        if is_chief and progress.step < total:
            log.info(
                "%s rows an epoch, %d steps of %d rows on %d rank(s)%s",
                f"{source.rows:,}",
                total,
                job.train.batch_size,
                collective.world.size,
                f", resuming from step {progress.step}" if progress.step else "",
            )
        trainer = Trainer(
            job,
            state,
            source,
            progress,
            total,
            collective,
            evaluations.while_training,
            callbacks=[
                tracer,
                watchdog,
                MetricsLog(
                    job.launch_metrics_file if is_chief else None,
                    progress,
                    total,
                    job.train.batch_size,
                    job.earlier_metrics_files() if is_chief else (),
                ),
                ProgressReporter(on_progress, job, progress.step, total),
            ],
            stop_requested=lambda: watchdog.stop_requested,
        )
        evaluation = trainer.fit()
    profile = {}
    if job.train.profile and tracer.counted:
        profile = collect_profile(job, tracer, collective)
        if is_chief:
            log.info("%s", show_profile(profile, job.trace))

    total = best_step = progress.step
    on_progress(ProgressEvent(phase="evaluate", step=total, total=total))
    watchdog.phase = "evaluate"
    monitor = monitor_of(job.train, model.predicts)
    best = progress.best_step(monitor)
    if job.train.patience is not None and best is not None and best != progress.step:
        best_step, evaluation = best, None
        if is_chief:
            log.info("taking the weights of step %d, which had the %s", best_step, monitor.best)
        restore_step(job.checkpoints, best_step, model, state.dense, collective, config=job.config_fingerprint)
    # None: other weights than those of the last step; or all steps were taken before this run began.
    final_evaluations, sizes = evaluations.at_the_end(layout, evaluation)
    metrics: dict[str, float | None] = {}
    for split in ("valid", "rank", "valid_full"):
        metrics |= final_evaluations[split].metrics if split in final_evaluations else {}
    forgetting: dict[str, Any] = {}
    if job.forgetting is not None:
        forgetting = evaluations.of_other_rows(job.ws.locate(job.forgetting)) or {}
    dynamic, cached = dynamic_report(model, collective), cache_report(model, collective)
    on_progress(ProgressEvent(phase="save", step=total, total=total))
    watchdog.phase = "save"
    if is_chief:
        job.check_fence()
        if job.token:
            job.metrics_file.copy_from(job.launch_metrics_file)
        write_replicates(
            job.replicates_file, {split: of_split.replicates for split, of_split in final_evaluations.items()}
        )
    saved.save_model(
        job.saved_model,
        model,
        workflow=dataset / "workflow",
        pipeline=job.pipeline,
        ds=job.ds,
        key=job.key,
        metrics=metrics,
        changes=changes_of(job, model),
    )
    return TrainingReport(
        rows={"train": source.rows} | sizes,
        steps=total,
        steps_per_epoch=source.steps_per_epoch,
        resumed_from_step=resumed_from,
        warm_start=job.warm_start,
        metrics=metrics,
        curve=progress.curve,
        evals=progress.evals,
        best_step=best_step,
        calibration_bins=final_evaluations["valid"].calibration_bins,
        evaluation={}
        if evaluations.is_basic and TEST not in final_evaluations
        else {s: of_split.record() for s, of_split in final_evaluations.items()},
        data_wait_seconds=round(source.wait_seconds, 3),
        checkpoint_wait_seconds=round(trainer.checkpoint_wait_seconds, 3),
        profile=profile,
        forgetting=forgetting,
        saved=saved_bytes(job),
        dynamic=dynamic,
        cached=cached,
        peak_memory_mib={f"rank{collective.world.rank}": peak_mib()},
        core_seconds={f"rank{collective.world.rank}": core_seconds()},
    )


def _restore_or_build(
    job: Job, schema: DatasetSchema, rows: SplitLayout, collective: Collective, watchdog: Watchdog
) -> tuple[TrainState, LoopProgress]:
    """Restore the newest whole checkpoint's state; else build a new one, with the weights of the models that it starts
    from.
    """
    state = build_state(job, schema, collective)
    observe_training_rows(state.model, rows)
    watchdog.phase = "restore"
    resumed = restore(
        job.checkpoints,
        state.model,
        state.dense,
        collective,
        config=job.config_fingerprint,
        check_fence=job.check_fence,
    )
    if resumed is not None:
        return state, resumed
    if list_steps(job.checkpoints):
        del state  # before there is another: the tables may not fit twice
        state = build_state(job, schema, collective)
        observe_training_rows(state.model, rows)
    if job.warm_start is not None:
        start = job.ws.locate(job.warm_start)
        loaded = saved.restore(state.model, start, saved.has_state_of(start, job.train.embeddings.kind))
        state.model.age_state(job.train.warm_decay)
        if job.new_rows != "random":
            start_new_rows(state.model, loaded, rows, by_segment=job.new_rows == "segment")
    elif job.pretrained:
        start_from_pretrained(state.model, {part: job.ws.locate(name) for part, name in job.pretrained.items()})
    return state, LoopProgress()


def dynamic_report(model: ShardedModel, collective: Collective) -> dict[str, dict[str, float | None]]:
    """Report on tables of raw ids; `oov_share` is of the split `valid`. Collective."""
    if model.dynamic is None:
        return {}
    tables = model.dynamic.report()
    if collective.world.is_chief:
        for name, table in tables.items():
            log.info(
                "raw ids of %s: %s rows, %s admitted and %s evicted so far, %s wait; %s of the lookups of valid "
                "found no row",
                name,
                f"{table.rows:,}",
                f"{table.admitted:,}",
                f"{table.evicted:,}",
                f"{table.waiting:,}",
                f"{table.oov_share or 0:.1%}",
            )
    return {
        name: {
            "rows": t.rows,
            "waiting": t.waiting,
            "load": round(t.load, 4),
            "admitted": t.admitted,
            "evicted": t.evicted,
            "hit_share": round(t.hits / t.lookups, 6) if t.lookups else None,
            "oov_share": None if t.oov_share is None else round(t.oov_share, 6),
            "mib": round(t.nbytes / 2**20, 3),
        }
        for name, t in tables.items()
    }


def cache_report(model: ShardedModel, collective: Collective) -> dict[str, dict[str, float | None]]:
    """Report on tables in host memory with hot rows on GPUs. Collective."""
    tables = cache_use(model.embeddings)
    if collective.world.is_chief:
        for name, use in tables.items():
            log.info(
                "table %s: %s rows in host memory, %.1f%% of them on the GPU too, where %.1f%% of the lookups "
                "found theirs",
                name,
                f"{use.rows:,}",
                100 * use.share,
                100 * (use.hit_rate or 0),
            )
    return {
        name: {
            "rows": u.rows,
            "share": u.share,
            "lookups": u.lookups,
            "hit_share": None if u.hit_rate is None else round(u.hit_rate, 6),
        }
        for name, u in tables.items()
    }


def peak_mib() -> float:
    """Peak resident size of this process, MiB."""
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1)


def core_seconds() -> float:
    """Processor time of this process and of its children that have ended."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return round(sum(r.ru_utime + r.ru_stime for r in usages), 3)
