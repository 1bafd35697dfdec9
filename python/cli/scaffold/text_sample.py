"""Rows of delimited text and of JSON lines, from a part of each file where files are large."""

from __future__ import annotations

import csv
import io
import json
import re
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv

from headrace.cli.scaffold.spelled import NumberMarks, find_marks
from headrace.cli.scaffold.text_chunks import SAMPLE_BYTES, Chunk, rewritten, whole_lines
from headrace.errors import UserError

_SEPARATORS = (",", "\t", ";", "|")
#: Looked for where none of those cuts the lines: Hive's own, and signs that some exports have.
_RARE_SEPARATORS = ("\x01", "~", "^", "#")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
#: Numbers with any marks and signs, and times: where a column has these, a dash or a word is no value.
_NUMBER_OR_TIME = re.compile(r"[$€£¥]? ?[+-]?\d[\d.,' :/+-]*([eE][+-]?\d+)?(T[\d:.]+Z?)?[%$€£¥]?")
#: Files whose names and fields are compared, and names of a file that a message shows.
_COMPARED, _FIRST_NAMES = 50, 5
#: A line of libSVM or libFM: the label, then `feature:value` for each feature.
_LIBSVM = re.compile(r"[+-]?\d+(\.\d+)?( +\w+:\S+)+ *")
#: A command that makes JSON lines of such lines.
_AS_JSON_LINES = (
    r"""awk '{printf "{\"label\": %s, \"features\": [", $1; """
    r"""for (i = 2; i <= NF; i++) printf "%s\"%s\"", i > 2 ? ", " : "", $i; print "]}"}'"""
)
#: Rows above which the first may explain the header, and those below it that are looked through.
_UNITS_ABOVE, _LOOKED_THROUGH = 20, 1_000
#: Share of lines that must agree for a separator that is none of the usual ones.
_MOST = 0.9
#: How JSON text spells half of a character beyond 16 bits.
_SURROGATE = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}|\\u[dD][c-fC-F][0-9a-fA-F]{2}")
#: Texts that stand for nothing.
_SURE_NULLS = (
    *("?", "NA", "N/A", "NULL", r"\N", "NaN", "NaT", "<NA>", "#N/A", "#DIV/0!", "(null)"),
    *("0000-00-00", "0000-00-00 00:00:00"),
)
_NULLS = (*_SURE_NULLS, "n/a", "null", "None", "none", "nan", "nil", "k.A.", "-", "--")


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
        UserError: not UTF-8, not a table, several tables, lines before the header, or a name twice. The message has a
            command that mends it.
    """
    # Of several files some may be empty, as those of days without events.
    chunks = [chunk for chunk in chunks if chunk.head.strip()] or chunks
    _check_one_table(chunks, text)
    for chunk in chunks:
        chunk.check_encoding(text)
    lines = chunks[0].first_lines(text)
    separator = _separator(lines, text)
    _check_first_line(chunks[0], lines, separator, text)
    first = next(csv.reader([lines[0]], delimiter=separator))
    # A blank behind each separator, as people write lists.
    blank = [f for line in lines[1:20] for f in line.split(separator)[1:]]
    trim = bool(blank) and sum(f.startswith(" ") for f in blank) > len(blank) / 2
    if trim:
        first = [f.strip() for f in first]
    header = _has_header(first, lines, separator, trim)
    multiline = _has_line_breaks(chunks[0], separator)
    tables, skipped, headers = [], 0, 0
    for chunk in chunks:
        # Each file has names of its own, in an order of its own.
        column_names = (
            _names(chunk, separator, trim, text) if header else tuple(f"column{k}" for k in range(len(first)))
        )
        parsed, bad = _parse(chunk, column_names, separator, header, multiline, text)
        if header:
            parsed, repeated = _without_headers(parsed)
            headers += repeated
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
    if headers:
        notes.append(f"{headers:,} of the lines looked at repeat the header or explain it: they go to quarantine")
    notes += marks.notes
    if separator == ":":
        notes.append("two colons stand between fields: the column between each two fields is empty")
    if not header:
        notes.append("no line with names was seen: columns are numbered; rename them below, in their order")
    return CsvRows(rows, options, marks, tuple(notes), skipped + headers)


def _check_one_table(chunks: Sequence[Chunk], text: str) -> None:
    """Check that files have names in common, or as many fields where they have no names.

    Raises:
        UserError: they are of several tables; names the files, and the command for the largest.
    """
    by_columns: dict[frozenset[str], Chunk] = {}
    for chunk in chunks[:_COMPARED]:
        lines = chunk.head[: 1 << 16].decode("utf-8-sig", errors="replace").splitlines()[:100]
        if lines := [line for line in lines if line.strip()]:
            separator = _separator(lines, text)
            first = next(csv.reader([lines[0]], delimiter=separator))
            is_header = _has_header(first, lines, separator, trim=True)
            names = [f.strip() for f in first] if is_header else [f"{len(first)} fields"]
            by_columns.setdefault(frozenset(names), chunk)
    names_of = list(by_columns)
    common = (len(a & b) / min(len(a), len(b)) for i, a in enumerate(names_of) for b in names_of[:i])
    if min(common, default=1.0) >= 0.5:
        return
    files = []
    for columns, chunk in by_columns.items():
        first_names = ", ".join(sorted(columns)[:_FIRST_NAMES]) + (", ..." if len(columns) > _FIRST_NAMES else "")
        files.append(f"{chunk.file.name} ({first_names})")
    largest = max(by_columns.values(), key=lambda chunk: len(chunk.head) + (0 if chunk.is_complete else SAMPLE_BYTES))
    raise UserError(
        f"{text}: files of several tables: {'; '.join(files[:_FIRST_NAMES])}. Give the one with the events, or a "
        f"glob of its files: headrace init {shlex.quote(str(largest.file))}"
    )


def _check_first_line(chunk: Chunk, lines: Sequence[str], separator: str, text: str) -> None:
    """Check that the first line has as many fields as most lines.

    Raises:
        UserError: it has not; says what stands there, and the command that mends it.
    """
    counts = [len(row) for row in csv.reader(lines, delimiter=separator)]
    fields, lines_so = Counter(counts).most_common(1)[0]
    if counts[0] == fields or lines_so <= len(counts) / 2 or len(counts) != len(lines):
        return
    rest = [line for line, n in zip(lines, counts, strict=True) if n == fields]
    sign = {"\t": r"\t", "^": r"\^", "\x01": r"\x01"}.get(separator, separator)
    if counts[0] == fields - 1 and all(line.endswith(separator) for line in rest):
        fault, repair = "each line but the header ends in a separator", rf"sed 's/{sign}\r\?$//'"
    elif counts[0] == fields + 1 and lines[0].endswith(separator):
        fault, repair = "the header ends in a separator, and the lines do not", rf"sed '1s/{sign}\r\?$//'"
    else:
        header = chunk.numbered_lines().index(rest[0])
        begin = f"line 1 has {counts[0]} field{'s' if counts[0] > 1 else ''} and most lines have {fields}"
        excel = ", as Excel writes" if lines[0].lower().startswith("sep=") else ""
        number = "the first line is" if header == 1 else f"the first {header} lines are"
        fault, repair = f"{begin}: {number} no header{excel}", f"tail -n +{header + 1}"
    raise UserError(f"{text}: {chunk.file.name}: {fault}: {rewritten(chunk.file, repair)}")


def _without_headers(rows: pa.Table) -> tuple[pa.Table, int]:
    """Return a file's rows without those that repeat its header, or that explain it below (units); and their number."""
    names = rows.column_names
    is_header = pc.equal(rows[names[0]], names[0]).fill_null(names[0].startswith("column"))
    if pc.any(is_header).as_py():
        for name in names[1:]:
            is_header = pc.and_(is_header, pc.equal(rows[name], name).fill_null(name.startswith("column")))
    is_header = np.asarray(is_header.to_numpy(zero_copy_only=False), dtype=bool)
    if rows.num_rows > _UNITS_ABOVE and not is_header[0] and _explains(rows):
        is_header = is_header | (np.arange(len(is_header)) == 0)
    count = int(is_header.sum())
    return (rows.filter(pa.array(~is_header)), count) if count else (rows, 0)


def _explains(rows: pa.Table) -> bool:
    """Return whether the first row has no number, and two columns or more have nothing else below it."""
    first = {name: rows[name][0].as_py() for name in rows.column_names}
    if any(v is not None and _NUMBER_OR_TIME.fullmatch(v) for v in first.values()):
        return False
    below = rows.slice(1, _LOOKED_THROUGH)
    columns_of_numbers = 0
    for name, value in first.items():
        if value is not None and value not in _NULLS:
            values = [v for v in pc.unique(below[name]).to_pylist() if v is not None and v not in _NULLS]
            columns_of_numbers += bool(values) and all(_NUMBER_OR_TIME.fullmatch(v) for v in values)
    return columns_of_numbers > 1


def _names(chunk: Chunk, separator: str, trim: bool, text: str) -> tuple[str, ...]:
    """Return the names in a file's first line, as `ingest` takes them (headrace.lake.landing.formats)."""
    fields = next(csv.reader([chunk.first_lines(text)[0]], delimiter=separator, skipinitialspace=trim))
    names = tuple((f.strip() if trim else f) or f"column{k}" for k, f in enumerate(fields))
    if twice := [n for n, k in Counter(names).items() if k > 1]:
        raise UserError(f"{text}: the header of {chunk.file.name} names column '{twice[0]}' twice")
    return names


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
    if share(usual)[0] < _MOST and share(rare := max(_RARE_SEPARATORS, key=share))[0] >= _MOST:
        return rare
    blank = share(" ")
    is_pairs = blank[0] >= _MOST and not any(" " in field.strip() for line in lines for field in line.split(" "))
    return " " if share(usual)[0] < _MOST and is_pairs else usual


def _has_line_breaks(chunk: Chunk, separator: str) -> bool:
    """Return whether quoted fields continue in the next line: records then have one number of fields, and lines have
    not.
    """
    text = whole_lines(chunk.head[: 1 << 18] + b"\n").decode("utf-8-sig", errors="replace")
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
    rest = [row for row in rest if row != list(first)]  # a header may come again, where files were joined
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
        begin = chunks[0].head.lstrip()[:1]
        program = "jq -c '.[]'" if begin == b"[" else "jq -c ."
        is_one_value = begin in (b"[", b"{") and chunks[0].is_complete
        repair = f". For objects in another form: {rewritten(chunks[0].file, program)}" if is_one_value else ""
        raise UserError(
            f"{text}: not JSON lines (one object a line): {bad:,} lines of {bad + len(objects):,} are none{repair}"
        )
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
