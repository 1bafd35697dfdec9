"""AUC within each user: whether a user's clicks are above the same user's other rows. Collective."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headrace.train.evaluation.auc import Runs, SortedRows
from headrace.train.evaluation.bootstrap import F64, NO_REPLICATES, Bootstrap
from headrace.train.evaluation.partition import by_id
from headrace.train.evaluation.ranks import I64, Ranks
from headrace.train.evaluation.rows import OVERALL, Dimension, ScoredRows, check_scores, sort_keys, unpacked
from headrace.train.evaluation.sums import sum_by_cell

METRICS = ("gauc", "user_auc")


def user_metrics(
    ranks: Ranks, rows: ScoredRows, *, dimensions: Sequence[Dimension] = (), bootstrap: Bootstrap = NO_REPLICATES
) -> list[dict[str, F64]]:
    """Means of the AUC of users who have rows of both classes: of all rows, then by dimension.

    gauc: weighted by the user's rows (Zhu et al., 2017; Zhou et al., 2018). user_auc: each user counts once.

    Returns:
        For all rows and for each dimension, by metric: float64 [1 + replicates, slices], NaN without such a user.

    Raises:
        UserError: a score is NaN.
    """
    check_scores(ranks, rows.scores)
    assert rows.users is not None
    ids, (keys, *codes) = by_id(ranks, rows.users, [sort_keys(rows), *rows.slices])
    distinct, index = np.unique(ids, return_inverse=True)
    found = []
    for dimension, code in zip((OVERALL, *dimensions), (np.zeros(len(keys), np.int64), *codes), strict=True):
        order = np.lexsort((keys, index, code))
        order = order[np.searchsorted(code[order], 0) :]
        found.append(
            _of_slices(ranks, len(dimension.values), code[order], index[order], distinct, keys[order], bootstrap)
        )
    return found


def _of_slices(
    ranks: Ranks, slices: int, code: I64, index: I64, distinct: I64, keys: I64, bootstrap: Bootstrap
) -> dict[str, F64]:
    """Rows by slice, user (a position in `distinct`) and score."""
    order, labels = unpacked(keys)
    begins = np.ones(len(code), bool)
    begins[1:] = (code[1:] != code[:-1]) | (index[1:] != index[:-1])
    first = np.flatnonzero(begins)
    group = np.cumsum(begins) - 1
    runs = Runs(SortedRows(len(first), group, order, labels))
    positives, negatives = runs.counts(None)
    in_order = runs.per_segment(positives * (2 * runs.before(negatives) + negatives))
    positives, negatives = runs.per_segment(positives), runs.per_segment(negatives)
    both = (positives > 0) & (negatives > 0)
    auc = in_order[both] / (2 * positives[both] * negatives[both])
    rows = (positives + negatives)[both]
    sums = sum_by_cell(
        ranks,
        slices,
        code[first][both],
        distinct[index[first]][both],
        {"users": np.ones(len(rows), np.int64), "rows": rows},
        {"auc": auc, "weighted": auc * rows},
        bootstrap,
    )
    with np.errstate(invalid="ignore", divide="ignore"):
        return {"gauc": sums["weighted"] / sums["rows"], "user_auc": sums["auc"] / sums["users"]}
