"""Hypothesis strategies for rows with all that operators meet: nulls, NaN, infinities, extremes, odd texts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from headrace.features.types import declared
from headrace.schema import ColumnType, TableColumn

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

_START = datetime(2026, 1, 1, tzinfo=UTC)


def batches(
    columns: Mapping[str, ColumnType], label: str | None = None, max_rows: int = 40
) -> SearchStrategy[pa.Table]:
    """Tables with these columns, of 0 to `max_rows` rows.

    Args:
        columns: name -> type, as in `table.columns`.
        label: a column whose values are 0 and 1 alone.
        max_rows: the most.
    """
    from hypothesis import strategies as st

    def values(name: str, type_: ColumnType) -> SearchStrategy[Any]:
        if name == label:
            return st.integers(0, 1)
        if type_.startswith("array<"):
            return st.none() | st.lists(_scalars(type_[len("array<") : -1]), max_size=4)
        return _scalars(type_)

    types = {name: declared(TableColumn(name=name, type=type_)).arrow for name, type_ in columns.items()}
    row = st.fixed_dictionaries({name: values(name, type_) for name, type_ in columns.items()})
    rows = st.lists(row, max_size=max_rows)
    return rows.map(lambda drawn: pa.table({n: pa.array([r[n] for r in drawn], t) for n, t in types.items()}))


def _scalars(type_: str) -> SearchStrategy[Any]:
    from hypothesis import strategies as st

    edges = {
        "string": st.sampled_from(["", "a", "A", " ", "0", "é", "日本", "\U0001f600", "a'b\"c\\"])
        | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=6),
        "boolean": st.booleans(),
        "timestamp": st.builds(
            lambda days, micros: _START + timedelta(days=days, microseconds=micros),
            st.integers(-40_000, 40_000),
            st.sampled_from([0, 1, -1, 999_999]),
        ),
        "date": st.builds(lambda days: (_START + timedelta(days=days)).date(), st.integers(-40_000, 40_000)),
    }
    if type_ in ("int", "bigint"):
        top = 2**31 if type_ == "int" else 2**63
        values: SearchStrategy[Any] = st.sampled_from([0, 1, -1, top - 1, -top]) | st.integers(-50, 50)
    elif type_ in ("float", "double"):
        special = st.sampled_from([0.0, -0.0, 1.0, math.nan, math.inf, -math.inf])
        values = special | st.floats(-1e6, 1e6, width=32 if type_ == "float" else 64)
    else:
        values = edges[type_]
    return st.none() | values
