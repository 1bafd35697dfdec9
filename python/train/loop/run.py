"""The training run: one function that every rank runs; its steps are in headrace.train.loop.trainer.

A step: the rank's part of the global batch forward (embedding rows come by all-to-all), local loss = sum over its rows
/ rows of the global batch, backward (row gradients go back to their owners), one all-reduce of the dense gradients,
two optimizers. The sum over ranks of local losses is the mean over the global batch, so gradients are summed, and any
number of ranks takes the same steps.
"""

from __future__ import annotations

import logging
import resource
from collections.abc import Sequence
from pathlib import Path

from headrace.comm.base import Collective, LocalCollective
from headrace.comm.shared_memory import may_share
from headrace.dataset.loader.source import TrainSource
from headrace.dataset.parquet.layout import SplitLayout, open_split
from headrace.embeddings.dynamic.memory import bytes_beside
from headrace.embeddings.dynamic.spec import dynamic_features, dynamic_specs
from headrace.embeddings.lookup.cache_use import cache_use
from headrace.embeddings.planner.cost import Besides
from headrace.embeddings.planner.search import plan_tables
from headrace.embeddings.sharding.plan import Lookup, Plan, Table
from headrace.models import saved
from headrace.models.dlrm import DLRM
from headrace.schema import DatasetSchema
from headrace.train.callbacks.collective import WatchedCollective
from headrace.train.callbacks.profile import collect_profile, show_profile
from headrace.train.callbacks.progress import Tick
from headrace.train.callbacks.tracing import NoSpans, Spans
from headrace.train.callbacks.watchdog import Watch
from headrace.train.checkpoint import write as checkpoint
from headrace.train.checkpoint.write import Progress
from headrace.train.evaluation.predict import Evaluation, evaluate_clicks, evaluate_ranking, predict_split
from headrace.train.job import Job, Report, list_steps
from headrace.train.loop.trainer import Learner, Loop, Say
from headrace.train.optim.dense import DenseOptimizer
from headrace.train.setup.device import free_gib, place
from headrace.train.setup.popularity import sampled_popularity

log = logging.getLogger("headrace.train")


def train_local(job: Job, say: Say = lambda tick: None) -> Report:
    """Train in this process, as the only rank."""
    return train(job, LocalCollective(), say)


def train(job: Job, collective: Collective, say: Say = lambda tick: None, watch: Watch | None = None) -> Report:
    """Train, evaluate and save the model. Collective; every rank returns the same report, its own peak memory apart.

    Goes on from the newest whole checkpoint of the same run, so that it ends with the weights of a run that was never
    interrupted (bit for bit on as many ranks and threads).

    Raises:
        Diverged: the loss is not finite.
        Stopped: a rank was asked to stop, by its watch.
        UserError: the dataset, a checkpoint or the warm-start model cannot be used.
    """
    watch, spans = watch or Watch(), Spans() if job.train.profile else NoSpans()
    collective = WatchedCollective(collective, watch, spans)
    dataset, schema = job.ws.home / job.features.output("dataset").name, job.features.dataset_schema
    assert schema is not None
    layout = open_split(dataset, "train", schema)
    learner = _new_learner(job, schema, collective)
    watch.doing = "restore"
    resumed = checkpoint.restore(job.checkpoints, learner.model, learner.dense, collective, config=job.obeyed)
    if resumed is None:
        if list_steps(job.checkpoints):
            del learner  # before there is another: the tables may not fit twice
            learner = _new_learner(job, schema, collective)
        if job.warm_start is not None:
            saved.restore(learner.model, job.warm_start, saved.has_state_of(job.warm_start, job.train.embeddings.kind))
            learner.model.age_state(job.train.warm_decay)
    warm = str(job.warm_start) if job.warm_start is not None else None
    progress = resumed or Progress()
    resumed_from = watch.step = progress.step
    valid = open_split(dataset, "valid", schema)
    spans.attach(learner.model.embeddings)

    with TrainSource(
        layout, schema, job.train, collective.world, start_step=progress.step, timed=spans.timed
    ) as source:
        total = source.steps_per_epoch * job.train.epochs
        total = min(total, job.train.max_steps or total)
        if collective.world.is_chief and progress.step < total:
            log.info(
                "%s rows an epoch, %d steps of %d rows on %d rank(s)%s",
                f"{source.rows:,}",
                total,
                job.train.batch_size,
                collective.world.size,
                f", going on from step {progress.step}" if progress.step else "",
            )
        loop = Loop(
            job,
            learner,
            source,
            progress,
            total,
            collective,
            lambda: _evaluate(job, learner.model, valid, schema, collective),
            say=say,
            spans=spans,
            watch=watch,
        )
        evaluation = loop.run()
        rows, per_epoch, waited = source.rows, source.steps_per_epoch, source.wait_seconds
    profile = {}
    if job.train.profile and spans.counted:
        profile = collect_profile(job, spans, collective)
        if collective.world.is_chief:
            log.info("%s", show_profile(profile, job.trace))

    total = progress.step
    say(Tick(phase="evaluate", step=total, total=total))
    watch.doing = "evaluate"
    best_step = progress.step
    if job.train.patience is not None and progress.best_step not in (None, progress.step):
        assert progress.best_step is not None
        best_step, evaluation = progress.best_step, None
        if collective.world.is_chief:
            log.info("taking the weights of step %d, which had the lowest log loss", best_step)
        checkpoint.restore_step(job.checkpoints, best_step, learner.model, learner.dense, collective, config=job.obeyed)
    if evaluation is None:  # other weights than those of the last step; or all steps were taken before this run began
        evaluation = _evaluate(job, learner.model, valid, schema, collective)
    metrics = dict(evaluation.metrics)
    dynamic, cached = _dynamic(learner.model, collective), _cached(learner.model, collective)
    sizes = {"train": rows, "valid": evaluation.rows}
    if job.train.rank_group is not None:
        ranked = open_split(dataset, "rank", schema, [schema.carried_name(job.train.rank_group)])
        sizes["rank"] = ranked.rows
        metrics |= _rank(job, learner.model, ranked, schema, collective)
    say(Tick(phase="save", step=total, total=total))
    watch.doing = "save"
    _save(job, learner, dataset, metrics, collective)
    return Report(
        rows=sizes,
        steps=total,
        steps_per_epoch=per_epoch,
        resumed_from_step=resumed_from,
        warm_start=warm,
        metrics=metrics,
        curve=progress.curve,
        evals=progress.evals,
        best_step=best_step,
        calibration_bins=evaluation.calibration_bins,
        data_wait_seconds=round(waited, 3),
        profile=profile,
        dynamic=dynamic,
        cached=cached,
        peak_memory_mib={f"rank{collective.world.rank}": peak_mib()},
    )


def _new_learner(job: Job, schema: DatasetSchema, collective: Collective) -> Learner:
    dataset, chooses = job.ws.home / job.features.output("dataset").name, job.train.sharding.kind == "auto"
    popularity = sampled_popularity(dataset, schema) if chooses and collective.world.size > 1 else None

    raw = dynamic_features(schema)
    beside = bytes_beside(
        dynamic_specs(schema, job.model.embedding_dim, job.train.embeddings) if raw else (),
        [f.length for f in raw],
        job.train.batch_size,
        collective.world.size,
        job.train.embeddings.kind,
        1 + job.train.background_checkpoints,
    )
    shares_memory = job.train.device == "cpu" and may_share(collective.world)
    device, settings = place(job.train.device, collective.world), job.train.sharding
    if device.type == "cuda" and settings.memory_gib is None:
        settings = settings.model_copy(update={"memory_gib": free_gib(device, collective)})

    def make_plan(tables: Sequence[Table], lookups: Sequence[Lookup], world_size: int) -> Plan:
        return plan_tables(
            tables,
            lookups,
            world_size,
            batch_size=job.train.batch_size,
            optimizer=job.train.embeddings.kind,
            settings=settings,
            popularity=popularity,
            card=device.type == "cuda",
            besides=Besides(beside, shares_memory, job.train.background_checkpoints),
        ).plan

    model = DLRM(schema, job.model, collective, job.train.seed, make_plan, job.train.embeddings, device)
    model.precision = job.train.precision
    model.configure_optimizer(job.train.embeddings)
    return Learner(model, DenseOptimizer(model.dense_parameters(), job.train.dense, collective))


def _evaluate(job: Job, model: DLRM, layout: SplitLayout, schema: DatasetSchema, collective: Collective) -> Evaluation:
    model.eval()
    return evaluate_clicks(
        predict_split(model, layout, schema, collective, batch_size=job.train.batch_size, streams=job.train.streams)
    )


def _rank(
    job: Job, model: DLRM, layout: SplitLayout, schema: DatasetSchema, collective: Collective
) -> dict[str, float]:
    assert job.train.rank_group is not None
    model.eval()
    return evaluate_ranking(
        predict_split(
            model,
            layout,
            schema,
            collective,
            batch_size=job.train.batch_size,
            streams=job.train.streams,
            group=schema.carried_name(job.train.rank_group),
        ),
        job.train.rank_k,
    )


def _save(job: Job, learner: Learner, dataset: Path, metrics: dict[str, float | None], collective: Collective) -> None:
    if collective.world.is_chief:
        job.check_fence()
    saved.save_model(
        job.saved_model,
        learner.model,
        workflow=dataset / "workflow",
        pipeline=job.pipeline,
        ds=job.ds,
        key=job.key,
        metrics=metrics,
    )


def _dynamic(model: DLRM, collective: Collective) -> dict[str, dict[str, float | None]]:
    """What the report says of tables of raw ids; `oov_share` is of the split `valid`. Collective."""
    if model.dynamic is None:
        return {}
    found = model.dynamic.report()
    if collective.world.is_chief:
        for name, table in found.items():
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
        for name, t in found.items()
    }


def _cached(model: DLRM, collective: Collective) -> dict[str, dict[str, float | None]]:
    """What the report says of tables in host memory with hot rows on GPUs. Collective."""
    found = cache_use(model.embeddings)
    if collective.world.is_chief:
        for name, use in found.items():
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
        for name, u in found.items()
    }


def peak_mib() -> float:
    """Peak resident size of this process, MiB."""
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1)
