"""Role of each column: label, time, key, user, item, a kind of feature, or none, each with a reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from typing import Literal

import numpy as np
import pyarrow as pa

from headrace.cli.scaffold.columns import ColumnProfile, free_name, text_facts
from headrace.cli.scaffold.label import Label, find_label, leak, undecided
from headrace.cli.scaffold.names import (
    amount_of,
    is_identifier,
    is_item,
    is_key,
    is_line_number,
    is_numbered,
    is_occasion,
    is_user,
    side_of,
    time_rank,
    words,
)
from headrace.config.schema import path_steps, quoted_names
from headrace.errors import UserError, nearest

#: How a column becomes features.
Treatment = Literal["number", "skewed", "category", "id", "list", "time"]
#: Integers with so few values are categories.
_FEW = 12
#: Digits that integers all have where they are codes by their shape, and the share of round ones below which they are.
_CODE_DIGITS, _ROUND = 5, 0.3
#: Keys that must have this many rows (times) for a statement about what follows from a key.
_REPEATED, _CONSTANT = 20, 0.9


@dataclass(frozen=True)
class Named:
    """Columns that the user has named; None: to be detected."""

    label: str | None = None
    positive: str | None = None
    time: str | None = None
    key: str | None = None
    user: str | None = None
    item: str | None = None
    #: Whether each row is something that a user did with an item, whatever else the columns say.
    implicit: bool = False


@dataclass
class Roles:
    """The choices, each with its reason."""

    #: None: implicit feedback, each row is a positive.
    label: Label | None
    #: Why the rows are implicit feedback; empty where there is a label.
    implicit: str = ""
    #: Columns that say how much of an item a user took, or what it cost, or how good it was -> which of these.
    amounts: dict[str, str] = field(default_factory=dict)
    #: `user` and `item` where nothing but the place of a column in a file without names says which one it is.
    placed: dict[str, str] = field(default_factory=dict)
    #: Columns that `prepare` makes of others, each with its expression.
    added: list[ColumnProfile] = field(default_factory=list)
    #: Of these the date of the event with the time of day that another column has.
    moment: ColumnProfile | None = None
    #: The time of the event.
    time: ColumnProfile | None = None
    #: What numbers the rows.
    key: ColumnProfile | None = None
    user: ColumnProfile | None = None
    item: ColumnProfile | None = None
    #: Without a user: columns whose combination stands for one.
    segment: list[str] = field(default_factory=list)
    user_columns: list[str] = field(default_factory=list)
    item_columns: list[str] = field(default_factory=list)
    #: Features that are neither user's nor item's.
    context: list[str] = field(default_factory=list)
    features: dict[str, Treatment] = field(default_factory=dict)
    #: Column -> why it is no feature.
    left_out: dict[str, str] = field(default_factory=dict)
    #: Column -> why it is what it is.
    reasons: dict[str, str] = field(default_factory=dict)
    #: For evaluation, not for the model.
    carried: list[str] = field(default_factory=list)

    @property
    def scores(self) -> bool:
        """Return whether there are users to score items for."""
        return self.item is not None and (self.user is not None or bool(self.segment))

    @property
    def days(self) -> tuple[str, str] | None:
        """(first, last) day of the events."""
        return self.time.days() if self.time is not None else None

    @property
    def split_by_time(self) -> bool:
        return self.label is not None and self.days is not None and self.days[0] != self.days[1]


def find_roles(columns: Sequence[ColumnProfile], named: Named, partitions: Sequence[str] = ()) -> Roles:
    """Choose.

    Args:
        columns: of the sample.
        named: what the user says.
        partitions: columns that partition a table.

    Raises:
        UserError: no label is likely, or a named column is not there or cannot be what it is said to be.
    """
    if len(columns) == 1:
        raise UserError(
            f"'{columns[0].name}' is the only column, and there is nothing to learn it from. Where a row has several "
            f"values, put a comma, tab, semicolon or bar between them"
        )
    named = _declared_names(named, columns)
    roles = _label_or_implicit(columns, named)
    left = {c.name: c for c in columns}
    if roles.label is not None:
        del left[roles.label.column.name]
    for name in [n for n, c in left.items() if c.fault]:
        roles.left_out[name] = left.pop(name).fault
    for name in [n for n, c in left.items() if c.distinct == 0]:
        roles.left_out[name] = "it has no value"
        del left[name]
    for name in list(left):
        if roles.label is None:
            break
        if name not in vars(named).values() and (reason := leak(left[name], roles.label)):
            roles.left_out[name] = f"suspected leak: {reason}; was it known before the label was?"
            del left[name]
    _time(roles, left, named)
    _add_moment(roles, left, columns)
    _key(roles, left, named)
    _sides(roles, left, named)
    for name in [n for n, c in left.items() if n in partitions]:
        roles.left_out[name] = "the table's partition"
        del left[name]
    if roles.label is None:
        _check_repeated(roles)
    _add_numbers(roles, left, columns)
    for column in left.values():
        _treat(roles, column)
    _belongs(roles, left)
    if roles.label is None:
        _leave_out_context(roles, left)
    return roles


def _label_or_implicit(columns: Sequence[ColumnProfile], named: Named) -> Roles:
    """Return the roles with a label, or with the reason why rows are implicit feedback.

    Raises:
        UserError: as `find_label`; implicit feedback has no user or no item, or neither it nor a label is likely.
    """
    user, item = (_likely_key(columns, side, named) for side in ("user", "item"))
    if named.implicit:
        if named.label is not None or named.positive is not None:
            raise UserError("--implicit says that each row is a positive: leave --label and --positive out")
        if user is None or item is None:
            missing = "users" if user is None else "items"
            raise UserError(
                f"--implicit: no column looks like {missing}; say which one it is: --{missing[:-1]} COLUMN "
                f"(there are: {', '.join(c.name for c in columns if not c.fault)})"
            )
        return Roles(None, "you said so: each row is something that a user did", placed=_placed(user, item))
    has_pairs = user is not None and item is not None
    label = find_label(columns, named.label, named.positive, ratings=not has_pairs)
    if label is not None:
        return Roles(label)
    if user is None or item is None:
        raise undecided(columns)
    rated = next((c.name for c in columns if not c.fault and amount_of(c.name) == "rating" and c.is_number), None)
    return Roles(
        None,
        "no column says yes or no, so each row counts as something that a user did"
        + (f", whatever its '{rated}' (--label {rated} learns from high and low ones instead)" if rated else ""),
        placed=_placed(user, item),
    )


def _placed(user: str, item: str) -> dict[str, str]:
    """Return users and items that are known by their place alone."""
    return {side: name for side, name in (("user", user), ("item", item)) if is_numbered(name)}


def _likely_key(columns: Sequence[ColumnProfile], side: str, named: Named) -> str | None:
    """Return the column of users or items: as the user says, by its name, or by its place in a file without names."""
    requested: str | None = vars(named)[side]
    if requested is not None:
        return requested
    is_side = is_user if side == "user" else is_item
    usable = [c for c in columns if not c.fault and (c.type == "string" or c.is_integer) and c.distinct > 1]
    by_name = [c.name for c in usable if is_side(c.name)]
    if by_name or not all(is_numbered(c.name) for c in columns):
        return next(iter(by_name), None)
    # As in `u.data` and `ratings.dat`: user, item, and what else there is.
    places = [c.name for c in usable if c.distinct < c.rows - c.nulls]
    place = ("user", "item").index(side)
    return places[place] if len(places) > place and len(columns) > 1 else None


def _check_repeated(roles: Roles) -> None:
    """Check that some user has two rows, the last of which can be held out. Raises UserError."""
    # Users and items that never occur twice look like what numbers the rows.
    for side, column in (("user", roles.user or roles.key), ("item", roles.item or roles.key)):
        if column is None or column.counts.max() < 2:
            name, rows = ("", 0) if column is None else (column.name, column.rows)
            raise UserError(
                f"column '{name}' has another value in each of {rows:,} rows: no {side} has a second event to learn "
                f"from. Say which column names the {side}s (--{side} COLUMN), or what to predict (--label COLUMN)"
            )


def _leave_out_context(roles: Roles, left: Mapping[str, ColumnProfile]) -> None:
    """Leave out of implicit feedback what is neither the user's nor the item's: it is not known when lists are made."""
    for time in (roles.time, roles.moment):
        if time is not None:
            roles.features.pop(time.name, None)
    for name in roles.context:
        if name not in left:
            continue
        del roles.features[name]
        if left[name].is_number and (kind := amount_of(name)) is not None:
            roles.amounts[name] = kind
            roles.left_out[name] = f"a {kind} of the event itself: a weight or a threshold, see `prepare`"
        elif is_occasion(name):
            roles.left_out[name] = "numbers baskets, sessions or the like, by its name"
        else:
            roles.left_out[name] = "of the event itself, neither of the user nor of the item: not known for a list"
    for name in (n for n, kind in ((n, amount_of(n)) for n in left) if kind == "rating"):
        # What this user thought of this item follows from neither, whatever the rows say.
        if name in roles.features and left[name].is_number:
            del roles.features[name]
            roles.amounts[name] = "rating"
            roles.left_out[name] = "a rating of the event itself: a weight or a threshold, see `prepare`"
            for side in (roles.user_columns, roles.item_columns):
                if name in side:
                    side.remove(name)
    roles.context = []


def _declared_names(named: Named, columns: Sequence[ColumnProfile]) -> Named:
    """Return what the user says under the names that columns are declared by, where the source has others."""
    declared = {c.name for c in columns}
    renamed = {path_steps(c.path): c.name for c in columns if c.path is not None}
    named_columns = {option: name for option, name in vars(named).items() if option not in ("positive", "implicit")}
    return replace(
        named, **{o: renamed.get((n,), n) for o, n in named_columns.items() if n is not None and n not in declared}
    )


def _named_column(roles: Roles, left: Mapping[str, ColumnProfile], option: str, name: str) -> ColumnProfile:
    """Return the column that the user names; raise UserError with the reason why it is not to be had."""
    if name in left:
        return left[name]
    label = None if roles.label is None else roles.label.column
    taken = {"label": label, "time": roles.time, "key": roles.key, "user": roles.user, "item": roles.item}
    if role := next((role for role, column in taken.items() if column is not None and column.name == name), None):
        raise UserError(f"--{option} {name}: it is the {role} already")
    if name in roles.left_out:
        raise UserError(f"--{option} {name}: {roles.left_out[name]}")
    raise UserError(f"--{option} {name}: no such column{nearest(name, left)}; there are: {', '.join(left)}")


def _time(roles: Roles, left: dict[str, ColumnProfile], named: Named) -> None:
    if named.time is not None:
        roles.time = _named_column(roles, left, "time", named.time)
        if not roles.time.is_time:
            raise UserError(f"--time {named.time}: it is {roles.time.type}, neither a timestamp nor a date")
        roles.reasons[named.time] = "time of the event: you said so"
    else:
        candidates = [c for c in left.values() if c.is_time and c.null_rate < 0.01]
        candidates.sort(key=lambda c: (c.type != "timestamp", time_rank(c.name)))
        if not candidates:
            return
        roles.time = candidates[0]
        also = f"; also times: {', '.join(c.name for c in candidates[1:])}" if candidates[1:] else ""
        roles.reasons[candidates[0].name] = (
            f"time of the event: the likeliest name{also}" if also else "time of the event"
        )
    name = roles.time.name
    first, last = roles.time.days()
    hours = len({int(s) // 3600 % 24 for s in roles.time.numbers[:10_000] if not np.isnan(s)})
    if roles.time.type == "timestamp" and hours > 1:
        roles.features[name] = "time"
    roles.reasons[name] += f" ({first} to {last})"
    if roles.time.is_ambiguous:  # what speaks for the order has a line of its own
        roles.reasons[name] += "; the order of day and month is ambiguous"
    elif roles.time.evidence:
        roles.reasons[name] += f"; {roles.time.evidence}"
    del left[name]


def _add_moment(roles: Roles, left: dict[str, ColumnProfile], columns: Sequence[ColumnProfile]) -> None:
    """Join the event's date with the time of day that another column has, if one does."""
    column = next((c for c in left.values() if c.clock is not None), None)
    if column is None or column.clock is None or roles.time is None:
        return
    seconds = roles.time.numbers
    if (seconds[~np.isnan(seconds)] % 86_400 != 0).any():
        return
    seconds = seconds + np.asarray(column.clock.seconds.cast(pa.float64()).to_numpy(zero_copy_only=False))
    micros = pa.array(np.nan_to_num(seconds * 1e6).astype(np.int64), mask=np.isnan(seconds))
    day, clock = quoted_names([roles.time.name, column.name])
    name = free_name("event_moment", {c.name.lower() for c in columns})
    text = f"concat(cast(cast({day} as date) as string), ' ', {clock})"
    roles.moment = ColumnProfile(
        name,
        "timestamp",
        micros.cast(pa.timestamp("us", tz="UTC")),
        expression=f"try_to_timestamp({text}, 'yyyy-MM-dd {column.clock.spark_format}')",
        origin=f"the date in '{roles.time.name}' with the time of day in '{column.name}'",
    )
    roles.added.append(roles.moment)
    roles.reasons[name] = roles.moment.origin
    roles.features.pop(roles.time.name, None)
    if len(np.unique(seconds[~np.isnan(seconds)] // 3_600 % 24)) > 1:
        roles.features[name] = "time"
    roles.left_out[column.name] = f"the time of day: '{name}' has it with the date"
    del left[column.name]


def _add_numbers(roles: Roles, left: dict[str, ColumnProfile], columns: Sequence[ColumnProfile]) -> None:
    """Put numbers in the place of texts that have a currency or a percent sign beside each."""
    taken = {c.name.lower() for c in columns}
    for column in [c for c in left.values() if c.signed is not None]:
        assert column.signed is not None
        name = free_name(f"{column.name}_value", taken)
        (quoted,) = quoted_names([column.name])
        left[name] = ColumnProfile(
            name,
            "double",
            column.signed.values,
            expression=column.signed.expression(quoted),
            origin=f"the number in '{column.name}', without its sign",
        )
        roles.added.append(left[name])
        roles.left_out[column.name] = f"text such as {column.signed.example!r}: '{name}' has its number"
        del left[column.name]


def _key(roles: Roles, left: dict[str, ColumnProfile], named: Named) -> None:
    if named.key is not None:
        roles.key = _named_column(roles, left, "key", named.key)
        roles.reasons[named.key] = "key: you said so"
    else:
        for c in left.values():
            single = not c.is_list and (c.type == "string" or c.is_integer)
            if single and c.rows >= 20 and c.distinct == c.rows and is_key(c.name):
                roles.key = c
                roles.reasons[c.name] = "key: another value in each row, and its name"
                break
    if roles.key is not None:
        roles.carried.append(roles.key.name)
        del left[roles.key.name]


def _sides(roles: Roles, left: dict[str, ColumnProfile], named: Named) -> None:
    for option, user_choice, by_name in (("user", named.user, is_user), ("item", named.item, is_item)):
        if user_choice is not None:
            candidates, reason = [_named_column(roles, left, option, user_choice)], "you said so"
        else:
            candidates = [c for c in left.values() if by_name(c.name) and (c.type == "string" or c.is_integer)]
            candidates = [c for c in candidates if c.distinct > 1]
            # Of several, the one whose name says that it is an id, then the one with more values.
            candidates.sort(key=lambda c: (not is_identifier(c.name), -c.distinct))
            reason = "by its name"
            if not candidates and option in roles.placed:
                candidates, reason = [left[roles.placed[option]]], "by its place in a file without names; check it"
        if not candidates:
            continue
        column = candidates[0]
        if not (column.type == "string" or column.is_integer):
            raise UserError(f"--{option} {column.name}: it is {column.type}; a key of scores is text or an integer")
        setattr(roles, option, column)
        roles.features[column.name] = "id"
        roles.reasons[column.name] = f"{option}: {reason}"
        del left[column.name]
    if roles.user is None and roles.item is not None:
        attributes = [c for c in left.values() if side_of(c.name) == "user" and (c.type == "string" or c.is_integer)]
        attributes = [c for c in attributes if 1 < c.distinct <= c.rows // 10]
        if attributes:
            roles.segment = [c.name for c in attributes]


def _treat(roles: Roles, column: ColumnProfile) -> None:
    """Choose the features that a column makes."""
    name = column.name
    if column.distinct <= 1 and column.null_rate < 0.01 and not column.is_list:
        roles.left_out[name] = f"one value alone: {column.top!r}"
    elif column.is_integer and is_line_number(name) and column.distinct > _FEW:
        roles.left_out[name] = "numbers the lines of a file, by its name"
    elif "propensity" in words(name):
        roles.left_out[name] = "how likely it was to be shown, by its name: carried for evaluation, no feature"
        roles.carried.append(name)
    elif column.is_list:
        if column.type in ("array<float>", "array<double>"):
            roles.left_out[name] = "a list of numbers; `list_slice` and `pad` would take some of them"
        else:
            roles.features[name], roles.reasons[name] = "list", "a list: codes, cut to the length that most rows have"
    elif column.is_time:
        roles.left_out[name] = "another time; `age` makes the time between it and the event"
    elif column.type == "boolean":
        roles.features[name], roles.reasons[name] = "category", "two values"
    elif column.type == "string":
        _text(roles, column)
    else:
        _number(roles, column)


def _text(roles: Roles, column: ColumnProfile) -> None:
    name, values = column.name, column.rows - column.nulls
    characters, mean_words = text_facts(column)
    if mean_words >= 4 and characters >= 20 and column.distinct > values * 0.3:
        roles.left_out[name] = f"free text ({mean_words:.0f} words on average); `text_ngrams` makes features of it"
    elif values >= 100 and column.distinct > values * 0.9:
        roles.left_out[name] = "almost another value in each row: nothing could be learned of it"
    else:
        roles.features[name] = "category"
        roles.reasons[name] = f"text with {column.distinct:,} values"


def _number(roles: Roles, column: ColumnProfile) -> None:
    name = column.name
    values = column.numbers[~np.isnan(column.numbers)]
    if column.is_integer and (column.is_token or is_identifier(name) or _are_codes(column)):
        if column.rows >= 100 and column.distinct > 0.9 * len(values):
            roles.left_out[name] = "almost another value in each row: nothing could be learned of it"
            return
        by = "the file's word" if column.is_token else "its name" if is_identifier(name) else "the shape of its values"
        roles.features[name], roles.reasons[name] = "category", f"an id by {by}, {column.distinct:,} values"
    elif column.is_integer and column.distinct <= _FEW:
        roles.features[name], roles.reasons[name] = "category", f"{column.distinct} whole numbers"
    elif values.min() >= 0 and values.max() > 20 * max(float(np.median(values)), 1.0):
        roles.features[name], roles.reasons[name] = "skewed", "not negative, with a long tail: log first"
    else:
        digits = ",.0f" if column.is_integer else ",.6g"
        roles.features[name] = "number"
        roles.reasons[name] = f"a number, {values.min():{digits}} to {values.max():{digits}}"


def _are_codes(column: ColumnProfile) -> bool:
    """Return whether integers are codes by their shape: as many digits each, several rows a value, few round ones."""
    values = np.abs(column.uniques.drop_null().to_numpy(zero_copy_only=False))
    if len(values) < _REPEATED or column.distinct > 0.9 * column.rows or values.min() < 10 ** (_CODE_DIGITS - 1):
        return False
    same_length = len(str(values.min())) == len(str(values.max()))
    return same_length and (values % 10 == 0).mean() < _ROUND and column.epoch is None


def _belongs(roles: Roles, left: Mapping[str, ColumnProfile]) -> None:
    """Choose the side of a score that provides each feature's column."""
    if not roles.scores:
        return
    for name in roles.features:
        if (roles.user is not None and name == roles.user.name) or (roles.item is not None and name == roles.item.name):
            continue
        side = side_of(name) if name in left else None
        if name in roles.segment:
            side = "user"
        elif name in left and side is None:
            side = _follows(left[name], roles)
        if side == "user":
            roles.user_columns.append(name)
        elif side == "item":
            roles.item_columns.append(name)
        else:
            roles.context.append(name)


def _follows(column: ColumnProfile, roles: Roles) -> str | None:
    """Return the side whose key determines the value in nearly all rows, as far as keys occur more than once."""
    for side, key in (("user", roles.user), ("item", roles.item)):
        if key is None or column.is_list:
            continue
        known = (key.codes >= 0) & (column.codes >= 0)
        keys, values = key.codes[known], column.codes[known]
        rows = np.bincount(keys, minlength=key.distinct)
        if (rows > 1).sum() < _REPEATED or len(np.unique(values)) < 2:
            continue
        pairs, counts = np.unique(np.stack([keys, values]), axis=1, return_counts=True)
        most = np.zeros(key.distinct)
        np.maximum.at(most, pairs[0], counts)
        repeated = rows > 1
        # More than the most frequent value would explain by itself.
        plain = np.bincount(values).max() / len(values)
        share = most[repeated].sum() / rows[repeated].sum()
        if share >= _CONSTANT and share > plain + (1 - plain) / 2:
            return side
    return None


def window_days(days: tuple[str, str]) -> int:
    """Days from the first to the last, at least 1."""
    return max(1, (date.fromisoformat(days[1]) - date.fromisoformat(days[0])).days)
