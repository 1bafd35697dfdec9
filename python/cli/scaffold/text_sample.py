"""Rows of text files: delimited text and JSON lines, plain or compressed, a part of each file where they are large."""

from __future__ import annotations

import csv
import io
import json
import re
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv

from headrace.cli.scaffold.spelled import NumberMarks, find_marks
from headrace.errors import UserError
from headrace.lake.landing.text_lines import DamagedError, ending, open_plain
from headrace.storage import Location, StoreError
from headrace.storage.store import Info

#: Bytes of text that are looked at, over all files, and the files that they are from.
SAMPLE_BYTES, SAMPLE_FILES = 32 << 20, 8
#: Bytes whose compression tells that of the rest.
_PROBE = 1 << 20
_SEPARATORS = (",", "\t", ";", "|")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
#: Numbers with any marks, and times: where a column has these, a dash or a word is no value.
_NUMBER_OR_TIME = re.compile(r"[+-]?\d[\d.,' :/+-]*([eE][+-]?\d+)?(T[\d:.]+Z?)?")
#: A line of libSVM or libFM: the label, then `feature:value` for each feature.
_LIBSVM = re.compile(r"[+-]?\d+(\.\d+)?( +\w+:\S+)+ *")
#: A command that makes JSON lines of such lines.
_AS_JSON_LINES = (
    r"""awk '{printf "{\"label\": %s, \"features\": [", $1; """
    r"""for (i = 2; i <= NF; i++) printf "%s\"%s\"", i > 2 ? ", " : "", $i; print "]}"}'"""
)
#: Share of lines that must agree for a separator that is none of the usual ones.
_MOST = 0.9
#: How JSON text spells half of a character beyond 16 bits.
_SURROGATE = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}|\\u[dD][c-fC-F][0-9a-fA-F]{2}")
#: Texts that stand for nothing.
_SURE_NULLS = ("?", "NA", "N/A", "NULL", r"\N", "NaN", "NaT", "<NA>", "#N/A", "(null)")
_NULLS = (*_SURE_NULLS, "n/a", "null", "None", "none", "nan", "nil", "k.A.", "-", "--")


@dataclass(frozen=True)
class Chunk:
    """Whole lines of one file."""

    file: Location
    #: The file's first bytes, decompressed, up to the end of a line.
    head: bytes
    #: The end of a large file: whole lines.
    tail: bytes
    #: Bytes of the file, compressed or not, that `head` and `tail` are.
    read_bytes: int
    is_complete: bool

    def lines(self) -> list[bytes]:
        return (self.head + self.tail).splitlines()


def sample_bytes(files: Mapping[Location, Info]) -> list[Chunk]:
    """Lines of up to SAMPLE_FILES files, evenly from the first to the last. Of a store no more is fetched.

    Raises:
        UserError: a file cannot be read.
    """
    total, chosen = sum(info.size for info in files.values()), list(files)
    if total > SAMPLE_BYTES and len(files) > SAMPLE_FILES:
        step = (len(files) - 1) / (SAMPLE_FILES - 1)
        chosen = [chosen[round(i * step)] for i in range(SAMPLE_FILES)]
    each = SAMPLE_BYTES // len(chosen) if total > SAMPLE_BYTES else SAMPLE_BYTES
    try:
        return [_chunk(file, files[file].size, each) for file in chosen]
    except StoreError:  # which says nothing of the file
        raise
    except (OSError, DamagedError) as e:
        raise UserError(f"cannot be read: {e}") from None


def _chunk(file: Location, size: int, most: int) -> Chunk:
    if ending(file.name):
        with open_plain(file) as data:
            head = data.read(most + 1)
        if len(head) <= most:
            return Chunk(file, head, b"", size, True)
        # How many bytes of the file these are is not known: as zlib would do it.
        used = round(len(head) * len(zlib.compress(head[:_PROBE])) / len(head[:_PROBE]))
        return Chunk(file, _whole_lines(head), b"", min(used, size), False)
    if size <= most:
        with file.open() as raw:
            return Chunk(file, raw.read(size), b"", size, True)
    with file.open_parts() as raw:
        # Files are mostly in the order of time: the end says until when.
        head = _whole_lines(raw.read(most * 3 // 4))
        raw.seek(size - most // 4)
        tail = raw.read(most // 4).partition(b"\n")[2]
    return Chunk(file, head, tail, len(head) + len(tail), False)


def _whole_lines(data: bytes) -> bytes:
    return data[: data.rfind(b"\n") + 1]


# --- delimited text ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CsvRows:
    """Rows of delimited text, and how they are written."""

    #: All text.
    rows: pa.Table
    #: Keys of the section `source`.
    options: dict[str, Any]
    marks: NumberMarks
    #: What a person should know.
    notes: tuple[str, ...]
    #: Lines that are no rows.
    unread_lines: int


def csv_rows(chunks: Sequence[Chunk], text: str) -> CsvRows:
    """Return the rows of delimited text.

    Raises:
        UserError: not UTF-8, not a table, or a name twice.
    """
    lines = _first_lines(chunks[0], text)
    separator = _separator(lines, text)
    first = next(csv.reader([lines[0]], delimiter=separator))
    # A blank behind each separator, as people write lists.
    blank = [f for line in lines[1:20] for f in line.split(separator)[1:]]
    trim = bool(blank) and sum(f.startswith(" ") for f in blank) > len(blank) / 2
    if trim:
        first = [f.strip() for f in first]
    header = _has_header(first, lines, separator, trim)
    multiline = _has_line_breaks(chunks[0], separator)
    tables, skipped = [], 0
    for chunk in chunks:
        # Each file has names of its own, in an order of its own.
        column_names = (
            _names(chunk, separator, trim, text) if header else tuple(f"column{k}" for k in range(len(first)))
        )
        parsed, bad = _parse(chunk, column_names, separator, header, multiline, text)
        tables.append(parsed)
        skipped += bad
    rows = pa.concat_tables(tables, promote_options="default")
    names = rows.column_names
    if trim:
        rows = pa.table({n: pc.utf8_trim_whitespace(rows[n]) for n in names})
        rows = pa.table({n: pc.if_else(pc.equal(rows[n], ""), None, rows[n]) for n in names})
    null_texts = _null_texts(rows)
    options: dict[str, Any] = {}
    if separator != ",":
        options["separator"] = separator
    if not header:
        options["header"] = False
    if null_texts:
        key = "null_value" if len(null_texts) == 1 else "null_values"
        options[key] = null_texts[0] if len(null_texts) == 1 else null_texts
        is_null = {n: pc.is_in(rows[n], pa.array(null_texts, pa.string())) for n in names}
        rows = pa.table({n: pc.if_else(is_null[n], None, rows[n]) for n in names})
    marks = find_marks({n: pc.unique(rows[n]).drop_null() for n in names}, separator)
    if marks.decimal != ".":
        options["decimal"] = marks.decimal
    if marks.thousands is not None:
        options["thousands"] = marks.thousands
    if multiline:
        options["multiline"] = True
    if trim:
        options["trim"] = True
    notes = []
    if skipped:
        notes.append(f"{skipped:,} of the lines looked at have another number of fields: they go to quarantine")
    notes += marks.notes
    if separator == ":":
        notes.append("two colons stand between fields: the column between each two fields is empty")
    if not header:
        notes.append("no line with names was seen: columns are numbered; rename them below, in their order")
    return CsvRows(rows, options, marks, tuple(notes), skipped)


def _names(chunk: Chunk, separator: str, trim: bool, text: str) -> tuple[str, ...]:
    """Return the names in a file's first line, as `ingest` takes them (headrace.lake.landing.formats)."""
    fields = next(csv.reader([_first_lines(chunk, text)[0]], delimiter=separator, skipinitialspace=trim))
    names = tuple((f.strip() if trim else f) or f"column{k}" for k, f in enumerate(fields))
    if twice := [n for n, k in Counter(names).items() if k > 1]:
        raise UserError(f"{text}: the header of {chunk.file.name} names column '{twice[0]}' twice")
    return names


def _first_lines(chunk: Chunk, text: str) -> list[str]:
    try:
        lines = [line for line in chunk.head[: 1 << 18].decode("utf-8-sig").splitlines() if line.strip()]
    except UnicodeDecodeError as e:
        if e.start < (1 << 18) - 4:
            raise UserError(f"{text}: {chunk.file.name} is not UTF-8 text (byte {e.start:,})") from None
        lines = chunk.head[: e.start].decode("utf-8-sig").splitlines()
    if not lines:
        raise UserError(f"{text}: {chunk.file.name} is empty")
    return lines[:200]


def _separator(lines: Sequence[str], text: str) -> str:
    """Return the separator that cuts most lines into the same number of fields, more than one.

    Raises:
        UserError: lines of libSVM or libFM that have different numbers of features.
    """
    if sum(_LIBSVM.fullmatch(line) is not None for line in lines) >= _MOST * len(lines):
        features = {len(line.split()) - 1 for line in lines}
        if len(features) > 1:
            raise UserError(
                f"{text}: lines of libSVM or libFM with {min(features)} to {max(features)} features, which is no "
                f"table. Make JSON lines with a list of them: {_AS_JSON_LINES} {text} > features.jsonl"
            )
        return " "
    if sum("::" in line for line in lines) >= _MOST * len(lines):
        return ":"

    def share(separator: str) -> tuple[float, int]:
        counts = Counter(len(row) for row in csv.reader(lines, delimiter=separator))
        fields, lines_so = counts.most_common(1)[0]
        return (lines_so / len(lines) if fields > 1 else 0.0, fields)

    usual = max(_SEPARATORS, key=share)
    blank = share(" ")
    is_pairs = blank[0] >= _MOST and not any(" " in field.strip() for line in lines for field in line.split(" "))
    return " " if share(usual)[0] < _MOST and is_pairs else usual


def _has_line_breaks(chunk: Chunk, separator: str) -> bool:
    """Return whether quoted fields continue in the next line: records then have one number of fields, and lines have
    not.
    """
    text = _whole_lines(chunk.head[: 1 << 18] + b"\n").decode("utf-8-sig", errors="replace")
    if '"' not in text:
        return False
    lines = [line for line in text.splitlines() if line.strip()]
    try:
        records = [row for row in csv.reader(io.StringIO(text, newline=""), delimiter=separator) if row]
    except csv.Error:
        return False
    fields = Counter(map(len, records)).most_common(1)[0][1]
    return len(records) < len(lines) and fields > 0.9 * len(records)


def _has_header(first: Sequence[str], lines: Sequence[str], separator: str, trim: bool) -> bool:
    """Return whether the first line has names: none of its fields reads as a number, or occurs below it, too."""
    if any(_NUMBER.fullmatch(f) for f in first):
        return False
    rest = [[f.strip() if trim else f for f in row] for row in csv.reader(lines[1:51], delimiter=separator)]
    if not rest:
        return True
    named = [f for f in first if f]
    # A text that stands among the values of its column is a value.
    repeated = sum(any(k < len(row) and row[k] == f for row in rest) for k, f in enumerate(first) if f)
    return repeated <= len(named) // 4


def _parse(
    chunk: Chunk, names: Sequence[str], separator: str, header: bool, multiline: bool, text: str
) -> tuple[pa.Table, int]:
    bad = 0

    def skip(row: Any) -> str:
        nonlocal bad
        bad += 1
        return "skip"

    body = chunk.head.partition(b"\n")[2] if header else chunk.head
    if not (body + chunk.tail).strip():
        return pa.table({n: pa.array([], pa.string()) for n in names}), 0
    try:
        table = pacsv.read_csv(
            io.BytesIO(body + chunk.tail),
            read_options=pacsv.ReadOptions(column_names=list(names)),
            parse_options=pacsv.ParseOptions(
                delimiter=separator, invalid_row_handler=skip, newlines_in_values=multiline
            ),
            convert_options=pacsv.ConvertOptions(
                column_types=dict.fromkeys(names, pa.string()),
                strings_can_be_null=True,
                null_values=[""],
                quoted_strings_can_be_null=False,
            ),
        )
    except pa.ArrowInvalid as e:
        raise UserError(f"{text}: {chunk.file.name}: {' '.join(str(e).split())[:200]}") from None
    return table, bad


def _null_texts(rows: pa.Table) -> list[str]:
    """Return the texts that stand for a missing value, the most frequent first."""
    counts: Counter[str] = Counter()
    for name in rows.column_names:
        value_counts = pc.value_counts(rows[name].combine_chunks())
        seen = {
            v: c for v, c in zip(value_counts.field(0).to_pylist(), value_counts.field(1).to_pylist(), strict=True) if v
        }
        tokens = [t for t in _NULLS if t in seen]
        values = [v for v in seen if v not in _NULLS]
        numeric = bool(values) and all(_NUMBER_OR_TIME.fullmatch(v) for v in values[:1_000])
        for token in tokens:
            # A dash or a word may be a value of a text column; in a column of numbers it is none.
            if numeric or token in _SURE_NULLS:
                counts[token] += seen[token]
    return [token for token, _ in counts.most_common()]


# --- JSON lines -------------------------------------------------------------------------------------------------------


def json_rows(chunks: Sequence[Chunk], text: str) -> tuple[pa.Table, tuple[str, ...], int]:
    """(rows; notes; lines that are no rows) of JSON lines; values of one column that have several types are text.

    Raises:
        UserError: no line is a JSON object.
    """
    objects: list[Mapping[str, Any]] = []
    bad = replaced = 0
    for chunk in chunks:
        for line in chunk.lines():
            if not line.strip():
                continue
            try:
                value = json.loads(line)
            except ValueError:
                value = None
            if isinstance(value, dict):
                if _SURROGATE.search(line) and (valid := _without_surrogates(value)) != value:
                    value, replaced = valid, replaced + 1
                objects.append(value)
            else:
                bad += 1
    if not objects or bad > len(objects):
        raise UserError(f"{text}: not JSON lines (one object a line): {bad:,} lines of {bad + len(objects):,} are none")
    names = dict.fromkeys(key for o in objects for key in o)
    notes = []
    if bad:
        notes.append(f"{bad:,} of the lines looked at are no JSON object: they go to quarantine")
    if replaced:
        notes.append(f"{replaced:,} of the lines looked at have half a surrogate pair: U+FFFD takes its place")
    return pa.table({name: _json_column([o.get(name) for o in objects]) for name in names}), tuple(notes), bad


def _without_surrogates(value: Any) -> Any:
    """Return a JSON value with U+FFFD in place of each half of a surrogate pair, in keys and texts."""
    if isinstance(value, str):
        return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    if isinstance(value, list):
        return [_without_surrogates(v) for v in value]
    if isinstance(value, dict):
        return {_without_surrogates(k): _without_surrogates(v) for k, v in value.items()}
    return value


def _json_column(values: Sequence[Any]) -> pa.Array:
    kinds = {type(v) for v in values if v is not None}
    try:
        if not kinds <= {int, float} and len(kinds) > 1:
            raise pa.ArrowInvalid("several types")
        return pa.array([float(v) if kinds == {int, float} and v is not None else v for v in values])
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
        return pa.array(
            [None if v is None else v if isinstance(v, str) else json.dumps(v) for v in values], pa.string()
        )
