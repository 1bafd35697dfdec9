"""JSON lines as columns: plain lines by native/cpp/json_lines.cpp, the rest by pyarrow's JSON reader."""

from __future__ import annotations

import ctypes
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pjson

from headrace.lake.landing.blocks import I64, Declaration, LineBlock, Mask, Parsed, SeenColumns, odd_json
from headrace.lake.landing.convert import bounds, element_type, from_json, lines_library, list_of

_KINDS = {pa.string(): 0, pa.int64(): 1, pa.float64(): 2, pa.bool_(): 3}
_DTYPES = {pa.int64(): np.int64, pa.float64(): np.float64, pa.bool_(): np.uint8}
#: Types whose values JSON spells as texts.
_TEXTS = ("string", "timestamp", "timestamp_ntz", "date", "binary")
#: Bytes of a block, and where Arrow parses all of it.
_BLOCK, _ARROW_BLOCK = 1 << 22, 1 << 20
_ROW = re.compile(r" in row (\d+)$")
#: Lines at the beginning of a file that say how it spells its columns.
_SAMPLE = 200
#: Of the lines of a block; where more make the parser stop, the rest is judged line by line.
_MOST_STOPS = 1 / 32
#: As few lines are not split further to find the one that stops the parser.
_FEW = 4


@dataclass(frozen=True)
class PlainRows:
    """Values of the lines that were parsed."""

    #: Which of the lines. bool [lines].
    taken: Mask
    #: By name: a value for each line that was taken.
    columns: dict[str, pa.Array]
    #: Keys that no column was asked for.
    undeclared: set[str]


def parse_plain(
    data: npt.NDArray[np.uint8], offsets: I64, kinds: Mapping[str, pa.DataType], pass_others: bool
) -> PlainRows | None:
    """Parse the lines that are plainly objects with values of these kinds; a key that is not there is null.

    Args:
        data: UTF-8.
        offsets: of the lines and the end of the last one, in `data`; int64 [lines + 1].
        kinds: by key, the type that its values are read as: string, int64, float64 or bool.
        pass_others: whether a line may have other keys; else it is left.

    Returns:
        None where the library is not there, or a kind is another one.
    """
    lib = lines_library()
    if lib is None or not kinds.keys() or any(kind not in _KINDS for kind in kinds.values()):
        return None
    names = [name.encode() for name in kinds]
    ends = np.cumsum([len(name) for name in names], dtype=np.int64)
    codes = np.array([_KINDS[kind] for kind in kinds.values()], np.uint8)
    lines = lib.headrace_json_lines(b"".join(names), _address(ends), _address(codes), len(names))
    if not lines:
        raise MemoryError("no memory to parse lines")
    try:
        n = len(offsets) - 1
        size = int(offsets[-1] - offsets[0])
        # Texts are copied out: together they are as long as the lines, and each has room for all of them.
        columns = [_Column(kind, n, size) for kind in kinds.values()]
        for k, column in enumerate(columns):
            lib.headrace_json_lines_column(
                lines, k, _address(column.values), _address(column.valid), _address(column.offsets)
            )
        taken = np.empty(n, np.uint8)
        rows = lib.headrace_json_lines_parse(lines, _address(data), _address(offsets), n, pass_others, _address(taken))
        if rows < 0:
            raise MemoryError("no memory to parse lines")
        columns_by_key = {name: column.array(rows) for name, column in zip(kinds, columns, strict=True)}
        return PlainRows(taken.view(np.bool_), columns_by_key, _undeclared_keys(lib, lines))
    finally:
        lib.headrace_json_lines_free(lines)


class _Column:
    """Buffers of a column's values."""

    def __init__(self, kind: pa.DataType, lines: int, size: int) -> None:
        self._kind = kind
        is_text = kind == pa.string()
        self.values = np.empty(size if is_text else lines, np.uint8 if is_text else _DTYPES[kind])
        self.valid = np.empty(lines, np.uint8)
        self.offsets = np.empty(lines + 1 if is_text else 0, np.int32)

    def array(self, rows: int) -> pa.Array:
        """Return the first rows as an array."""
        valid = self.valid[:rows]
        nulls = rows - int(np.count_nonzero(valid))
        bits = pa.py_buffer(np.packbits(valid, bitorder="little")) if nulls else None
        if self._kind == pa.string():
            offsets = self.offsets[: rows + 1].copy()
            data = self.values[: offsets[-1]].copy()
            buffers = [bits, pa.py_buffer(offsets), pa.py_buffer(data)]
        elif self._kind == pa.bool_():
            buffers = [bits, pa.py_buffer(np.packbits(self.values[:rows], bitorder="little"))]
        else:
            buffers = [bits, pa.py_buffer(self.values[:rows].copy() if rows < len(self.values) else self.values)]
        return pa.Array.from_buffers(self._kind, rows, buffers, null_count=nulls)


def _undeclared_keys(lib: ctypes.CDLL, lines: int) -> set[str]:
    size = np.zeros(1, np.int64)
    keys: set[str] = set()
    while name := lib.headrace_json_lines_other(lines, len(keys), _address(size)):
        keys.add(ctypes.string_at(name, int(size[0])).decode())
    return keys


def _address(x: npt.NDArray[Any]) -> int:
    return int(x.__array_interface__["data"][0])


@dataclass(frozen=True)
class _Rows:
    """Lines [first, last) of the given ones, parsed."""

    first: int
    last: int
    table: pa.Table


@dataclass(frozen=True)
class _Keys:
    """Values of lines by key."""

    #: Of each row the place of its line among the given ones. int64 [rows].
    places: I64
    #: By key: a value for each row.
    values: dict[str, pa.Array]
    #: bool [rows].
    unsure: Mask
    #: Keys that were not asked for.
    undeclared: set[str]


class JsonReader:
    """Reads one file."""

    def __init__(self, declaration: Declaration, accept: bool) -> None:
        """Begin a file. `accept`: undeclared columns become columns of the table, so their values matter."""
        #: Declared columns by the names of their keys.
        self._declaration, self._accept = _by_keys(declaration), accept
        self._column_of = {str(c.steps[0]): c.name for c in declaration.columns}
        self.seen = SeenColumns()
        self.block_size = _ARROW_BLOCK if lines_library() is None else _BLOCK
        self._kinds: dict[str, pa.DataType] | None = None
        self._declared = {c.name: c.type for c in self._declaration.columns}
        self._by_lower = {name.lower(): name for name in self._declared}
        #: By declared column, the keys of the file that differ from it in case alone.
        self._variants: dict[str, list[str]] = {}

    def odd(self, block: LineBlock) -> Mask:
        """Return a mask of lines that are not `{...}`."""
        return odd_json(block)

    def skipped(self, block: LineBlock) -> Mask:
        """Return an empty mask: all lines are rows, but for empty ones."""
        return np.zeros(len(block), np.bool_)

    def parse(self, lines: pa.BinaryArray) -> Parsed:
        """Parse lines to rows; lines that the parser stops at are left out."""
        data, offsets = _text_of(lines)
        if self._kinds is None:
            self._kinds = self._sampled(data.slice(0, int(offsets[min(_SAMPLE, len(lines))])).to_pybytes())
        keys = self._keys(lines, data, offsets)
        while self._note_variants(keys.undeclared):
            keys = self._keys(lines, data, offsets)
        self.seen.extra |= keys.undeclared
        unsure = keys.unsure
        columns = []
        for name in self._declaration.names:
            value = self._in_any_case(name, keys, data, unsure) if name in self._variants else keys.values[name]
            column = self._typed(name, value)
            if column.null_count != value.null_count:
                unsure |= pc.and_(column.is_null(), value.is_valid()).to_numpy(zero_copy_only=False)
            columns.append(column)
        self._note_present(columns, data)
        return Parsed(keys.places, columns, unsure)

    def _keys(self, lines: pa.BinaryArray, data: pa.Buffer, offsets: I64) -> _Keys:
        """Return the values of the keys of `_kinds` in lines."""
        assert self._kinds is not None
        plain = parse_plain(np.frombuffer(data, np.uint8), offsets, self._kinds, pass_others=not self._accept)
        if plain is None:
            return self._by_arrow(data, offsets)
        if plain.taken.all():
            return _Keys(np.arange(len(lines)), plain.columns, np.zeros(len(lines), np.bool_), plain.undeclared)
        return self._with_others(lines, plain)

    def _by_arrow(self, data: pa.Buffer, offsets: I64) -> _Keys:
        """Return the values of the lines that Arrow parses."""
        pieces = list(_Attempts(data, offsets, self._schema()).rows(0, len(offsets) - 1))
        places = np.concatenate([np.arange(p.first, p.last) for p in pieces] or [np.zeros(0, np.int64)])
        values = {}
        for field in self._schema():
            chunks = [c for p in pieces for c in p.table.column(field.name).chunks]
            values[field.name] = pa.concat_arrays(chunks) if chunks else pa.nulls(0, field.type)
        return _Keys(places, values, *self._undeclared_values(pieces, len(places)))

    def _with_others(self, lines: pa.BinaryArray, plain: PlainRows) -> _Keys:
        """Return what was parsed plainly, and by Arrow what was not."""
        rest = self._by_arrow(*_text_of(lines.filter(pa.array(~plain.taken))))
        places = np.concatenate([np.flatnonzero(plain.taken), np.flatnonzero(~plain.taken)[rest.places]])
        order = np.argsort(places)
        both = {key: pa.concat_arrays([x, rest.values[key]]) for key, x in plain.columns.items()}
        unsure = np.concatenate([np.zeros(len(places) - len(rest.unsure), np.bool_), rest.unsure])
        values = {key: x.take(pa.array(order)) for key, x in both.items()}
        return _Keys(places[order], values, unsure[order], plain.undeclared | rest.undeclared)

    def _note_variants(self, undeclared: set[str]) -> bool:
        """Read keys that differ from a declared column in case alone as that column; return whether some are new."""
        assert self._kinds is not None
        new = [key for key in undeclared if key.lower() in self._by_lower]
        for key in new:
            name = self._by_lower[key.lower()]
            self._variants.setdefault(name, []).append(key)
            self._kinds[key] = self._kinds[name]
        return bool(new)

    def _in_any_case(self, name: str, keys: _Keys, data: pa.Buffer, unsure: Mask) -> pa.Array:
        """Return a column of the key that it is named by, else of the only one that differs in case alone.

        Marks rows as unsure in which it is not known which of several keys are there.
        """
        exact, variants = keys.values[name], self._variants[name]
        text = data.to_pybytes()
        if sum(_may_have_key(text, key) for key in (name, *variants)) > 1:
            unsure |= exact.is_null().to_numpy(zero_copy_only=False)
        return pc.coalesce(exact, *(keys.values[key] for key in variants))

    def _typed(self, name: str, value: pa.Array) -> pa.Array:
        zone, unit = self._declaration.timezone, self._declaration.timestamps.get(name)
        declared = self._declared.get(name, "string")
        element, spelling = element_type(declared), self._declaration.spellings.get(name)
        if spelling is not None and not pa.types.is_boolean(value.type):
            # As the judge sees it: a number by its text.
            text = _valid(value if pa.types.is_string(value.type) else _digits(value))
            return from_json(spelling.plain(text), declared, zone, unit)
        if element is None:
            return _valid(from_json(value, declared, zone, unit))
        return list_of(value, _valid(from_json(value.values, element, zone, None)), declared)

    def _schema(self) -> pa.Schema:
        assert self._kinds is not None
        return pa.schema(list(self._kinds.items()))

    def _sampled(self, text: bytes) -> dict[str, pa.DataType]:
        """Return the type by which the first lines spell each column."""
        rows: list[Mapping[str, Any]] = []
        for line in text.splitlines():
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict):
                rows.append(row)
        keys = dict.fromkeys(key for row in rows for key in row)
        kinds: dict[str, pa.DataType] = {}
        for name in self._names:
            if name in self._declared:
                variants = [k for k in keys if k != name and self._by_lower.get(k.lower()) == name]
                self._variants |= {name: variants} if variants else {}
            spelled = (name, *self._variants.get(name, ()))
            kind = self._kind(name, [r[key] for r in rows for key in spelled if r.get(key) is not None])
            kinds |= dict.fromkeys(spelled, kind)
        return kinds

    @property
    def _names(self) -> tuple[str, ...]:
        return self._declaration.names

    def _kind(self, name: str, values: list[Any]) -> pa.DataType:
        declared = self._declared.get(name, "string")
        element = element_type(declared)
        if element is None:
            return _spelling(declared, values, name in self._declaration.timestamps)
        elements = [e for v in values if isinstance(v, list) for e in v if e is not None]
        return pa.list_(_spelling(element, elements, False))

    def _undeclared_values(self, pieces: list[_Rows], rows: int) -> tuple[Mask, set[str]]:
        """Return the rows with values of undeclared columns that become columns of the table, and undeclared keys."""
        unsure, undeclared = np.zeros(rows, np.bool_), set()
        row = 0
        for piece in pieces:
            for name in piece.table.schema.names:
                if self._kinds is not None and name in self._kinds:
                    continue
                undeclared.add(name)
                if self._accept:
                    has_value = piece.table.column(name).is_valid().to_numpy()
                    unsure[row : row + piece.table.num_rows] |= has_value
            row += piece.table.num_rows
        return unsure, undeclared

    def _note_present(self, columns: list[pa.Array], data: pa.Buffer) -> None:
        """Record the columns that are present: a null may be a key or none, so text is searched until one occurs."""
        text: bytes | None = None
        for name, column in zip(self._names, columns, strict=True):
            seen = self.seen.present if name in self._declared else self.seen.extra
            column_name = self._column_of.get(name, name)
            if column_name in seen:
                continue
            if column.null_count < len(column):
                seen.add(column_name)
                continue
            text = data.to_pybytes() if text is None else text
            keys = (name, *self._variants.get(name, ()))
            if any(key in row for key in keys for row in _rows_with(text, _signs_of(key))):
                seen.add(column_name)


def _by_keys(declaration: Declaration) -> Declaration:
    """Return a declaration whose columns, of one step each, have the names of their keys."""
    keys = {c.name: str(c.steps[0]) for c in declaration.columns}
    if all(name == key for name, key in keys.items()):
        return declaration
    return replace(
        declaration,
        columns=tuple(c.model_copy(update={"name": keys[c.name], "path": None}) for c in declaration.columns),
        timestamps={keys[name]: unit for name, unit in declaration.timestamps.items()},
        spellings={keys[name]: spelling for name, spelling in declaration.spellings.items()},
    )


def _signs_of(key: str) -> list[bytes]:
    """Return texts of which a line with a key has one."""
    return [json.dumps(key, ensure_ascii=False).encode(), b"\\u00" if key.isascii() else b"\\u"]


def _may_have_key(text: bytes, key: str) -> bool:
    return any(sign in text for sign in _signs_of(key))


def _text_of(lines: pa.BinaryArray) -> tuple[pa.Buffer, I64]:
    """Return (bytes of the lines, offsets: where each begins and the last one ends)."""
    start, end = bounds(lines)
    offsets = np.frombuffer(lines.buffers()[1], np.int32, len(lines) + 1, lines.offset * 4).astype(np.int64) - start
    return lines.buffers()[2].slice(start, end - start), offsets


class _Attempts:
    """Parses lines, around those that the parser stops at."""

    def __init__(self, data: pa.Buffer, offsets: Any, schema: pa.Schema) -> None:
        self._data, self._offsets = data, offsets
        self._options = pjson.ParseOptions(
            explicit_schema=schema, newlines_in_values=False, unexpected_field_behavior="infer"
        )
        self._left = max(8, int(_MOST_STOPS * (len(offsets) - 1)))

    def rows(self, first: int, last: int) -> Iterator[_Rows]:
        """Yield lines [first, last) in stretches, without those that are to be judged line by line."""
        while first < last:
            stop = None
            try:
                table = self._read(first, last)
            except pa.ArrowInvalid as e:
                match = _ROW.search(str(e))
                stop = first + int(match.group(1)) if match is not None else None
            else:
                if table.num_rows == last - first:
                    yield _Rows(first, last, table)
                    return
            self._left -= 1
            if self._left < 0 or (last - first <= _FEW and stop is None):
                return
            if stop is None or stop >= last:
                # A value that its column cannot hold, or two objects on a line: somewhere.
                middle = (first + last) // 2
                if middle == first:
                    return
                yield from self.rows(first, middle)
                first = middle
                continue
            yield from self.rows(first, stop)
            first = stop + 1

    def _read(self, first: int, last: int) -> pa.Table:
        start, end = int(self._offsets[first]), int(self._offsets[last])
        source = pa.BufferReader(self._data.slice(start, end - start))
        options = pjson.ReadOptions(use_threads=False, block_size=end - start + 1)
        return pjson.read_json(source, options, self._options)


def _spelling(declared: str, values: list[Any], is_epoch: bool) -> pa.DataType:
    """Return the JSON type of a column's values; without any, the type that one would write."""
    first = values[0] if values else None
    if isinstance(first, bool) or (first is None and declared == "boolean"):
        return pa.bool_()
    if isinstance(first, str):
        return pa.string()
    if declared in ("float", "double"):
        return pa.float64()
    if first is None and declared in _TEXTS and not is_epoch:
        return pa.string()
    return pa.int64()


def _digits(value: pa.Array) -> pa.StringArray:
    """Return integers as text; other numbers, which have several texts, are left out."""
    return value.cast(pa.string()) if pa.types.is_integer(value.type) else pa.nulls(len(value), pa.string())


def _valid(column: pa.Array) -> pa.Array:
    """Return the column; null where its text is not UTF-8: half a surrogate pair."""
    if not pa.types.is_string(column.type):
        return column
    try:
        column.validate(full=True)
    except pa.ArrowInvalid:
        return pa.array([_decodable(v) for v in column.cast(pa.binary()).to_pylist()], pa.string())
    return column


def _decodable(value: bytes | None) -> str | None:
    try:
        return value.decode() if value is not None else None
    except UnicodeDecodeError:
        return None


def _rows_with(text: bytes, signs: list[bytes]) -> Iterator[Mapping[str, Any]]:
    """Yield the objects of lines that have one of some texts in them."""
    if not any(sign in text for sign in signs):
        return
    for line in text.splitlines():
        if any(sign in line for sign in signs):
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict):
                yield row
