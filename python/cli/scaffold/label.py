"""Choice of the label's column, and of columns that would give it away."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.cli.scaffold.columns import ColumnProfile
from headrace.cli.scaffold.names import LABELS, POSITIVE, amount_of, label_rank, words
from headrace.config.schema import quoted_names as quote_names
from headrace.errors import UserError, nearest

#: Rows that a verdict about a leak takes.
_ROWS, _POSITIVES = 100, 10
#: Values of a label that mean 0; rows from which on a label with one value is refused.
_NEGATIVE, _ROWS_OF_ONE_CLASS = frozenset({"0", "0.0", "-1", "no", "n", "false", "f", "nein"}), 20
#: Columns that cannot be read and that a refusal names.
_FAULTS_SHOWN = 3
#: What a column that gives the label away does at least: rows whose value says it, or the area under the curve.
_SURE = 0.999


@dataclass(frozen=True)
class Label:
    """The label, and how its column becomes 0 and 1."""

    column: ColumnProfile
    #: Expression of Spark's SQL that is true for a positive row; None where the column is 0/1 or a boolean.
    expression: str | None
    #: Of each row of the sample 1, 0, or NaN for null.
    values: NDArray[np.float64]
    reason: str
    #: Other columns that could be it.
    alternatives: tuple[str, ...] = ()

    @property
    def is_verdict(self) -> bool:
        """Return whether rows of label 0 are of items that the user has had, too: rated low, or bought in small number.

        A click log's rows of label 0 are not.
        """
        several = self.column.is_number and self.column.distinct > 2
        return self.expression is not None and (several or amount_of(self.column.name) is not None)

    @property
    def rate(self) -> float:
        """Share of positive rows."""
        return float(np.nanmean(self.values))


class UndecidedError(UserError):
    """No column is likely to be the label, and rows are no users' items either: the user must say what to do."""


def find_label(
    columns: Sequence[ColumnProfile], name: str | None, positive: str | None, ratings: bool = True
) -> Label | None:
    """Find the label's column by name and values; None where none is likely.

    Args:
        columns: of the sample.
        name: what the user says it is.
        positive: the value that means 1, as the user says.
        ratings: whether a column of ratings may be it: high ones mean 1.

    Raises:
        UserError: the named one is not there or has not two values, or the one of a label's name has one value alone.
    """
    usable = [c for c in columns if not c.fault]
    binary = [c for c in usable if not c.is_list and not c.is_time and c.distinct == 2]
    if name is not None:
        names = [c.name for c in usable]
        if name not in names and (unread := [c for c in columns if c.name == name]):
            raise UserError(f"--label {name}: such a column cannot be declared ({unread[0].fault})")
        if name not in names:
            raise UserError(f"--label {name}: no such column{nearest(name, names)}; there are: {', '.join(names)}")
        column = usable[names.index(name)]
        return _label(column, positive, "you said so", ())
    if positive is not None:
        raise UserError("--positive is a value of the label: say which column that is (--label COLUMN)")
    ranked = sorted((rank, i) for i, c in enumerate(binary) if (rank := _rank(c, columns)) is not None)
    if ranked:
        first = binary[ranked[0][1]]
        alternatives = tuple(binary[i].name for rank, i in ranked[1:] if rank[0] == 0)
        basis = "its name" if ranked[0][0][0] == 0 else "its place, the first or the last,"
        return _label(first, None, f"by {basis} and its two values", alternatives)
    for c in usable:
        if ratings and c.is_number and amount_of(c.name) == "rating" and 2 < c.distinct <= 20:
            return _label(c, None, "by its name; high values mean 1", tuple(b.name for b in binary))
    for c in usable:
        if c.distinct == 1 and c.rows >= _ROWS_OF_ONE_CLASS and not (c.is_list or c.is_time) and _is_verdict(c):
            raise _of_one_class(c)
    return None


def _is_verdict(column: ColumnProfile) -> bool:
    """Return whether a column of one value is a label by its name and that value."""
    named = set(words(column.name)) <= {*LABELS, "is", "was", "has"}
    return named and str(column.top).lower() in POSITIVE | _NEGATIVE


def _of_one_class(column: ColumnProfile) -> UserError:
    """Return the refusal of a label with one value, and what to do."""
    rows, missing = column.rows - column.nulls, f", and missing in {column.nulls:,}" if column.nulls else ""
    return UserError(
        f"column '{column.name}' looks like a label and is {column.top!r} in all {rows:,} rows that have it{missing}: "
        f"there is nothing to tell apart. If each row is something that a user did, have negatives drawn: --implicit. "
        f"Else add the rows with another value, or name another label: --label COLUMN"
    )


def undecided(columns: Sequence[ColumnProfile]) -> UndecidedError:
    """Return the refusal where no column looks like a label, with the columns that could be one."""
    binary = [c for c in columns if not c.fault and not c.is_list and not c.is_time and c.distinct == 2]
    message = f"two values have: {', '.join(c.name for c in binary)}" if binary else "no column has exactly two values"
    if faulty := [f"'{c.name}' ({c.fault})" for c in columns if c.fault]:
        more = ", ..." if len(faulty) > _FAULTS_SHOWN else ""
        message += f"; not looked at, since they cannot be declared: {', '.join(faulty[:_FAULTS_SHOWN])}{more}"
    return UndecidedError(
        f"no column looks like a label; {message}. Say which one it is: --label COLUMN, and --positive VALUE where "
        f"it is neither 0/1 nor true/false; or that each row is what a user did: --implicit --user COLUMN --item COLUMN"
    )


def _rank(column: ColumnProfile, columns: Sequence[ColumnProfile]) -> tuple[int, int] | None:
    """Smaller is likelier; None: nothing says that it is a label."""
    named = label_rank(column.name)
    if column.null_rate > 0.05:
        return None
    last = columns[-1].name == column.name or columns[0].name == column.name
    if named is not None:
        return (0, named)
    is_sign = column.is_number and {*column.uniques.to_pylist()} == {-1, 1}
    return (1, 0) if last and (is_sign or _is_zero_one(column)) else None


def _is_zero_one(column: ColumnProfile) -> bool:
    return column.type == "boolean" or (column.is_number and {*column.uniques.to_pylist()} == {0, 1})


def _label(column: ColumnProfile, positive: str | None, reason: str, alternatives: tuple[str, ...]) -> Label:
    if column.is_list or column.is_time:
        raise UserError(f"--label {column.name}: it is {column.type}; a label has two values, or numbers")
    uniques = [str(v) for v in column.uniques.to_pylist()]
    if column.distinct == 1 and (positive is None or positive in uniques):
        raise _of_one_class(column)
    if _is_zero_one(column) and positive is None:
        return Label(column, None, column.numbers, reason, alternatives)
    (quoted,) = quote_names([column.name])
    if column.is_number and column.distinct > 2 and positive is None:
        if column.distinct > 20:
            raise UserError(
                f"--label {column.name}: it has {column.distinct:,} different numbers; say which of them means 1 "
                f"(--positive VALUE), or write features.prepare yourself (docs/features.md, lambda)"
            )
        seen = column.numbers[~np.isnan(column.numbers)]
        bound = next(v for v in np.unique(seen)[::-1] if (seen >= v).mean() >= 0.4 or v == np.unique(seen)[1])
        values = np.where(np.isnan(column.numbers), np.nan, (column.numbers >= bound).astype(float))
        return Label(column, f"{quoted} >= {bound:g}", values, reason, alternatives)
    if positive is None:
        if column.distinct != 2:
            raise UserError(
                f"--label {column.name}: it has {column.distinct:,} values; say which of them means 1: --positive VALUE"
            )
        known = [u for u in uniques if u.lower() in POSITIVE]
        positive = known[0] if len(known) == 1 else uniques[int(column.counts.argmin())]
    elif positive not in uniques:
        raise UserError(f"--positive {positive}: no value of '{column.name}'{nearest(positive, uniques)}")
    is_positive = np.array([u == positive for u in uniques])
    values = np.where(column.codes < 0, np.nan, is_positive[column.codes].astype(float))
    literal = positive if column.is_number else _sql(positive)
    if column.type == "boolean":
        literal = positive.lower()
    return Label(column, f"{quoted} = {literal}", values, reason, alternatives)


def _sql(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


# --- columns that say the label ---------------------------------------------------------------------------------------


def leak(column: ColumnProfile, label: Label) -> str | None:
    """Return why a column is suspected to reveal the label, or None.

    It may have been written when the label was known.
    """
    known = ~np.isnan(label.values)
    y = label.values[known] == 1
    if known.sum() < _ROWS or y.sum() < _POSITIVES or (~y).sum() < _POSITIVES or column.fault:
        return None
    codes = column.codes[known]
    present = codes >= 0
    if 0 < present.sum() < len(present) and ((present == y).mean() >= _SURE or (present != y).mean() >= _SURE):
        return "it has a value exactly where the label is " + ("1" if (present == y).mean() >= _SURE else "0")
    if column.is_list:
        return None
    if column.distinct <= max(2, present.sum() // 10):
        rows = np.bincount(codes[present], minlength=column.distinct)
        positive = np.bincount(codes[present], weights=y[present], minlength=column.distinct)
        pure = np.maximum(positive, rows - positive).sum() / max(rows.sum(), 1)
        both = ((positive > rows / 2) & (rows > 0)).any() and ((positive < rows / 2) & (rows > 0)).any()
        if both and present.mean() > 0.9 and pure >= _SURE and y.mean() < _SURE and y.mean() > 1 - _SURE:
            return "each of its values goes with one label alone"
    if column.is_number or column.is_time:
        values = column.numbers[known]
        area = _auc(values[present], y[present])
        if present.mean() > 0.9 and (area >= _SURE or area <= 1 - _SURE):
            return f"a threshold on it alone tells the labels apart (AUC {max(area, 1 - area):.4f})"
    return None


def _auc(values: NDArray[np.float64], y: NDArray[np.bool_]) -> float:
    """Area under the ROC curve of a value as a score; ties count half."""
    positives, negatives = int(y.sum()), int((~y).sum())
    if not positives or not negatives:
        return 0.5
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    rank = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    return float((rank[y].sum() - positives * (positives + 1) / 2) / (positives * negatives))
