"""What a policy would earn, from events that another policy chose: exact sums over all ranks. Collective."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from headrace.errors import UserError
from headrace.train.evaluation.bootstrap import F64, NO_REPLICATES, Bootstrap
from headrace.train.evaluation.policy import Choices
from headrace.train.evaluation.ranks import I64, Ranks
from headrace.train.evaluation.rows import Dimension, check_scores
from headrace.train.evaluation.sums import sums_by_slice

METRICS = ("logged_value", "ips", "snips", "dm", "dr", "effective_sample_size")


def off_policy_metrics(
    ranks: Ranks,
    choices: Choices,
    propensity: npt.NDArray[np.generic],
    reward: F64,
    predicted: F64,
    *,
    max_weight: float | None = None,
    users: I64 | None = None,
    slices: Sequence[I64] = (),
    dimensions: Sequence[Dimension] = (),
    bootstrap: Bootstrap = NO_REPLICATES,
) -> list[dict[str, F64]]:
    """Values of a policy: mean rewards of a row, of all rows, then of the slices of each dimension.

    With the weight w = policy's probability of the logged action / its propensity, rewards r, and q what the model
    expects of an action:

    logged_value: mean r, what the logging policy earned. ips: mean w r (inverse propensity scores; Horvitz and
    Thompson, 1952). snips: sum of w r over sum of w (self-normalised; Swaminathan and Joachims, 2015). dm: mean over
    rows of the policy's mean q (direct method). dr: dm plus mean w (r - q of the logged action) (doubly robust: Dudik
    et al., 2011). effective_sample_size: (sum of w)^2 / sum of w^2, the rows that the weights leave. Their names are
    those of Open Bandit Pipeline (Saito et al., 2021).

    Args:
        propensity: of the logged actions, in (0, 1]; [n], of this rank's rows.
        reward: float64 [n].
        predicted: q of the logged actions, float64 [n].
        max_weight: where weights are cut off.
        users, slices: as in `regression_metrics`.

    Returns:
        For all rows and for each dimension, by metric: float64 [1 + replicates, slices].

    Raises:
        UserError: a propensity or a reward is null, a propensity is not in (0, 1], or what the model expects is not
            finite; all ranks raise it.
    """
    p = np.asarray(propensity, np.float64)
    bad = ranks.add_up(np.array([(~((p > 0) & (p <= 1))).sum(), (~np.isfinite(reward)).sum(), len(p)])).tolist()
    if bad[0]:
        raise UserError(
            f"train.evaluation.off_policy.propensity: in {bad[0]:,} of {bad[2]:,} rows it is null, or not above 0 and "
            f"at most 1; let ingest quarantine such rows (`required`, expectations.ranges), or mend the log"
        )
    if bad[1]:
        raise UserError(
            f"train.evaluation.off_policy.reward: it is null or not finite in {bad[1]:,} of {bad[2]:,} rows"
        )
    check_scores(ranks, choices.expected, finite=True)
    weight = choices.chosen / p
    if max_weight is not None:
        weight = np.minimum(weight, max_weight)
    columns = {
        "reward": reward,
        "weighted": weight * reward,
        "weight": weight,
        "squares": weight * weight,
        "expected": choices.expected,
        "correction": weight * (reward - predicted),
    }
    found = []
    for sums in sums_by_slice(ranks, columns, users, slices, dimensions, bootstrap):
        with np.errstate(invalid="ignore", divide="ignore"):
            n = sums["rows"]
            found.append(
                {
                    "logged_value": sums["reward"] / n,
                    "ips": sums["weighted"] / n,
                    "snips": sums["weighted"] / sums["weight"],
                    "dm": sums["expected"] / n,
                    "dr": (sums["expected"] + sums["correction"]) / n,
                    "effective_sample_size": sums["weight"] ** 2 / sums["squares"],
                }
            )
    return found
