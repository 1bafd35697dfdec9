"""Adapters: how the lines of each format become the text of the declared columns. Chosen by `source.format`.

An adapter returns frames with the columns of `Reading.lines` and
  `_broken` string     why the line as a whole cannot be read; null where it can
  `_skip` boolean      a header or an empty line: no row at all
  `_t<i>` string       declared column i as the file spells it; null where it is null or not there
  `_v<i>`              the same ready to be cast, where that differs: a string, or array<string> for list columns
  `_present<k>` bigint bit b: the row has a key (a field) for declared column 60 k + b, be it null
  `_extra` map         undeclared columns of the row, name to text; null where there are none
"""

from __future__ import annotations

import csv
import gzip
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from headrace.errors import UserError
from headrace.lake.landing import LandingFile
from headrace.lake.lines import Reading

#: Declared columns a bit mask.
MASK_BITS = 60
_EXTRA = "map<string,string>"
_JSON_ENDINGS = (".json", ".jsonl", ".ndjson")
_CSV_ENDINGS = (".csv", ".tsv", ".txt")
#: Lists in one CSV field.
LIST_SEPARATOR = "|"

NOT_UTF8 = "not UTF-8 text"
NOT_JSON = "not a JSON object"
WRONG_FIELDS = "wrong number of fields"
#: Reasons that are about a line as a whole.
BROKEN = frozenset({NOT_UTF8, NOT_JSON, WRONG_FIELDS})


@dataclass(frozen=True)
class Adapter:
    """One format."""

    #: Lines to frames as the module describes them.
    parse: Callable[[Reading], list[DataFrame]]
    #: What needs typed rows: splits, drawn negatives. Gets and gives rows as headrace.lake.cast makes them.
    finish: Callable[[DataFrame, Reading], DataFrame] | None = None
    #: Columns that the spec must declare.
    columns: tuple[str, ...] = ()


def adapter(name: str) -> Adapter:
    """The adapter of `source.format`."""
    from headrace.lake import sources_fixed, sources_movielens

    adapters: Mapping[str, Adapter] = {
        "clicks": Adapter(clicks),
        "csv": Adapter(csv_files),
        "jsonl": Adapter(jsonl_files),
        "criteo": Adapter(sources_fixed.criteo),
        "talkingdata": Adapter(sources_fixed.talkingdata),
        "movielens": Adapter(sources_movielens.ratings, sources_movielens.leave_last_out, sources_movielens.COLUMNS),
        "movielens_ncf": Adapter(sources_movielens.ncf, sources_movielens.hold_one_out, sources_movielens.COLUMNS),
    }
    return adapters[name]


def clicks(reading: Reading) -> list[DataFrame]:
    """JSON lines (`.json.gz`) and CSV with a header (`.csv.gz`) side by side.

    Raises:
        UserError: a file with another ending.
    """
    json_files, csv_files_ = [], []
    for i, (_, file) in enumerate(reading.files):
        stem = file.name.removesuffix(".gz")
        if stem.endswith(_JSON_ENDINGS):
            json_files.append(i)
        elif stem.endswith(_CSV_ENDINGS):
            csv_files_.append(i)
        else:
            raise UserError(
                f"landing file {file.name}: its name ends in neither .json nor .csv (with or without .gz), so its "
                f"format is unknown; rename it, or narrow source.path"
            )
    frames = [json_lines(reading, json_files)] if json_files else []
    return frames + delimited(reading, csv_files_, separator=",", header=True)


def jsonl_files(reading: Reading) -> list[DataFrame]:
    """JSON lines: one object a line."""
    return [json_lines(reading, range(len(reading.files)))]


def csv_files(reading: Reading) -> list[DataFrame]:
    """Delimited text by `source.separator`, `source.header` and `source.null_value`; lists joined by `|`."""
    source = reading.source
    return delimited(
        reading,
        range(len(reading.files)),
        separator=source.separator,
        header=source.header,
        null_value=source.null_value,
    )


def json_lines(reading: Reading, files: Sequence[int]) -> DataFrame:
    """One JSON object a line. Nested values of undeclared columns are kept as JSON text."""
    lines = reading.lines(files)
    # As the one element of a list: so that text after the object, or a second one, is an error and not ignored.
    parsed = F.from_json(F.concat(F.lit("["), F.col("_text"), F.lit("]")), f"array<{_EXTRA}>")
    whole = F.rtrim("_text").endswith("}")
    lines = lines.select("*", F.when(whole & (F.length("_text") > 0), parsed).alias("_json"))
    lines = lines.select(*_without(lines, "_json"), F.when(F.size("_json") == 1, F.col("_json")[0]).alias("_map"))
    columns = reading.table.columns
    lines = lines.select("*", *(F.try_element_at("_map", F.lit(c.name)).alias(f"_t{i}") for i, c in enumerate(columns)))
    has = [F.col(f"_t{i}").isNotNull() | F.map_contains_key("_map", c.name) for i, c in enumerate(columns)]
    declared = [c.name for c in columns]
    lists = [
        F.from_json(F.col(f"_t{i}"), "array<string>").alias(f"_v{i}")
        for i, c in enumerate(columns)
        if c.type.startswith("array")
    ]
    lines = lines.select("*", *_masks(has), *lists)
    present = sum((F.bit_count(name) for name in mask_names(len(columns))), start=F.lit(0))
    extra = F.map_filter("_map", lambda key, _: ~key.isin(declared))
    frame = lines.select(
        *_without(lines, "_map"),
        # Looked for only where there is more than what is declared.
        F.when(F.size("_map") > present, extra).alias("_extra"),
        F.col("_map").isNull().alias("_unread"),
    )
    return _judged(frame, F.when(F.col("_unread"), F.lit(NOT_JSON))).drop("_unread")


def delimited(
    reading: Reading,
    files: Sequence[int],
    *,
    separator: str,
    header: bool,
    null_value: str | None = None,
    fix: Mapping[str, Callable[[Column], Column]] | None = None,
) -> list[DataFrame]:
    """Delimited text, RFC 4180 quotes, one row a line (no line breaks within quotes); nothing between two separators
    is null. One frame for each different header.

    Args:
        reading: what is read.
        files: numbers of the files.
        separator: one character.
        header: whether the first line of each file names the columns; else they are the declared ones, in order.
        null_value: another text that means null.
        fix: by column: what makes its text castable.

    Raises:
        UserError: a header names a column twice, or not at all.
    """
    by_header: dict[tuple[str, ...], list[int]] = {}
    declared = tuple(c.name for c in reading.table.columns)
    for i in files:
        names = header_of(reading.files[i][1], separator) if header else declared
        by_header.setdefault(names, []).append(i)
    return [
        _delimited(reading, chosen, names, separator, header, null_value, fix or {})
        for names, chosen in by_header.items()
    ]


def _delimited(
    reading: Reading,
    files: Sequence[int],
    names: tuple[str, ...],
    separator: str,
    header: bool,
    null_value: str | None,
    fix: Mapping[str, Callable[[Column], Column]],
) -> DataFrame:
    columns = reading.table.columns
    lines = reading.lines(files)
    schema = ", ".join([*(f"f{k} string" for k in range(len(names))), "_bad string"])
    options = {"sep": separator, "escape": '"', "columnNameOfCorruptRecord": "_bad", "mode": "PERMISSIVE"}
    lines = lines.select("*", F.from_csv("_text", schema, options).alias("_row"))

    def text(k: int) -> Column:
        field = F.col(f"_row.f{k}")
        return field if null_value is None else F.when(field != null_value, field)

    place = {name: k for k, name in enumerate(names)}
    none = F.lit(None).cast("string")
    undeclared = [name for name in names if name not in {c.name for c in columns}]
    extra = (
        F.create_map(*(part for n in undeclared for part in (F.lit(n), text(place[n]))))
        if undeclared
        else F.lit(None).cast(_EXTRA)
    )
    lines = lines.select(
        *_without(lines, "_row"),
        *((text(place[c.name]) if c.name in place else none).alias(f"_t{i}") for i, c in enumerate(columns)),
        *_masks([F.lit(c.name in place) for c in columns]),
        extra.alias("_extra"),
        F.col("_row._bad").isNotNull().alias("_unread"),
    )
    values = []
    for i, c in enumerate(columns):
        if c.type.startswith("array"):
            values.append(F.split(f"_t{i}", re.escape(LIST_SEPARATOR)).alias(f"_v{i}"))
        elif c.name in fix:
            values.append(fix[c.name](F.col(f"_t{i}")).alias(f"_v{i}"))
    first = F.lit(header) & (F.col("_line") == 1)
    frame = lines.select("*", *values)
    return _judged(frame, F.when(F.col("_unread"), F.lit(WRONG_FIELDS)), first).drop("_unread")


def header_of(file: LandingFile, separator: str) -> tuple[str, ...]:
    """The column names in a file's first line; () for an empty file.

    Raises:
        UserError: it cannot be read, or names a column twice or with nothing.
    """
    opener = gzip.open if file.path.suffix == ".gz" else open
    try:
        with opener(file.path, "rt", encoding="utf-8-sig", newline="") as f:
            line = f.readline().rstrip("\r\n")
    except (EOFError, gzip.BadGzipFile) as e:
        raise UserError(f"landing file {file.name} is damaged: {e}; deliver it again") from None
    except OSError as e:
        raise UserError(f"landing file {file.name} cannot be read: {e.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"landing file {file.name}: its first line, the header, is not UTF-8 text") from None
    names = tuple(next(csv.reader([line], delimiter=separator), ()))
    for name in names:
        if not name:
            raise UserError(f"landing file {file.name}: its header has a column without a name: {line!r}")
        if names.count(name) > 1:
            raise UserError(f"landing file {file.name}: its header names column '{name}' twice")
    return names


def fields(
    reading: Reading,
    frame: DataFrame,
    texts: Mapping[str, Column],
    broken: Column,
    values: Mapping[str, Column] | None = None,
) -> DataFrame:
    """A frame of an adapter with fixed fields, by name. Declared columns that the format lacks are missing ones."""
    columns = reading.table.columns
    none = F.lit(None).cast("string")
    made = [texts.get(c.name, none).alias(f"_t{i}") for i, c in enumerate(columns)]
    made += [values[c.name].alias(f"_v{i}") for i, c in enumerate(columns) if values and c.name in values]
    masks = _masks([F.lit(c.name in texts) for c in columns])
    kept = [c for c in frame.columns if not c.startswith("_f_")]
    out = frame.select(*kept, *made, *masks, F.lit(None).cast(_EXTRA).alias("_extra"), broken.alias("_unread"))
    return _judged(out, F.when(F.col("_unread"), F.lit(WRONG_FIELDS))).drop("_unread")


def mask_names(columns: int) -> list[str]:
    """The `_present<k>` columns for that many declared ones."""
    return [f"_present{k}" for k in range(-(-columns // MASK_BITS))]


def _masks(has: Sequence[Column]) -> list[Column]:
    masks = []
    for k, name in enumerate(mask_names(len(has))):
        mask = F.lit(0).cast("bigint")
        for b, one in enumerate(has[k * MASK_BITS : (k + 1) * MASK_BITS]):
            mask = mask.bitwiseOR(F.when(one, F.lit(1 << b).cast("bigint")).otherwise(F.lit(0).cast("bigint")))
        masks.append(mask.alias(name))
    return masks


def _judged(frame: DataFrame, broken: Column, header: Column | None = None) -> DataFrame:
    """Add `_broken` and `_skip`."""
    empty = F.trim("_text") == ""
    skip = empty if header is None else empty | header
    return frame.select(
        "*",
        skip.alias("_skip"),
        F.when(skip, None).when(~F.is_valid_utf8("_text"), F.lit(NOT_UTF8)).otherwise(broken).alias("_broken"),
    )


def _without(frame: DataFrame, *names: str) -> list[str]:
    return [c for c in frame.columns if c not in names]
