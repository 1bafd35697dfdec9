"""Persons to forget: their values of a column, and a place that has some."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from headrace.config import Spec, TableSource
from headrace.config.schema import TableColumn
from headrace.errors import UserError, nearest
from headrace.features.ops.categories import Categorify
from headrace.features.workflow.workflow import Workflow
from headrace.lake.forgotten import words_of

Mask = npt.NDArray[np.bool_]
_INTEGERS = {"tinyint": 8, "smallint": 16, "int": 32, "bigint": 64}
_INTEGER = re.compile(r"[+-]?[0-9]{1,19}")
#: Shortest text (bytes) and integer (digits) to search files for: shorter ones occur by chance.
_LEAST_BYTES, _LEAST_DIGITS = 6, 12
#: Integers that are no parts of other numbers.
_DIGITS_IN_TEXT = re.compile(r"(?<![0-9.])[0-9]{12,19}(?![0-9.eE])")
_DIGITS = re.compile(_DIGITS_IN_TEXT.pattern.encode())
#: Replaces a value in texts.
_REDACTED = "[forgotten]"
#: Placeholder of a code's value: a letter of Unicode's private use area, which data do not have, and the code.
_FORGOTTEN_PERSON = "\ue000forgotten/{}"
_LENGTH = re.compile(r"(\d+):")


@dataclass(frozen=True)
class Place:
    """Place that has some of the values. A second look after it is erased finds none."""

    #: events, quarantine, table, vocabulary, statistics, dataset, search, cache, log, report, training, model,
    #: warehouse, online, landing, source.
    kind: str
    #: A path below the workspace, or a name for messages.
    name: str
    #: Rows: of tables, values of a vocabulary, rows of embeddings, users of a store.
    rows: int = 0
    #: Number of files to rewrite, and to remove.
    rewritten: int = 0
    removed: int = 0
    #: Bytes of the removed files.
    size: int = 0
    #: Work that could not be done, or must be done by hand; empty: none.
    left: str = ""
    #: Whether a later run of the command does that work.
    later: bool = False
    #: Text for messages: how the place changes.
    note: str = ""
    #: Erases it, and returns what remains to be done by hand, if anything; None: headrace does not write it.
    act: Callable[[], str | None] | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True)
class Persons:
    """Persons to forget: the texts of their values of a column."""

    column: str
    #: Whether the values are integers.
    integers: bool
    texts: frozenset[str]

    @cached_property
    def _set(self) -> pa.Array:
        if self.integers:
            return pa.array(sorted(map(int, self.texts)), pa.int64())
        return pa.array(sorted(self.texts), pa.string())

    def mask(self, values: pa.ChunkedArray | pa.Array) -> Mask:
        """Return which values are theirs, of any type: bool [n]."""
        if pa.types.is_dictionary(values.type):
            values = values.cast(values.type.value_type)
        if pa.types.is_integer(values.type) and self.integers:
            is_theirs = pc.is_in(values.cast(pa.int64()), value_set=self._set)
        elif pa.types.is_string(values.type) or pa.types.is_large_string(values.type):
            is_theirs = pc.is_in(values.cast(pa.string()), value_set=self._set.cast(pa.string()))
        else:
            return np.zeros(len(values), np.bool_)
        return np.asarray(pc.fill_null(is_theirs, False).to_numpy(zero_copy_only=False), np.bool_)

    def occurs_in(self, text: str | None, cut: bool = False) -> bool:
        """Return whether a text that is no row has a value as one of its words, or, where a value is no word, anywhere.

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
        """Return whether a search of bytes can find some: long texts, long integers; others are in files by chance."""
        return bool(self._digits if self.integers else self._bytes)

    @cached_property
    def long_texts(self) -> frozenset[str]:
        """Texts that are a value of theirs in whatever column: shorter ones are others' values by chance."""
        if self.integers:
            return frozenset(t for t in self.texts if len(t.lstrip("-")) >= _LEAST_DIGITS)
        return frozenset(b.decode() for b in self._bytes)

    @property
    def longest(self) -> int:
        """Return bytes of the longest value."""
        return max(len(t.encode()) for t in self.texts)

    def in_bytes(self, data: bytes) -> bool:
        """Return whether a file's bytes have one of the searchable values."""
        if self.integers:
            return any(run in self._digits for run in _DIGITS.findall(data))
        return any(b in data for b in self._bytes)

    def redact(self, text: str) -> str:
        """Return a text in which searchable values are replaced."""
        if self.integers:
            return _DIGITS_IN_TEXT.sub(lambda m: _REDACTED if m[0].encode() in self._digits else m[0], text)
        for value in self._bytes:
            text = text.replace(value.decode(), _REDACTED)
        return text

    @cached_property
    def _bytes(self) -> tuple[bytes, ...]:
        encoded = (t.encode() for t in sorted(self.texts))
        return tuple(b for b in encoded if len(b) >= _LEAST_BYTES)

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
    """Return the values of a text file, one a line, of a column that the pipeline declares.

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
    if other_types := sorted(types - {*_INTEGERS, "string"}):
        raise UserError(f"--column {column}: it is {other_types[0]}; persons are told apart by text or integers")
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
    """Yield the sources that declare the column: name (None: the main one), and the user's table where it is one."""
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


def is_blanked(value: str | None) -> bool:
    """Return whether a value is a placeholder."""
    return value is not None and value.startswith(_FORGOTTEN_PERSON.format(""))


def with_placeholders(
    values: Sequence[str | None], is_replaced: Sequence[bool] | npt.NDArray[np.bool_], numbers: Iterable[int]
) -> list[str | None]:
    """Replace selected texts by placeholders that are distinct by their numbers."""
    return [_FORGOTTEN_PERSON.format(n) if out else v for v, out, n in zip(values, is_replaced, numbers, strict=True)]


def vocabularies_of(workflow: Workflow, column: str) -> set[str]:
    """Return the vocabularies that have values of a column; one that an older spec named after the column, too."""
    names = {column}
    for chain in workflow.chains:
        names |= {t.vocabulary for n, t in chain.outputs.items() if t.vocabulary and column in chain.sources[n]}
        for step in chain.steps:
            if isinstance(step.op, Categorify) and column in step.inputs:
                names.add(step.op.vocabulary_of(column))
    return names


def parts_of(key: str) -> list[str]:
    """Return the values that a key may consist of: itself, or its parts (features.functions.keys.joint_key)."""
    parts, offset = [], 0
    while (match := _LENGTH.match(key, offset)) is not None and match.end() + int(match.group(1)) <= len(key):
        end = match.end() + int(match.group(1))
        parts.append(key[match.end() : end])
        offset = end
    return [key, *parts, *([key[offset:]] if parts else [])]
