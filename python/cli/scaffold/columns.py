"""Profile of each column of a sample: its type, the number of values, and their spread."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cached_property
from itertools import chain, count
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from headrace.cli.scaffold.names import is_identifier, is_item, is_numbered, is_time, is_user
from headrace.cli.scaffold.spelled import (
    NumberMarks,
    SignedNumbers,
    SpelledTimes,
    TimesOfDay,
    find_clock,
    find_signed_numbers,
    find_times,
)
from headrace.config.schema import EpochUnit, path_of
from headrace.lake.landing.convert import since_1970

_INTEGER = r"^[+-]?\d{1,19}$"
_ZEROS = r"^[+-]?0\d"
#: Integers, some as programs write floats.
_WHOLE_NUMBER = r"^[+-]?\d{1,15}(\.0+)?$"
#: Times and dates without a sign between their parts.
_COMPACT_TIME = r"^(19|20)\d{6}(\d{6})?$"
_NUMBER = r"^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$"
_DATE = r"^\d{4}-\d{2}-\d{2}$"
#: What `ingest` reads as a timestamp (headrace.lake.landing.exact_casts).
_TIMESTAMP = r"^\d{4}-\d{2}-\d{2}([T ]\d{2}:\d{2}(:\d{2}([.]\d{1,9})?)?( ?(Z|[+-]\d{2}(:?\d{2})?))?)?$"
#: Pairs of texts that `ingest` reads as booleans.
_BOOLEANS = ({"true", "false"}, {"yes", "no"}, {"t", "f"}, {"y", "n"})
_INT32, _INT64 = 2**31 - 1, 2**63 - 1
#: What Spark reads unsigned integers of 64 bits as.
_UINT64 = "decimal(20,0)"
#: Seconds since 1970 that a column of times has: 1990 to 2100, without a name to say so 1995 to 2040.
_EPOCH, _NAMELESS_EPOCH = (631_152_000, 4_102_444_800), (788_918_400, 2_208_988_800)
_PER_SECOND: Mapping[EpochUnit, int] = {
    "epoch_seconds": 1,
    "epoch_milliseconds": 1_000,
    "epoch_microseconds": 1_000_000,
    "epoch_nanoseconds": 1_000_000_000,
}
#: A name with a type, as RecBole's atomic files have them.
_TYPED_NAME = re.compile(r"(.+):(token|float|token_seq|float_seq)")
#: Microseconds since 1970 of 0001-01-01 and of 10000-01-01: times between them are read, others go to quarantine.
_FIRST_MICROS, _END_MICROS = -62_135_596_800_000_000, 253_402_300_800_000_000
_MICROS_PER_DAY = 86_400_000_000
#: Microseconds per unit of Arrow's timestamps; of nanoseconds 1,000 are one.
_MICROS: Mapping[str, int] = {"s": 1_000_000, "ms": 1_000, "us": 1}
#: What Delta takes in no name without column mapping.
_BAD_NAME = re.compile(r"[ ,;{}()\n\t=]")


_PLAIN = NumberMarks()


@dataclass(frozen=True)
class ColumnProfile:
    """A column of the sample."""

    name: str
    #: As `table.columns` declares it.
    type: str
    #: The values in that type; for lists their elements' lists.
    values: pa.Array
    #: Of times spelled as numbers.
    epoch: EpochUnit | None = None
    #: Of times in text that are not ISO 8601: their format, in the words of `strptime`.
    time_format: str | None = None
    #: What says the order of day and month in `time_format`.
    evidence: str = ""
    #: Whether another order of day and month fits, too.
    is_ambiguous: bool = False
    #: Of texts that are times of day: these.
    clock: TimesOfDay | None = None
    #: Of texts that are numbers with a currency or a percent sign: these.
    signed: SignedNumbers | None = None
    #: Expression of Spark's SQL by which `prepare` adds it; empty of a column of the source.
    expression: str = ""
    #: What the expression makes of which columns, for people.
    origin: str = ""
    #: Whether the file says that values are names and not amounts (`user_id:token`).
    is_token: bool = False
    #: Where the source has it, where its name does not say so.
    path: str | None = None
    #: Why it cannot be declared; then only the name counts.
    fault: str = ""
    #: Times before year 1 or after year 9999, which are null in `values`: `ingest` sends such rows to quarantine.
    far_times: int = 0

    @property
    def rows(self) -> int:
        return len(self.values)

    @cached_property
    def nulls(self) -> int:
        return int(self.values.null_count)

    @property
    def null_rate(self) -> float:
        return self.nulls / max(self.rows, 1)

    @property
    def is_list(self) -> bool:
        return self.type.startswith("array<")

    @property
    def is_number(self) -> bool:
        return self.is_integer or self.type in ("float", "double") or self.type.startswith("decimal")

    @property
    def is_integer(self) -> bool:
        return self.type in ("tinyint", "smallint", "int", "bigint")

    @property
    def is_time(self) -> bool:
        return self.type in ("timestamp", "date")

    @cached_property
    def codes(self) -> NDArray[np.int64]:
        """Return each row's distinct value as its place in `uniques`; -1 for null. Lists: their lengths' places."""
        values = pc.list_value_length(self.values) if self.is_list else self.values
        coded = values.dictionary_encode()
        return np.asarray(coded.indices.fill_null(-1).to_numpy(zero_copy_only=False), dtype=np.int64)

    @cached_property
    def uniques(self) -> pa.Array:
        """The distinct values, nulls not among them."""
        values = pc.list_value_length(self.values) if self.is_list else self.values
        return values.dictionary_encode().dictionary

    @property
    def distinct(self) -> int:
        return len(self.uniques)

    @cached_property
    def counts(self) -> NDArray[np.int64]:
        """Rows of each of `uniques`."""
        return np.bincount(self.codes[self.codes >= 0], minlength=self.distinct)

    @property
    def top(self) -> Any:
        """The most frequent value; None where there is none."""
        return self.uniques[int(self.counts.argmax())].as_py() if self.distinct else None

    @cached_property
    def numbers(self) -> NDArray[np.float64]:
        """Values as doubles (times: seconds), NaN for null; of text, nothing."""
        values = self.values
        if self.type == "timestamp":
            values = values.cast(pa.int64()).cast(pa.float64(), safe=False)
            return np.asarray(values.to_numpy(zero_copy_only=False)) / 1e6
        if self.type == "date":
            values = values.cast(pa.int32())
            return np.asarray(values.cast(pa.float64()).to_numpy(zero_copy_only=False)) * 86_400.0
        if not self.is_number and self.type != "boolean":
            return np.empty(0)
        if self.type == "boolean":
            values = values.cast(pa.int8())
        return np.asarray(values.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False))

    def days(self) -> tuple[str, str]:
        """(first, last) UTC day of a column of times."""
        valid = self.numbers[~np.isnan(self.numbers)]
        return _day(valid.min()), _day(valid.max())


def _day(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).date().isoformat()


def profile(rows: pa.Table, copied: bool, marks: NumberMarks = _PLAIN) -> list[ColumnProfile]:
    """Each column's profile, in order; the fields of a structure are columns of their own.

    Args:
        rows: of a sample.
        copied: whether rows become a Delta table of ours, which does not take all names.
        marks: of the numbers in text.
    """
    taken = {name.lower() for name in rows.column_names}
    if copied and rows.num_columns and all(map(_TYPED_NAME.fullmatch, rows.column_names)):
        return [_typed_column(name, rows[name].combine_chunks(), taken, marks) for name in rows.column_names]
    declared: set[str] = set()
    profiles = []
    for name in rows.column_names:
        for steps, values in _leaves((name,), rows[name].combine_chunks()):
            plain = steps[0] if len(steps) == 1 else None
            # Of names that differ by case alone the first keeps its own: two columns of a table may not.
            twin = plain is not None and plain.lower() in declared
            if twin and not copied:  # Spark reads one of them alone
                fault = "its name differs from another column's in case alone"
                profiles.append(ColumnProfile(steps[0], "string", pa.nulls(len(values), pa.string()), fault=fault))
                continue
            if plain is not None and not (twin or _is_reserved(plain) or (copied and _BAD_NAME.search(plain))):
                declared.add(plain.lower())
                profiles.append(_column(plain, values, copied, marks))
                continue
            unique_name = free_name("_".join(steps), taken)
            profiles.append(replace(_column(unique_name, values, copied, marks), path=path_of(steps)))
    return profiles


def _leaves(steps: tuple[str, ...], values: pa.Array) -> Iterator[tuple[tuple[str, ...], pa.Array]]:
    if isinstance(values, pa.ChunkedArray):
        values = pa.concat_arrays(values.chunks) if values.num_chunks else pa.array([], values.type)
    if not pa.types.is_struct(values.type):
        yield steps, values
        return
    for field in values.type:
        yield from _leaves((*steps, field.name), pc.struct_field(values, field.name))


def _is_reserved(name: str) -> bool:
    return name.startswith("_") or name.lower() == "ds"


def free_name(requested: str, taken: set[str]) -> str:
    """Return a name that Delta takes and no column has, and reserve it."""
    name = re.sub(r"_+", "_", re.sub(r"[^\w-]", "_", requested)).strip("_") or "column"
    numbered = (f"{name}_{k}" for k in count(2))
    name = next(n for n in chain([name], numbered) if n.lower() not in taken | {"ds"})
    taken.add(name.lower())
    return name


def _typed_column(name: str, values: pa.Array, taken: set[str], marks: NumberMarks) -> ColumnProfile:
    """Return the profile of a column whose name says its type (`user_id:token`), under the name alone."""
    match = _TYPED_NAME.fullmatch(name)
    assert match is not None
    column = _column(free_name(match[1], taken), values, True, marks)
    return replace(column, path=path_of((name,)), is_token=match[2].startswith("token"))


def _column(name: str, values: pa.Array, copied: bool, marks: NumberMarks) -> ColumnProfile:
    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    if pa.types.is_string(values.type) or pa.types.is_large_string(values.type):
        return _text(name, values.cast(pa.string()), marks, copied)
    if pa.types.is_null(values.type):
        return ColumnProfile(name, "string", values.cast(pa.string()))
    if pa.types.is_list(values.type) or pa.types.is_large_list(values.type):
        element = _arrow_type(values.type.value_type)
        if element in ("string", "int", "bigint", "float", "double"):
            return ColumnProfile(name, f"array<{element}>", values)
        return ColumnProfile(name, "string", values, fault=f"lists of {values.type.value_type}")
    type_ = _arrow_type(values.type)
    if type_ is None:
        return ColumnProfile(name, "string", values, fault=f"of type {values.type}")
    if pa.types.is_uint64(values.type) and (pc.max(values).as_py() or 0) > _INT64:
        # Text takes part in features and scores; such a decimal is a number that is none.
        if is_identifier(name) or is_user(name) or is_item(name):
            return ColumnProfile(name, "string", values.cast(pa.string()))
        return ColumnProfile(name, _UINT64, values.cast(pa.decimal128(20, 0)))
    if type_ in ("tinyint", "smallint", "int", "bigint"):
        values = values.cast(pa.int64())
    if type_ in ("int", "bigint"):
        if (unit := _epoch(name, values)) is not None:
            return _with_epoch(name, values, unit)
        if copied:
            type_ = _integer_type(name, values)
    if type_ in ("float", "double") and _names_one(name) and _is_whole(values):
        return ColumnProfile(name, "bigint", values.cast(pa.int64()))
    if type_ == "double" and (times := _float_epoch(name, values)) is not None:
        return times
    if type_ in ("timestamp", "date"):
        nulls = values.null_count
        values = _within_years(values)
        return ColumnProfile(name, type_, values, far_times=values.null_count - nulls)
    return ColumnProfile(name, type_, values)


def _within_years(values: pa.Array) -> pa.Array:
    """Return times as timestamps in microseconds of UTC, dates as date32; null outside the years 1 to 9999."""
    if pa.types.is_date(values.type):
        days = values.cast(pa.date32(), safe=False).cast(pa.int32())
        first, end, plain, type_ = _FIRST_MICROS // _MICROS_PER_DAY, _END_MICROS // _MICROS_PER_DAY, days, pa.date32()
    elif values.type.unit == "ns":  # of the years 1677 to 2262
        return values.cast(pa.timestamp("us", tz="UTC"), safe=False)
    else:
        per = _MICROS[values.type.unit]
        first, end, plain = _FIRST_MICROS // per, _END_MICROS // per, values.cast(pa.int64())
        type_ = pa.timestamp("us", tz="UTC")
    is_near = pc.and_(pc.greater_equal(plain, first), pc.less(plain, end))
    near = pc.if_else(is_near, plain, None)
    return near.cast(type_) if pa.types.is_date(type_) else pc.multiply(near, per).cast(type_)


def _arrow_type(type_: pa.DataType) -> str | None:
    """Return the declared type of an Arrow type, or None where there is none."""
    if pa.types.is_decimal(type_):
        return f"decimal({type_.precision},{type_.scale})"
    for check, name in (
        (pa.types.is_string, "string"),
        (pa.types.is_large_string, "string"),
        (pa.types.is_int8, "tinyint"),
        (pa.types.is_int16, "smallint"),
        (pa.types.is_int32, "int"),
        (pa.types.is_int64, "bigint"),
        (pa.types.is_uint8, "smallint"),
        (pa.types.is_uint16, "int"),
        (pa.types.is_uint32, "bigint"),
        (pa.types.is_uint64, "bigint"),
        (pa.types.is_float32, "float"),
        (pa.types.is_float64, "double"),
        (pa.types.is_boolean, "boolean"),
        (pa.types.is_timestamp, "timestamp"),
        (pa.types.is_date, "date"),
    ):
        if check(type_):
            return name
    return None


def _names_one(name: str) -> bool:
    """Return whether a name is of ids: those of users and items among them."""
    return is_identifier(name) or is_user(name) or is_item(name)


def _is_whole(values: pa.Array) -> bool:
    """Return whether floats are integers that fit 64 bits, as pandas writes integers of which some are missing."""
    numbers = values.drop_null().to_numpy()
    return bool(len(numbers) and np.isfinite(numbers).all() and (numbers % 1 == 0).all() and abs(numbers).max() < 2**53)


def _text(name: str, values: pa.Array, marks: NumberMarks, copied: bool) -> ColumnProfile:
    """Profile a column of text. The distinct values are read, so large columns cost little."""
    distinct = pc.unique(values).drop_null()
    if not len(distinct):
        return ColumnProfile(name, "string", values)
    # Other formats of times are of landing files alone.
    is_compact = copied and is_time(name) and _all(distinct, _COMPACT_TIME)
    if is_compact and (times := find_times(values)) is not None:
        return _with_format(name, times)
    plain = marks.plain(values)
    if plain.null_count == values.null_count and (number := _number(name, plain)) is not None:
        return number
    spelled = {str(v).lower() for v in distinct.to_pylist()} if len(distinct) <= 4 else set()
    for pair in _BOOLEANS:
        if spelled == pair:
            true = max(pair - {"false", "no", "f", "n"})
            return ColumnProfile(name, "boolean", pc.equal(pc.utf8_lower(values), true))
    if _all(distinct, _TIMESTAMP):
        try:
            instants = _times(values)
        except ValueError:
            return ColumnProfile(name, "string", values)
        if _all(distinct, _DATE):
            return ColumnProfile(name, "date", instants.cast(pa.date32()))
        return ColumnProfile(name, "timestamp", instants)
    if copied and (times := find_times(values)) is not None:
        return _with_format(name, times)
    return ColumnProfile(name, "string", values, clock=find_clock(values), signed=find_signed_numbers(values, marks))


def _number(name: str, values: pa.Array) -> ColumnProfile | None:
    """Profile a column of text whose values are all plain numbers; None where they are not."""
    distinct = pc.unique(values).drop_null()
    if _any(distinct, _ZEROS):
        return None
    if _all(distinct, _INTEGER):
        try:
            numbers = values.cast(pa.int64())
        except pa.ArrowInvalid:
            return ColumnProfile(name, "string", values)
        unit = _epoch(name, numbers)
        return _with_epoch(name, numbers, unit) if unit else ColumnProfile(name, _integer_type(name, numbers), numbers)
    if not _all(distinct, _NUMBER):
        return None
    floats = values.cast(pa.float64())
    if _names_one(name) and _all(distinct, _WHOLE_NUMBER):
        return ColumnProfile(name, "bigint", floats.cast(pa.int64()))
    return _float_epoch(name, floats) or ColumnProfile(name, "double", floats)


def _float_epoch(name: str, floats: pa.Array) -> ColumnProfile | None:
    """Profile doubles that are times by their name and size, such as 1.7e12; None where they are none."""
    is_finite = pc.all(pc.is_finite(floats)).as_py()
    if not (is_time(name) and is_finite) or (unit := _unit_of(floats, _EPOCH)) is None:
        return None
    micros = pc.round(pc.multiply(floats, 1e6 / _PER_SECOND[unit])).cast(pa.int64())
    return ColumnProfile(name, "timestamp", micros.cast(pa.timestamp("us", tz="UTC")), unit)


def _with_format(name: str, times: SpelledTimes) -> ColumnProfile:
    type_ = "date" if pa.types.is_date(times.values.type) else "timestamp"
    return ColumnProfile(
        name, type_, times.values, time_format=times.format, evidence=times.evidence, is_ambiguous=times.is_ambiguous
    )


def _all(values: pa.Array, pattern: str) -> bool:
    return bool(pc.all(pc.match_substring_regex(values, pattern)).as_py())


def _any(values: pa.Array, pattern: str) -> bool:
    return bool(pc.any(pc.match_substring_regex(values, pattern)).as_py())


def _times(values: pa.Array) -> pa.Array:
    """Instants of ISO 8601 text; without an offset UTC. Raises ValueError."""
    coded = values.dictionary_encode()
    instants = [_instant(str(v)) for v in coded.dictionary.to_pylist()]
    return pa.array(instants, pa.timestamp("us", tz="UTC")).take(coded.indices)


def _instant(text: str) -> datetime:
    # Python knows no blank before an offset.
    instant = datetime.fromisoformat(re.sub(r" (?=[Z+-])", "", text) if len(text) > 10 else text)
    return instant.replace(tzinfo=UTC) if instant.tzinfo is None else instant


def _integer_type(name: str, values: pa.Array) -> str:
    """int only where it surely stays so: ids grow."""
    bounds = pc.min_max(values).as_py()
    most = max(abs(bounds["min"] or 0), abs(bounds["max"] or 0))
    return "bigint" if _names_one(name) or most > _INT32 // 100 else "int"


def _epoch(name: str, values: pa.Array) -> EpochUnit | None:
    """Return the unit of integers that are times, judged by name and by size, or None."""
    if not is_time(name) and not is_numbered(name):
        return None
    return _unit_of(values, _EPOCH if is_time(name) else _NAMELESS_EPOCH)


def _unit_of(values: pa.Array, seconds: tuple[int, int]) -> EpochUnit | None:
    """Return the unit in which all numbers are within some seconds since 1970; None where there is none."""
    (low, high), bounds = seconds, pc.min_max(values).as_py()
    if bounds["min"] is None:
        return None
    units = (unit for unit, n in _PER_SECOND.items() if n * low <= bounds["min"] and bounds["max"] <= n * high)
    return next(units, None)


def _with_epoch(name: str, values: pa.Array, unit: EpochUnit) -> ColumnProfile:
    return ColumnProfile(name, "timestamp", since_1970(values, unit), unit)


def text_facts(column: ColumnProfile) -> tuple[float, float]:
    """(mean characters, mean words) of the distinct values of a text column."""
    texts: Sequence[str] = [str(v) for v in column.uniques.slice(0, 5_000).to_pylist()]
    if not texts:
        return 0.0, 0.0
    return sum(map(len, texts)) / len(texts), sum(len(t.split()) for t in texts) / len(texts)
