"""Profiles of landing files: counts of rows, nulls, reasons, columns. Small aggregates over staged rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from headrace.config import Table
from headrace.config.schema import quoted_names
from headrace.lake.faults import GOOD, NOT_JSON, NOT_UTF8, SKIPPED, WRONG_FIELDS
from headrace.lake.landing.blocks import TOO_LONG
from headrace.lake.landing.delimited import STRAY, UNCLOSED
from headrace.lake.landing.formats import LandingBatch

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
#: Reasons that are about a line as a whole.
LINE_FAULTS = frozenset({NOT_UTF8, NOT_JSON, WRONG_FIELDS, STRAY, UNCLOSED, TOO_LONG})


@dataclass(frozen=True)
class UnreadableValues:
    """Values of one column in one file that are not of its type."""

    count: int
    example: str


@dataclass
class FileProfile:
    """Profile of one landing file."""

    ds: str
    name: str
    #: Why none of it was read (`expectations.max_bad_files`); None: it was.
    fault: str | None = None
    #: Data lines: neither headers nor empty ones.
    read: int = 0
    good: int = 0
    bad: int = 0
    #: Rows that must not come back (headrace.lake.forgotten), good or not.
    forgotten: int = 0
    #: Rows beyond one a line (lists that are exploded, drawn negatives).
    expanded: int = 0
    #: Bad rows that do not even read as a line.
    broken: int = 0
    #: Declared columns that no row of the file has a key for.
    absent: frozenset[str] = frozenset()
    #: Undeclared columns.
    extra: frozenset[str] = frozenset()
    #: By column: values, good rows' or not, that are of the type.
    readable: dict[str, int] = field(default_factory=dict)
    unreadable: dict[str, UnreadableValues] = field(default_factory=dict)
    #: By column: texts of good rows that have U+FFFD for half a surrogate pair.
    mended: dict[str, int] = field(default_factory=dict)
    #: By column of `expectations.null_rate`: nulls in good rows.
    nulls: dict[str, int] = field(default_factory=dict)
    #: First reason of each bad row.
    reasons: dict[str, int] = field(default_factory=dict)
    newest: datetime | None = None
    #: Greatest value of the column of `source.complete.watermark` in good rows.
    watermark: datetime | None = None

    @staticmethod
    def moment(micros: int) -> datetime:
        """Return a moment by its microseconds since 1970."""
        return datetime.fromtimestamp(micros / 1e6, UTC)


def empty_profiles(table: Table, batch: LandingBatch) -> list[FileProfile]:
    """Return a profile without rows of each file of a batch, in order."""
    nulls = dict.fromkeys(table.expectations.null_rate, 0)
    return [FileProfile(ds, file.name, nulls=dict(nulls)) for ds, file in batch.files]


def recount(rows: DataFrame, batch: LandingBatch, files: list[FileProfile]) -> None:
    """Count the rows of files anew that a format has made of judged ones (`LandingReader.finish`); bad rows stay.

    Args:
        rows: the rows.
        batch: of the files.
        files: their profiles, which are changed.
    """
    table = batch.table
    null_columns, columns = list(table.expectations.null_rate), [c.name for c in table.columns]
    good, is_row = F.col("_state") == GOOD, F.col("_state") != SKIPPED
    aggregates = [
        F.count_if(is_row & (F.col("_copy") == 0)).alias("read"),
        F.count_if(is_row & (F.col("_copy") > 0)).alias("expanded"),
        F.count_if(good).alias("good"),
        *(F.count_if(good & F.col(q).isNull()).alias(f"n{i}") for i, q in enumerate(quoted_names(null_columns))),
        *(F.count_if(is_row & F.col(q).isNotNull()).alias(f"c{i}") for i, q in enumerate(quoted_names(columns))),
    ]
    for row in rows.groupBy("_file").agg(*aggregates).collect():
        profile = files[row["_file"]]
        profile.read, profile.expanded = row["read"] + profile.forgotten, row["expanded"]
        profile.good = row["good"]
        profile.readable = {name: row[f"c{i}"] for i, name in enumerate(columns)}
        profile.nulls = {name: row[f"n{i}"] for i, name in enumerate(null_columns)}
