"""What is known about a day that was generated: the truth file beside the landing files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, SerializerFunctionWrapHandler, ValidationError, model_serializer

from headrace.counter_random import Floats, Ints
from headrace.generate.auc import Histogram, auc, auc_of_histogram, histogram
from headrace.generate.click_model import NULLABLE, Events, probability
from headrace.generate.faults import MALFORMED
from headrace.generate.purchase_model import Purchases
from headrace.storage import Location

#: Up to this many rows a day the ceiling is computed from all scores; above from histograms (2^16 bins of the logit).
EXACT_ROWS = 2_000_000


class GeneratedFile(BaseModel):
    """One file of a day. `crc32` and `size` of the text are what gzip's trailer holds."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    #: Lines, a CSV header not counted.
    lines: int
    bytes: int
    crc32: int


class PurchaseTruth(BaseModel):
    """What the purchases of the valid rows allow (headrace.generate.purchase_model)."""

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
    #: Good rows that land on this day, each counted once: what ingest keeps (if it has loaded the day before, where a
    #: part of the duplicates has its first copies).
    rows: int
    #: Rows and, besides, duplicates and malformed lines: what ingest reads.
    lines: int
    #: Of the good rows, those that happened on this day: what a time split with one day of validation evaluates on,
    #: and what the four numbers below are about.
    valid_rows: int
    #: AUC of the true P(click | row) against the labels: no model is better but by the labels' noise.
    auc_ceiling: float | None
    #: exact, or histogram (scores within 2^-11 of a logit count as ties).
    auc_method: Literal["exact", "histogram"]
    #: The same over all labels that these probabilities could have given: the ceiling without the labels' noise.
    auc_expected: float | None
    #: Mean log loss (natural logarithm) of the true probabilities.
    log_loss_floor: float | None
    #: Share of clicks.
    base_rate: float | None
    #: Of a log with purchases of at most `EXACT_ROWS` a day.
    purchases: PurchaseTruth | None = None
    #: Users and items alive on this day, and those of them born on it.
    users: int
    items: int
    new_users: int
    new_items: int
    #: What was injected: {"duplicates": {"same_day", "day_before"}, "late": {days: rows}, "nulls": {column: rows},
    #: "malformed": {kind: lines}}.
    faults: dict[str, dict[str, int]]
    files: tuple[GeneratedFile, ...]
    seed: int
    #: All parameters, `late_days` of the table among them, and their fingerprint with the generator's version.
    parameters: dict[str, Any]
    key: str

    @model_serializer(mode="wrap")
    def _without_no_purchases(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Truths of logs without purchases are written as before there were any."""
        dumped: dict[str, Any] = serialize(self)
        if self.purchases is None:
            dumped.pop("purchases")
        return dumped

    @staticmethod
    def load(file: Location) -> DayTruth | None:
        """The truth in `file`; None where there is none or it is of another version's form."""
        try:
            return DayTruth.model_validate_json(file.read_text())
        except (FileNotFoundError, ValidationError, UnicodeDecodeError):
            return None


@dataclass(frozen=True)
class Tally:
    """What one file, or several, add to a day's truth. Two of them merge."""

    rows: int
    valid_rows: int
    clicks: int
    log_loss: float
    late: Ints  # [late_days + 1], rows by lag
    nulls: Ints  # [len(NULLABLE)]
    duplicates: Ints  # [2]: of the same day, of the day before
    malformed: Ints  # [len(MALFORMED)]
    #: The valid rows' logits and labels, where the day is small enough ...
    scores: tuple[tuple[Floats, Floats], ...]
    #: ... else counts by label and by expected label.
    counts: tuple[Histogram, Histogram] | None
    #: The valid rows' logits of a purchase after a click, and purchases, where there are any and scores.
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
    ds: str, found: Tally, population: Mapping[str, int], seed: int, parameters: Mapping[str, Any], key: str
) -> DayTruth:
    """A day's truth from the sum of its files' tallies (in any order)."""
    if found.counts is None:
        logit = np.concatenate([s for s, _ in found.scores])
        ceiling, expected = auc(logit, np.concatenate([c for _, c in found.scores])), auc(logit, probability(logit))
    else:
        ceiling, expected = auc_of_histogram(found.counts[0]), auc_of_histogram(found.counts[1])
    files = tuple(sorted(found.files, key=lambda f: int(f.name.removeprefix("part-").partition(".")[0])))
    return DayTruth(
        ds=ds,
        rows=found.rows,
        lines=sum(f.lines for f in files),
        valid_rows=found.valid_rows,
        auc_ceiling=_rounded(ceiling),
        auc_method="exact" if found.counts is None else "histogram",
        auc_expected=_rounded(expected),
        log_loss_floor=_rounded(found.log_loss / found.valid_rows) if found.valid_rows else None,
        base_rate=_rounded(found.clicks / found.valid_rows) if found.valid_rows else None,
        purchases=_of_purchases(found),
        **population,
        faults={
            "duplicates": _named(("same_day", "day_before"), found.duplicates),
            "late": {str(lag): int(n) for lag, n in enumerate(found.late) if lag > 0},
            "nulls": _named(NULLABLE, found.nulls),
            "malformed": _named(MALFORMED, found.malformed),
        },
        files=files,
        seed=seed,
        parameters=dict(parameters),
        key=key,
    )


def _of_purchases(found: Tally) -> PurchaseTruth | None:
    if not found.purchases:
        return None
    logit, purchased = (np.concatenate(parts) for parts in zip(*found.purchases, strict=True))
    click, clicked = (np.concatenate(parts) for parts in zip(*found.scores, strict=True))
    of_clicks = clicked > 0
    return PurchaseTruth(
        rate=_rounded(float(purchased.sum() / of_clicks.sum())) if of_clicks.any() else None,
        auc_of_clicks=_rounded(auc(logit[of_clicks], purchased[of_clicks])),
        auc_of_rows=_rounded(auc(probability(click) * probability(logit), purchased)),
    )


def _named(names: tuple[str, ...], counts: Ints) -> dict[str, int]:
    return {name: int(n) for name, n in zip(names, counts, strict=True)}


def _rounded(value: float | None) -> float | None:
    """To 9 decimals: sums in another order (files made by other processes) then give the same text."""
    return None if value is None else round(value, 9)
