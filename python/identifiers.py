"""Names of columns in SQL and in Spark's functions: the one rule by which they are quoted.

A name is a column's whole name, whatever characters it has: dots, blanks, quotes, `%`, reserved words.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import Column


def quoted(name: str, quote: str = "`", escape: str = "") -> str:
    """Return a name as an identifier: between quotes, which are doubled within it.

    Args:
        name: the whole name of one column or table.
        quote: the character around identifiers: a backtick for Spark, a quotation mark in standard SQL.
        escape: a character by which others are escaped within quotes, which is doubled likewise; empty: there is none.
    """
    if escape:
        name = name.replace(escape, escape * 2)
    return quote + name.replace(quote, quote * 2) + quote


def quoted_names(names: Sequence[str]) -> list[str]:
    """Return names for Spark's column functions, whatever characters they have."""
    return [quoted(name) for name in names]


def column(name: str) -> Column:
    """Return Spark's column of exactly this name."""
    from pyspark.sql import functions as F

    return F.col(quoted(name))
