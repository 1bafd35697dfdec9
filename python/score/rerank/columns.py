"""Whether the columns that `score.rerank` looks at are such as it can."""

from __future__ import annotations

from headrace.config import Spec
from headrace.errors import UserError
from headrace.features.table_ops.preparation import prepared_columns
from headrace.features.types import declared


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
