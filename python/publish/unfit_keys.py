"""Keys of users and items that a target cannot hold: their rows are left out, counted and named."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import TYPE_CHECKING, Any

from headrace.identifiers import column

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


log = logging.getLogger("headrace.publish")

#: Keys that are named.
_NAMED = 5
#: Characters of a key that a manifest takes; of a longer one its length alone is told.
_MOST_CHARACTERS = 8_192


@dataclass(frozen=True)
class KeyLimits:
    """What a target holds of a text that is a key; None: any length."""

    #: UTF-8 bytes at most.
    max_bytes: int | None = None
    #: Characters at most.
    max_characters: int | None = None
    #: Whether it takes a NUL character (U+0000).
    nul: bool = True
    #: Whether it takes the empty text.
    empty: bool = True

    def reason(self, key: Column) -> Column:
        """Return why a key cannot be held, as text; null where it can."""
        from pyspark.sql import functions as F

        reason = F.when(F.lit(False), F.lit(""))
        if not self.nul:
            reason = reason.when(key.contains("\0"), F.lit("it has a NUL character"))
        if not self.empty:
            reason = reason.when(key == "", F.lit("it is empty"))
        for most, length, what in (
            (self.max_bytes, F.octet_length(key), "bytes"),
            (self.max_characters, F.length(key), "characters"),
        ):
            if most is not None:
                reason = reason.when(length > most, F.concat(length, F.lit(f" {what}, at most {most:,} are taken")))
        return reason


@dataclass(frozen=True)
class LeftOut:
    """Rows that are not in a target, and some of the keys that it cannot hold."""

    rows: int = 0
    #: `{column: key, "reason": text}`; of a key that is too long to be named the key is None.
    keys: Sequence[dict[str, Any]] = field(default=())

    def __add__(self, other: LeftOut) -> LeftOut:
        return LeftOut(self.rows + other.rows, [*self.keys, *(k for k in other.keys if k not in self.keys)])

    def warn(self, label: str) -> None:
        """Log what is left out of a target, if anything is."""
        if self.rows:
            log.warning("%s: %s rows are left out: %s", label, f"{self.rows:,}", "; ".join(map(described, self.keys)))


def described(key: dict[str, Any]) -> str:
    """Return a key of `LeftOut` for people: at most 40 characters of it, control characters escaped."""
    column = next(name for name in key if name != "reason")
    value = key[column]
    shown = "a key" if value is None else repr(value if len(value) <= 40 else value[:40] + "…")
    return f"{column} {shown}: {key['reason']}"


def without_unfit_keys(df: DataFrame, limits: dict[str, KeyLimits], user: str) -> tuple[DataFrame, LeftOut]:
    """Leave out the rows whose keys a target cannot hold; ranks of a list begin at 1 and have no gaps as before.

    Args:
        df: the day's scores.
        limits: by key column. Columns that are no text are passed over.
        user: name of the user key.

    Returns:
        the rows that the target holds, and what is left out.
    """
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    texts = {name for name, type_ in df.dtypes if type_ == "string"}
    names = [name for name, of in limits.items() if name in texts and of != KeyLimits()]
    if not names:
        return df, LeftOut()
    keys = [column(name) for name in names]
    reasons = [limits[name].reason(key) for name, key in zip(names, keys, strict=True)]
    unfit = reduce(lambda a, b: a | b, (reason.isNotNull() for reason in reasons))
    rows = df.where(unfit).count()
    if not rows:
        return df, LeftOut()
    named: list[dict[str, Any]] = []
    for name, key, reason in zip(names, keys, reasons, strict=True):
        shown = F.when(F.length(key) <= _MOST_CHARACTERS, key)
        found = df.select(shown.alias("key"), reason.alias("reason")).where("reason IS NOT NULL").distinct()
        named += [{name: row["key"], "reason": row["reason"]} for row in found.orderBy("reason", "key").take(_NAMED)]
    kept = df.where(~unfit)
    order = Window.partitionBy(column(user)).orderBy("rank")
    rank = F.row_number().over(order).cast(df.schema["rank"].dataType)
    return kept.withColumn("rank", rank).select(*map(column, df.columns)), LeftOut(rows, named[:_NAMED])
