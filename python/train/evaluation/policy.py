"""The model as a policy: its choice in place of each logged row's action, and the expected reward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq

from headrace.config.evaluation import OffPolicy
from headrace.config.schema import Feature
from headrace.dataset.layout import SplitLayout
from headrace.errors import UserError
from headrace.train.evaluation.bootstrap import NO_REPLICATES, Bootstrap, sums_by_slice
from headrace.train.evaluation.ranks import F64, I64, Dimension, Ranks, check_scores, sigmoid

#: Function that returns the logits float [n] of some rows with other values of features, by name.
ScoreAction = Callable[[Mapping[str, Any]], npt.NDArray[Any]]
_NONE = np.iinfo(np.int64).max


@dataclass(frozen=True)
class Actions:
    """Actions to choose from: codes int64 [A] of a feature, ascending; its other features' values, [A] each."""

    feature: str
    codes: I64
    features: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)

    def values(self, code: int) -> dict[str, Any]:
        """Return the values of features for a row with this action, including the action's code."""
        place = int(np.searchsorted(self.codes, code))
        return {self.feature: code} | {name: values[place].item() for name, values in self.features.items()}


@dataclass(frozen=True)
class Choices:
    """Choices of a policy for each row.

    Attributes:
        chosen: probability of the logged action under the policy, float64 [n]; 0 for an action that it does not know.
        expected: reward of the policy that the model expects, float64 [n].
    """

    chosen: F64
    expected: F64

    @staticmethod
    def concat(parts: Sequence[Choices]) -> Choices:
        """Concatenate the rows of several."""
        if not parts:
            return Choices(np.empty(0), np.empty(0))
        return Choices(np.concatenate([p.chosen for p in parts]), np.concatenate([p.expected for p in parts]))


@dataclass(frozen=True)
class Policy:
    """Rule by which actions are chosen, and the actions."""

    settings: OffPolicy
    actions: Actions

    def choose(self, logged: I64, score: ScoreAction) -> Choices:
        """Return the policy's choices for some rows.

        It scores all A actions one after the other, so A scores of each row are in memory.

        Args:
            logged: codes of the rows' logged actions, int64 [n].
            score: the model, called once for each action, in order. Collective if the model is.
        """
        actions = self.actions
        logits = np.stack([np.asarray(score(actions.values(code)), np.float64) for code in actions.codes.tolist()], 1)
        if self.settings.policy == "greedy":
            share = np.zeros_like(logits)
            share[np.arange(len(logits)), logits.argmax(1)] = 1.0  # the first of equal ones
        else:
            scaled = logits / self.settings.temperature
            share = np.exp(scaled - scaled.max(axis=1, keepdims=True))
            share /= share.sum(axis=1, keepdims=True)
        place = np.searchsorted(actions.codes, logged).clip(max=len(actions.codes) - 1)
        known = actions.codes[place] == logged
        chosen = np.where(known, share[np.arange(len(logged)), place], 0.0)
        return Choices(chosen, (share * sigmoid(logits)).sum(1))


def find_actions(ranks: Ranks, train: SplitLayout, action: Feature, features: Sequence[Feature]) -> Actions:
    """Find the known actions of the split `train`, each rank in its share of the row groups. Collective.

    Raises:
        UserError: a feature differs among the rows of an action; all ranks raise it.
    """
    size = action.cardinality or 0
    # For each code the position of its first row, and the bits of its features there.
    local_first = np.full((size, 1 + len(features)), _NONE, np.int64)
    differ = np.zeros(len(features), np.int64)
    known = np.arange(size) >= action.first_code
    world = ranks.world
    for group in train.row_groups[world.rank :: world.size]:
        with pq.ParquetFile(group.path.local_path()) as file:
            table = file.read_row_group(group.index, columns=[action.name, *(f.name for f in features)])
        codes = table[action.name].to_numpy().astype(np.int64)
        present, first = np.unique(codes, return_index=True)
        bits = np.stack([_bits(table[f.name].to_numpy()) for f in features], axis=1) if features else None
        new = local_first[present, 0] == _NONE
        local_first[present[new], 0] = group.piece * 2**32 + first[new]
        if bits is not None:
            local_first[present[new], 1:] = bits[first[new]]
            differ += ((bits != local_first[codes, 1:]) & known[codes, None]).sum(0)
    gathered = ranks.gather(local_first)
    winner = gathered[:, :, 0].argmin(0)
    best = gathered[winner, np.arange(size)] if size else local_first
    is_present = (gathered[:, :, 0] != _NONE) & known
    differ = ranks.add_up(differ) + ((gathered[:, :, 1:] != best[:, 1:]) & is_present[:, :, None]).sum((0, 1))
    if bad := [f.name for f, n in zip(features, differ.tolist(), strict=True) if n]:
        raise UserError(
            f"train.evaluation.off_policy.action_features: '{bad[0]}' differs among rows with the same "
            f"'{action.name}', so it does not follow from the action; leave it out"
        )
    codes = np.flatnonzero((best[:, 0] != _NONE) & known)
    if not len(codes):
        raise UserError(f"train.evaluation.off_policy: no row of the split 'train' has a known '{action.name}'")
    values = {f.name: _values(best[codes, 1 + i], f.dtype) for i, f in enumerate(features)}
    return Actions(action.name, codes, values)


def _bits(values: npt.NDArray[Any]) -> I64:
    """Return integers that are equal where the numbers are; NaN equals NaN."""
    if values.dtype.kind != "f":
        return values.astype(np.int64)
    return values.astype(np.float32).view(np.int32).astype(np.int64)


def _values(bits: I64, dtype: str) -> npt.NDArray[Any]:
    return bits.astype(np.int32).view(np.float32) if dtype.startswith("float") else bits


POLICY_METRICS = ("logged_value", "ips", "snips", "dm", "dr", "effective_sample_size")


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
    """Return the values of a policy: mean rewards of a row, over all rows, then over the slices of each dimension.

    Let w = policy's probability of the logged action / its propensity, r the reward, q the model's expected reward:

    logged_value: mean r, what the logging policy earned. ips: mean w r (inverse propensity scores; Horvitz and
    Thompson, 1952). snips: sum of w r over sum of w (self-normalised; Swaminathan and Joachims, 2015). dm: mean over
    rows of the policy's mean q (direct method). dr: dm plus mean w (r - q of the logged action) (doubly robust: Dudik
    et al., 2011). effective_sample_size: (sum of w)^2 / sum of w^2, the rows that the weights leave. Their names are
    those of Open Bandit Pipeline (Saito et al., 2021).

    Args:
        propensity: propensities of the logged actions of this rank's rows, in (0, 1]; [n].
        reward: float64 [n].
        predicted: q of the logged actions, float64 [n].
        max_weight: largest weight; larger ones are clipped to it.
        users, slices: as in `regression_metrics`.

    Returns:
        for all rows and for each dimension, by metric: float64 [1 + replicates, slices].

    Raises:
        UserError: a propensity or a reward is null, a propensity is not in (0, 1], or an expected reward is not finite;
            all ranks raise it.
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
    metrics = []
    for sums in sums_by_slice(ranks, columns, users, slices, dimensions, bootstrap):
        with np.errstate(invalid="ignore", divide="ignore"):
            n = sums["rows"]
            metrics.append(
                {
                    "logged_value": sums["reward"] / n,
                    "ips": sums["weighted"] / n,
                    "snips": sums["weighted"] / sums["weight"],
                    "dm": sums["expected"] / n,
                    "dr": (sums["expected"] + sums["correction"]) / n,
                    "effective_sample_size": sums["weight"] ** 2 / sums["squares"],
                }
            )
    return metrics
