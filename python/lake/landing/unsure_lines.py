"""Judgement of landing lines that Arrow is unsure of, or cannot read at all, in the task that reads them.

A line becomes typed rows, each good or bad, and a bad one says why. headrace.lake.landing.exact_casts has the rules of
single values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from decimal import Decimal
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.config.schema import TableColumn
from headrace.lake.faults import (
    BAD,
    FORGOTTEN,
    GOOD,
    NOT_JSON,
    NOT_UTF8,
    SHOWN_CHARACTERS,
    a_type,
    half_pair,
    kind_empty,
    kind_missing,
    kind_nul,
    kind_outside,
    kind_unreadable,
    most_bytes,
    span_outside,
    untimely_faults,
)
from headrace.lake.forgotten import ForgottenValues
from headrace.lake.landing.blocks import BOM, I64, TOO_LONG, Declaration, LineBlock, Mask, TimeRange, event_micros
from headrace.lake.landing.convert import arrow_type, element_type
from headrace.lake.landing.delimited import LineForm, LineRow
from headrace.lake.landing.exact_casts import (
    DeclaredNames,
    Members,
    NamedNumber,
    Reached,
    cast_texts,
    columns_with_halves,
    double_text,
    element_text,
    elements_of,
    float_text,
    members_of,
    moment_text,
    reached_by_lists,
    room_for_levels,
    spelled_text,
    text_of,
    without_halves,
)

_NUL = "\0"
_EXTRA_TYPE = pa.map_(pa.string(), pa.string())


@dataclass
class _Line:
    """A line that is a row, good or bad."""

    number: int
    text: str
    #: Why the line as a whole cannot be read.
    broken: str | None
    #: Of each declared column its value: a text, or what headrace.lake.landing.exact_casts gives; None for null, and an
    #: `Obstacle` for what cannot be read.
    values: Sequence[Any]
    #: Declared columns that the line has a key (a field) for, be it null.
    present: Set[str]
    #: Undeclared columns and their values.
    extra: Mapping[str, Any]
    #: Further reasons why the row is bad.
    faults: list[str] = field(default_factory=list)
    #: Declared columns that have U+FFFD for half a surrogate pair, by their places.
    halves: Sequence[int] = ()
    #: Number of the row among those of its line.
    copy: int = 0


@dataclass(frozen=True)
class Obstacle:
    """A value on the way of a path that expects an object or a list there: it cannot be read."""

    text: str


@dataclass
class _Fault:
    """One thing that is wrong with a row: its kind (for counting), its reason, and the value."""

    kind: str
    reason: str
    example: str = ""


@dataclass
class JudgedCounts:
    """Counts of judged rows; see `headrace.lake.landing.expectations.FileProfile`. JSON values, by columns' names."""

    skipped: int = 0
    good: int = 0
    bad: int = 0
    forgotten: int = 0
    broken: int = 0
    readable: dict[str, int] = field(default_factory=dict)
    #: Nulls in good rows.
    nulls: dict[str, int] = field(default_factory=dict)
    #: (count, example).
    unreadable: dict[str, list[Any]] = field(default_factory=dict)
    mended: dict[str, int] = field(default_factory=dict)
    reasons: dict[str, int] = field(default_factory=dict)
    present: list[str] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)
    #: Rows beyond one a line.
    expanded: int = 0
    #: Microseconds since 1970.
    newest: int | None = None
    watermark: int | None = None

    def add(self, counts: JudgedCounts) -> None:
        """Add the counts of further rows."""
        for name in ("skipped", "good", "bad", "forgotten", "broken", "expanded"):
            setattr(self, name, getattr(self, name) + getattr(counts, name))
        for name in ("readable", "nulls", "mended", "reasons"):
            totals = getattr(self, name)
            for key, count in getattr(counts, name).items():
                totals[key] = totals.get(key, 0) + count
        for key, (count, example) in counts.unreadable.items():
            total, first = self.unreadable.get(key, (0, example))
            self.unreadable[key] = [total + count, min(first, example)]
        self.present = sorted({*self.present, *counts.present})
        self.extra = sorted({*self.extra, *counts.extra})
        self.newest = later(self.newest, counts.newest)
        self.watermark = later(self.watermark, counts.watermark)


def later(*micros: int | None) -> int | None:
    """Return the greatest of some moments; None where there is none."""
    return max((n for n in micros if n is not None), default=None)


@dataclass(frozen=True)
class JudgedLines:
    """Some lines of a block, judged."""

    #: By `judged_schema`: the good rows and the bad ones.
    rows: pa.Table
    counts: JudgedCounts


def judged_schema(declaration: Declaration) -> pa.Schema:
    """Return the columns of judged rows, which formats that make rows anew are given, too."""
    position = [("_file", pa.int32()), ("_ds", pa.string()), ("_source_file", pa.string()), ("_line", pa.int64())]
    columns = [(c.name, arrow_type(c.type)) for c in declaration.columns]
    texts = [("_extra", _EXTRA_TYPE), ("_raw", pa.string()), ("_reason", pa.string())]
    return pa.schema([*position, ("_copy", pa.int32()), ("_state", pa.int32()), *columns, *texts])


@dataclass(frozen=True)
class LineJudge:
    """Judges lines of one landing file."""

    declaration: Declaration
    #: None: JSON lines.
    form: LineForm | None
    #: Whether undeclared columns become columns of the table.
    accept: bool
    times: TimeRange
    #: Number, day and name of the file.
    file: tuple[int, str, str]
    forgotten: ForgottenValues | None = None

    def judge(self, block: LineBlock, chosen: Mask) -> JudgedLines:
        """Judge some lines of a block. `chosen`: bool [lines]."""
        texts = block.texts(chosen).view(pa.binary()).to_pylist()
        counts, lines = JudgedCounts(), list[_Line]()
        with room_for_levels(texts if self.form is None or self._paths else ()):
            for place, number, text in zip(
                np.flatnonzero(chosen).tolist(), block.number(chosen).tolist(), texts, strict=True
            ):
                fault = TOO_LONG if block.too_long else block.faults.get(place)
                rows_of_line = self._rows(number, text, fault)
                if rows_of_line:
                    lines += rows_of_line
                    counts.expanded += len(rows_of_line) - 1
                else:
                    counts.skipped += 1
            rows = _Rows(self, lines)
        counts.add(rows.counts)
        return JudgedLines(rows.table, counts)

    def _rows(self, number: int, raw: bytes, fault: str | None) -> list[_Line]:
        """Return what a line says; nothing where it is no row."""
        data = raw.rstrip(b"\r")
        if number == 1:
            while data.startswith(BOM):
                data = data.removeprefix(BOM)
        text = data.decode(errors="replace")
        is_utf8 = "\ufffd" not in text or text.encode() == data
        if fault is None and not text.strip(" "):
            return []
        if self.form is not None and self.form.header and number == 1:
            return []
        broken = fault or (None if is_utf8 else NOT_UTF8)
        if self.form is None:
            return [self._of_json(number, text, data, broken)]
        rows = self.form.rows(text)
        return [self._of_texts(number, text, broken, row, copy) for copy, row in enumerate(rows)]

    def _of_texts(self, number: int, text: str, broken: str | None, row: LineRow, copy: int) -> _Line:
        nulls, places, texts = self._nulls, self._places, row.texts
        values: list[Any] = [None if k is None or texts[k] in nulls else texts[k] for k in places.declared]
        extra = {name: None if texts[k] in nulls else texts[k] for name, k in places.undeclared}
        present, faults = places.present, list[str]()
        if self._paths is not None:
            inside = self._paths.read(lambda key: None if (k := places.of_key.get(key)) is None else texts[k], nulls)
            present, faults = present | inside.present, inside.faults
            for i, value in inside.values.items():
                values[i] = value
        return _Line(number, text, broken or row.fault, values, present, extra, faults, copy=copy)

    def _of_json(self, number: int, text: str, data: bytes, broken: str | None) -> _Line:
        names = self._names
        halves: list[int] = []
        if "\\u" in text:
            halves = columns_with_halves(data, [c.steps for c in self.declaration.columns])
        members = members_of(text)
        if members is None:
            members, broken = Members(), broken or NOT_JSON
        members, fault = names.renamed(members)
        by_name: dict[str, Any] = {}
        for name, value in members:
            by_name.setdefault(name, value)  # of several members with one name the first
        extra = {name: by_name[name] for name in by_name if name not in names.present}
        faults = [fault] if fault is not None else []
        values = [by_name.get(key) if key is not None else None for key in self._keys]
        present = {self._columns[i] for i, key in enumerate(self._keys) if key in by_name}
        if self._paths is not None:
            by_lists = reached_by_lists(without_halves(data), self._paths.steps)
            inside = self._paths.read(by_name.get)
            present |= inside.present
            faults += inside.faults
            for i, value in inside.values.items():
                values[i] = value
            for i, target in by_lists.items():
                values[i] = _value_by_list(target)
                (present.add if target.is_present else present.discard)(self._columns[i])
        ids, columns = self.declaration.ids, self._columns
        faults += [half_pair(columns[i]) for i in halves if columns[i] in ids]
        return _Line(number, text, broken, values, present, extra, faults, halves)

    @cached_property
    def _columns(self) -> list[str]:
        return [c.name for c in self.declaration.columns]

    @cached_property
    def _keys(self) -> list[str | None]:
        """The field of each declared column's value; None where a path leads further in."""
        return [str(c.steps[0]) if len(c.steps) == 1 else None for c in self.declaration.columns]

    @cached_property
    def _paths(self) -> NestedPaths | None:
        paths = {i: c.steps for i, c in enumerate(self.declaration.columns) if len(c.steps) > 1}
        return NestedPaths(paths, self._columns) if paths else None

    @cached_property
    def _nulls(self) -> frozenset[str | None]:
        assert self.form is not None
        return frozenset({None, *self.form.null_texts})

    @cached_property
    def _places(self) -> _FieldPlaces:
        assert self.form is not None
        place = {name: k for k, name in enumerate(self.form.names)}
        declared = {str(c.steps[0]) for c in self.declaration.columns}
        return _FieldPlaces(
            [None if key is None else place.get(key) for key in self._keys],
            [(name, k) for name, k in place.items() if name not in declared],
            frozenset(name for name, key in zip(self._columns, self._keys, strict=True) if key in place),
            place,
        )

    @cached_property
    def _names(self) -> DeclaredNames:
        return DeclaredNames(list(dict.fromkeys(str(c.steps[0]) for c in self.declaration.columns)))


def _value_by_list(target: Reached) -> Any:
    """Return what a path through a list leads to."""
    if target.obstacle is None:
        return spelled_text(target.value)
    return None if (text := spelled_text(target.obstacle)) is None else Obstacle(text)


@dataclass(frozen=True)
class _FieldPlaces:
    """Places of columns among the fields of a line."""

    #: Of each declared column; None: the file has no such field.
    declared: list[int | None]
    undeclared: list[tuple[str, int]]
    #: The declared columns that the file has.
    present: Set[str]
    of_key: Mapping[str, int]


@dataclass(frozen=True)
class _Inside:
    """Values that nested paths lead to in one row, by the places of their columns."""

    #: Text, list, number or `Obstacle`; None where there is none, or null.
    values: Mapping[int, Any]
    #: Columns whose last key is there, be its value null.
    present: frozenset[str]
    #: Reasons why an object's members cannot be distinguished.
    faults: list[str]


class NestedPaths:
    """Paths through objects, and through JSON objects in texts. Each object on the way is parsed once."""

    def __init__(self, steps: Mapping[int, tuple[str, ...]], columns: Sequence[str]) -> None:
        """Arrange the objects on the paths.

        Args:
            steps: by the place of its column, each path of several steps.
            columns: names of the columns.
        """
        self.steps, self._columns = steps, columns
        outer = dict.fromkeys(path[:k] for path in steps.values() for k in range(1, len(path)))
        #: Objects, outer ones first, and the names of their members that paths go through.
        self._objects = {
            prefix: DeclaredNames(
                list(
                    dict.fromkeys(
                        str(path[len(prefix)])
                        for path in steps.values()
                        if path[: len(prefix)] == prefix and len(path) > len(prefix)
                    )
                )
            )
            for prefix in sorted(outer, key=len)
        }

    def read(self, field: Callable[[str], Any], nulls: Set[str | None] = frozenset()) -> _Inside:
        """Follow the paths in one row.

        Args:
            field: the value of a field of the row, by its name.
            nulls: texts of fields that are null.
        """
        objects: dict[tuple[str, ...], dict[str, Any] | None] = {}
        inner_objects, faults = set[tuple[str, ...]](), list[str]()

        def value_of(steps: tuple[str, ...]) -> Any:
            if len(steps) > 1:
                members = objects[steps[:-1]]
                value = None if members is None else members.get(steps[-1])
                # Of an object that another one has within, NaN and infinities are texts.
                return str(value) if isinstance(value, NamedNumber) and steps[:-1] in inner_objects else value
            value = field(steps[0])
            return None if isinstance(value, str) and value in nulls else value

        for prefix, names in self._objects.items():
            value = value_of(prefix)
            if isinstance(value, str):
                value = members_of(value)
            else:
                inner_objects.add(prefix)
            if not isinstance(value, Members):
                objects[prefix] = None
                continue
            members, fault = names.renamed(value)
            if fault is not None:
                faults.append(fault)
            by_name: dict[str, Any] = {}
            for name, inner in members:
                by_name.setdefault(name, inner)
            objects[prefix] = by_name
        values, present = dict[int, Any](), set[str]()
        for i, steps in self.steps.items():
            values[i] = value = value_of(steps)
            if value is None:
                blocked = (value_of(o) for o in (steps[:k] for k in range(1, len(steps))) if objects[o] is None)
                obstacle = next((v for v in blocked if v is not None), None)
                values[i] = None if obstacle is None else Obstacle(text_of(obstacle))
            if steps[-1] in (objects[steps[:-1]] or ()):
                present.add(self._columns[i])
        return _Inside(values, frozenset(present), faults)


class _Rows:
    """Lines as typed rows with their states."""

    def __init__(self, judge: LineJudge, lines: list[_Line]) -> None:
        self._judge, self._declaration, self._lines = judge, judge.declaration, lines
        self._faults: list[list[_Fault]] = [[] for _ in lines]
        columns = [self._typed(i, c) for i, c in enumerate(self._declaration.columns)]
        self._values = dict(zip((c.name for c in self._declaration.columns), columns, strict=True))
        self._add_unfit_texts()
        self._add_outside()
        self._add_untimely()
        for faults, line in zip(self._faults, lines, strict=True):
            faults += [_Fault(fault, fault) for fault in line.faults]
        states = self._states()
        extra = [self._extra_texts(row) for row in range(len(lines))]
        self.table = self._table(states, columns, extra)
        self.counts = self._counts(states)

    # --- values ------------------------------------------------------------------------------------------------------

    def _text_of(self, row: int, i: int) -> str:
        """Return a value that is not null as text."""
        value = self._lines[row].values[i]
        if isinstance(value, Obstacle):
            return value.text
        return value if type(value) is str else text_of(value)

    def _typed(self, i: int, column: TableColumn) -> pa.Array:
        """Return a declared column's values, and record the faults of those that cannot be read."""
        raw = [line.values[i] for line in self._lines]
        is_list = element_type(column.type) is not None
        values, lost = self._lists(i, column, raw) if is_list else self._scalars(i, column, raw)
        for row in np.flatnonzero(lost).tolist():
            example = self._text_of(row, i)[:SHOWN_CHARACTERS]
            reason = f"{column.name}: '{example}' is not {a_type(column.type)}"
            self._faults[row].append(_Fault(kind_unreadable(column), reason, example))
        if column.required:
            for row, value in enumerate(raw):
                if value is None:
                    self._faults[row].append(_Fault(kind_missing(column), kind_missing(column)))
        return values

    def _scalars(self, i: int, column: TableColumn, raw: list[Any]) -> tuple[pa.Array, Mask]:
        declaration, name = self._declaration, column.name

        def ready(row: int) -> str | None:
            value = raw[row]
            if isinstance(value, float) and column.type == "double" and name not in declaration.spellings:
                return repr(value)  # however Java spells it, it is this double
            return None if value is None or isinstance(value, Obstacle) else self._text_of(row, i)

        form = self._judge.form
        is_text = form is not None and len(column.steps) == 1
        texts = pa.array(raw if is_text else [ready(row) for row in range(len(raw))], pa.string())
        plain = texts
        if form is not None and name in form.rewrites:
            plain = pc.replace_substring_regex(plain, *form.rewrites[name])
        if name in declaration.spellings:
            plain = declaration.spellings[name].plain(plain)
        unit = declaration.timestamps.get(name) or (form.epochs.get(name) if form is not None else None)
        values = cast_texts(plain, column.type, declaration.timezone, unit)
        return values, _lost(values, texts) | _obstacles(raw)

    def _lists(self, i: int, column: TableColumn, raw: list[Any]) -> tuple[pa.Array, Mask]:
        declaration, form, element = self._declaration, self._judge.form, element_type(column.type)
        assert element is not None

        def ready(row: int) -> list[str | None] | None:
            value = raw[row]
            if value is None:
                return None
            if form is not None and len(column.steps) == 1:
                return list(value.split(form.lists))
            elements = elements_of(value)
            if elements is None:
                return None
            is_double = element == "double" and column.name not in declaration.spellings
            return [repr(e) if is_double and isinstance(e, float) else element_text(e) for e in elements]

        is_absent = np.array([value is None for value in raw], np.bool_)
        lists = pa.array([ready(row) for row in range(len(raw))], pa.list_(pa.string()))
        texts = lists.flatten()
        plain = texts
        if column.name in declaration.spellings:
            plain = declaration.spellings[column.name].plain(plain)
        values = cast_texts(plain, element, declaration.timezone, None)
        sizes = pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False)
        row_of = np.repeat(np.arange(len(lists)), sizes)
        lost = ~is_absent & lists.is_null().to_numpy(zero_copy_only=False)
        lost[row_of[_lost(values, texts)]] = True
        offsets = np.append(0, np.cumsum(sizes)).astype(np.int32)
        typed = pa.ListArray.from_arrays(pa.array(offsets), values, type=arrow_type(column.type))
        # A list with an element that is spelled otherwise is none; one with another element that cannot be read is a
        # list with a null there, of a bad row.
        is_none = lists.is_null().to_numpy(zero_copy_only=False).copy()
        is_none[row_of[_lost(plain, texts)]] = True
        return (pc.if_else(pa.array(is_none), None, typed) if is_none.any() else typed), lost

    def _extra_texts(self, row: int) -> list[tuple[str, str | None]] | None:
        """Return undeclared members that the table has a column for."""
        judge, line = self._judge, self._lines[row]
        if not line.extra:
            return None
        names = [n for n in line.extra if judge.accept or n in self._declaration.extra]
        return [(n, None if line.extra[n] is None else text_of(line.extra[n])) for n in names]

    # --- faults ------------------------------------------------------------------------------------------------------

    def _add_unfit_texts(self) -> None:
        declaration = self._declaration
        for column in declaration.columns:
            name, values, is_id = column.name, self._values[column.name], column.name in declaration.ids
            if column.type not in ("string", "array<string>"):
                continue
            may_have_nul = declaration.nul_in_ids if is_id else declaration.nul_in_texts
            looked_at = np.zeros(len(values), np.bool_)
            if is_id and (declaration.id_bytes is not None or not declaration.empty_ids):
                looked_at |= values.is_valid().to_numpy(zero_copy_only=False)
            if not may_have_nul and _has_nul(values):
                looked_at |= values.is_valid().to_numpy(zero_copy_only=False)
            for row in np.flatnonzero(looked_at).tolist():
                value = values[row].as_py()
                faults = self._faults[row]
                if is_id and declaration.id_bytes is not None and len(value.encode()) > declaration.id_bytes:
                    limit, size = most_bytes(declaration.id_bytes), len(value.encode())
                    reason = f"{name}: '{value[:SHOWN_CHARACTERS]}' has {size}; {limit}"
                    faults.append(_Fault(f"{name}: {limit}", reason.replace(_NUL, "\\0")))
                if is_id and not declaration.empty_ids and value == "":
                    faults.append(_Fault(kind_empty(name), kind_empty(name)))
                texts = value if isinstance(value, list) else [value]
                if not may_have_nul and any(text is not None and _NUL in text for text in texts):
                    faults.append(_Fault(kind_nul(name, is_id), kind_nul(name, is_id)))

    def _add_outside(self) -> None:
        types = {c.name: c.type for c in self._declaration.columns}
        for name, (low, high) in self._declaration.ranges.items():
            for row, value in enumerate(self._values[name].to_pylist()):
                if value is None:
                    continue
                number = float(value)
                if (low is None or number >= low) and (high is None or number <= high):
                    continue
                kind, text = kind_outside(name, low, high), _number_text(value, types[name])
                self._faults[row].append(_Fault(kind, f"{name}: {text} is {span_outside(low, high)}"))

    def _add_untimely(self) -> None:
        name, times = self._declaration.event_time, self._judge.times
        if name is None:
            return
        too_late, too_early = untimely_faults(self._declaration.late_days)
        for row, micros in enumerate(event_micros(self._values[name], self._declaration.timezone).to_pylist()):
            if micros is None:
                continue
            for is_fault, fault in (
                (times.first is not None and micros < times.first, too_late),
                (micros >= times.end, too_early),
            ):
                if is_fault:
                    reason = f"{name}: '{moment_text(micros)}' is {fault}"
                    self._faults[row].append(_Fault(f"{name}: {fault}", reason))

    # --- results -----------------------------------------------------------------------------------------------------

    def _states(self) -> I64:
        broken = np.array([line.broken is not None for line in self._lines], np.bool_)
        faulty = np.array([bool(faults) for faults in self._faults], np.bool_)
        states = np.where(broken | faulty, BAD, GOOD)
        forgotten = self._judge.forgotten
        if forgotten is None or not len(states):
            return states
        names = [c.name for c in self._declaration.columns]
        is_forgotten = forgotten.any_of(names, list(self._values.values()))
        for name in forgotten.columns:
            i = names.index(name)

            def text(row: int, i: int = i) -> str | None:
                return None if self._lines[row].values[i] is None else self._text_of(row, i)

            texts = [text(row) for row in range(len(self._lines))]
            is_forgotten |= forgotten.mask(name, pa.array(texts, pa.string()))
        for row in np.flatnonzero(broken).tolist():
            is_forgotten[row] |= forgotten.in_line(self._lines[row].text)
        return np.where(is_forgotten, FORGOTTEN, states)

    def _reason(self, row: int) -> str:
        broken = self._lines[row].broken
        return broken if broken is not None else "; ".join(fault.reason for fault in self._faults[row])

    def _table(self, states: I64, columns: list[pa.Array], extra: list[Any]) -> pa.Table:
        written = np.flatnonzero(states != FORGOTTEN)
        number, ds, name = self._judge.file
        is_bad = states == BAD
        raw = [line.text if bad else None for line, bad in zip(self._lines, is_bad.tolist(), strict=True)]
        reasons = [self._reason(row) if bad else None for row, bad in enumerate(is_bad.tolist())]
        n = len(self._lines)
        arrays = [
            pa.array(np.full(n, number, np.int32)),
            pa.array([ds] * n, pa.string()),
            pa.array([name] * n, pa.string()),
            pa.array([line.number for line in self._lines], pa.int64()),
            pa.array([line.copy for line in self._lines], pa.int32()),
            pa.array(states.astype(np.int32)),
            *columns,
            pa.array(extra, _EXTRA_TYPE),
            pa.array(raw, pa.string()),
            pa.array(reasons, pa.string()),
        ]
        return pa.Table.from_arrays(arrays, schema=judged_schema(self._declaration)).take(pa.array(written))

    def _counts(self, states: I64) -> JudgedCounts:
        counts = JudgedCounts()
        counts.good, counts.bad, counts.forgotten = (int((states == s).sum()) for s in (GOOD, BAD, FORGOTTEN))
        good = states == GOOD
        for column in self._declaration.columns:
            is_value = self._values[column.name].is_valid().to_numpy(zero_copy_only=False)
            counts.readable[column.name] = int(is_value.sum())
            counts.nulls[column.name] = int((good & ~is_value).sum())
        kinds = {kind_unreadable(c): c.name for c in self._declaration.columns}
        present: set[str] = set()
        extra: set[str] = set()
        for row, line in enumerate(self._lines):
            present |= line.present
            extra |= line.extra.keys()
            if states[row] == GOOD:
                for i in line.halves:
                    name = self._declaration.columns[i].name
                    counts.mended[name] = counts.mended.get(name, 0) + 1
            elif states[row] == BAD and line.broken is not None:
                counts.broken += 1
                counts.reasons[line.broken] = counts.reasons.get(line.broken, 0) + 1
            elif states[row] == BAD:
                faults = self._faults[row]
                counts.reasons[faults[0].kind] = counts.reasons.get(faults[0].kind, 0) + 1
                for fault in faults:
                    if fault.kind in kinds:
                        count, example = counts.unreadable.get(kinds[fault.kind], (0, fault.example))
                        counts.unreadable[kinds[fault.kind]] = [count + 1, min(example, fault.example)]
        counts.present, counts.extra = sorted(present), sorted(extra)
        declaration = self._declaration
        if good.any():
            counts.newest, counts.watermark = (
                None
                if name is None
                else pc.max(event_micros(self._values[name], declaration.timezone).filter(pa.array(good))).as_py()
                for name in (declaration.event_time, declaration.watermark)
            )
        return counts


def _obstacles(values: list[Any]) -> Mask:
    return np.array([isinstance(value, Obstacle) for value in values], np.bool_)


def _has_nul(values: pa.Array) -> bool:
    """Return whether a text, or an element of a list of texts, has a NUL character."""
    texts = values.flatten() if pa.types.is_list(values.type) else values
    return bool(pc.any(pc.match_substring(texts, _NUL)).as_py())


def _lost(values: pa.Array, texts: pa.Array) -> Mask:
    """Return a mask of texts that have no value. bool [texts]."""
    lost: Mask = pc.and_(values.is_null(), texts.is_valid()).to_numpy(zero_copy_only=False)
    return lost


def _number_text(value: float | Decimal, declared: str) -> str:
    if isinstance(value, Decimal):
        return f"{value:f}"
    if declared == "double":
        return double_text(value)
    return float_text(value) if declared == "float" else str(value)
