"""The columns that a table of published scores has, whatever warehouse it is in."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

from headrace.errors import UserError

#: How many columns each scores table has; those after them are further ones of the scores, and may be null.
SCORES = 6


def published_columns(
    user: str, item: str, spark_types: Sequence[tuple[str, str]], taken: Container[str]
) -> list[tuple[str, str]]:
    """(column, Spark's `simpleString`) of the table: ds, user, item, rank, score, model_version, then the rest.

    Args:
        user: name of the user key.
        item: name of the item key.
        spark_types: of the lake's scores.
        taken: the types that the warehouse takes.

    Raises:
        UserError: a column is missing or has a type that the warehouse does not take.
    """
    types = dict(spark_types)
    first = ("ds", user, item, "rank", "score", "model_version")
    columns = []
    for column in (*first, *(name for name in types if name not in first)):
        found = types.get(column)
        if found is None:
            raise UserError(
                f"the scores to publish have no column '{column}' (they have {', '.join(types)}): "
                f"run stage 'score' again"
            )
        if found not in taken:
            known = f"; it takes {', '.join(taken)}" if isinstance(taken, Iterable) else ""
            raise UserError(f"the scores' column '{column}' has type {found}, which the warehouse does not take{known}")
        columns.append((column, found))
    return columns
