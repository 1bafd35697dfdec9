"""The training run, from the restored state to the saved model, and its evaluations; steps are in `loop.trainer`."""

from __future__ import annotations

import logging
import resource
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, get_args

import pyarrow as pa
import pyarrow.parquet as pq

from headrace.comm.base import Collective, LocalCollective
from headrace.config.evaluation import CatalogueMetric
from headrace.config.schema import DatasetSchema
from headrace.dataset.layout import TEST, SplitLayout, open_split, stored_columns
from headrace.embeddings.lookup.local_tables import cache_use
from headrace.errors import UserError
from headrace.models import saved
from headrace.models.sharded_model import ShardedModel
from headrace.storage import Location, StoreAway
from headrace.train.callbacks.metrics_log import MetricsLog
from headrace.train.callbacks.progress import LoopProgress, OnProgress, ProgressEvent, ProgressReporter, monitor_of
from headrace.train.callbacks.tracing import InstrumentedCollective, NoOpTracer, Tracer, collect_profile, show_profile
from headrace.train.callbacks.watchdog import Watchdog
from headrace.train.carried_columns import ListColumn, SampleWeights, TaskLabels
from headrace.train.checkpoint.read import list_steps, restore, restore_step
from headrace.train.evaluation.bootstrap import write_replicates
from headrace.train.evaluation.click import BASIC, ERROR_METRICS
from headrace.train.evaluation.evaluate import (
    Evaluation,
    Evaluator,
    Predictions,
    evaluate_basic,
    evaluate_errors,
    evaluate_tasks,
)
from headrace.train.evaluation.full_ranker import FullRanker
from headrace.train.evaluation.policy import Policy
from headrace.train.evaluation.predict import predict_split
from headrace.train.evaluation.ranks import Ranks
from headrace.train.evaluation.request import Request
from headrace.train.job import Job, TrainingReport
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
    """Train, evaluate and save the model. Collective; ranks return equal reports except for their peak memory.

    It resumes from the newest complete checkpoint of the run, and ends with the same weights as a run without
    interruption (bit for bit with the same number of ranks and threads).

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
    # None if the weights are not those of the last step, or if all steps were completed before this launch.
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
    """Restore the newest complete checkpoint, or build a new state with the weights of the models it starts from."""
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
        del state  # first, since the tables may not fit in memory twice
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
    """Return the peak resident size of this process, MiB."""
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1)


def core_seconds() -> float:
    """Return the processor time of this process and of its ended children, in seconds."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return round(sum(r.ru_utime + r.ru_stime for r in usages), 3)


_OF_CATALOGUE = get_args(CatalogueMetric)


class Evaluations:
    """Evaluator of a run's model. Every method is collective.

    Args:
        job: the run, with its requested metrics.
        model: the model, evaluated as it is at each call.
        dataset: folder of the splits.
        collective: the ranks.

    Raises:
        UserError: dataset or model lack something that the metrics need.
    """

    def __init__(self, job: Job, model: ShardedModel, dataset: Location, collective: Collective) -> None:
        self._train, self._model, self._dataset, self._collective = job.train, model, dataset, collective
        self._ranks = Ranks(collective)
        self._request, self._labels = Request(job.train, model.schema), TaskLabels(job.train, model.schema, job.ds)
        self._valid = open_split(
            dataset, "valid", model.schema, self._labels.with_label_columns(self._request.carried())
        )
        self._ranker = (
            None
            if job.train.evaluation.full_ranking is None
            else FullRanker(self._request, model, dataset, job.train, collective)
        )

    @property
    def is_basic(self) -> bool:
        """True if the final evaluation needs only the result of `while_training`."""
        return self._request.is_basic

    def while_training(self) -> Evaluation:
        """Compute the basic metrics of the split `valid`, and `train.monitor`; for predicted numbers their errors."""
        if self._model.predicts == "number":
            return evaluate_errors(self._ranks, self._predict(self._valid))
        monitor = self._train.monitor
        basic = evaluate_basic(self._ranks, self._predict(self._valid))
        if monitor in basic.metrics:
            return basic
        # Only of all rows, without slices and intervals.
        settings = self._train.evaluation.model_copy(update={"slices": {}, "bootstrap": None})
        settings = settings.model_copy(update={"metrics": tuple(m for m in settings.metrics if m not in _OF_CATALOGUE)})
        request = Request(self._train.model_copy(update={"evaluation": settings}), self._model.schema)
        evaluator = Evaluator(request)
        if self._ranker is not None and monitor.endswith("_full"):
            judged = self._ranker.evaluate(evaluator, "valid")
        elif monitor.endswith("_at_k"):
            judged = self._lists(evaluator, request)[1]
        else:
            predictions = self._predict(self._valid, request.carried(), request.codes(), self._labels)
            judged = evaluate_tasks(evaluator, request, self._ranks, predictions)
        return replace(basic, metrics=basic.metrics | {monitor: judged.metrics[monitor]})

    def at_the_end(self, layout: SplitLayout, last: Evaluation | None) -> tuple[dict[str, Evaluation], dict[str, int]]:
        """Return all requested evaluations by split, with full rankings as `<split>_full`, and the splits' rows.

        Args:
            layout: layout of the split `train`.
            last: result of `while_training` for the current weights; None if there is none.
        """
        evaluator, request, evaluations = Evaluator(self._request), self._request, {}
        splits = {"valid": self._valid}
        if (self._dataset / TEST).is_dir():
            carried = self._labels.with_label_columns(request.carried())
            splits[TEST] = open_split(self._dataset, TEST, self._model.schema, carried)
        evaluator.count_training_rows(self._ranks, layout)
        policy = evaluator.policy(self._ranks, layout)
        for name, split in splits.items():
            if name == "valid" and last is not None and request.is_basic:
                evaluations[name] = replace(
                    last, metrics={m: x for m, x in last.metrics.items() if m in (*BASIC, *ERROR_METRICS)}
                )
                continue
            predictions = self._predict(split, request.carried(), request.codes(), self._labels, policy)
            if self._model.predicts == "number":
                evaluations[name] = evaluator.evaluate_regression(self._ranks, predictions)
                continue
            evaluations[name] = evaluate_tasks(evaluator, request, self._ranks, predictions)
        rows = {name: evaluation.rows for name, evaluation in evaluations.items()}
        if self._train.rank_group is not None:
            rows["rank"], evaluations["rank"] = self._lists(evaluator, request)
        if self._ranker is not None:
            assert request.settings.full_ranking is not None
            for name in request.settings.full_ranking.splits:
                if name in splits:
                    evaluations[f"{name}_full"] = self._ranker.evaluate(evaluator, name)
        return evaluations, rows

    def of_other_rows(self, dataset: Location) -> dict[str, Any] | None:
        """Return the basic `metrics` on the split valid of another dataset with the same features, and its `rows`.

        Returns None, with a warning, if a rank cannot read them. All ranks know that before the first one predicts.
        """
        reasons = [reason for reason in self._ranks.gather_json(self._unreadable(dataset)) if reason is not None]
        if reasons:
            if self._collective.world.is_chief:
                log.warning("not measured on the rows of %s: %s", dataset, reasons[0])
            return None
        split = open_split(dataset, "valid", self._model.schema)
        basic = evaluate_errors if self._model.predicts == "number" else evaluate_basic
        return {"metrics": basic(self._ranks, self._predict(split)).metrics, "rows": split.rows}

    def _unreadable(self, dataset: Location) -> str | None:
        """Return the reason why this rank cannot read its share of the row groups of a split valid, or None."""
        world = self._collective.world
        try:
            split = open_split(dataset, "valid", self._model.schema)
            for group in split.row_groups[world.rank :: world.size]:
                with pq.ParquetFile(group.path.local_path()) as file:
                    file.read_row_group(group.index, columns=stored_columns(self._model.schema))
        except StoreAway:
            raise
        except (UserError, pa.ArrowException, OSError) as e:
            return str(e)
        return None if split.rows else "it has none"

    def _lists(self, evaluator: Evaluator, request: Request) -> tuple[int, Evaluation]:
        """Return the rows and metrics of the split `rank`."""
        carried = request.carried(lists=True)
        ranked = open_split(self._dataset, "rank", self._model.schema, carried)
        return ranked.rows, evaluator.evaluate_lists(
            self._ranks, self._predict(ranked, carried, request.codes(lists=True))
        )

    def _predict(
        self,
        split: SplitLayout,
        carried: Sequence[str] = (),
        codes: Sequence[str] = (),
        tasks: TaskLabels | None = None,
        policy: Policy | None = None,
    ) -> Predictions:
        self._model.eval()
        return predict_split(
            self._model,
            split,
            self._model.schema,
            self._collective,
            batch_size=self._train.batch_size,
            streams=self._train.streams,
            carried=carried,
            codes=codes,
            tasks=tasks,
            policy=policy,
        )
