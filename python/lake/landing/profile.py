"""Profiles of landing files: counts of rows, nulls, reasons, columns. Small aggregates over staged rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from headrace.config import AnySource, Table
from headrace.config.schema import quoted_names
from headrace.lake.faults import BAD, FORGOTTEN, GOOD, NOT_JSON, NOT_UTF8, SKIPPED, WRONG_FIELDS, kind_unreadable
from headrace.lake.landing.blocks import TOO_LONG
from headrace.lake.landing.delimited import STRAY, UNCLOSED
from headrace.lake.landing.frame import MASK_BITS, event_time, mask_names
from headrace.lake.landing.reader import LandingBatch

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


def profiles(rows: DataFrame | None, table: Table, batch: LandingBatch) -> list[FileProfile]:
    """Return a profile of each file of `batch`, in order.

    Args:
        rows: as headrace.lake.landing.frame makes them; None: there are none.
        table: the declaration.
        batch: whose lines they are.

    Raises:
        RuntimeError: lines were lost or not numbered one by one; nothing may be committed then.
    """
    nulls = dict.fromkeys(table.expectations.null_rate, 0)
    file_profiles = [FileProfile(ds, file.name, nulls=dict(nulls)) for ds, file in batch.files]
    if rows is None:
        return file_profiles
    extras, halves = _count(rows, table, batch.source, file_profiles)
    if any(f.bad for f in file_profiles):
        _reasons(rows, table, file_profiles)
    if halves:
        each = rows.where(F.col("_state") == GOOD).select("_file", F.explode("_halves").alias("column"))
        for row in each.groupBy("_file", "column").count().collect():
            file_profiles[row["_file"]].mended[table.columns[row["column"]].name] = row["count"]
    if not extras:
        return file_profiles
    extra = rows.where(F.col("_extra").isNotNull() & (F.col("_state") != SKIPPED))
    names = extra.groupBy("_file").agg(F.array_distinct(F.flatten(F.collect_set(F.map_keys("_extra")))).alias("names"))
    for row in names.collect():
        file_profiles[row["_file"]].extra = frozenset(row["names"])
    return file_profiles


def _count(rows: DataFrame, table: Table, source: AnySource, file_profiles: list[FileProfile]) -> tuple[int, int]:
    """Fill in all that one aggregate gives; the numbers of rows with undeclared columns and with `_halves`."""
    extras = halves = 0
    state, columns = F.col("_state"), [c.name for c in table.columns]
    good = state == GOOD
    wanted_nulls = list(table.expectations.null_rate)
    aggregates = [
        F.count_if(F.col("_copy") == 0).alias("lines"),
        F.max("_line").alias("last"),
        F.count_if((state != SKIPPED) & (F.col("_copy") == 0)).alias("read"),
        F.count_if((state != SKIPPED) & (F.col("_copy") > 0)).alias("expanded"),
        F.count_if(good).alias("good"),
        F.count_if(state == BAD).alias("bad"),
        F.count_if(state == FORGOTTEN).alias("forgotten"),
        F.count_if((state != SKIPPED) & F.col("_extra").isNotNull()).alias("extras"),
        F.count_if(good & F.col("_halves").isNotNull()).alias("halves"),
        *(F.bit_or(F.when(state != SKIPPED, F.col(m))).alias(m) for m in mask_names(len(columns))),
        *(F.count_if(good & F.col(q).isNull()).alias(f"n{i}") for i, q in enumerate(quoted_names(wanted_nulls))),
        *(
            F.count_if((state != SKIPPED) & F.col(q).isNotNull()).alias(f"c{i}")
            for i, q in enumerate(quoted_names(columns))
        ),
    ]
    if table.event_time:
        time = event_time(table.event_time, source)
        aggregates.append(F.max(F.when(good, F.unix_micros(time))).alias("newest"))
    watermark = source.complete and source.complete.watermark
    if watermark:
        reached = event_time(watermark.column, source)
        aggregates.append(F.max(F.when(good, F.unix_micros(reached))).alias("watermark"))
    counted = rows.groupBy("_file").agg(*aggregates).collect()
    for row in counted:
        if row["_file"] is None or row["lines"] != row["last"]:
            raise RuntimeError(f"lines of landing files were lost or misnumbered: {row.asDict()}")
        extras += row["extras"]
        halves += row["halves"]
        profile = file_profiles[row["_file"]]
        profile.read, profile.good, profile.bad, profile.expanded = (
            row["read"],
            row["good"],
            row["bad"],
            row["expanded"],
        )
        profile.forgotten = row["forgotten"]
        profile.readable = {name: row[f"c{i}"] for i, name in enumerate(columns)}
        profile.nulls = {name: row[f"n{i}"] for i, name in enumerate(wanted_nulls)}
        if row["read"]:
            masks = [row[m] or 0 for m in mask_names(len(columns))]
            profile.absent = frozenset(
                name for i, name in enumerate(columns) if not masks[i // MASK_BITS] >> (i % MASK_BITS) & 1
            )
        if table.event_time and row["newest"] is not None:
            profile.newest = FileProfile.moment(row["newest"])
        if watermark and row["watermark"] is not None:
            profile.watermark = _EPOCH + timedelta(microseconds=row["watermark"])
    return extras, halves


def _reasons(rows: DataFrame, table: Table, file_profiles: list[FileProfile]) -> None:
    unreadable = {kind_unreadable(c): c.name for c in table.columns}
    each = rows.where(F.col("_state") == BAD).select("_file", F.posexplode("_kinds").alias("position", "what"))
    counts = each.groupBy("_file", "what.kind").agg(
        F.count_if(F.col("position") == 0).alias("first"),
        F.count("*").alias("all"),
        F.min("what.value").alias("example"),
    )
    for row in counts.orderBy("kind").collect():
        profile = file_profiles[row["_file"]]
        if row["first"]:
            profile.reasons[row["kind"]] = row["first"]
        if row["kind"] in unreadable:
            profile.unreadable[unreadable[row["kind"]]] = UnreadableValues(row["all"], row["example"])
        elif row["kind"] in LINE_FAULTS:
            profile.broken += row["all"]
