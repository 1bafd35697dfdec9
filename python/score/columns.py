"""Columns, expressions, models and metrics that the section `score` names: their checks and types, without data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa

from headrace.config import ExperimentArm, PairEvents, Score, Spec, WhereFilter
from headrace.config.score import ITEM_COLUMNS_OF_CANDIDATES, score_entries, score_keys
from headrace.errors import UserError, nearest
from headrace.features.table_ops.preparation import Preparation, prepared_columns
from headrace.features.types import ValueType, declared


def check_score(spec: Spec) -> None:
    """Check all that the section `score` names, as far as the spec alone decides it.

    Raises:
        UserError: a column, an expression, a model or a metric that the pipeline does not have.
    """
    score = spec.score
    if score is None:
        return
    check_columns(spec, score)
    check_rule_columns(spec)
    _check_expressions(spec, score)
    arms = {f"experiments.{name}.arms.{arm}.model": settings.model for name, arm, settings in _arms(spec)}
    for key, model in {"score.model": score.model, **arms}.items():
        if model == "baseline" and spec.baseline is None:
            raise UserError(f"{key} is 'baseline', and there is no section `baseline`: add it, or set {key} to neural")
        if model == "best" and spec.baseline is not None:
            _check_metric(spec, key)


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
    if not all(_is_plain(value, types[name]) for name, value in score.context.items()):
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


#: A power of two up to which whole numbers are of every type of numbers but float.
_PLAIN_INTEGER = 1 << 31


def _is_plain(value: object, column_type: ValueType) -> bool:
    """Return whether a constant is of a type for certain; pyarrow, which knows, imports pandas to tell (0.3 s)."""
    if column_type.is_list:
        return False
    if column_type.element == "string":
        return isinstance(value, str) and value.isascii()
    if column_type.element in ("int", "bigint", "double"):
        return type(value) is int and -_PLAIN_INTEGER <= value < _PLAIN_INTEGER
    return column_type.element == "boolean" and isinstance(value, bool)


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


#: Delta's names of the types that Spark names differently.
_SQL_TYPES = {"int": "integer", "bigint": "long"}


def key_types(spec: Spec, score: Score) -> dict[str, str]:
    """Return Delta's types of the keys of users and items, by column."""
    types = {c.name: str(declared(c)) for c in prepared_columns(spec)}
    return {k: _SQL_TYPES.get(types[k], types[k]) for k in (score.user.key, score.item.key)}


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


def _arms(spec: Spec) -> Iterator[tuple[str, str, ExperimentArm]]:
    """Yield (experiment, arm, settings)."""
    for name, experiment in (spec.experiments or {}).items():
        for arm, settings in experiment.arms.items():
            yield name, arm, settings


def _check_metric(spec: Spec, key: str) -> None:
    """Check that both models are measured by the metric that says which of them is better."""
    assert spec.score is not None
    is_number = spec.model.loss is not None and spec.model.loss.predicts == "number"
    known = [*spec.train.monitored(), *(("rmse", "mae", "r2") if is_number else ())]
    if (metric := spec.score.metric) not in known:
        raise UserError(
            f"{key} is 'best' by score.metric, and '{metric}' is not measured{nearest(metric, known)}; there are: "
            f"{', '.join(known)}. Ask for more in train.evaluation.metrics"
        )


def _check_expressions(spec: Spec, score: Score) -> None:
    """Check expressions of candidates and filters against the columns of what they look at, and keys of events."""
    events = _event_columns(spec)
    pair = [*dict.fromkeys((score.user.key, *score.user.columns, score.item.key, *score.item.columns, *score.context))]
    for key, entry in score_entries(score):
        fault = None
        if isinstance(entry, PairEvents):
            columns = events if entry.from_ is None else [c.name for c in spec.sources[entry.from_].table.columns]
            for name, column in score_keys(entry, score):
                if column not in columns:
                    raise UserError(f"{key}.{name}: the events have no column '{column}'{nearest(column, columns)}")
            fault = None if entry.where is None else _fault_of(entry.where, columns)
        elif isinstance(entry, WhereFilter):
            fault = _fault_of(entry.where, [*pair, *ITEM_COLUMNS_OF_CANDIDATES])
        if fault is not None:
            raise UserError(f"{key}.where: {fault}")


def _fault_of(expression: str, columns: Sequence[str]) -> str | None:
    from headrace.features.table_ops.sql import fault_without_spark  # late: most pipelines have no expression here

    return fault_without_spark(expression, columns)


def _event_columns(spec: Spec) -> list[str]:
    """Return the columns of the pipeline's own events as scoring reads them: after operators of single rows."""
    preparation = Preparation.from_spec(spec)
    later = preparation.split(serving=True)[1].steps
    return [*(later[0].schema.types if later else preparation.end.types)]
