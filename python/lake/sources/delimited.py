"""Delimited text: CSV and its relatives."""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import BinaryIO

import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from headrace.errors import UserError
from headrace.lake.blocks.delimited import DelimitedForm
from headrace.lake.blocks.quotes import QuotedFields, QuotesTask
from headrace.lake.landing import LandingFile
from headrace.lake.sources.compression import DamagedError, open_plain
from headrace.lake.sources.frame import EXTRA_TYPE, WRONG_FIELDS, presence_masks, schema_of, with_line_faults, without
from headrace.lake.sources.lines import FileRefused, LandingBatch
from headrace.lake.sources.nested import NestedTexts
from headrace.lake.sources.reader import LandingReader
from headrace.lake.sources.text_lines import lines_of, whole_records
from headrace.schema import match_names
from headrace.storage import StoreError

#: Bytes of a header that are read. Its names may have fewer (csv.field_size_limit).
_HEADER_BYTES = 1 << 20
_OLD_MAC = "its lines end with a carriage return alone, as on old Macs; deliver it with line feeds"
#: Bytes that are read at once to find a header that may go over several lines.
_RECORD_BLOCK = 64 << 10
#: Lists in one CSV field.
LIST_SEPARATOR = "|"


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
        declared = tuple(c.name for c in batch.table.columns)
        fields = QuotedFields(source.separator, escape=source.escape)
        names = declared_names(file, header_of(file, fields), declared) if source.header else declared
        return DelimitedForm(
            names,
            source.separator,
            header=source.header,
            escape=source.escape,
            nulls=source.null_texts,
            lists=LIST_SEPARATOR,
        )


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
    names = declared_names(file, header_of(file, QuotedFields(",")), tuple(c.name for c in batch.table.columns))
    return DelimitedForm(names, ",", header=True, lists=LIST_SEPARATOR, rewrites=rewrites or {})


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
    """Delimited text, RFC 4180 quotes; nothing between two separators is null. One frame for each different header.

    A row is a line; with `source.multiline` a record, which may have line breaks within quotes.

    Args:
        reading: what is read.
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
        *without(texts.frame, "_row", *texts.parsed),
        *(texts.shown(c.steps).alias(f"_t{i}") for i, c in enumerate(columns)),
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
    frame = lines.select(*without(lines, *(f"_n{i}" for i in inside)), *values)
    return with_line_faults(frame, broken, first).drop("_unread", "_record", "_quotes")


def header_of(file: LandingFile, form: QuotedFields, multiline: bool = False) -> tuple[str, ...]:
    """The column names in a file's first line (with `multiline`: its first record); () for an empty file.

    A column without a name, as pandas writes for its index, is `column<k>`, k its place from 0 (DuckDB's name for it).

    Raises:
        FileRefused: its data are damaged, it is no text, no header, or names a column twice.
        UserError: the file system does not give it.
    """
    line = ""
    try:
        with open_plain(file.path, begin=True) as data:
            line = _first_record(data, form) if multiline else next(_lines(data), "")
            record = form.rfc4180(line.removeprefix("\ufeff").rstrip("\r\n").encode("utf-8", "surrogateescape"))
            if isinstance(record, str):
                raise FileRefused(file, f"landing file {file.name}: its first line is no header: {record}")
            fields = next(csv.reader([record.decode()], delimiter=form.separator), [])
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
        by_file = {name: wanted for wanted, name in match_names(declared, header).items()}
    except ValueError as e:
        raise FileRefused(file, f"landing file {file.name}: its header names {e}; rename one of them") from None
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
