"""Ground truth of a generated day: its counts, and the AUC that the best model could reach.

AUC is the chance that a clicked row has a higher score than one not clicked (ties count half: Hanley and McNeil, 1982),
so it depends on the ranks of the scores alone. No function of what a row shows ranks better, in expectation, than
P(click | row) itself (the Neyman-Pearson lemma): its AUC is the ceiling. On one day's rows a model can come out above
it by the labels' noise alone (an AUC's standard error is below 0.5 / sqrt(rows of the rarer class)).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, SerializerFunctionWrapHandler, ValidationError, model_serializer

from headrace.compute.counter_random import Floats, Ints
from headrace.lake.generate.click_model import NULLABLE, Events, Purchases, probability
from headrace.lake.generate.event_lines import MALFORMED
from headrace.storage import Location

#: Logits outside are counted in the outermost bins.
LOGIT_LIMIT = 16.0
BINS = 1 << 16

#: Up to this many rows a day the ceiling is computed from all scores; above from histograms (2^16 bins of the logit).
EXACT_ROWS = 2_000_000


@dataclass(frozen=True)
class Histogram:
    """Weights of the two classes by bin of the score's logit; two of them add up. Bins are 2^-11 of a logit wide."""

    negative: Floats  # [BINS]
    positive: Floats  # [BINS]

    def __add__(self, other: Histogram) -> Histogram:
        return Histogram(self.negative + other.negative, self.positive + other.positive)


def histogram(logit: Floats, positive: Floats) -> Histogram:
    """Count rows by logit.

    Args:
        logit: float64 [n].
        positive: float64 [n], each row's weight as a positive; 1 - positive is its weight as a negative.
    """
    place = ((logit + LOGIT_LIMIT) * (BINS / (2.0 * LOGIT_LIMIT))).astype(np.int64).clip(0, BINS - 1)
    ones: Floats = np.bincount(place, weights=positive, minlength=BINS).astype(np.float64)
    return Histogram(np.bincount(place, minlength=BINS).astype(np.float64) - ones, ones)


def auc_of_histogram(counts: Histogram) -> float | None:
    """Return the AUC with rows of one bin taken as ties; None where a class has no weight.

    It differs from the exact AUC by at most half of the pairs within a bin.
    """
    return _auc(counts.negative, counts.positive)


def auc(score: Floats, positive: Floats | NDArray[np.bool_]) -> float | None:
    """Return the exact AUC of n scores, ties counted half; None where a class has no weight.

    Args:
        score: float64 [n]; any increasing function of it gives the same AUC.
        positive: [n], 0/1 labels, or each row's probability of being a positive: then the result is the ratio of the
            expected number of well-ordered pairs to that of all pairs.
    """
    _, place = np.unique(score, return_inverse=True)
    ones: Floats = np.bincount(place, weights=positive.astype(np.float64)).astype(np.float64)
    return _auc(np.bincount(place).astype(np.float64) - ones, ones)


def _auc(negative: Floats, positive: Floats) -> float | None:
    """Return the AUC from the classes' weights at each distinct score, in increasing order of the score."""
    pairs = float(negative.sum()) * float(positive.sum())
    if pairs <= 0.0:
        return None
    below = np.cumsum(negative) - negative
    return float(np.dot(positive, below + 0.5 * negative)) / pairs


class GeneratedFile(BaseModel):
    """One file of a day. `crc32` and `size` of the text are what gzip's trailer holds."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    #: Lines, a CSV header not counted.
    lines: int
    bytes: int
    crc32: int


class PurchaseTruth(BaseModel):
    """AUC that the purchases of the valid rows allow (headrace.lake.generate.click_model)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    #: Share of the clicks that a purchase follows.
    rate: float | None
    #: AUC of the true P(purchase | click) against the purchases, over the clicks.
    auc_of_clicks: float | None
    #: AUC of the true P(click and purchase) against the purchases, over all rows.
    auc_of_rows: float | None


class DayTruth(BaseModel):
    """`truth/<ds>.json`. Rates are shares; None where a class (clicked, not clicked) has no row."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    ds: str
    #: Good rows that land on this day, each counted once. Ingest loads so many, if it has loaded the day before, which
    #: has the first copies of some duplicates.
    rows: int
    #: Rows, duplicates and malformed lines: the lines that ingest reads.
    lines: int
    #: Good rows that happened on this day. A time split with one day of validation evaluates on them, and the four
    #: numbers below are about them.
    valid_rows: int
    #: AUC of the true P(click | row) against the labels; only the labels' noise can make a model's AUC higher.
    auc_ceiling: float | None
    #: exact, or histogram (scores within 2^-11 of a logit count as ties).
    auc_method: Literal["exact", "histogram"]
    #: Expected AUC over all labels that these probabilities could have given: the ceiling without the labels' noise.
    auc_expected: float | None
    #: Mean log loss (natural logarithm) of the true probabilities.
    log_loss_floor: float | None
    #: Share of clicks.
    base_rate: float | None
    #: For a log with purchases and at most `EXACT_ROWS` rows a day.
    purchases: PurchaseTruth | None = None
    #: Users and items alive on this day, and those of them born on it.
    users: int
    items: int
    new_users: int
    new_items: int
    #: Injected faults: {"duplicates": {"same_day", "day_before"}, "late": {days: rows}, "nulls": {column: rows},
    #: "malformed": {kind: lines}}.
    faults: dict[str, dict[str, int]]
    files: tuple[GeneratedFile, ...]
    seed: int
    #: All parameters, `late_days` of the table among them, and their fingerprint with the generator's version.
    parameters: dict[str, Any]
    key: str

    @model_serializer(mode="wrap")
    def _omit_missing_purchases(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave `purchases` out of the file of a log without purchases."""
        dumped: dict[str, Any] = serialize(self)
        if self.purchases is None:
            dumped.pop("purchases")
        return dumped

    @staticmethod
    def load(file: Location) -> DayTruth | None:
        """Read the truth in `file`; return None where there is none or another version wrote it."""
        try:
            return DayTruth.model_validate_json(file.read_text())
        except (FileNotFoundError, ValidationError, UnicodeDecodeError):
            return None


@dataclass(frozen=True)
class Tally:
    """Counts of one or several files of a day. The sum of two is that of all their files."""

    rows: int
    valid_rows: int
    clicks: int
    log_loss: float
    late: Ints  # [late_days + 1], rows by lag
    nulls: Ints  # [len(NULLABLE)]
    duplicates: Ints  # [2]: of the same day, of the day before
    malformed: Ints  # [len(MALFORMED)]
    #: Logits and labels of the valid rows, if the day has at most `EXACT_ROWS` rows; else empty.
    scores: tuple[tuple[Floats, Floats], ...]
    #: Histograms by label and by expected label, for larger days.
    counts: tuple[Histogram, Histogram] | None
    #: Logits of a purchase after a click, and purchases, of the valid rows; empty without purchases or `scores`.
    purchases: tuple[tuple[Floats, Floats], ...] = ()
    files: tuple[GeneratedFile, ...] = field(default=())

    def __add__(self, other: Tally) -> Tally:
        counts = None
        if self.counts and other.counts:
            counts = (self.counts[0] + other.counts[0], self.counts[1] + other.counts[1])
        return Tally(
            rows=self.rows + other.rows,
            valid_rows=self.valid_rows + other.valid_rows,
            clicks=self.clicks + other.clicks,
            log_loss=self.log_loss + other.log_loss,
            late=self.late + other.late,
            nulls=self.nulls + other.nulls,
            duplicates=self.duplicates + other.duplicates,
            malformed=self.malformed + other.malformed,
            scores=self.scores + other.scores,
            counts=counts,
            purchases=self.purchases + other.purchases,
            files=self.files + other.files,
        )


def tally(
    good: Events,
    bought: Purchases | None,
    late_days: int,
    same_day: int,
    day_before: int,
    malformed_kinds: Ints,
    exact: bool,
    file: GeneratedFile,
) -> Tally:
    """Count one file's events."""
    valid = good.lag == 0
    logit, clicked = good.logit[valid], good.clicked[valid].astype(np.float64)
    # log(1 + exp(-z)) for a click, log(1 + exp(z)) for none, without overflow.
    loss = np.logaddexp(0.0, np.where(clicked > 0, -logit, logit)).sum()
    return Tally(
        rows=len(good),
        valid_rows=int(valid.sum()),
        clicks=int(clicked.sum()),
        log_loss=float(loss),
        late=np.bincount(good.lag, minlength=late_days + 1),
        nulls=good.null.sum(axis=0, dtype=np.int64),
        duplicates=np.array([same_day, day_before]),
        malformed=np.bincount(malformed_kinds, minlength=len(MALFORMED)),
        scores=((logit, clicked),) if exact else (),
        counts=None if exact else (histogram(logit, clicked), histogram(logit, probability(logit))),
        purchases=((bought.logit[valid], bought.purchased[valid].astype(np.float64)),) if bought and exact else (),
        files=(file,),
    )


def summarise(
    ds: str, total: Tally, population: Mapping[str, int], seed: int, parameters: Mapping[str, Any], key: str
) -> DayTruth:
    """Build a day's truth from the sum of its files' tallies (in any order)."""
    if total.counts is None:
        logit = np.concatenate([s for s, _ in total.scores])
        ceiling, expected = auc(logit, np.concatenate([c for _, c in total.scores])), auc(logit, probability(logit))
    else:
        ceiling, expected = auc_of_histogram(total.counts[0]), auc_of_histogram(total.counts[1])
    files = tuple(sorted(total.files, key=lambda f: int(f.name.removeprefix("part-").partition(".")[0])))
    return DayTruth(
        ds=ds,
        rows=total.rows,
        lines=sum(f.lines for f in files),
        valid_rows=total.valid_rows,
        auc_ceiling=_rounded(ceiling),
        auc_method="exact" if total.counts is None else "histogram",
        auc_expected=_rounded(expected),
        log_loss_floor=_rounded(total.log_loss / total.valid_rows) if total.valid_rows else None,
        base_rate=_rounded(total.clicks / total.valid_rows) if total.valid_rows else None,
        purchases=_purchase_truth(total),
        **population,
        faults={
            "duplicates": _named(("same_day", "day_before"), total.duplicates),
            "late": {str(lag): int(n) for lag, n in enumerate(total.late) if lag > 0},
            "nulls": _named(NULLABLE, total.nulls),
            "malformed": _named(MALFORMED, total.malformed),
        },
        files=files,
        seed=seed,
        parameters=dict(parameters),
        key=key,
    )


def _purchase_truth(total: Tally) -> PurchaseTruth | None:
    if not total.purchases:
        return None
    logit, purchased = (np.concatenate(parts) for parts in zip(*total.purchases, strict=True))
    click, clicked = (np.concatenate(parts) for parts in zip(*total.scores, strict=True))
    is_click = clicked > 0
    return PurchaseTruth(
        rate=_rounded(float(purchased.sum() / is_click.sum())) if is_click.any() else None,
        auc_of_clicks=_rounded(auc(logit[is_click], purchased[is_click])),
        auc_of_rows=_rounded(auc(probability(click) * probability(logit), purchased)),
    )


def _named(names: tuple[str, ...], counts: Ints) -> dict[str, int]:
    return {name: int(n) for name, n in zip(names, counts, strict=True)}


def _rounded(value: float | None) -> float | None:
    """Round to 9 decimals, so that sums in another order (files of other processes) give the same text."""
    return None if value is None else round(value, 9)
