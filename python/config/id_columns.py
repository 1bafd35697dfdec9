"""The columns whose values become ids: keys of rows, and of what is scored and published."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from headrace.config.candidate_checks import score_entries, score_keys
from headrace.config.features import OpSpec
from headrace.config.spec import Spec
from headrace.config.table import Table


def id_columns(spec: Spec) -> dict[str | None, frozenset[str]]:
    """Return the declared text columns of each source whose values are ids.

    These are the keys of each table (`table.keys`), the columns that become `score.user.key` and `score.item.key`, and
    those that candidates and filters read as a user's or an item's key.

    Args:
        spec: the pipeline.

    Returns:
        names of columns by source; None is the pipeline's own events.
    """
    tables: dict[str | None, Table] = {None: spec.table, **{name: s.table for name, s in spec.sources.items()}}
    ids: dict[str | None, set[str]] = {name: set(table.keys) for name, table in tables.items()}
    if spec.score is not None:
        # Labels of `outcomes` are joined by these keys, whichever source they are of.
        for columns in ids.values():
            columns |= {spec.score.user.key, spec.score.item.key}
        for _, entry in score_entries(spec.score):
            if getattr(entry, "path", None) is not None:
                continue  # a table of somebody else's, which ingest does not read
            ids[getattr(entry, "from_", None)] |= {
                column for key, column in score_keys(entry, spec.score) if key in ("key", "user", "item")
            }
        ids[None] = {_before_renames(spec.features.prepare, column) for column in ids[None]} | set(spec.table.keys)
    texts = {name: {c.name for c in table.columns if c.type == "string"} for name, table in tables.items()}
    return {name: frozenset(columns & texts[name]) for name, columns in ids.items()}


def _before_renames(prepare: Sequence[OpSpec], column: str) -> str:
    """Return the name that a column has before `features.prepare` renames it."""
    for op in reversed(prepare):
        to = op.params.get("to")
        if op.op == "rename" and isinstance(to, Mapping):
            column = next((str(old) for old, new in to.items() if new == column), column)
    return column
