"""Formats of landing files: the contract of a reader, and the shipped ones.

Delimited text, JSON lines and the click logs of `headrace generate` are shipped. Each is a `LandingReader`, and has a
`FileFormat` with a line of `FILE_FORMATS` in `headrace.config.formats`. A format of another package needs neither:
docs/plugins.md.
"""

from __future__ import annotations

import csv
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import BinaryIO, ClassVar

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from headrace.config import LandingSource, Table
from headrace.config.schema import is_of_list, match_names
from headrace.config.source import following, midnight
from headrace.errors import UserError
from headrace.lake.landing.compression import COMPRESSIONS, UNREADABLE_ENDINGS, DamagedError, open_plain, without_ending
from headrace.lake.landing.delimited import DelimitedForm, LineForm, QuotedFields, lines_of, whole_records
from headrace.lake.landing.files import LandingDay, LandingFile
from headrace.plugins import import_class
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
#: Columns that say where a row stands.
POSITION = ("_file", "_line", "_copy")


@dataclass
class FileDamaged(Exception):
    """A landing file that cannot be read to its end."""

    ds: str
    file: LandingFile
    cause: str
    #: Whether its bytes are at fault, and not the file system that does not give them.
    is_of_content: bool = True


class FileRefused(UserError):
    """A landing file that is no file of the source's format, by its name or its header."""

    def __init__(self, file: LandingFile, message: str) -> None:
        super().__init__(message)
        self.file = file


@dataclass(frozen=True)
class LandingBatch:
    """The landing files of one or more days, which are read together."""

    spark: SparkSession
    source: LandingSource
    table: Table
    days: tuple[LandingDay, ...]
    #: The declared text columns whose values are ids (`table.ids`).
    ids: frozenset[str] = frozenset()

    @property
    def files(self) -> list[tuple[str, LandingFile]]:
        """(ds, file), oldest day first, by name within a day. The place in this list is a file's `_file`."""
        return [(day.ds, file) for day in self.days for file in day.files]

    def event_times(self, ds: str) -> tuple[datetime | None, datetime]:
        """Return the range of a landing day's event times, [first, end) in UTC; `first` None: nothing is too late."""
        end = midnight(self.source, following(ds)) + timedelta(seconds=self.table.clock_skew_seconds)
        return midnight(self.source, following(ds, -self.table.late_days)) if self.source.daily else None, end


class LandingReader(ABC):
    """A reader of one format of landing files.

    `form` says how a file's lines become rows. Tasks read them by Arrow where it may, about ten times as fast as one by
    one (headrace.lake.landing.write_rows).
    """

    #: Whether `finish` makes the rows anew: splits, drawn negatives. All lines are judged one by one then.
    remakes_rows: ClassVar[bool] = False

    @abstractmethod
    def form(self, batch: LandingBatch, number: int) -> LineForm | None:
        """Return how a file of the batch is written, by its number in `batch.files`; None: JSON lines.

        Raises:
            UserError: a file whose name or header is refused.
        """

    def finish(self, rows: DataFrame, batch: LandingBatch) -> DataFrame:
        """Return what becomes of a batch's rows, as a Spark frame with the same columns.

        Args:
            rows: `_ds`, `_source_file` string; `_file`, `_copy`, `_state` int; `_line` bigint; the declared columns;
                `_extra`, `_raw` and `_reason`. Rows of other states than GOOD are to stay as they are.
            batch: whose rows they are.
        """
        return rows


def reader_of(source: LandingSource) -> LandingReader:
    """Return the reader of a source's format.

    Raises:
        UserError: it cannot be imported, or is no reader.
    """
    key = f"source.format {source.format}"
    # What is imported is a subclass; one with abstract methods left raises TypeError here.
    return import_class(source.file_format.reader, LandingReader, key, "reader")()  # type: ignore[type-abstract]


def checked_reader(batch: LandingBatch) -> LandingReader:
    """Return the reader of the batch's landing files, whose format is checked against the declared columns.

    Raises:
        FileRefused: a file is compressed in a way that cannot be read.
        UserError: a column that the format needs is not declared, or one is declared as the format has none.
    """
    for _, file in batch.files:
        if (suffix := file.path.suffix.lower()) in UNREADABLE_ENDINGS:
            raise FileRefused(
                file,
                f"landing file {file.name}: files that end in {suffix} cannot be read; deliver it plain, or compressed "
                f"as one of {', '.join(COMPRESSIONS)}",
            )
    known = batch.source.file_format
    declared = {c.name for c in batch.table.columns}
    for name in known.columns:
        if name not in declared:
            raise UserError(f"source.format '{batch.source.format}' needs column '{name}' in table.columns")
    for c in batch.table.columns:
        if c.path is not None and not known.paths:
            raise UserError(
                f"table.columns: '{c.name}' has a path, but the fields of '{batch.source.format}' have none"
            )
        if not known.list_paths and any(map(is_of_list, c.steps)):
            raise UserError(
                f"table.columns: '{c.name}': path {c.path} leads into a list, which is read of tables and of "
                f"'jsonl', and not of '{batch.source.format}': have the writer flatten it, or declare the list itself"
            )
    return reader_of(batch.source)


class CsvReader(LandingReader):
    """The format `csv`."""

    def form(self, batch: LandingBatch, number: int) -> DelimitedForm:
        """Read delimited text by the keys of `source`; lists are joined by `|`."""
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

    def form(self, batch: LandingBatch, number: int) -> None:
        """Read all files as JSON lines. Nested values of undeclared columns are kept as JSON text."""
        return None


class ClicksReader(LandingReader):
    """The format `clicks`."""

    def form(self, batch: LandingBatch, number: int) -> DelimitedForm | None:
        """Read JSON lines (`.json.gz`) and CSV with a header (`.csv.gz`) side by side.

        Raises:
            FileRefused: a file with another ending.
        """
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
