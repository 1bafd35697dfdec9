"""The evaluations of a run: those that the loop looks at while it trains, and all that is asked for at the end."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, get_args

import pyarrow as pa
import pyarrow.parquet as pq

from headrace.comm.base import Collective
from headrace.config.evaluation import CatalogueMetric
from headrace.dataset.layout import TEST, SplitLayout, open_split, stored_columns
from headrace.errors import UserError
from headrace.models.sharded_model import ShardedModel
from headrace.storage import Location, StoreAway
from headrace.train.carried_columns import TaskLabels
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
from headrace.train.job import Job

log = logging.getLogger("headrace.train")

_OF_CATALOGUE = get_args(CatalogueMetric)


class Evaluations:
    """Evaluates the model of a run. Every method is collective.

    Args:
        job: what is asked for.
        model: as it is at the time of each call.
        dataset: the folder of the splits.
        collective: the ranks.

    Raises:
        UserError: what is asked for, neither dataset nor model have.
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
        """True if the end needs nothing besides the result of `while_training`."""
        return self._request.is_basic

    def while_training(self) -> Evaluation:
        """Compute the basic metrics of the split `valid`, and `train.monitor`; for predicted numbers their errors."""
        if self._model.predicts == "number":
            return evaluate_errors(self._ranks, self._predict(self._valid))
        monitor = self._train.monitor
        basic = evaluate_basic(self._ranks, self._predict(self._valid))
        if monitor in basic.metrics:
            return basic
        # Of all rows alone, without intervals.
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
        """Return all requested evaluations, by split, and the rows of the splits. `<split>_full`: a full ranking of it.

        Args:
            layout: of the split `train`.
            last: what `while_training` said of the model as it is, where it did.
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

        None, with a warning, where a rank cannot read them: all ranks know before the first predicts.
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
        """Rows and metrics of the split `rank`."""
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
