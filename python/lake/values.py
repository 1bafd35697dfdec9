"""A declared column's values: from the text of a landing file, or from a table as another writer typed it.

A value that is there but cannot be read as its declared type is *unread*, and makes its row bad; nothing is turned into
null silently, and nothing raises (Spark 4's ANSI casts would). What counts as readable text is narrower than Spark's
own cast, which takes `12d` for a double, `2026` for a timestamp, and `12:30` for a time of today:

  tinyint .. bigint  an optional sign and decimal digits, within the type's range; a fraction of zeros may stand behind
                   them (`100054.0`), and scientific notation of a whole number below 2^53 is one (`1.2E7`)
  decimal(p,s)     decimal notation that the type holds exactly: 1.500 is a decimal(3,1), 1.55 is none
  float, double    decimal or scientific notation, finite
  boolean          true, false, t, f, yes, no, y, n, 1, 0
  timestamp        ISO 8601 date, or date and time (`T` or a blank between), fraction (behind a dot or a comma) and
                   offset (or Z, UTC, GMT) optional; without an offset in `source.timezone`. What is beyond microseconds
                   is cut. A column of `source.timestamps`: a number since 1970, as decimal or scientific notation, of
                   the years 1 to 9999; or text by its format (headrace.lake.landing.spellings)
  timestamp_ntz    the same without an offset: the local time as it is written
  date             yyyy-MM-dd
  binary           Base64 (RFC 4648); its value is the SHA-256 of the bytes, 64 hexadecimal digits
  array<...>       each element by its type; null elements stay

A table's column is read as the declared type where no value can change on the way (an int as a bigint), or where those
that would are told from the others (a bigint as an int, a decimal as one of fewer digits): see `extract`.

Spark's names have no case, so fields whose names differ in case alone, `Price` and `price`, are `Price` and `price_2`
in a frame. The metadata of the second field say what it is called where it is stored.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal

from pyspark.sql import Column
from pyspark.sql import functions as F
from pyspark.sql import types as T

from headrace.config import AnySource
from headrace.config.schema import (
    KEY_FIELD,
    Each,
    Element,
    EpochUnit,
    TableColumn,
    decimal_digits,
    is_of_list,
    match_names,
    quoted_names,
    unique_names,
)
from headrace.errors import UserError
from headrace.lake.faults import AMBIGUOUS

_STORED_NAME = "headrace.stored_name"


def stored_name(field: T.StructField) -> str:
    """Return what a field of a frame is called where it is stored."""
    return str((field.metadata or {}).get(_STORED_NAME, field.name))


def with_unique_names(type_: T.DataType) -> T.DataType:
    """Return a type whose structs have no two fields that differ in case alone; `stored_name` says what they were."""
    if isinstance(type_, T.ArrayType):
        return T.ArrayType(with_unique_names(type_.elementType), type_.containsNull)
    if isinstance(type_, T.MapType):
        return T.MapType(type_.keyType, with_unique_names(type_.valueType), type_.valueContainsNull)
    if not isinstance(type_, T.StructType):
        return type_
    fields = list[T.StructField]()
    for field, name in zip(type_.fields, unique_names(type_.names), strict=True):
        metadata = field.metadata if name == field.name else {**(field.metadata or {}), _STORED_NAME: field.name}
        fields.append(T.StructField(name, with_unique_names(field.dataType), field.nullable, metadata))
    return T.StructType(fields)


def has_twins(type_: T.DataType) -> bool:
    """Return whether a type, or one that it has within, has fields that differ in case alone."""
    if isinstance(type_, T.MapType):
        return has_twins(type_.valueType)
    if isinstance(type_, T.ArrayType):
        return has_twins(type_.elementType)
    if not isinstance(type_, T.StructType):
        return False
    return unique_names(type_.names) != type_.names or any(has_twins(f.dataType) for f in type_.fields)


_TIMESTAMP = r"^\d{4}-\d{2}-\d{2}([T ]\d{2}:\d{2}(:\d{2}([.,]\d{1,9})?)?( ?(Z|UTC|GMT|[+-]\d{2}(:?\d{2})?))?)?$"
_MINUTES_AND_OFFSET = r"^(.{10}[T ]\d{2}:\d{2})( ?[Z+-])"
_NO_OFFSET = r"^\d{4}-\d{2}-\d{2}([T ]\d{2}:\d{2}(:\d{2}([.,]\d{1,9})?)?)?$"
#: A whole number, maybe with a fraction of zeros or in scientific notation.
_WHOLE_NUMBER = r"^[+-]?\d+([.]\d{0,18})?([eE][+]?\d{1,2})?$"
_EPOCH = r"^[+-]?\d+([.]\d+)?([eE][+]?\d{1,2})?$"
#: Microseconds since 1970 at the beginning of year 1 and the end of year 9999.
_FIRST_MICROS, _LAST_MICROS = -62_135_596_800_000_000, 253_402_300_799_999_999
#: The first and the last value of a type of times: of the years 1 to 9999.
_MOMENTS = {
    "timestamp": ("0001-01-01 00:00:00", "9999-12-31 23:59:59.999999"),
    "timestamp_ntz": ("0001-01-01 00:00:00", "9999-12-31 23:59:59.999999"),
    "date": ("0001-01-01", "9999-12-31"),
}
_DATE = r"^\d{4}-\d{2}-\d{2}$"
#: Java reads `1d`, `1f`, `0x1p3` and `NaN`.
_NO_NUMBER = "[A-DF-Za-df-z]"
#: Below it every whole number is a double.
_EXACT = 1 << 53
#: Spark's type of undeclared columns: name to text.
EXTRA_TYPE = "map<string,string>"
_INTEGERS = ("tinyint", "smallint", "int", "bigint")
#: Types whose cast to text has one spelling a value.
_SPELLED_ONCE = (*_INTEGERS, "boolean", "date", "timestamp", "timestamp_ntz")


class AmbiguousColumn(UserError):
    """A declared name that two columns or fields of a table may mean."""


def from_text(text: Column, type_: str, source: AnySource, unit: EpochUnit | None = None) -> Column:
    """Convert text to a scalar of a declared type; null where it is none. `unit`: of `source.timestamps`."""
    if unit is not None:
        return _since_1970(F.when(text.rlike(_EPOCH), text), unit)
    if type_ == "string":
        return text
    if type_ in ("float", "double"):
        number = F.when(~text.rlike(_NO_NUMBER), text.try_cast(type_))
        # NaN is above infinity in Spark's order.
        return F.when(F.abs(number) < F.lit(float("inf")).cast(type_), number)
    if type_ == "date":
        return F.when(text.rlike(_DATE), text.try_cast(type_))
    if type_ == "timestamp":
        return _timestamp(text, source.timezone)
    if type_ == "timestamp_ntz":
        return F.when(text.rlike(_NO_OFFSET), F.translate(text, ",", ".").try_cast(type_))
    if type_ == "binary":
        return hashed(F.try_to_binary(text, F.lit("base64")))
    if digits := decimal_digits(type_):
        # Nothing but zeros may stand behind the digits that it has room for: Spark's cast would round.
        exact = rf"^[+-]?\d*([.]\d{{0,{digits[1]}}}0*)?$"
        return F.when(text.rlike(exact), text.try_cast(type_))
    if type_ in _INTEGERS:
        number = F.when(text.rlike(_WHOLE_NUMBER), text).try_cast("decimal(38,18)")
        # Scientific notation may be that of a double, to which JSON's numbers were rounded.
        number = F.when(~text.rlike("[eE]") | (F.abs(number) < _EXACT), number)
        return F.coalesce(text.try_cast(type_), F.when(number == F.floor(number), F.floor(number)).try_cast(type_))
    return text.try_cast(type_)


def list_from_texts(texts: Column, type_: str, source: AnySource) -> Column:
    """Convert array<string> to a declared list; elements that cannot be read are null."""
    element = type_[len("array<") : -1]
    return texts if element == "string" else F.transform(texts, lambda e: from_text(e, element, source))


def hashed(data: Column) -> Column:
    """Return the text that stands for binary: its SHA-256, 64 lower-case hexadecimal digits."""
    return F.sha2(data, 256)


@dataclass(frozen=True)
class Extracted:
    """A declared column of a table's rows."""

    #: Of `TableColumn.stored_type`; null where there is nothing, and where `unread`.
    value: Column
    #: Boolean, never null: there is a value that is none of the declared type.
    unread: Column
    #: String: the value as a reason shows it.
    text: Column
    #: Whether values may be unread although they are stored as declared.
    checked: bool = False


def extract(
    column: TableColumn,
    schema: T.StructType,
    source: AnySource,
    place: str = "the table",
    declared: Iterable[TableColumn] = (),
) -> Extracted | None:
    """Return a declared column as expressions over the columns of a table (Delta, Parquet, Iceberg, ...).

    Its `path` goes through structs, maps with text keys, JSON objects in text, and lists of them. What is there is read

    - as an integer: from another integer, a boolean (0 and 1), a float, double or decimal without fraction (NaN is
      null); what does not fit is unread;
    - as a decimal: from integers and decimals, exactly; as float or double: from any number, rounded to nearest;
    - as text: from integers, booleans, decimals (plain notation), dates and timestamps (UTC);
    - as a timestamp: from a date or a timestamp without zone, both in `source.timezone`; from numbers by
      `source.timestamps`. As timestamp_ntz: from a timestamp, in `source.timezone`. As a date: from a date;
    - as binary (SHA-256): from binary; as a list: from a list, element by element;
    - as any scalar from text, as a landing file's;
    - as anything from a column that has nothing but nulls (Spark's type void).

    Times and dates beyond the years 1 to 9999 are unread: no reader in Python has a value for them.

    Args:
        column: as declared.
        schema: of the table.
        source: timezone and timestamps.
        place: where the column is, for messages.
        declared: all columns: one that another of them names exactly does not stand for this one.

    Returns:
        None where the table has no such column or field.

    Raises:
        UserError: the table has it as a type that cannot be read as declared, or the path leads through one that has no
            fields.
    """
    at_path = _at_path(column, schema, [c.steps[0] for c in declared])
    if at_path is None:
        return None
    value, type_ = at_path
    unit = source.epoch_unit(column.name)
    if isinstance(type_, T.NullType):
        none = F.lit(None).cast(column.stored_type)
        return Extracted(none, F.lit(False), F.lit(None).cast("string"))
    if column.type.startswith("array<"):
        if not isinstance(type_, T.ArrayType):
            raise _unreadable(column, type_, place)
        element, stored = column.type[len("array<") : -1], type_.elementType
        if _same(stored, element):
            read = value
        else:
            # Raises here, and not in a lambda.
            _convert(F.lit(None).cast(stored), stored, element, source, None, column, place)
            read = F.transform(value, lambda e: _convert(e, stored, element, source, None, column, place))
        lost = F.exists(F.arrays_zip(value.alias("a"), read.alias("b")), lambda e: e["a"].isNotNull() & e["b"].isNull())
        unread = F.coalesce(lost, F.lit(False))
        return Extracted(F.when(~unread, read), unread, F.to_json(value))
    if isinstance(type_, (T.FloatType, T.DoubleType)) and column.type in _INTEGERS:
        value = F.when(~F.isnan(value), value)
    read = _convert(value, type_, column.type, source, unit, column, place)
    text = F.base64(value) if isinstance(type_, T.BinaryType) else value.cast("string")
    checked = column.type in _MOMENTS
    if checked:
        first, last = (F.lit(moment).cast(column.type) for moment in _MOMENTS[column.type])
        read = F.when(read.between(first, last), read)
    return Extracted(read, value.isNotNull() & read.isNull(), text, checked)


def parse_object(text: Column) -> Column:
    """Return the JSON object in a text: array<map<string,string>>, for `only_object`; null where there is no object."""
    # As the one element of a list: so that text after the object, or a second one, is an error and not ignored.
    parsed = F.from_json(F.concat(F.lit("["), text, F.lit("]")), f"array<{EXTRA_TYPE}>")
    return F.when(F.rtrim(text).endswith("}") & (F.length(text) > 0), parsed)


def only_object(parsed: Column) -> Column:
    """Return a parsed object's members, nested ones as JSON text: map<string,string>; null where the text was none.

    `parsed` had better be a column: it is looked at twice.
    """
    return F.when(F.size(parsed) == 1, parsed[0])


def declared_members(members: Column, declared: Iterable[str]) -> Column:
    """Return members of a JSON object with declared ones under their declared names: map<string,string>.

    A member that differs from a declared name in case alone stands for it where no member has the very name, as
    headrace.config.schema.match_names says. Objects of which `ambiguous_member` says something stay as they are.

    Args:
        members: map<string,string>; had better be a column, as it is looked at several times.
        declared: names of members.
    """
    names = _declared_names(members, list(declared))
    renamed = F.map_from_arrays(names, F.map_values(members))
    return (
        F.when(~F.coalesce(_has_variants(members, list(declared)), F.lit(False)), members)
        .when(F.size(F.array_distinct(names)) == F.size(names), renamed)
        .otherwise(members)
    )


def ambiguous_member(members: Column, declared: Iterable[str]) -> Column:
    """Return why `declared_members` cannot tell members of a JSON object from each other: string; null where it can."""
    requested = list(declared)
    names = _declared_names(members, requested)
    twice = F.filter(F.array(*map(F.lit, requested)), lambda w: F.size(F.filter(names, lambda name: name == w)) > 1)
    text = F.concat(F.coalesce(F.get(twice, F.lit(0)), F.lit("a field")), F.lit(AMBIGUOUS))
    is_ambiguous = _has_variants(members, requested) & (F.size(F.array_distinct(names)) < F.size(names))
    return F.when(is_ambiguous, text)


def _has_variants(members: Column, declared: list[str]) -> Column:
    """Return whether a member differs from a declared name in case alone."""
    lower = list(dict.fromkeys(name.lower() for name in declared))
    return F.exists(F.map_keys(members), lambda key: ~key.isin(declared) & F.lower(key).isin(lower))


def _declared_names(members: Column, declared: list[str]) -> Column:
    by_lower = {name.lower(): name for name in reversed(declared)}
    named = F.create_map(*(F.lit(x) for pair in by_lower.items() for x in pair))

    def name_of(key: Column) -> Column:
        name = F.try_element_at(named, F.lower(key))
        is_variant = ~key.isin(declared) & name.isNotNull() & ~F.map_contains_key(members, name)
        return F.when(is_variant, name).otherwise(key)

    return F.transform(F.map_keys(members), name_of)


def _at_path(column: TableColumn, schema: T.StructType, declared: Iterable[str]) -> tuple[Column, T.DataType] | None:
    """Return the value that a column's path leads to, and its type in the table; None where there is none."""
    field = _field(schema, column.steps[0], declared)
    return None if field is None else _inside(F.col(quoted_names([field.name])[0]), field.dataType, column, 1)


def _inside(value: Column, type_: T.DataType, column: TableColumn, done: int) -> tuple[Column, T.DataType] | None:
    """Return the same of a value that `done` steps of the path have led to."""
    if done == len(column.steps):
        return value, type_
    step = column.steps[done]
    if isinstance(type_, T.ArrayType):
        return _inside_list(value, type_.elementType, column, done)
    if not is_of_list(step):
        if isinstance(type_, T.StructType):
            field = _field(type_, step)
            return None if field is None else _inside(value.getField(field.name), field.dataType, column, done + 1)
        if isinstance(type_, T.MapType) and isinstance(type_.keyType, T.StringType):
            return _inside(F.try_element_at(value, F.lit(str(step))), type_.valueType, column, done + 1)
        if isinstance(type_, T.StringType):
            members = declared_members(only_object(parse_object(value)), [str(step)])
            return _inside(F.try_element_at(members, F.lit(str(step))), type_, column, done + 1)
    if isinstance(type_, T.NullType):
        return F.lit(None), type_
    expected = (
        "no list" if is_of_list(step) else "no struct, no map with text keys, no JSON text, no list of such records"
    )
    raise UserError(
        f"table.columns: '{column.name}': path {column.path} leads through '{'.'.join(column.steps[:done])}', which is "
        f"{type_.simpleString()}: {expected}"
    )


def _inside_list(
    value: Column, element: T.DataType, column: TableColumn, done: int
) -> tuple[Column, T.DataType] | None:
    step = column.steps[done]
    if isinstance(step, Element):
        return _inside(F.get(value, F.lit(int(step))), element, column, done + 1)
    if isinstance(step, Each):
        # The type of what is found, which a lambda does not tell.
        target = _inside(F.lit(None), element, column, done + 1)
        if target is None:
            return None
        elements = F.transform(value, lambda e: _inside(e, element, column, done + 1)[0])  # type: ignore[index]
        if any(isinstance(later, Each) for later in column.steps[done + 1 :]):
            # Of a record without an inner list there is nothing; Spark would make nothing of all the others, too.
            return F.flatten(F.filter(elements, lambda inner: inner.isNotNull())), target[1]
        return elements, T.ArrayType(target[1])
    key = _field(element, KEY_FIELD) if isinstance(element, T.StructType) else None
    if key is None or not isinstance(key.dataType, T.StringType):
        raise UserError(
            f"table.columns: '{column.name}': path {column.path} leads through '{'.'.join(column.steps[:done])}', a "
            f"list whose records have no text field '{KEY_FIELD}': write [] for all elements of a list, [0] for one"
        )
    first = F.get(F.filter(value, lambda e: e.getField(key.name) == F.lit(str(step))), F.lit(0))
    return _inside(first, element, column, done + 1)


def _field(struct: T.StructType, name: str, declared: Iterable[str] = ()) -> T.StructField | None:
    """Return the field of that name, else the only one that differs in case alone and that nobody else declares."""
    present = [stored_name(f) for f in struct.fields]
    try:
        matches = match_names([name, *(column for column in declared if column in present)], present)
    except ValueError as e:
        raise AmbiguousColumn(f"the table has the columns or fields {e}") from None
    return next((f for f in struct.fields if stored_name(f) == matches.get(name)), None)


def _convert(
    x: Column,
    stored: T.DataType,
    declared: str,
    source: AnySource,
    unit: EpochUnit | None,
    column: TableColumn,
    place: str,
) -> Column:
    """Convert a scalar to the declared type; null where it cannot be."""
    name = stored.simpleString()
    if isinstance(stored, T.NullType):
        return x.cast(declared)
    if isinstance(stored, T.StringType):
        return from_text(x, declared, source, unit)
    if unit is not None and (name in _INTEGERS or isinstance(stored, (T.DecimalType, T.FloatType, T.DoubleType))):
        return _since_1970(x, unit)
    if declared == "binary":
        if name == "binary":
            return hashed(x)
    elif name == declared:
        return x
    elif declared in _INTEGERS:
        if name in (*_INTEGERS, "boolean"):
            return x.try_cast(declared)
        if name in ("float", "double"):
            integer, number = x.try_cast(declared), x.cast("double")
            # Spark takes 2^63 for the greatest bigint, which is one less.
            return F.when((integer.cast("double") == number) & (number < F.lit(2.0**63)), integer)
        if isinstance(stored, T.DecimalType):
            integer = x.try_cast(declared)
            return F.when(integer == x, integer)
    elif declared in ("float", "double"):
        if name in _INTEGERS or isinstance(stored, (T.DecimalType, T.FloatType, T.DoubleType)):
            return x.try_cast(declared)
    elif decimal_digits(declared):
        if name in _INTEGERS:
            return x.try_cast(declared)
        if isinstance(stored, T.DecimalType):
            read = x.try_cast(declared)
            return F.when(read == x, read)
    elif declared == "string":
        if name in _SPELLED_ONCE or isinstance(stored, T.DecimalType):
            return x.cast("string")
    elif declared == "timestamp":
        if name in ("timestamp_ntz", "date"):
            return _to_utc(x.cast("timestamp"), source.timezone)
    elif declared == "timestamp_ntz" and name == "timestamp":
        local = x if source.timezone == "UTC" else F.from_utc_timestamp(x, F.lit(source.timezone))
        return local.cast("timestamp_ntz")
    raise _unreadable(column, stored, place)


def _same(stored: T.DataType, declared: str) -> bool:
    return declared != "binary" and stored.simpleString() == declared


def _unreadable(column: TableColumn, stored: T.DataType, place: str) -> UserError:
    return UserError(
        f"table.columns: '{column.name}' is {stored.simpleString()} in {place}, which cannot be read as {column.type}"
    )


def _timestamp(text: Column, timezone: str) -> Column:
    plain = F.regexp_replace(F.translate(text, ",", "."), " ?(UTC|GMT)$", "Z")
    # Spark's cast reads an offset behind seconds alone.
    plain = F.regexp_replace(plain, _MINUTES_AND_OFFSET, "$1:00$2")
    value = F.when(text.rlike(_TIMESTAMP), plain.try_cast("timestamp"))
    if timezone == "UTC":
        return value
    # The session's time zone is UTC: what has no offset was read as UTC.
    return F.when(text.rlike(_NO_OFFSET), _to_utc(value, timezone)).otherwise(value)


def _to_utc(local: Column, timezone: str) -> Column:
    """Return a local time that was read as UTC, as the instant that it is in the time zone."""
    return local if timezone == "UTC" else F.to_utc_timestamp(local, F.lit(timezone))


def _since_1970(x: Column, unit: EpochUnit) -> Column:
    if unit == "epoch_seconds":
        micros = (x.try_cast("decimal(24,6)") * F.lit(1_000_000)).try_cast("bigint")
    elif unit == "epoch_milliseconds":
        micros = (x.try_cast("decimal(24,3)") * F.lit(1_000)).try_cast("bigint")
    elif unit == "epoch_microseconds":
        micros = F.floor(x.try_cast("decimal(24,3)")).try_cast("bigint")
    else:  # what is beyond microseconds is cut
        micros = F.floor(x.try_cast("decimal(31,3)") / F.lit(Decimal(1_000))).try_cast("bigint")
    return F.when(micros.between(_FIRST_MICROS, _LAST_MICROS), F.timestamp_micros(micros))
