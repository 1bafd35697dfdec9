"""The values that are to be forgotten, and the columns that have them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from headrace.config import Spec, TableSource
from headrace.errors import UserError, nearest
from headrace.lake.forgotten import words_of
from headrace.schema import TableColumn

Mask = npt.NDArray[np.bool_]

_INTEGERS = {"tinyint": 8, "smallint": 16, "int": 32, "bigint": 64}
_INTEGER = re.compile(r"[+-]?[0-9]{1,19}")
#: Bytes of a text, and digits of an integer, that a search of files may rely on: shorter ones are in them by chance.
_LEAST_BYTES, _LEAST_DIGITS = 6, 12
#: Integers, but for parts of other numbers.
_DIGITS_IN_TEXT = re.compile(r"(?<![0-9.])[0-9]{12,19}(?![0-9.eE])")
_DIGITS = re.compile(_DIGITS_IN_TEXT.pattern.encode())
#: What stands where a value was.
_GONE = "[forgotten]"


@dataclass(frozen=True)
class Persons:
    """Values of a column, by their texts; whoever has them is forgotten."""

    column: str
    #: Whether they are integers.
    integers: bool
    texts: frozenset[str]

    @cached_property
    def _set(self) -> pa.Array:
        if self.integers:
            return pa.array(sorted(map(int, self.texts)), pa.int64())
        return pa.array(sorted(self.texts), pa.string())

    def mask(self, values: pa.ChunkedArray | pa.Array) -> Mask:
        """Which values are theirs, whatever their type. bool [n]."""
        if pa.types.is_dictionary(values.type):
            values = values.cast(values.type.value_type)
        if pa.types.is_integer(values.type) and self.integers:
            found = pc.is_in(values.cast(pa.int64()), value_set=self._set)
        elif pa.types.is_string(values.type) or pa.types.is_large_string(values.type):
            found = pc.is_in(values.cast(pa.string()), value_set=self._set.cast(pa.string()))
        else:
            return np.zeros(len(values), np.bool_)
        return np.asarray(pc.fill_null(found, False).to_numpy(zero_copy_only=False), np.bool_)

    def said_in(self, text: str | None, cut: bool = False) -> bool:
        """Whether a text that is no row has a value as one of its words, or, where a value is no word, anywhere.

        `cut`: it is the beginning of a longer one, so its last word may be that of a value.
        """
        if text is None:
            return False
        words = words_of(text)
        if cut and words[-1] and any(v.startswith(words[-1]) for v in self._words):
            return True
        return not self._words.isdisjoint(words) or any(v in text for v in self._no_words)

    @property
    def searchable(self) -> bool:
        """Whether a search of bytes can find some: long texts, long integers; others are in files by chance."""
        return bool(self._digits if self.integers else self._bytes)

    @cached_property
    def long_texts(self) -> frozenset[str]:
        """Texts that are a value of theirs in whatever column: shorter ones are others' values by chance."""
        if self.integers:
            return frozenset(t for t in self.texts if len(t.lstrip("-")) >= _LEAST_DIGITS)
        return frozenset(b.decode() for b in self._bytes)

    @property
    def longest(self) -> int:
        """Bytes of the longest value."""
        return max(len(t.encode()) for t in self.texts)

    def in_bytes(self, data: bytes) -> bool:
        """Whether one is among a file's bytes, of those that can be searched."""
        if self.integers:
            return any(run in self._digits for run in _DIGITS.findall(data))
        return any(b in data for b in self._bytes)

    def without(self, text: str) -> str:
        """A text with another one in the place of those that can be searched."""
        if self.integers:
            return _DIGITS_IN_TEXT.sub(lambda m: _GONE if m[0].encode() in self._digits else m[0], text)
        for value in self._bytes:
            text = text.replace(value.decode(), _GONE)
        return text

    @cached_property
    def _bytes(self) -> tuple[bytes, ...]:
        found = (t.encode() for t in sorted(self.texts))
        return tuple(b for b in found if len(b) >= _LEAST_BYTES)

    @cached_property
    def _digits(self) -> frozenset[bytes]:
        return frozenset(t.lstrip("-").encode() for t in self.texts if len(t.lstrip("-")) >= _LEAST_DIGITS)

    @cached_property
    def _words(self) -> frozenset[str]:
        return frozenset(t for t in self.texts if words_of(t) == [t])

    @cached_property
    def _no_words(self) -> tuple[str, ...]:
        return tuple(sorted(t for t in self.texts if t not in self._words and t.strip()))


def read_persons(spec: Spec, column: str, file: Path) -> Persons:
    """The values of a text file, one a line, of a column that the pipeline declares.

    Raises:
        UserError: no source declares the column, or it is neither text nor integers; the file cannot be read, has no
            value, or one of another type.
    """
    declared = list(_declared(spec, column))
    if not declared:
        known = {c.name for _, columns in _tables(spec) for c in columns}
        raise UserError(
            f"--column {column}: no source of {spec.pipeline} declares it{nearest(column, known)}; columns: "
            f"{', '.join(sorted(known))}"
        )
    types = {c.type for c in declared}
    if others := sorted(types - {*_INTEGERS, "string"}):
        raise UserError(f"--column {column}: it is {others[0]}; persons are told apart by text or integers")
    try:
        # Not splitlines(): texts may have other characters that end lines for it.
        lines = [line.removesuffix("\r") for line in file.read_bytes().decode("utf-8-sig").split("\n")]
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(f"--values {file}: {e}") from None
    values = [(n, line) for n, line in enumerate(lines, 1) if line.strip()]
    if not values:
        raise UserError(f"--values {file}: it has no values; write one a line")
    bits = min((_INTEGERS[t] for t in types if t in _INTEGERS), default=None)
    if bits is None:
        if blank := [n for n, line in values if line != line.strip()]:
            raise UserError(f"--values {file}, line {blank[0]}: it begins or ends with a blank; remove it")
        return Persons(column, False, frozenset(line for _, line in values))
    texts = set()
    for number, line in values:
        # The value itself is not repeated: messages are logged.
        if not _INTEGER.fullmatch(line.strip()) or not -(2 ** (bits - 1)) <= int(line) < 2 ** (bits - 1):
            (type_,) = (t for t in types if _INTEGERS.get(t) == bits)
            raise UserError(f"--values {file}, line {number}: it is no {type_}, as column '{column}' is declared")
        texts.add(str(int(line)))
    return Persons(column, True, frozenset(texts))


def sources_with(spec: Spec, column: str) -> Iterator[tuple[str | None, TableSource | None]]:
    """The sources that declare the column: the name (None: the main one), and the user's own table where it is one."""
    for name, columns in _tables(spec):
        if any(c.name == column for c in columns):
            source = spec.source if name is None else spec.sources[name].source
            yield name, source if isinstance(source, TableSource) else None


def _tables(spec: Spec) -> Iterator[tuple[str | None, Collection[TableColumn]]]:
    yield None, spec.table.columns
    for name, named in spec.sources.items():
        yield name, named.table.columns


def _declared(spec: Spec, column: str) -> Iterator[TableColumn]:
    return (c for _, columns in _tables(spec) for c in columns if c.name == column)
