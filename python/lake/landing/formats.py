"""Shipped formats of landing files: delimited text, JSON lines, and the click logs of `headrace generate`.

Each is a `reader.LandingReader`, and has a `FileFormat` with a line of `FILE_FORMATS` in `headrace.config.formats`. A
format of another package needs neither: docs/plugins.md.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import BinaryIO

import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from headrace.config import LandingSource, Table
from headrace.config.schema import match_names
from headrace.errors import UserError
from headrace.lake.faults import NOT_JSON, WRONG_FIELDS, half_pair
from headrace.lake.landing.compression import COMPRESSIONS, DamagedError, open_plain, without_ending
from headrace.lake.landing.delimited import DelimitedForm, QuotedFields, QuotesTask
from headrace.lake.landing.files import LandingFile
from headrace.lake.landing.frame import (
    NestedTexts,
    columns_except,
    mask_names,
    presence_masks,
    schema_of,
    with_line_faults,
)
from headrace.lake.landing.json_paths import ListPathsTask, SurrogatesTask
from headrace.lake.landing.reader import FileRefused, LandingBatch, LandingReader
from headrace.lake.landing.text_lines import lines_of, whole_records
from headrace.lake.values import EXTRA_TYPE, ambiguous_member, declared_members, only_object, parse_object
from headrace.storage import StoreError

#: Bytes of a header that are read. Its names may have fewer (csv.field_size_limit).
_HEADER_BYTES = 1 << 20
_OLD_MAC = "its lines end with a carriage return alone, as on old Macs; deliver it with line feeds"
#: Bytes that are read at once to find a header that may go over several lines.
_RECORD_BLOCK = 64 << 10
#: Lists in one CSV field.
LIST_SEPARATOR = "|"
_JSON_ENDINGS = (".json", ".jsonl", ".ndjson")
_CSV_ENDINGS = (".csv", ".tsv", ".txt")


class CsvReader(LandingReader):
    """The format `csv`."""

    by_arrow = True

    def read(self, batch: LandingBatch) -> list[DataFrame]:
        """Read delimited text by the keys of `source`; lists are joined by `|`."""
        source = batch.source
        return delimited(
            batch,
            range(len(batch.files)),
            separator=source.separator,
            header=source.header,
            escape=source.escape,
            nulls=source.null_texts,
            trim=source.trim,
        )

    def form(self, batch: LandingBatch, number: int) -> DelimitedForm:
        source, file = batch.source, batch.files[number][1]
        form = DelimitedForm(
            keys_of(batch.table),
            separator_of(source),
            header=source.header,
            escape=source.escape,
            nulls=source.null_texts,
            lists=LIST_SEPARATOR,
            trim=source.trim,
            multiline=source.multiline,
        )
        if not source.header:
            return form
        return replace(form, names=declared_names(file, header_of(file, form.fields, source.multiline), form.names))


def keys_of(table: Table) -> tuple[str, ...]:
    """Return the fields of a row that the declared columns are read from, in their order."""
    return tuple(dict.fromkeys(str(c.steps[0]) for c in table.columns))


def separator_of(source: LandingSource) -> str:
    """Return what separates fields; a tab may be spelled as a backslash and `t`."""
    return "\t" if source.separator == r"\t" else source.separator


def with_header(
    batch: LandingBatch, file: LandingFile, rewrites: Mapping[str, tuple[str, str]] | None = None
) -> DelimitedForm:
    """Return the form of a comma-separated file whose header names its columns.

    Args:
        batch: the batch that the file is of.
        file: the file.
        rewrites: by column: a regular expression and what replaces it, in Arrow's spelling.

    Raises:
        UserError: a header that is refused.
    """
    multiline = batch.source.multiline
    names = declared_names(file, header_of(file, QuotedFields(","), multiline), keys_of(batch.table))
    return DelimitedForm(names, ",", header=True, lists=LIST_SEPARATOR, rewrites=rewrites or {}, multiline=multiline)


def delimited(
    batch: LandingBatch,
    files: Sequence[int],
    *,
    separator: str,
    header: bool,
    escape: str | None = None,
    nulls: Sequence[str] = (),
    trim: bool = False,
    fix: Mapping[str, Callable[[Column], Column]] | None = None,
) -> list[DataFrame]:
    """Plan delimited text with RFC 4180 quotes; nothing between two separators is null. One frame for each header.

    A row is a line; with `source.multiline` a record, which may have line breaks within quotes.

    Args:
        batch: what is read.
        files: numbers of the files.
        separator: one character.
        header: whether the first line of each file names the columns; else they are the declared ones, in order.
        escape: besides a second quote, what makes a quote a part of a quoted field.
        nulls: texts that mean null, besides the empty one.
        trim: whether blanks around a field are no part of it.
        fix: by column: what makes its text castable.

    Raises:
        FileRefused: a header names a column twice, or two that differ from a declared one in case alone.
    """
    fields = QuotedFields(separator, trim, escape)
    by_header: dict[tuple[str, ...], list[int]] = {}
    declared = tuple(dict.fromkeys(c.steps[0] for c in batch.table.columns))
    for i in files:
        file = batch.files[i][1]
        names = declared
        if header:
            names = declared_names(file, header_of(file, fields, batch.source.multiline), declared)
        by_header.setdefault(names, []).append(i)
    return [_delimited(batch, chosen, names, fields, header, nulls, fix or {}) for names, chosen in by_header.items()]


def _delimited(
    batch: LandingBatch,
    files: Sequence[int],
    names: tuple[str, ...],
    fields: QuotedFields,
    header: bool,
    nulls: Sequence[str],
    fix: Mapping[str, Callable[[Column], Column]],
) -> DataFrame:
    columns = batch.table.columns
    lines = batch.lines(files, fields if batch.source.multiline else None)
    lines = lines.mapInArrow(QuotesTask(fields), f"{schema_of(lines)}, _record string, _quotes string")
    schema = ", ".join([*(f"f{k} string" for k in range(len(names))), "_bad string"])
    options = {"sep": fields.separator, "escape": '"', "columnNameOfCorruptRecord": "_bad", "mode": "PERMISSIVE"}
    if fields.trim:
        options |= {"ignoreLeadingWhiteSpace": "true", "ignoreTrailingWhiteSpace": "true"}
    lines = lines.select("*", F.from_csv("_record", schema, options).alias("_row"))

    def text(k: int) -> Column:
        field = F.col(f"_row.f{k}")
        return F.when(~field.isin(*nulls), field) if nulls else field

    place = {name: k for k, name in enumerate(names)}
    none = F.lit(None).cast("string")
    undeclared = [name for name in names if name not in {c.steps[0] for c in columns}]
    extra = (
        F.create_map(*(part for n in undeclared for part in (F.lit(n), text(place[n]))))
        if undeclared
        else F.lit(None).cast(EXTRA_TYPE)
    )
    texts = NestedTexts(lines, columns, lambda name: text(place[name]) if name in place else none)
    inside = {i: c for i, c in enumerate(columns) if len(c.steps) > 1}
    has = [texts.has(c.steps) if i in inside else F.lit(c.steps[0] in place) for i, c in enumerate(columns)]
    lines = texts.frame.select(
        *columns_except(texts.frame, "_row", *texts.parsed),
        *(texts.shown_text(c.steps).alias(f"_t{i}") for i, c in enumerate(columns)),
        *(texts.text(c.steps).alias(f"_n{i}") for i, c in inside.items()),
        *presence_masks(has),
        extra.alias("_extra"),
        *([F.array_compact(F.array(*texts.faults)).alias("_faults")] if texts.faults else []),
        F.col("_row._bad").isNotNull().alias("_unread"),
    )
    values = []
    for i, c in enumerate(columns):
        if i in inside:
            value = F.col(f"_n{i}")
            # In JSON a list is JSON's, too.
            values.append(
                (F.from_json(value, "array<string>") if c.type.startswith("array") else value).alias(f"_v{i}")
            )
        elif c.type.startswith("array"):
            values.append(F.split(f"_t{i}", re.escape(LIST_SEPARATOR)).alias(f"_v{i}"))
        elif c.name in fix:
            values.append(fix[c.name](F.col(f"_t{i}")).alias(f"_v{i}"))
    broken = F.coalesce("_quotes", F.when(F.col("_unread"), F.lit(WRONG_FIELDS)))
    first = F.lit(header) & (F.col("_line") == 1)
    frame = lines.select(*columns_except(lines, *(f"_n{i}" for i in inside)), *values)
    return with_line_faults(frame, broken, first).drop("_unread", "_record", "_quotes")


def header_of(file: LandingFile, form: QuotedFields, multiline: bool = False) -> tuple[str, ...]:
    """Return the column names in a file's first line (with `multiline`: its first record); () for an empty file.

    A column without a name, as pandas writes for its index, is `column<k>`, k its place from 0 (DuckDB's name for it).

    Raises:
        FileRefused: its data are damaged, it is no text, no header, or names a column twice.
        UserError: the file system does not give it.
    """
    line = ""
    try:
        with open_plain(file.path, begin=True) as data:
            line = _first_record(data, form) if multiline else next(_lines(data), "")
            text = line.removeprefix("\ufeff").rstrip("\r\n")
            record = form.rfc4180(text.encode("utf-8", "surrogateescape"))
            values = form.values(record) if isinstance(record, bytes) else record
            if isinstance(record, str) or isinstance(values, str):
                raise FileRefused(file, f"landing file {file.name}: its first line is no header: {values!s}")
            if len(form.separator) == 1:
                fields = next(csv.reader([record.decode()], delimiter=form.separator), [])
            else:
                fields = [field.decode() for field in values] if record else []
    except DamagedError as e:
        raise FileRefused(file, f"landing file {file.name} is damaged: {e}; deliver it again") from None
    except StoreError:
        raise
    except OSError as e:
        raise UserError(f"landing file {file.name} cannot be read: {e.strerror or e}") from None
    except UnicodeDecodeError:
        raise FileRefused(file, f"landing file {file.name}: its first line, the header, is not UTF-8 text") from None
    except csv.Error as e:
        cause = _OLD_MAC if "\r" in line else f"its first line is no header: {e}"
        raise FileRefused(file, f"landing file {file.name}: {cause}") from None
    names = tuple((field.strip() if form.trim else field) or f"column{k}" for k, field in enumerate(fields))
    for name, count in Counter(names).items():
        if count > 1:
            raise FileRefused(file, f"landing file {file.name}: its header names column '{name}' twice")
    return names


def declared_names(file: LandingFile, header: Sequence[str], declared: Iterable[str]) -> tuple[str, ...]:
    """Return a header with declared columns under their declared names, which may differ from the file's in case.

    Raises:
        FileRefused: two of its names differ from a declared one in case alone, and none is the same.
    """
    try:
        by_file = {name: declared_name for declared_name, name in match_names(declared, header).items()}
    except ValueError as e:
        raise FileRefused(file, f"landing file {file.name}: its header names {e}") from None
    return tuple(by_file.get(name, name) for name in header)


def _first_record(data: BinaryIO, form: QuotedFields) -> str:
    """Return a text's first record; a byte that is not UTF-8 as half a surrogate pair."""
    for records in whole_records(lines_of(data, _RECORD_BLOCK), form):
        first: bytes = records.texts.view(pa.binary())[0].as_py()
        return first.decode("utf-8", "surrogateescape")
    return ""


def _lines(data: BinaryIO) -> Iterator[str]:
    """Yield the lines of a text with their line feeds; a byte that is not UTF-8 as half a surrogate pair.

    Raises:
        csv.Error: a line has more than _HEADER_BYTES.
    """
    while line := data.readline(_HEADER_BYTES + 1):
        if len(line) > _HEADER_BYTES:
            mac = "; it has carriage returns: lines must end with line feeds" if b"\r" in line else ""
            raise csv.Error(f"it has more than {_HEADER_BYTES:,} bytes{mac}")
        yield line.decode("utf-8", "surrogateescape")


class JsonLinesReader(LandingReader):
    """The format `jsonl`."""

    by_arrow = True

    def read(self, batch: LandingBatch) -> list[DataFrame]:
        """Read all files as JSON lines."""
        return [json_lines(batch, range(len(batch.files)))]

    def form(self, batch: LandingBatch, number: int) -> None:
        return None


def json_lines(batch: LandingBatch, files: Sequence[int]) -> DataFrame:
    """Plan JSON objects, one a line. Nested values of undeclared columns are kept as JSON text."""
    columns = batch.table.columns
    lines = batch.lines(files)
    task = SurrogatesTask(tuple(c.steps for c in columns))
    lines = lines.mapInArrow(task, f"{schema_of(lines)}, _sound string, _halves array<int>")
    nested = {i: c.steps for i, c in enumerate(columns) if len(c.steps) > 1}
    if nested:
        by_lists = ListPathsTask("_sound", nested)
        lines = lines.mapInArrow(by_lists, f"{schema_of(lines)}, {by_lists.schema}")
    lines = lines.select("*", parse_object(F.col("_sound")).alias("_json"))
    lines = lines.select(*columns_except(lines, "_json", "_sound"), only_object(F.col("_json")).alias("_members"))
    declared = list(dict.fromkeys(c.steps[0] for c in columns))
    lines = lines.select(
        *columns_except(lines, "_members"),
        declared_members(F.col("_members"), declared).alias("_map"),
        ambiguous_member(F.col("_members"), declared).alias("_ambiguous"),
    )
    texts = NestedTexts(lines, columns, lambda key: F.try_element_at("_map", F.lit(key)))

    def by_list(kind: str, i: int, otherwise: Column) -> Column:
        """Return the value of a path that goes through a list, else that of one through objects alone."""
        return F.when(F.col(f"_list_has{i}").isNotNull(), F.col(f"_list_{kind}{i}")).otherwise(otherwise)

    shown_texts = [texts.shown_text(c.steps) for c in columns]
    lines = texts.frame.select(
        "*",
        *((by_list("shown", i, x) if i in nested else x).alias(f"_t{i}") for i, x in enumerate(shown_texts)),
        *(by_list("text", i, texts.text(steps)).alias(f"_n{i}") for i, steps in nested.items()),
        *(by_list("has", i, texts.has(steps)).alias(f"_h{i}") for i, steps in nested.items()),
    )
    lines = lines.select(*columns_except(lines, *(by_lists.types if nested else ())))
    halves = [
        F.when(F.array_contains("_halves", i), F.lit(half_pair(c.name)))
        for i, c in enumerate(columns)
        if c.name in batch.ids
    ]
    faults = F.array_compact(F.array("_ambiguous", *texts.faults, *halves)).alias("_faults")
    lines = lines.select(*columns_except(lines, "_ambiguous", *texts.parsed), faults)
    has = [
        F.col(f"_h{i}") if len(c.steps) > 1 else F.col(f"_t{i}").isNotNull() | F.map_contains_key("_map", c.steps[0])
        for i, c in enumerate(columns)
    ]
    ready = []
    for i, c in enumerate(columns):
        text = f"_n{i}" if len(c.steps) > 1 else f"_t{i}"
        if c.type.startswith("array"):
            ready.append(F.from_json(F.col(text), "array<string>").alias(f"_v{i}"))
        elif len(c.steps) > 1:
            ready.append(F.col(text).alias(f"_v{i}"))
    inner = [f"_{kind}{i}" for kind in "nh" for i in nested]
    lines = lines.select(*columns_except(lines, *inner), *presence_masks(has), *ready)
    extra = F.map_filter("_map", lambda key, _: ~key.isin(declared))
    if declared == [c.steps[0] for c in columns] and not nested:
        present = sum((F.bit_count(name) for name in mask_names(len(columns))), start=F.lit(0))
        # Looked for only where there is more than what is declared.
        extra = F.when(F.size("_map") > present, extra)
    else:
        extra = F.when(F.exists(F.map_keys("_map"), lambda key: ~key.isin(declared)), extra)
    frame = lines.select(*columns_except(lines, "_map"), extra.alias("_extra"), F.col("_map").isNull().alias("_unread"))
    return with_line_faults(frame, F.when(F.col("_unread"), F.lit(NOT_JSON))).drop("_unread")


class ClicksReader(LandingReader):
    """The format `clicks`."""

    by_arrow = True

    def read(self, batch: LandingBatch) -> list[DataFrame]:
        """Read JSON lines (`.json.gz`) and CSV with a header (`.csv.gz`) side by side.

        Raises:
            FileRefused: a file with another ending.
        """
        json_files: list[int] = []
        csv_files: list[int] = []
        for i, (_, file) in enumerate(batch.files):
            (json_files if is_json(file) else csv_files).append(i)
        frames = [json_lines(batch, json_files)] if json_files else []
        return frames + delimited(batch, csv_files, separator=",", header=True)

    def form(self, batch: LandingBatch, number: int) -> DelimitedForm | None:
        file = batch.files[number][1]
        return None if is_json(file) else with_header(batch, file)


def is_json(file: LandingFile) -> bool:
    """Return whether a file has JSON lines; else it is CSV.

    Raises:
        FileRefused: its name does not say.
    """
    stem = without_ending(file.name)
    if stem.endswith(_JSON_ENDINGS):
        return True
    if stem.endswith(_CSV_ENDINGS):
        return False
    raise FileRefused(
        file,
        f"landing file {file.name}: its name ends in neither .json nor .csv (with or without "
        f"{', '.join(COMPRESSIONS)}), so its format is unknown; rename it, or narrow source.path",
    )
