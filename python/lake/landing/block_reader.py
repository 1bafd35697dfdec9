"""Contract of a reader of blocks: its declaration, its result, and the checks that the rows of all readers pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.lake.landing.blocks import I64, LineBlock, Mask, odd_bytes
from headrace.lake.landing.convert import lengths
from headrace.lake.landing.spellings import Spelling
from headrace.schema import EpochUnit, TableColumn


@dataclass(frozen=True)
class Declaration:
    """Parts of a spec that decide about rows."""

    columns: tuple[TableColumn, ...]
    #: Undeclared columns that the table has: kept as text.
    extra: tuple[str, ...]
    timezone: str
    timestamps: Mapping[str, EpochUnit]
    ranges: Mapping[str, tuple[float | None, float | None]]
    event_time: str | None
    #: Text columns whose values are ids.
    ids: tuple[str, ...] = ()
    #: UTF-8 bytes of an id at most; None: any number.
    id_bytes: int | None = None
    #: Whether an id may be the empty text.
    empty_ids: bool = True
    #: By column, how the source spells it where that is not plain.
    spellings: Mapping[str, Spelling] = field(default_factory=dict)
    #: Whether an id, and another text, may have a NUL character.
    nul_in_ids: bool = False
    nul_in_texts: bool = False
    #: Days that an event may be late, for reasons.
    late_days: int = 0

    @property
    def names(self) -> tuple[str, ...]:
        """The columns that readers give, in this order."""
        return (*(c.name for c in self.columns), *self.extra)


@dataclass(frozen=True)
class TimeRange:
    """Range of a landing day's event times: microseconds since 1970, [first, end); None: no limit."""

    first: int | None
    end: int


@dataclass
class SeenColumns:
    """Columns that a reader has seen in a file."""

    #: Declared columns that a row has a key (a field) for.
    present: set[str] = field(default_factory=set)
    #: Undeclared columns.
    extra: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class Parsed:
    """Rows of lines."""

    #: Of each row the place of its line among the given ones. int64 [rows].
    places: I64
    #: By `Declaration.names`, in the declared types.
    columns: list[pa.Array]
    #: Whether the row must be judged line by line. bool [rows].
    unsure: Mask


class Reader(Protocol):
    """Reads the blocks of one file, in their order or from the middle."""

    seen: SeenColumns
    #: Bytes of the blocks that it works best on.
    block_size: int

    def odd(self, block: LineBlock) -> Mask:
        """Return a mask of lines that the reader does not parse. bool [lines]."""
        ...

    def skipped(self, block: LineBlock) -> Mask:
        """Return a mask of lines that are no rows. bool [lines]."""
        ...

    def parse(self, lines: pa.BinaryArray) -> Parsed:
        """Parse lines, each of which ends with a newline, to rows."""
        ...


@dataclass(frozen=True)
class ReadBlock:
    """A block's lines, each in one of three places."""

    #: Numbers of the good rows' lines; int64 [rows], ascending.
    lines: I64
    #: The good rows, by `Declaration.names`.
    columns: list[pa.Array]
    #: Lines that are no rows.
    skipped: int
    #: Lines that are to be judged one by one. bool [lines].
    unsure: Mask

    def drop_rows(self, rows: Mask) -> ReadBlock:
        """Return the same block without some of the good rows. `rows`: bool [rows]."""
        if not rows.any():
            return self
        keep = pa.array(~rows)
        return replace(self, lines=self.lines[~rows], columns=[c.filter(keep) for c in self.columns])


def read_block(reader: Reader, block: LineBlock, declaration: Declaration, times: TimeRange) -> ReadBlock:
    """Sort the lines of a block into good rows, lines to skip, and lines to be judged one by one."""
    skip = (block.ends == block.starts) | reader.skipped(block)
    unsure: Mask = (odd_bytes(block) | reader.odd(block)) & ~skip
    chosen = ~(skip | unsure)
    if not chosen.any():
        empty = [pa.nulls(0, pa.string()) for _ in declaration.names]
        return ReadBlock(np.zeros(0, np.int64), empty, int(skip.sum()), unsure)
    lines = np.flatnonzero(chosen)
    parsed = reader.parse(block.lines if len(lines) == len(block) else block.lines.filter(pa.array(chosen)))
    wrong = parsed.unsure | out_of_bounds(parsed.columns, declaration, times)
    columns, places = parsed.columns, parsed.places
    if wrong.any():
        right = pa.array(~wrong)
        columns, places = [c.filter(right) for c in columns], places[~wrong]
    good = lines[places]
    unsure[lines] = True
    unsure[good] = False
    return ReadBlock(block.first_line + good, columns, int(skip.sum()), unsure)


def out_of_bounds(columns: Sequence[pa.Array], declaration: Declaration, times: TimeRange) -> Mask:
    """Return a mask of rows that lack a required value, have an id that is empty or too long, are outside a range, or
    whose event was at another time. bool [rows].

    NUL characters are not looked for: whole lines that have one are left out before (`odd_bytes`, `odd_json`).
    """
    wrong = np.zeros(len(columns[0]), np.bool_)
    by_name = dict(zip(declaration.names, columns, strict=True))
    for c in declaration.columns:
        if c.required and by_name[c.name].null_count:
            wrong |= by_name[c.name].is_null().to_numpy(zero_copy_only=False)
    for name in declaration.ids:
        size = lengths(by_name[name])
        if declaration.id_bytes is not None:
            wrong |= size > declaration.id_bytes
        if not declaration.empty_ids and len(size) and not size.all():
            wrong |= (size == 0) & by_name[name].is_valid().to_numpy(zero_copy_only=False)
    for name, (low, high) in declaration.ranges.items():
        value = by_name[name].cast(pa.float64(), safe=False)
        if low is not None:
            wrong |= _true(pc.less(value, low))
        if high is not None:
            wrong |= _true(pc.greater(value, high))
    if declaration.event_time is not None:
        micros = event_micros(by_name[declaration.event_time])
        if times.first is not None:
            wrong |= _true(pc.less(micros, times.first))
        wrong |= _true(pc.greater_equal(micros, times.end))
    return wrong


def event_micros(time: pa.Array) -> pa.Array:
    """Return microseconds since 1970 of timestamps, or of dates (their midnight in UTC)."""
    return time.cast(pa.timestamp("us", tz="UTC")).cast(pa.int64())


def _true(condition: pa.Array) -> Mask:
    mask: Mask = pc.fill_null(condition, False).to_numpy(zero_copy_only=False)
    return mask
