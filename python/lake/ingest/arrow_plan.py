"""Whether Arrow may read a batch of landing files, and how: declarations, forms of files, parts, tasks."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import pairwise

from headrace.config import LandingSource, Table
from headrace.lake.blocks.convert import ARROW_TYPES, element_type
from headrace.lake.blocks.lines import COMPRESSIONS, Part
from headrace.lake.blocks.reader import Declaration, TimeRange
from headrace.lake.blocks.spellings import spellings_of
from headrace.lake.ingest.read_lines import SourceFile
from headrace.lake.sources.compression import ending
from headrace.lake.sources.lines import LandingBatch
from headrace.lake.sources.reader import reader_of

#: Keys of `source` that are known here; another one that is not at its default is left to Spark.
_KNOWN = {
    "format", "path", "separator", "escape", "header", "null_value", "null_values", "decimal", "thousands",
    "catch_up_days", "timezone", "timestamps", "complete",
}  # fmt: skip
_KNOWN_OF_COLUMNS = {"name", "type", "required"}
#: Uncompressed files are split into parts of so many bytes: at least, and at most.
PART_BYTES, _MOST_PART_BYTES = 64 << 20, 256 << 20
#: Files are left whole where the busiest core then has at most so many times its share: one that is split is read
#: twice, to count its lines.
_EVEN = 1.1
#: A task is to have at least so many bytes, so that small landing files make no small data files.
_LEAST_TASK_BYTES = 16 << 20
_TASKS_A_CORE = 2
#: Bytes of text that a byte of a compressed file may stand for.
COMPRESSED_TO = 4


@dataclass(frozen=True)
class ArrowPlan:
    """What Arrow reads of a batch."""

    files: Mapping[int, SourceFile]
    declaration: Declaration
    #: Whether undeclared columns become columns of the table.
    accept: bool


def why_spark(source: LandingSource, table: Table) -> str | None:
    """Why rows by this declaration are read by Spark alone; None where Arrow may read them."""
    reader = reader_of(source)
    if not reader.by_arrow:
        return f"format '{source.format}'"
    if len(source.separator) != 1 or not source.separator.isascii() or source.separator in '"\n\r\\':
        return f"separator {source.separator!r}"
    for section, known, what in (
        (source, _KNOWN, "source."),
        *((c, _KNOWN_OF_COLUMNS, f"column '{c.name}', ") for c in table.columns),
    ):
        for name, field in type(section).model_fields.items():
            if name not in known and getattr(section, name) != field.get_default(call_default_factory=True):
                return what + name
    for c in table.columns:
        if (element_type(c.type) or c.type) not in ARROW_TYPES:
            return f"column '{c.name}', type {c.type}"
        if element_type(c.type) is not None and (c.name in table.keys or not reader.lists_by_arrow):
            return f"column '{c.name}', a list"
    if source.complete is not None and source.complete.watermark is not None:
        return "source.complete.watermark"
    types = {c.name: c.type for c in table.columns}
    if table.event_time and types[table.event_time] == "date" and source.timezone != "UTC":
        return f"event_time of dates in {source.timezone}"
    return None


def arrow_plan(batch: LandingBatch, extra: Sequence[str]) -> ArrowPlan | str:
    """How Arrow reads a batch, or why it may not.

    Args:
        batch: what is read.
        extra: undeclared columns that the events' table has.

    Raises:
        UserError: a header that is refused.
    """
    source, table = batch.source, batch.table
    why = why_spark(source, table)
    if why is not None:
        return why
    for _, file in batch.files:
        kind = ending(file.name)
        if kind and file.path.suffix not in COMPRESSIONS:
            return f"{file.name}: compressed as {file.path.suffix}"
        if kind and not file.size:
            return f"{file.name}: an empty {kind}"
    accept = table.new_columns == "accept"
    reader = reader_of(source)
    forms = [reader.form(batch, i) for i in range(len(batch.files))]
    kept = dict.fromkeys(extra)
    if accept:
        declared = {c.name for c in table.columns}
        kept |= dict.fromkeys(n for form in forms if form is not None for n in form.names if n not in declared)
    lower = [name.lower() for name in (*(c.name for c in table.columns), *kept)]
    if len(set(lower)) < len(lower) or any(not name or name.startswith("_") or name == "ds" for name in lower):
        return "new columns whose names the table cannot have"
    files = {}
    for i, ((ds, file), form) in enumerate(zip(batch.files, forms, strict=True)):
        first, end = batch.event_times(ds)
        micros = TimeRange(None if first is None else _micros(first), _micros(end))
        files[i] = SourceFile(ds, file.name, micros, form)
    return ArrowPlan(files, declaration_of(source, table, tuple(kept), batch.ids), accept)


def declaration_of(source: LandingSource, table: Table, extra: Sequence[str], ids: Collection[str] = ()) -> Declaration:
    """What a spec's sections say to a reader of blocks.

    Args:
        source: the spec's.
        table: the spec's.
        extra: undeclared columns that the table has.
        ids: declared text columns whose values are ids.
    """
    return Declaration(
        table.columns,
        tuple(extra),
        source.timezone,
        {name: unit for name in source.timestamps if (unit := source.epoch_unit(name)) is not None},
        dict(table.expectations.ranges),
        table.event_time,
        tuple(sorted(ids)),
        table.ids.max_bytes,
        table.ids.empty == "keep",
        spellings_of(source, table),
    )


def part_size(sizes: Sequence[int], cores: int) -> int:
    """Bytes of the parts that files of these sizes are split into, so that `cores` have about as much to read."""
    total, busy = sum(sizes), [0] * cores
    for size in sorted(sizes, reverse=True):
        busy[busy.index(min(busy))] += size
    if max(sizes, default=0) <= _MOST_PART_BYTES and max(busy) * cores <= _EVEN * total:
        return _MOST_PART_BYTES
    return max(PART_BYTES, min(_MOST_PART_BYTES, total // (2 * _TASKS_A_CORE * cores)))


def split_files(batch: LandingBatch, part_bytes: int) -> list[Part]:
    """Parts of the files, in their order; first lines are those of whole files."""
    parts = []
    for i, (_, file) in enumerate(batch.files):
        if file.path.suffix in COMPRESSIONS or file.size <= part_bytes:
            parts.append(Part(i, file.path))
            continue
        count = -(-file.size // part_bytes)
        edges = [file.size * k // count for k in range(count + 1)]
        parts += [Part(i, file.path, a, b) for a, b in pairwise(edges)]
    return parts


def grouped_by_day(batch: LandingBatch, parts: Sequence[Part], cores: int) -> list[tuple[Part, ...]]:
    """Parts for tasks: of one day each, in their order, about even."""
    files = batch.files

    def size(part: Part) -> int:
        whole = files[part.file][1].size
        return part.end - part.start if part.end is not None else whole * (COMPRESSED_TO if part.compression else 1)

    total = sum(size(p) for p in parts)
    most = max(_LEAST_TASK_BYTES, min(PART_BYTES, total // (_TASKS_A_CORE * cores)))
    groups: list[tuple[int, list[Part]]] = []
    for part in parts:
        filled, group = groups[-1] if groups else (0, [])
        if not group or filled + size(part) > most or files[group[0].file][0] != files[part.file][0]:
            groups.append((size(part), [part]))
        else:
            groups[-1] = (filled + size(part), [*group, part])
    return [tuple(g) for _, g in sorted(groups, key=lambda pair: -pair[0])]


def _micros(moment: datetime) -> int:
    return (moment - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)
