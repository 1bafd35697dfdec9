"""Checks of the columns that the sections `score` and `score.rerank` name; they need no data."""

from __future__ import annotations

import pyarrow as pa

from headrace.config import Score, Spec
from headrace.errors import UserError
from headrace.features.table_ops.preparation import Preparation, prepared_columns
from headrace.features.types import declared


def check_columns(spec: Spec, score: Score) -> None:
    """See that every column that the features read comes from exactly one place; cheap, needs no data.

    Raises:
        UserError: a column comes from nowhere or from two places, a key is a list, or a constant has the wrong type.
    """
    types = {c.name: declared(c) for c in prepared_columns(spec)}
    origins: dict[str, list[str]] = {}
    for side_name, side in (("user", score.user), ("item", score.item)):
        if types[side.key].is_list:
            raise UserError(f"score.{side_name}.key: column '{side.key}' is {types[side.key]}; a key is a single value")
        for column in dict.fromkeys((side.key, *side.columns)):
            origins.setdefault(column, []).append(f"score.{side_name}")
    for column in score.context:
        origins.setdefault(column, []).append("score.context")
    for column, column_origins in origins.items():
        if len(column_origins) > 1:
            raise UserError(
                f"column '{column}' is in {' and in '.join(column_origins)}; a pair can have it from one only"
            )
    read = [c for chain in spec.features.workflow for c in chain.columns]
    missing = [c for c in read if c not in origins]
    if missing:
        raise UserError(
            f"score: the features read {', '.join(repr(c) for c in missing)}, which a pair has from nowhere; add to "
            f"score.user.columns, to score.item.columns, or a constant to score.context"
        )
    context_scalars(spec, score)
    _check_keys(spec, score)


def _check_keys(spec: Spec, score: Score) -> None:
    """Check that columns made before a key are of that key's side: they are read once a user or item."""
    if not spec.features.prepare:
        return
    preparation = Preparation.from_spec(spec)
    for side_name, side in (("user", score.user), ("item", score.item)):
        for column in side.columns:
            keys = preparation.keys_behind(column)
            other_keys = [k for k in keys if k not in (side.key, *side.columns)]
            if other_keys:
                raise UserError(
                    f"score.{side_name}.columns: '{column}' is made by keys {', '.join(keys)}, of which "
                    f"{', '.join(other_keys)} is not the {side_name}'s: what was before a pair is not asked for when "
                    f"all pairs are scored. Leave the operator out, or give it keys of one side"
                )


def context_scalars(spec: Spec, score: Score) -> dict[str, pa.Scalar]:
    """Return the constants in their declared types.

    Raises:
        UserError: a constant is not of its column's type.
    """
    types = {c.name: declared(c) for c in prepared_columns(spec)}
    scalars = {}
    for name, value in score.context.items():
        try:
            scalars[name] = pa.scalar(value, types[name].arrow)
        except (pa.ArrowException, TypeError, ValueError, OverflowError):
            raise UserError(f"score.context.{name}: {value!r} is no {types[name]}, the column's type") from None
    return scalars


def check_rule_columns(spec: Spec) -> None:
    """See that caps and diversity look at single values, and freshness at a time that tells items apart.

    Raises:
        UserError: they do not.
    """
    rules = None if spec.score is None else spec.score.rerank
    if rules is None:
        return
    types = {c.name: declared(c) for c in prepared_columns(spec)}
    for column in rules.columns():
        if types[column].is_list:
            raise UserError(f"score.rerank: '{column}' is {types[column]}, and the rules look at single values")
    if (freshness := rules.freshness) is None:
        return
    split = spec.features.split
    back = spec.features.window_days + (split.valid_days + split.test_days if split.by == "time" else 0)
    if freshness.column is not None:
        if types[freshness.column].element not in ("date", "timestamp"):
            raise UserError(
                f"score.rerank.freshness.column: '{freshness.column}' is {types[freshness.column]}, no date and no "
                f"timestamp"
            )
    elif spec.table.event_time is None:
        raise UserError("score.rerank.freshness: there is no table.event_time; name a column of score.item, `column`")
    elif freshness.days >= back:
        raise UserError(
            f"score.rerank.freshness.days is {freshness.days:g}, and the events go back {back} days "
            f"(features.window_days, and those that validate and test): every item would be fresh. Set fewer days, or "
            f"name a column of score.item, `column`"
        )
