"""Hyper-parameter search: short runs in this process, one after the other, on a sample of the day's dataset.

    search/<pipeline>/<ds>/<key>/
        dataset/      the sample (headrace.train.tuner)
        study.db      Optuna's study, SQLite: every trial with its parameters and its value
        models/       the run of the current trial; removed when the trial ends
        best.yaml     the best settings as an overlay of the spec

The key is a fingerprint of everything that a trial's value depends on. So the same search resumes where it was stopped,
and another one begins anew. Parameters are drawn by TPE (Bergstra et al., 2011) with a generator seeded by the number
of finished trials: a resumed search draws the same parameters as one without interruption.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import numpy as np
import optuna
import pyarrow.parquet as pq
from optuna.trial import TrialState

from headrace.config import Evaluation, Search, Spec
from headrace.config.evaluation import ClickMetric, RankingMetric, UserMetric
from headrace.config.schema import DatasetSchema
from headrace.config.section import OF_CHECKPOINTS, keys_with
from headrace.config.workspace import Workspace
from headrace.dataset.layout import SplitLayout, open_split
from headrace.errors import UserError
from headrace.stage import run_lock
from headrace.stage.manifest import Manifest, Output, fingerprint
from headrace.storage import Location, local
from headrace.train.callbacks.progress import OnProgress, ProgressEvent
from headrace.train.job import Diverged, Job
from headrace.train.loop.run import train_local
from headrace.train.search_space import check_values, distributions, draw, keys_of, model_of, overlay_of, values_of
from headrace.train.setup.earlier_days import find_pretrained, find_warm_start
from headrace.train.stage import check_dataset

#: Number of row groups over which a sample is spread, if the split has so many.
_SPREAD = 64


def sample_dataset(
    features: Manifest, ws: Workspace, target: Location, rows: dict[str, int], *, streams: int, seed: int
) -> Manifest:
    """Write a sample of a dataset to `target`, unless it exists, and return its manifest.

    Args:
        features: manifest of the complete dataset; the sample's differs only in the dataset's name.
        ws: workspace of the dataset.
        target: folder of the sample; it appears by one rename.
        rows: largest number of rows of each split. A split that is smaller, or not named, is complete in the sample.
        streams: least number of row groups of the sample, if the split has so many.
        seed: seed of the draw of rows within a row group.

    Raises:
        UserError: the dataset is missing or damaged.
    """
    dataset, schema = ws.locate(features.output("dataset").name), features.dataset_schema
    assert schema is not None
    if not target.is_dir():
        with target.new_folder() as sample:
            for part in [p for p in dataset.entries() if p.is_dir()]:
                layout = open_split(dataset, part.name, schema) if part.name in rows else None
                if layout is None or layout.rows <= rows[part.name]:
                    (sample / part.name).copy_from(part, share=True)
                else:
                    _write_sample(layout, sample / part.name, rows[part.name], streams, seed)
    output = Output(kind="dataset", name=str(target), version=features.output("dataset").version)
    return features.model_copy(update={"outputs": (output,)})


def sizes(manifest: Manifest, splits: tuple[str, ...] = ("train", "valid")) -> dict[str, int]:
    """Return the rows of the splits of a sampled dataset."""
    schema: DatasetSchema | None = manifest.dataset_schema
    assert schema is not None
    return {s: open_split(local(manifest.output("dataset").name), s, schema).rows for s in splits}


def _write_sample(layout: SplitLayout, folder: Location, rows: int, streams: int, seed: int) -> None:
    groups = layout.row_groups
    mean = layout.rows / len(groups)
    group_count = min(len(groups), max(streams, _SPREAD, math.ceil(rows / mean)))
    chosen = [groups[i * len(groups) // group_count] for i in range(group_count)]
    share = min(1.0, rows / sum(g.rows for g in chosen))
    for number, group in enumerate(chosen):
        table = pq.ParquetFile(group.path).read_row_group(group.index)
        keep = max(1, math.floor(share * group.rows))
        rows_of_group = np.random.default_rng((seed, number)).choice(group.rows, keep, replace=False)
        table = table.take(np.sort(rows_of_group))
        # Like files of the stage `features`: one row group, without compression.
        with (folder / f"part-{number:05d}.parquet").new_file() as path:
            pq.write_table(table, path, row_group_size=keep, compression="none", use_dictionary=False)


log = logging.getLogger("headrace.train")
_OVER = (TrialState.COMPLETE, TrialState.PRUNED)
_NEVER = 1 << 40


@dataclass(frozen=True)
class Trial:
    """A finished trial. `number` is None for the pipeline's own settings."""

    number: int | None
    state: Literal["finished", "pruned"]
    values: Mapping[str, Any]
    #: Objective at the last evaluation; None without an evaluation.
    value: float | None
    metrics: Mapping[str, float | None]
    steps: int
    seconds: float
    #: Reason why it was pruned; empty: it was not.
    reason: str = ""
    #: Name of its model in `search.models`; None without that section.
    model: str | None = None


@dataclass(frozen=True)
class SearchResult:
    """The result of a search."""

    folder: Location
    #: The pipeline's own settings, then the trials in order.
    trials: tuple[Trial, ...]
    #: Best trial; None if none is better than the pipeline's own settings.
    best: Trial | None

    @property
    def overlay(self) -> Location:
        return self.folder / "best.yaml"


class Tuner:
    """A search over one day's dataset.

    Args:
        spec: the pipeline with a section `train.search`.
        spec_of: returns the spec with the fields at these paths changed.
        ws: the workspace.
        ds: the day.
        on_trial: called after each trial of this process.
        on_progress: receives a trial's progress.

    Raises:
        UserError: the section or the day's dataset is missing, the spec refuses a value, or the dataset lacks something
            that a model needs.
    """

    def __init__(
        self,
        spec: Spec,
        spec_of: Callable[[Mapping[str, Any]], Spec],
        ws: Workspace,
        ds: str,
        *,
        on_trial: Callable[[Trial], None] = lambda trial: None,
        on_progress: OnProgress = lambda event: None,
    ) -> None:
        if spec.train.search is None:
            raise UserError(
                f"pipeline '{spec.pipeline}' has no section train.search, so it is not known what to try. Write, for "
                f"example, train: {{search: {{parameters: "
                "{train.dense.learning_rate: {low: 0.0001, high: 0.1, log: true}}}}"
            )
        self.search: Search = spec.train.search
        self._spec, self._spec_of, self._ws, self._ds = spec, spec_of, ws, ds
        self._on_trial, self._on_progress = on_trial, on_progress
        check_values(self.search, spec_of)
        features = Manifest.load(ws.manifest(spec.pipeline, ds, "features"))
        if features is None:
            raise UserError(
                f"a search needs the dataset of {ds}, and stage 'features' of '{spec.pipeline}' has not finished for "
                f"it. Run: headrace run {spec.argument} --ds {ds} --to features"
            )
        if ws.store.scheme != "file":
            raise UserError(
                f"a search keeps its study in SQLite and its trials in folders, and the store is {ws.store}: give one "
                f"on a file system, --set store=FOLDER, with the dataset copied there"
            )
        self._features = features
        self._kinds: dict[str | None, str] = {}
        for name in (None, *self.search.models):
            of_model = spec_of(dict(keys_of(self.search, name)))
            self._kinds[name] = of_model.model.kind
            try:
                check_dataset(self._job(of_model, features, ws.store, "look"))
            except UserError as e:
                raise e if name is None else UserError(f"train.search.models.{name}: {e}") from None
        self.folder = ws.search(spec.pipeline, ds, self._key())

    def run(self) -> SearchResult:
        """Run the missing trials.

        Raises:
            UserError: another search of this pipeline is running.
        """
        with run_lock(self._ws, f"{self._spec.pipeline}-search"):
            self.folder.make_dir()
            (self.folder / "models").remove_quietly()
            search = self.search
            self.dataset = sample_dataset(
                self._features,
                self._ws,
                self.folder / "dataset",
                {"train": search.rows, "valid": search.valid_rows},
                streams=self._spec.train.streams,
                seed=search.seed,
            )
            study = self._study()
            if "as_it_is" not in study.user_attrs:
                first = self._run_trial(self._spec, None, {}, None)
                study.set_user_attr("as_it_is", _packed(first))
                self._on_trial(first)
            while (number := len(study.get_trials(deepcopy=False, states=_OVER))) < search.trials:
                if search.total_seconds is not None and _seconds(study) >= search.total_seconds:
                    log.info("%d trials took the %g seconds that there were", number, search.total_seconds)
                    break
                self._next(study, number)
            return self._result(study)

    def _key(self) -> str:
        spec, search = self._spec, self.search
        schema = self._features.dataset_schema
        assert schema is not None
        warm = find_warm_start(self._ws, spec, self._ds, schema) if spec.train.warm_start else None
        judged, pretrained = self._judged_by(spec), find_pretrained(self._ws, spec, self._ds)
        return fingerprint(
            {
                "version": 2,
                "search": search.model_dump(mode="json", exclude={"trials", "total_seconds"}),
                "model": keys_with(spec.model, OF_CHECKPOINTS),
                "train": keys_with(spec.train, OF_CHECKPOINTS),
                "lists": [spec.train.rank_group, spec.train.rank_k],
                "evaluation": judged.model_dump(mode="json"),
                "pretrained": [i.version for i in pretrained],
                "dataset": self._features.output("dataset").version,
                "warm": warm.version if warm else None,
            }
        )

    def _study(self) -> optuna.Study:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        study = optuna.create_study(
            storage=f"sqlite:///{(self.folder / 'study.db').local_path()}",
            study_name="search",
            load_if_exists=True,
            direction="maximize" if self.search.maximizes else "minimize",
        )
        for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING, TrialState.WAITING)):
            study.tell(trial.number, state=TrialState.FAIL)  # the run was killed; another trial replaces it
        return study

    def _next(self, study: optuna.Study, number: int) -> None:
        search = self.search
        warmup = search.warmup_trials
        study.sampler = optuna.samplers.TPESampler(n_startup_trials=warmup, seed=search.seed * 1_000_003 + number)
        study.pruner = (
            optuna.pruners.MedianPruner(n_startup_trials=warmup) if search.prune else optuna.pruners.NopPruner()
        )
        open_trial = study.ask(distributions(search, self._spec.model.kind))
        draw(open_trial, search, self._kinds.__getitem__)
        values, model = values_of(search, open_trial.params), model_of(open_trial.params)
        try:
            spec = self._spec_of(values)
        except UserError as e:
            finished = Trial(number, "pruned", values, None, {}, 0, 0.0, f"the spec refuses it: {e}", model)
        else:
            finished = replace(self._run_trial(spec, number, values, open_trial), model=model)
        for key, value in _packed(finished).items():
            open_trial.set_user_attr(key, value)
        if finished.state == "pruned":
            study.tell(open_trial, state=TrialState.PRUNED)
        else:
            study.tell(open_trial, finished.value)
        self._on_trial(finished)

    def _run_trial(
        self, spec: Spec, number: int | None, values: Mapping[str, Any], trial: optuna.Trial | None
    ) -> Trial:
        """Run one short training."""
        search = self.search
        meter = _TrialProgress(search, trial, self._on_progress)
        job = self._job(spec, self.dataset, self.folder, f"trial-{'as-it-is' if number is None else number}")
        try:
            report = train_local(job, meter.on_progress)
            meter.metrics, meter.step = report.metrics, report.steps
        except _StopTrial as e:
            meter.reason = e.reason
        except Diverged as e:
            meter.reason = str(e).split(". ")[0]
        finally:
            (self.folder / "models").remove_quietly()
        value = meter.metrics.get(search.metric)
        over = value is not None and not meter.reason
        return Trial(
            number,
            "finished" if over else "pruned",
            values,
            value,
            meter.metrics,
            meter.step,
            round(time.perf_counter() - meter.start, 2),
            meter.reason,
        )

    def _job(self, spec: Spec, features: Manifest, home: Location, key: str) -> Job:
        """Return the job of a trial: `spec` on the sample, in this process, without checkpoints."""
        search, train = self.search, spec.train
        schema = features.dataset_schema
        start = find_warm_start(self._ws, spec, self._ds, schema) if train.warm_start and schema else None
        pretrained = [str(self._ws.locate(i.name)) for i in find_pretrained(self._ws, spec, self._ds)]
        steps = search.epochs * max(1, min(search.rows, features.rows.get("train", search.rows)) // train.batch_size)
        steps = min(steps, search.steps or steps)
        short = train.model_copy(
            update={
                "ranks": 1,
                "epochs": search.epochs,
                "max_steps": search.steps,
                "patience": None,
                "eval_steps": max(1, -(-steps // search.evaluations)),
                "checkpoint_steps": _NEVER,
                "background_checkpoints": False,
                "rank_group": train.rank_group if search.of_lists else None,
                "evaluation": self._judged_by(spec),
                "monitor": search.metric,
            }
        )
        return Job(
            home=home.local_path(),
            pipeline=spec.pipeline,
            ds=self._ds,
            key=key,
            features=features,
            model=spec.model,
            train=short,
            progress_seconds=0.2,
            warm_start=str(self._ws.locate(start.name)) if start else None,
            pretrained=dict(zip(sorted(train.pretrained), pretrained, strict=True)),
            threads=train.threads,
        )

    def _judged_by(self, spec: Spec) -> Evaluation:
        """Return the evaluation settings of a trial: the metrics that its objective needs."""
        metric, settings = self.search.metric, spec.train.evaluation
        if metric in {m for kind in (ClickMetric, UserMetric, RankingMetric) for m in get_args(kind)}:
            return Evaluation(metrics=(metric,), user=settings.user)
        return Evaluation(full_ranking=settings.full_ranking if metric.endswith("_full") else None)

    def _result(self, study: optuna.Study) -> SearchResult:
        trials = [_unpacked(None, {}, study.user_attrs["as_it_is"])]
        for number, t in enumerate(study.get_trials(states=_OVER)):
            trial = _unpacked(number, values_of(self.search, t.params), t.user_attrs)
            trials.append(replace(trial, model=model_of(t.params)))
        finished = [t for t in trials if t.state == "finished" and t.value is not None]
        sign = -1 if self.search.maximizes else 1
        # The first of equals; the pipeline's own settings come first.
        best = min(finished, key=lambda t: sign * (t.value or 0.0), default=None)
        result = SearchResult(self.folder, tuple(trials), None if best is None or best.number is None else best)
        if result.best is None:
            result.overlay.remove()
        else:
            write_overlay(result.overlay, result, self.search, f"{self._spec.pipeline}, {self._ds}")
        return result


def write_overlay(path: Location, result: SearchResult, search: Search, place: str) -> None:
    """Write the best trial's settings as a file for `--overlay`."""
    best, first = result.best, result.trials[0]
    assert best is not None
    head = f"# The best of {len(result.trials) - 1} trials on {place}: {search.objective} {show_value(best.value)}, "
    head += f"as it was {show_value(first.value)}.\n"
    path.put_text(head + overlay_of(best.values))


def show_value(value: float | None) -> str:
    """Return an objective's value as text for people."""
    return "-" if value is None else f"{value:.5f}"


class _StopTrial(Exception):
    """Request to end a trial: its objective is known, or it was pruned (`reason`)."""

    def __init__(self, reason: str = "") -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass
class _TrialProgress:
    """Observer of a trial's progress, which holds its last evaluation and stops it when that suffices."""

    search: Search
    trial: optuna.Trial | None
    forward: OnProgress
    start: float = field(default_factory=lambda: time.perf_counter())
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    step: int = 0
    reason: str = ""
    evaluations: int = 0

    def on_progress(self, event: ProgressEvent) -> None:
        """Handle a progress event.

        Raises:
            _StopTrial: the trial's objective is known, or it is pruned.
        """
        self.forward(event)
        if event.phase == "train":
            self.step = event.step
        if event.phase != "evaluated" or event.metrics is None:
            return
        self.metrics, self.step = event.metrics, event.step
        self.evaluations += 1
        value = event.metrics[self.search.metric]
        last = event.step == event.total
        if self.trial is not None and value is not None and not last:
            self.trial.report(value, self.evaluations)
            if self.trial.should_prune():
                raise _StopTrial(f"below the median at step {event.step} of {event.total}")
        late = self.search.seconds is not None and time.perf_counter() - self.start >= self.search.seconds
        if last or late:
            raise _StopTrial


def _seconds(study: optuna.Study) -> float:
    """Return the seconds of all trials, including the pipeline's own settings."""
    over = [study.user_attrs["as_it_is"], *(t.user_attrs for t in study.get_trials(deepcopy=False, states=_OVER))]
    return sum(float(attributes["seconds"]) for attributes in over)


def _packed(trial: Trial) -> dict[str, Any]:
    return {
        "state": trial.state,
        "worth": trial.value,
        "metrics": dict(trial.metrics),
        "steps": trial.steps,
        "seconds": trial.seconds,
        "reason": trial.reason,
    }


def _unpacked(number: int | None, values: Mapping[str, Any], packed: Mapping[str, Any]) -> Trial:
    return Trial(
        number,
        packed["state"],
        values,
        packed["worth"],
        packed["metrics"],
        packed["steps"],
        packed["seconds"],
        packed["reason"],
    )
