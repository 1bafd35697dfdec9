"""Metrics of the lists of a served day: of all rows, and by model, arm and slice, with intervals over users."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from headrace.features.functions.arrays import one_chunk
from headrace.train.evaluation.bootstrap import F64, NO_REPLICATES, Bootstrap
from headrace.train.evaluation.click import OF_PROBABILITIES, click_metrics
from headrace.train.evaluation.ranks import I64, Ranks
from headrace.train.evaluation.rows import OVERALL, Dimension, ScoredRows
from headrace.train.evaluation.slices import NULL, hash_ids, make_dimension
from headrace.train.evaluation.sums import sum_by_cell

#: Of a metric of a group of rows.
SCHEMA = pa.schema(
    [
        ("served_ds", pa.string()),
        ("label", pa.string()),
        ("dimension", pa.string()),
        ("value", pa.string()),
        ("metric", pa.string()),
        ("estimate", pa.float64()),
        ("low", pa.float64()),
        ("high", pa.float64()),
        ("rows", pa.int64()),
        ("users", pa.int64()),
        ("positives", pa.int64()),
    ]
)
#: What is computed of click_metrics, and what it is called here.
_CLICK = {"base_rate": "rate", "auc": "auc", "log_loss": "log_loss", "calibration": "calibration"}


@dataclass(frozen=True)
class Measure:
    """What is measured: a task of Spark, called with the rows of one served day.

    labels: columns of 0 and 1; the scores are probabilities of the first. lengths: of lists, for `hr_at_K`.
    slices: columns of text, by name. most: values of a slice that are told apart.
    """

    user: str
    labels: tuple[str, ...]
    lengths: tuple[int, ...]
    slices: tuple[str, ...]
    most: int
    bootstrap: Bootstrap = NO_REPLICATES

    def __call__(self, rows: pa.Table) -> pa.Table:
        """Rows of the outcomes table of one served day -> rows of SCHEMA.

        rate: share of the rows with the label; of clicks it is the click-through rate. auc, log_loss, calibration: of
        the score against the label (headrace.train.evaluation.click). hr_at_K: share of the users with the label on
        one of the first K items or more. Groups by dimension: `all`; `model`; `arm:EXPERIMENT`, by the arms in the
        column `arms`; `slice:NAME`.
        """
        ranks = Ranks()
        users = hash_ids(_numpy(rows[self.user]))
        scores = _numpy(rows["score"]).astype(np.float32)
        place = _numpy(rows["rank"]).astype(np.int64)
        dimensions, codes = self._groups(ranks, rows)
        is_probability = bool(np.all((scores >= 0) & (scores <= 1)))
        served_ds = rows["served_ds"][0].as_py() if rows.num_rows else ""
        found: list[dict[str, Any]] = []
        for number, label in enumerate(self.labels):
            positive = _numpy(rows[label]).astype(np.int64) > 0
            clicks = click_metrics(
                ranks,
                ScoredRows(scores, positive, users, tuple(codes)),
                dimensions=dimensions,
                bootstrap=self.bootstrap,
                probability=lambda p: np.asarray(p, np.float64),
            )
            everybody = [np.zeros(len(users), np.int64), *codes]
            for dimension, code, click in zip((OVERALL, *dimensions), everybody, clicks, strict=True):
                values = {_CLICK[name]: v for name, v in click.values.items() if name in _CLICK}
                if number or not is_probability:
                    values = {name: v for name, v in values.items() if name not in OF_PROBABILITIES}
                values |= self._hit_rates(ranks, dimension, code, users, positive, place)
                counts = _counts(dimension, code, users, positive)
                for segment, value in enumerate(dimension.values):
                    about = {"served_ds": served_ds, "label": label, "dimension": dimension.name or "all"}
                    about |= {"value": value, **{name: int(n[segment]) for name, n in counts.items()}}
                    found += [about | self._estimate(name, v[:, segment]) for name, v in values.items()]
        return pa.Table.from_pylist(found, SCHEMA)

    def _estimate(self, metric: str, values: F64) -> dict[str, Any]:
        """A metric of one group: float64 [1 + replicates], the first of the rows as they are."""
        low, high = (self.bootstrap.interval(values) if self.bootstrap.replicates else None) or (None, None)
        estimate = None if np.isnan(values[0]) else float(values[0])
        return {"metric": metric, "estimate": estimate, "low": low, "high": high}

    def _groups(self, ranks: Ranks, rows: pa.Table) -> tuple[list[Dimension], list[I64]]:
        """By what rows are told apart, and each row's position, -1 where it has none."""
        texts: dict[str, npt.NDArray[np.object_]] = {"model": _texts(rows["model_version"])}
        arms = _texts(rows["arms"])
        known, of = np.unique(arms.astype(str), return_inverse=True)
        by_text = [dict(part.partition("=")[::2] for part in text.split(",") if "=" in part) for text in known]
        for experiment in sorted({name for parts in by_text for name in parts}):
            values = np.array([parts.get(experiment, NULL) for parts in by_text], object)
            texts[f"arm:{experiment}"] = values[of]
        texts |= {f"slice:{name}": _texts(rows[f"slice_{name}"]) for name in self.slices}
        dimensions, codes = [], []
        for name, of_rows in texts.items():
            dimension, code = make_dimension(ranks, name, of_rows, self.most)
            if name.startswith("arm:"):
                # Users outside of an experiment are no arm.
                code = np.where(of_rows == NULL, -1, code)
                kept = [i for i, value in enumerate(dimension.values) if value != NULL]
                position = np.full(len(dimension.values) + 1, -1)
                position[kept] = np.arange(len(kept))
                dimension, code = Dimension(name, tuple(dimension.values[i] for i in kept)), position[code]
            dimensions.append(dimension)
            codes.append(code)
        return dimensions, codes

    def _hit_rates(
        self, ranks: Ranks, dimension: Dimension, code: I64, users: I64, positive: npt.NDArray[np.bool_], place: I64
    ) -> dict[str, F64]:
        """`hr_at_K` of each group: float64 [1 + replicates, groups]."""
        groups, found = len(dimension.values), {}
        chosen = code >= 0
        distinct, index = np.unique(users[chosen], return_inverse=True)
        pair, of = np.unique(code[chosen] * max(len(distinct), 1) + index, return_inverse=True)
        cell, user = pair // max(len(distinct), 1), distinct[pair % max(len(distinct), 1)] if len(pair) else users[:0]
        for k in self.lengths:
            hit = np.zeros(len(pair), bool)
            hit[of[(positive & (place <= k))[chosen]]] = True
            integers = {"users": np.ones(len(pair), np.int64), "hits": hit.astype(np.int64)}
            sums = sum_by_cell(ranks, groups, cell, user, integers, {}, self.bootstrap)
            with np.errstate(invalid="ignore", divide="ignore"):
                found[f"hr_at_{k}"] = sums["hits"] / sums["users"]
        return found


def _counts(
    dimension: Dimension, code: I64, users: I64, positive: npt.NDArray[np.bool_]
) -> dict[str, npt.NDArray[np.int64]]:
    """Rows, users and positives of each group."""
    groups, chosen = len(dimension.values), code >= 0
    distinct, index = np.unique(users[chosen], return_inverse=True)
    pairs = np.unique(code[chosen] * max(len(distinct), 1) + index)
    return {
        "rows": np.bincount(code[chosen], minlength=groups),
        "users": np.bincount(pairs // max(len(distinct), 1), minlength=groups),
        "positives": np.bincount(code[chosen & positive], minlength=groups),
    }


def _numpy(column: pa.ChunkedArray) -> npt.NDArray[Any]:
    found: npt.NDArray[Any] = one_chunk(column).to_numpy(zero_copy_only=False)
    return found


def _texts(column: pa.ChunkedArray) -> npt.NDArray[np.object_]:
    """Values as text, `NULL` of those that are null."""
    found: npt.NDArray[np.object_] = _numpy(pc.fill_null(column, NULL))
    return found.astype(object)


def measured(tables: Sequence[pa.Table]) -> pa.Table:
    """The metrics of several days, in an order of their own: by day, label, dimension, value and metric."""
    keys = ("served_ds", "label", "dimension", "value", "metric")
    return pa.concat_tables(tables).sort_by([(key, "ascending") for key in keys])
