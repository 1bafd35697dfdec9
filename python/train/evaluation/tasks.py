"""The evaluation of a split for all tasks of a model (`train.tasks`): each task's own rows, labels and metrics."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from headrace.train.evaluation.evaluate import Evaluation, Evaluator
from headrace.train.evaluation.predictions import Predictions
from headrace.train.evaluation.ranks import Ranks
from headrace.train.evaluation.request import Request


def evaluate_tasks(evaluator: Evaluator, request: Request, ranks: Ranks, predictions: Predictions) -> Evaluation:
    """The first task's evaluation, with the others' in `tasks`, and their metrics as `<metric>.<task>`. Collective.

    A task without rows has metrics without values.

    Raises:
        UserError: a prediction is NaN, or a slice's expression cannot be evaluated.
    """
    found = evaluator.evaluate(ranks, predictions)
    metrics, replicates, tasks = dict(found.metrics), dict(found.replicates), dict[str, dict[str, Any]]()
    for name, task in request.tasks.items():
        rows = predictions.of_task(name)
        if task.is_probability:
            wanted = request.settings.metrics if task.metrics is None else task.metrics
            of_task = evaluator.with_metrics(wanted).evaluate(ranks, rows)
        else:
            of_task = evaluator.evaluate_regression(ranks, rows)
        metrics |= {f"{metric}.{name}": value for metric, value in of_task.metrics.items()}
        replicates |= {f"{metric}.{name}": values for metric, values in of_task.replicates.items()}
        tasks[name] = of_task.record()
    return replace(found, metrics=metrics, replicates=replicates, tasks=tasks)
