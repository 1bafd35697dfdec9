"""Evaluation of a model by the spec: metrics, slices and intervals of each split. Collective."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.config.evaluation import CatalogueMetric, ClickMetric, RankingMetric, UserMetric
from headrace.config.schema import Feature
from headrace.dataset.layout import SplitLayout
from headrace.train.evaluation.auc import user_metrics
from headrace.train.evaluation.bootstrap import Bootstrap
from headrace.train.evaluation.click import (
    BASIC,
    OF_PROBABILITIES,
    Probability,
    click_metrics,
    regression_metrics,
    value_of,
)
from headrace.train.evaluation.policy import Choices, Policy, find_actions, off_policy_metrics
from headrace.train.evaluation.ranking import (
    COVERAGE,
    Occurrences,
    RankedLists,
    catalogue_metrics,
    count_occurrences,
    full_name,
    ranked_lists,
    ranking_metrics,
)
from headrace.train.evaluation.ranks import F32, F64, I64, Dimension, Ranks, ScoredRows, sigmoid
from headrace.train.evaluation.request import SEEN, Request, carried_ids, make_dimension, slice_values


@dataclass(frozen=True)
class Predictions:
    """Predicted rows of this rank: logits and labels float32 [n]; carried columns [n]; codes int64 [n].

    Further tasks (`train.tasks`) have outputs and targets float32 [n], NaN for rows that are not in the task.

    In place of logits there may be any scores that the evaluation's `probability` converts to probabilities.
    `choices`: choices of the model as a policy, for `train.evaluation.off_policy`.
    """

    logits: F32
    labels: F32
    carried: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    codes: Mapping[str, I64] = field(default_factory=dict)
    outputs: Mapping[str, F32] = field(default_factory=dict)
    targets: Mapping[str, F32] = field(default_factory=dict)
    choices: Choices | None = None

    def of_task(self, task: str) -> Predictions:
        """Return a further task's rows, with its outputs in place of the logits and its labels."""
        target = self.targets[task]
        known = ~np.isnan(target)
        return Predictions(
            self.outputs[task][known],
            target[known],
            {name: x[known] for name, x in self.carried.items()},
            {name: x[known] for name, x in self.codes.items()},
        )


#: Metrics of lists of the split `rank` that are always computed.
OF_LISTS = ("hr_at_k", "ndcg_at_k")


@dataclass(frozen=True)
class Evaluation:
    """The metrics of a split by name, None where undefined, and the calibration plot's points.

    Attributes:
        slices: a record for each value: `slice`, `value`, `rows`, `metrics`, `intervals`, and `replicates` on request.
        intervals: [low, high] by metric.
        tasks: record of the evaluation of each further task (`train.tasks`).
        replicates: values in each replicate of the bootstrap, by metric of all rows.
    """

    rows: int
    metrics: dict[str, float | None]
    calibration_bins: list[dict[str, Any]] = field(default_factory=list)
    intervals: dict[str, list[float]] = field(default_factory=dict)
    slices: list[dict[str, Any]] = field(default_factory=list)
    replicates: dict[str, list[float | None]] = field(default_factory=dict)
    tasks: dict[str, dict[str, Any]] = field(default_factory=dict)

    def record(self) -> dict[str, Any]:
        """Return the record for a report: everything but the replicates, with tasks only if there are any."""
        left_out = {"replicates"} if self.tasks else {"replicates", "tasks"}
        return {name: value for name, value in asdict(self).items() if name not in left_out}


def evaluate_basic(ranks: Ranks, predictions: Predictions, probability: Probability | None = sigmoid) -> Evaluation:
    """Return AUC, log loss and calibration, which the training loop monitors. Collective.

    Args:
        probability: function from scores to probabilities; None: scores only order rows, without such metrics.

    Raises:
        UserError: a prediction is NaN.
    """
    rows = ScoredRows.from_scores(predictions.logits, predictions.labels)
    (clicks,) = click_metrics(ranks, rows, probability=probability or sigmoid)
    metrics = {name: value_of(clicks.values[name]) for name in _meaningful(BASIC, probability)}
    return Evaluation(clicks.rows[0], metrics, [asdict(b) for b in clicks.bins[0]] if probability else [])


def evaluate_errors(ranks: Ranks, predictions: Predictions) -> Evaluation:
    """Return the errors of predicted numbers, which the loop monitors. Collective; raises as `evaluate_basic`."""
    (errors,), counts = regression_metrics(ranks, predictions.logits, predictions.labels)
    return Evaluation(counts[0][0], {name: value_of(values) for name, values in errors.items()})


def _meaningful(names: Sequence[str], probability: Probability | None) -> list[str]:
    return [n for n in names if probability is not None or n not in OF_PROBABILITIES]


class Evaluator:
    """Evaluator of splits by the spec.

    Args:
        request: requested metrics and slices.
        probability: see `evaluate_basic`.
        of_slices: whether records of slices include their replicates.
    """

    def __init__(self, request: Request, probability: Probability | None = sigmoid, *, of_slices: bool = False) -> None:
        self._request, self._settings, self._schema = request, request.settings, request.schema
        self._probability, self._of_slices = probability, of_slices
        bootstrap = request.settings.bootstrap
        self._bootstrap = (
            Bootstrap(bootstrap.replicates, bootstrap.seed, bootstrap.confidence) if bootstrap else Bootstrap()
        )
        self._occurrences: dict[str, Occurrences] = {}

    def with_metrics(self, metrics: Sequence[str]) -> Evaluator:
        """Return a copy that measures other metrics than `train.evaluation.metrics`."""
        evaluator = copy(self)
        evaluator._settings = self._settings.model_copy(update={"metrics": tuple(metrics)})
        return evaluator

    def count_training_rows(self, ranks: Ranks, layout: SplitLayout) -> None:
        """Count the codes of the split `train`, if a metric needs them. Collective."""
        item = (
            [self._request.item.name]
            if self._request.item is not None and self._settings.metrics_of(CatalogueMetric)
            else []
        )
        names = {*item, *self._request.seen_features.values()}
        self._occurrences = count_occurrences(ranks, layout, self._schema, sorted(names))

    def policy(self, ranks: Ranks, layout: SplitLayout) -> Policy | None:
        """Return the model as a policy over the actions of the split `train`, or None if the spec has none. Collective.

        Raises:
            UserError: see `find_actions`.
        """
        request = self._request
        if request.policy is None or request.action is None:
            return None
        return Policy(request.policy, find_actions(ranks, layout, request.action, request.action_features))

    def evaluate(self, ranks: Ranks, predictions: Predictions) -> Evaluation:
        """Compute all metrics of rows. Collective.

        Raises:
            UserError: a prediction is NaN, or a slice's expression cannot be evaluated.
        """
        if self._request.is_basic:
            return evaluate_basic(ranks, predictions, self._probability)
        rows, dimensions = self._rows(ranks, predictions, self._request.user)
        settings, draws = self._settings, self._bootstrap
        further = _meaningful(settings.metrics_of(ClickMetric), self._probability)
        click_tables = click_metrics(
            ranks,
            rows,
            dimensions=dimensions,
            metrics=further,
            bootstrap=draws,
            probability=self._probability or sigmoid,
        )
        names = [*_meaningful(BASIC, self._probability), *further]
        tables = [{name: clicks.values[name] for name in names} for clicks in click_tables]
        if of_users_wanted := settings.metrics_of(UserMetric):
            for table, of_users in zip(
                tables, user_metrics(ranks, rows, dimensions=dimensions, bootstrap=draws), strict=True
            ):
                table |= {name: of_users[name] for name in of_users_wanted}
        if predictions.choices is not None:
            for table, values in zip(tables, self._of_policy(ranks, predictions, rows, dimensions), strict=True):
                table |= values
        metrics, intervals, slices = self._split_tables(tables, [clicks.rows for clicks in click_tables], dimensions)
        bins = [asdict(b) for b in click_tables[0].bins[0]] if self._probability else []
        return Evaluation(click_tables[0].rows[0], metrics, bins, intervals, slices, _replicates(tables[0]))

    def _of_policy(
        self, ranks: Ranks, predictions: Predictions, rows: ScoredRows, dimensions: Sequence[Dimension]
    ) -> list[dict[str, F64]]:
        """Return the values of the model as a policy."""
        policy, schema = self._request.policy, self._schema
        assert policy is not None
        assert predictions.choices is not None
        carried = predictions.carried
        reward = predictions.labels if policy.reward is None else carried[schema.carried_name(policy.reward)]
        return off_policy_metrics(
            ranks,
            predictions.choices,
            carried[schema.carried_name(policy.propensity)],
            np.asarray(reward, np.float64),
            (self._probability or sigmoid)(predictions.logits),
            max_weight=policy.max_weight,
            users=rows.users,
            slices=rows.slices,
            dimensions=dimensions,
            bootstrap=self._bootstrap,
        )

    def evaluate_regression(self, ranks: Ranks, predictions: Predictions) -> Evaluation:
        """Return the errors of predicted numbers. Collective; raises as `evaluate`."""
        rows, dimensions = self._rows(ranks, predictions, self._request.user)
        tables, counts = regression_metrics(
            ranks,
            predictions.logits,
            predictions.labels,
            users=rows.users,
            slices=rows.slices,
            dimensions=dimensions,
            bootstrap=self._bootstrap,
        )
        metrics, intervals, slices = self._split_tables(tables, counts, dimensions)
        return Evaluation(counts[0][0], metrics, [], intervals, slices, _replicates(tables[0]))

    def evaluate_full(
        self,
        ranks: Ranks,
        lists: RankedLists,
        dimensions: Sequence[Dimension],
        slices: Sequence[I64],
        rows: int,
        item: Feature,
    ) -> Evaluation:
        """Return the metrics of full rankings, by their names with k (`ndcg_at_20_full`). Collective.

        Args:
            lists: first items of each user; see headrace.train.evaluation.full_ranking.
            slices: for each dimension, the slice of each row of this rank, int64 [rows].
            rows: number of positive rows of this rank.
            item: feature of the ranked items.
        """
        settings, draws = self._settings, self._bootstrap
        assert settings.full_ranking is not None
        of_items = settings.metrics_of(CatalogueMetric)
        tables: list[dict[str, F64]] = [{} for _ in range(1 + len(dimensions))]
        coverage: dict[str, float | None] = {}
        for k in settings.full_ranking.k:
            rankings = ranking_metrics(ranks, lists, k, dimensions=dimensions, bootstrap=draws)
            for table, more_metrics in zip(tables, rankings, strict=True):
                table |= {full_name(name, k): values for name, values in more_metrics.items()}
            if of_items:
                positives = self._occurrences[item.name].positives
                more, covered = catalogue_metrics(
                    ranks, lists, positives, item.first_code, k, dimensions=dimensions, bootstrap=draws
                )
                for table, more_metrics in zip(tables, more, strict=True):
                    table |= {full_name(name, k): more_metrics[name] for name in of_items if name != COVERAGE}
                if COVERAGE in of_items:
                    coverage[full_name(COVERAGE, k)] = covered
        counts = _count_rows(ranks, rows, dimensions, slices)
        metrics, intervals, of_slices = self._split_tables(tables, counts, dimensions)
        return Evaluation(counts[0][0], metrics | coverage, [], intervals, of_slices, _replicates(tables[0]))

    def evaluate_lists(self, ranks: Ranks, predictions: Predictions) -> Evaluation:
        """Return the metrics of the split `rank`, a list for each `rank_group`. Collective; raises as `evaluate`."""
        assert self._request.group is not None
        rows, dimensions = self._rows(ranks, predictions, self._request.group)
        settings, draws = self._settings, self._bootstrap
        item, of_items = self._request.item, settings.metrics_of(CatalogueMetric)
        lists = ranked_lists(ranks, rows, predictions.codes[item.name] if item is not None else None)
        names = [*OF_LISTS, *settings.metrics_of(RankingMetric)]
        tables = [
            {name: rankings[name] for name in names}
            for rankings in ranking_metrics(ranks, lists, self._request.k, dimensions=dimensions, bootstrap=draws)
        ]
        coverage: float | None = None
        if item is not None and of_items:
            positives = self._occurrences[item.name].positives
            rankings, coverage = catalogue_metrics(
                ranks, lists, positives, item.first_code, self._request.k, dimensions=dimensions, bootstrap=draws
            )
            for table, more in zip(tables, rankings, strict=True):
                table |= {name: more[name] for name in of_items if name != COVERAGE}
        counts = _count_rows(ranks, len(rows.scores), dimensions, rows.slices)
        metrics, intervals, slices = self._split_tables(tables, counts, dimensions)
        if COVERAGE in of_items:
            metrics[COVERAGE] = coverage
        return Evaluation(counts[0][0], metrics, [], intervals, slices, _replicates(tables[0]))

    def _rows(self, ranks: Ranks, predictions: Predictions, key: str | None) -> tuple[ScoredRows, list[Dimension]]:
        """Return this rank's rows with their user or list and their slices."""
        users = None if key is None else carried_ids(ranks, predictions.carried[key], key, self._schema)
        dimensions, slices = self.slices(ranks, predictions)
        return ScoredRows(predictions.logits, predictions.labels > 0, users, tuple(slices)), dimensions

    def slices(self, ranks: Ranks, predictions: Predictions) -> tuple[list[Dimension], list[I64]]:
        """Return the dimensions of slices, and by dimension the position of each row's value: int64 [n]. Collective.

        Args:
            predictions: predictions, of which only carried columns and codes are read.
        """
        dimensions: list[Dimension] = []
        slices: list[I64] = []
        for name in self._settings.slices:
            if name in self._request.seen_features:
                occurrences = self._occurrences[self._request.seen_features[name]].rows
                codes = (occurrences[predictions.codes[self._request.seen_features[name]]] == 0).astype(np.int64)
                dimension = Dimension(name, SEEN)
            else:
                values = slice_values(self._request.expressions[name], predictions.carried, self._schema)
                dimension, codes = make_dimension(ranks, name, values, self._settings.max_slices)
            dimensions.append(dimension)
            slices.append(codes)
        return dimensions, slices

    def _split_tables(
        self, tables: Sequence[Mapping[str, F64]], rows: Sequence[Sequence[int]], dimensions: Sequence[Dimension]
    ) -> tuple[dict[str, float | None], dict[str, list[float]], list[dict[str, Any]]]:
        """Return the metrics and intervals of all rows, and of each slice."""

        def metrics(table: Mapping[str, F64], segment: int) -> dict[str, float | None]:
            return {name: value_of(values, segment) for name, values in table.items()}

        def intervals(table: Mapping[str, F64], segment: int) -> dict[str, list[float]]:
            bounds = {name: self._bootstrap.interval(values[:, segment]) for name, values in table.items()}
            return {name: list(ends) for name, ends in bounds.items() if ends is not None}

        slices = [
            {
                "slice": dimension.name,
                "value": value,
                "rows": counts[segment],
                "metrics": metrics(table, segment),
                "intervals": intervals(table, segment),
                **({"replicates": _replicates(table, segment)} if self._of_slices else {}),
            }
            for dimension, table, counts in zip(dimensions, tables[1:], rows[1:], strict=True)
            for segment, value in enumerate(dimension.values)
        ]
        return metrics(tables[0], 0), intervals(tables[0], 0), slices


def _replicates(table: Mapping[str, F64], segment: int = 0) -> dict[str, list[float | None]]:
    """Return, by metric of the rows of a segment, its values in the replicates; empty without any."""
    return {
        name: [None if np.isnan(v) else v for v in values[1:, segment].tolist()]
        for name, values in table.items()
        if len(values) > 1
    }


def _count_rows(ranks: Ranks, rows: int, dimensions: Sequence[Dimension], slices: Sequence[I64]) -> list[list[int]]:
    """Count the rows over all ranks: all of them, and by dimension those of each slice."""
    counts = [[int(ranks.add_up(np.array(rows)))]]
    for dimension, codes in zip(dimensions, slices, strict=True):
        local_counts = np.bincount(codes[codes >= 0], minlength=len(dimension.values))
        counts.append(ranks.add_up(local_counts).tolist())
    return counts


def evaluate_tasks(evaluator: Evaluator, request: Request, ranks: Ranks, predictions: Predictions) -> Evaluation:
    """Evaluate the first task, with the others in `tasks`, and their metrics as `<metric>.<task>`. Collective.

    A task without rows has metrics without values.

    Raises:
        UserError: a prediction is NaN, or a slice's expression cannot be evaluated.
    """
    first = evaluator.evaluate(ranks, predictions)
    metrics, replicates, tasks = dict(first.metrics), dict(first.replicates), dict[str, dict[str, Any]]()
    for name, task in request.tasks.items():
        rows = predictions.of_task(name)
        if task.is_probability:
            metric_names = request.settings.metrics if task.metrics is None else task.metrics
            of_task = evaluator.with_metrics(metric_names).evaluate(ranks, rows)
        else:
            of_task = evaluator.evaluate_regression(ranks, rows)
        metrics |= {f"{metric}.{name}": value for metric, value in of_task.metrics.items()}
        replicates |= {f"{metric}.{name}": values for metric, values in of_task.replicates.items()}
        tasks[name] = of_task.record()
    return replace(first, metrics=metrics, replicates=replicates, tasks=tasks)
