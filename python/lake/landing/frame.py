"""Landing rows as Spark frames: what readers return, and the judgement of each row by Spark.

A reader returns frames with the columns of `LandingBatch.lines` and
  `_broken` string     why the line as a whole cannot be read; null where it can
  `_skip` boolean      a header or an empty line: no row at all
  `_t<i>` string       declared column i as the file spells it; null where it is null or absent
  `_v<i>`              the same ready to be cast, where that differs: a string, or array<string> for list columns
  `_present<k>` bigint bit b: the row has a key (a field) for declared column 60 k + b, be it null
  `_extra` map         undeclared columns of the row, name to text; null without any
  `_halves` array      declared columns that have U+FFFD for half a surrogate pair, int; may be left out
  `_faults` array      further reasons why the row is bad, strings; may be left out

`typed` gives the values of the declared types, and the reasons why a row is no row of the table. headrace.lake.values
says which text is readable as which type.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import reduce

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from headrace.config import AnySource, Table, schema
from headrace.config.schema import TableColumn, quoted_names
from headrace.config.schema import TableColumn as Declared
from headrace.lake.faults import (
    BAD,
    FORGOTTEN,
    GOOD,
    NOT_UTF8,
    SHOWN_CHARACTERS,
    SKIPPED,
    WRONG_FIELDS,
    a_type,
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
from headrace.lake.landing.reader import LandingBatch
from headrace.lake.landing.spellings import Spelling, SpellingsTask
from headrace.lake.values import (
    EXTRA_TYPE,
    ambiguous_member,
    declared_members,
    from_text,
    list_from_texts,
    only_object,
    parse_object,
)

#: Declared columns a bit mask.
MASK_BITS = 60

Steps = tuple[str, ...]


def fixed_fields(
    batch: LandingBatch,
    frame: DataFrame,
    texts: Mapping[str, Column],
    broken: Column,
    values: Mapping[str, Column] | None = None,
) -> DataFrame:
    """Return the frame of a format with fixed fields, by name. Declared columns that the format lacks are missing."""
    columns = batch.table.columns
    none = F.lit(None).cast("string")
    texts_of_columns = [texts.get(c.name, none).alias(f"_t{i}") for i, c in enumerate(columns)]
    texts_of_columns += [values[c.name].alias(f"_v{i}") for i, c in enumerate(columns) if values and c.name in values]
    masks = presence_masks([F.lit(c.name in texts) for c in columns])
    kept_columns = [c for c in frame.columns if not c.startswith("_f_")]
    out = frame.select(
        *kept_columns, *texts_of_columns, *masks, F.lit(None).cast(EXTRA_TYPE).alias("_extra"), broken.alias("_unread")
    )
    return with_line_faults(out, F.when(F.col("_unread"), F.lit(WRONG_FIELDS))).drop("_unread")


def mask_names(columns: int) -> list[str]:
    """Return the `_present<k>` columns for that many declared ones."""
    return [f"_present{k}" for k in range(-(-columns // MASK_BITS))]


def presence_masks(has: Sequence[Column]) -> list[Column]:
    """Return the `_present<k>` columns: a bit for each declared column that a row has."""
    masks = []
    for k, name in enumerate(mask_names(len(has))):
        mask = F.lit(0).cast("bigint")
        for b, is_present in enumerate(has[k * MASK_BITS : (k + 1) * MASK_BITS]):
            mask = mask.bitwiseOR(F.when(is_present, F.lit(1 << b).cast("bigint")).otherwise(F.lit(0).cast("bigint")))
        masks.append(mask.alias(name))
    return masks


def with_line_faults(frame: DataFrame, broken: Column, header: Column | None = None) -> DataFrame:
    """Add `_broken` and `_skip`; what is known of a line since it was cut (`_fault`) goes before other faults."""
    fault = F.col("_fault")
    empty = (F.trim("_text") == "") & fault.isNull()
    skip = empty if header is None else empty | header
    return frame.select(
        "*",
        skip.alias("_skip"),
        F.when(skip, None)
        .when(fault.isNotNull(), fault)
        .when(~F.is_valid_utf8("_text"), F.lit(NOT_UTF8))
        .otherwise(broken)
        .alias("_broken"),
    ).drop("_fault")


def with_plain_texts(frame: DataFrame, table: Table, spellings: Mapping[str, Spelling]) -> DataFrame:
    """Return a reader's frame whose columns `_v<i>` are plain where the source spells them otherwise."""
    spelled = {f"_v{i}": spellings[c.name] for i, c in enumerate(table.columns) if c.name in spellings}
    if not spelled:
        return frame
    sources = {name: name if name in frame.columns else name.replace("_v", "_t") for name in spelled}
    kept_columns = {f.name: f.dataType.simpleString() for f in frame.schema if f.name not in spelled}
    plain_columns = {name: frame.schema[source].dataType.simpleString() for name, source in sources.items()}
    task = SpellingsTask(tuple((sources[name], name, spelling) for name, spelling in spelled.items()))
    return frame.mapInArrow(
        task, ", ".join(f"{name} {type_}" for name, type_ in (kept_columns | plain_columns).items())
    )


def schema_of(frame: DataFrame) -> str:
    """Return the columns of a frame as a Spark DDL string; for names that need no quotes."""
    return ", ".join(f"{field.name} {field.dataType.simpleString()}" for field in frame.schema)


def columns_except(frame: DataFrame, *names: str) -> list[str]:
    """Return the frame's columns but some."""
    return [c for c in frame.columns if c not in names]


class NestedTexts:
    """The texts that paths lead to. Each object on a path is parsed once, in a column `_o<k>` of the frame."""

    def __init__(self, frame: DataFrame, columns: Sequence[TableColumn], field: Callable[[str], Column]) -> None:
        """Parse the objects.

        Args:
            frame: rows of a landing file.
            columns: the declared ones.
            field: the text of a field of the row, by the first step of a path.
        """
        self._field = field
        self._objects: dict[Steps, Column] = {}
        outer = dict.fromkeys(c.steps[:k] for c in columns for k in range(1, len(c.steps)))
        # One select a level: a level's objects are columns that the next one refers to, and are not computed twice.
        for depth in sorted({len(steps) for steps in outer}):
            level = [steps for steps in outer if len(steps) == depth]
            names = {steps: f"_o{len(self._objects) + i}" for i, steps in enumerate(level)}
            objects = [parse_object(self.text(steps)).alias(f"{name}_found") for steps, name in names.items()]
            members = [only_object(F.col(f"{name}_found")).alias(f"{name}_members") for name in names.values()]
            previous_columns = frame.columns
            frame = frame.select("*", *objects).select(*previous_columns, *members)
            named = []
            for steps, name in names.items():
                through = [c.steps for c in columns if c.steps[:depth] == steps and len(c.steps) > depth]
                inside = dict.fromkeys(inner[depth] for inner in through)
                members_of_object = F.col(f"{name}_members")
                named.append(declared_members(members_of_object, inside).alias(name))
                named.append(ambiguous_member(members_of_object, inside).alias(f"{name}_ambiguous"))
            frame = frame.select(*previous_columns, *named)
            self._objects |= {steps: F.col(name) for steps, name in names.items()}
        self.frame = frame

    @property
    def parsed(self) -> list[str]:
        """The columns that were added to the frame, to be dropped when the texts are read."""
        return [name for i in range(len(self._objects)) for name in (f"_o{i}", f"_o{i}_ambiguous")]

    @property
    def faults(self) -> list[Column]:
        """Reasons why an object's members cannot be distinguished: strings, null where they can."""
        return [F.col(f"_o{i}_ambiguous") for i in range(len(self._objects))]

    def text(self, steps: Steps) -> Column:
        """Return the text that a path leads to; null where there is none, or null."""
        if len(steps) == 1:
            return self._field(steps[0])
        return F.try_element_at(self._objects[steps[:-1]], F.lit(steps[-1]))

    def has(self, steps: Steps) -> Column:
        """Return whether the object that a nested path leads through has its last key, be its value null."""
        return F.coalesce(F.map_contains_key(self._objects[steps[:-1]], steps[-1]), F.lit(False))

    def shown_text(self, steps: Steps) -> Column:
        """Return `text`, or what stands where the path expects an object and is none: a value that cannot be read."""
        outer = [steps[:k] for k in range(1, len(steps))]
        faults = [F.when(self._objects[o].isNull(), self.text(o)) for o in outer]
        return reduce(lambda a, b: F.coalesce(a, b), faults, self.text(steps))


_NUL = "\0"


class Wrong:
    """One thing that can be wrong with a row: its condition, its kind (for counting), its reason, the value (text)."""

    def __init__(self, when: Column, kind: str, reason: Column, value: Column) -> None:
        self.when, self.kind, self.reason, self.value = when, kind, reason, value


def missing(column: TableColumn, when: Column, value: Column) -> Wrong:
    """Return the fault that a required column has no value."""
    kind = kind_missing(column)
    return Wrong(when, kind, F.lit(kind), value)


def out_of_range(table: Table) -> list[Wrong]:
    """Return the faults of values outside `expectations.ranges`."""
    faults = []
    for column, (low, high) in table.expectations.ranges.items():
        value = column_of(column)
        outside = F.lit(False)
        if low is not None:
            outside = outside | (value < F.lit(low))
        if high is not None:
            outside = outside | (value > F.lit(high))
        text = value.cast("string")
        reason = F.concat(F.lit(f"{column}: "), text, F.lit(f" is {span_outside(low, high)}"))
        faults.append(Wrong(F.coalesce(outside, F.lit(False)), kind_outside(column, low, high), reason, text))
    return faults


def unfit_texts(table: Table, ids: Collection[str]) -> list[Wrong]:
    """Return the faults of texts that `table.ids` and `table.text_nul` refuse.

    Args:
        table: the declaration.
        ids: declared text columns whose values are ids.
    """
    limits = table.ids
    faults: list[Wrong] = []
    for column in table.columns:
        name, value = column.name, column_of(column.name)
        if name in ids:
            if limits.max_bytes is not None:
                length, most = F.octet_length(value), most_bytes(limits.max_bytes)
                reason = F.concat(
                    F.lit(f"{name}: '"),
                    F.substring(value, 1, SHOWN_CHARACTERS),
                    F.lit("' has "),
                    length,
                    F.lit(f"; {most}"),
                )
                faults.append(_unfit(length > limits.max_bytes, f"{name}: {most}", reason, value))
            if limits.empty == "quarantine":
                faults.append(_unfit(value == "", kind_empty(name), None, value))
        if (limits.nul if name in ids else table.text_nul) == "quarantine":
            kind = kind_nul(name, name in ids)
            if column.type == "string":
                faults.append(_unfit(value.contains(_NUL), kind, None, value))
            elif column.type == "array<string>":
                faults.append(_unfit(F.exists(value, lambda e: e.contains(_NUL)), kind, None, F.to_json(value)))
    return faults


def _unfit(when: Column, kind: str, reason: Column | None, value: Column) -> Wrong:
    """Return the fault of a text that may be shown, but has no place in the table; null is none."""
    example = F.replace(F.substring(value, 1, SHOWN_CHARACTERS), F.lit(_NUL), F.lit("\\0"))
    text = F.lit(kind) if reason is None else F.replace(reason, F.lit(_NUL), F.lit("\\0"))
    return Wrong(F.coalesce(when, F.lit(False)), kind, text, example)


def untimely(source: AnySource, table: Table) -> list[Wrong]:
    """Return the faults of events that come too late, or from after their day: of rows with `_from` and `_to`."""
    if not table.event_time:
        return []
    column = table.event_time
    time = event_time(column, source)
    text = time.cast("string")
    late, future = F.coalesce(time < F.col("_from"), F.lit(False)), F.coalesce(time >= F.col("_to"), F.lit(False))
    too_late, too_early = untimely_faults(table.late_days)
    return [
        Wrong(when, f"{column}: {fault}", F.concat(F.lit(f"{column}: '"), text, F.lit(f"' is {fault}")), text)
        for when, fault in ((late, too_late), (future, too_early))
    ]


def event_time(column: str, source: AnySource) -> Column:
    """Return the instant of a row's event: a date's begins at midnight in the source's time zone."""
    value = column_of(column)
    if source.timezone == "UTC":
        return value.cast("timestamp")
    local = F.to_utc_timestamp(value.cast("timestamp"), F.lit(source.timezone))
    return F.when(F.typeof(value) == "date", local).otherwise(value.cast("timestamp"))


def column_of(name: str) -> Column:
    """Return a column by its name, whatever characters it has."""
    return schema.column(name)


def typed(
    frame: DataFrame, source: AnySource, table: Table, ids: Collection[str], forgotten: ForgottenValues | None = None
) -> DataFrame:
    """Return a reader's frame with its columns typed and the state of each row.

    Args:
        frame: a reader's.
        source: the spec's.
        table: the declaration.
        ids: declared text columns whose values are ids.
        forgotten: values whose rows must not come back, of declared columns.

    Returns:
        `_file`, `_ds`, `_source_file`, `_line`, `_copy`; `_state` int (GOOD, BAD, SKIPPED, FORGOTTEN); the declared
        columns; `_present<k>`, `_extra`, `_halves`; and, null where the row is not bad, `_raw` string, `_reason`
        string, `_kinds` array<struct<kind string, value string>>.
    """
    columns = table.columns
    values = [_cast(frame, i, c, source).alias(c.name) for i, c in enumerate(columns)]
    frame = frame.select("*", *values)
    wrong = _wrong(frame, source, table, ids)
    faults = F.col("_faults") if "_faults" in frame.columns else F.array().cast("array<string>")
    bad = F.col("_broken").isNotNull() | (F.size(faults) > 0)
    bad = reduce(lambda a, b: a | b, (w.when for w in wrong), bad)
    state = F.when(F.col("_skip"), SKIPPED)
    if forgotten is not None:
        state = state.when(_forgotten(forgotten, table), FORGOTTEN)
    state = state.when(F.coalesce(bad, F.lit(True)), BAD).otherwise(GOOD)
    frame = frame.select("*", state.alias("_state"))
    is_bad = F.col("_state") == BAD
    kinds = F.array_compact(
        F.array(*(F.when(w.when, F.struct(F.lit(w.kind).alias("kind"), w.value.alias("value"))) for w in wrong))
    )
    line = F.substring("_text", 1, SHOWN_CHARACTERS)
    kinds = F.concat(kinds, F.transform(faults, lambda f: F.struct(f.alias("kind"), line.alias("value"))))
    line_fault = F.array(F.struct(F.col("_broken").alias("kind"), line.alias("value")))
    reason = F.concat_ws("; ", *(F.when(w.when, w.reason) for w in wrong), faults)
    broken = F.col("_broken").isNotNull()
    return frame.select(
        "_file",
        "_ds",
        "_source_file",
        "_line",
        "_copy",
        "_state",
        *quoted_names([c.name for c in columns]),
        *mask_names(len(columns)),
        "_extra",
        F.col("_halves") if "_halves" in frame.columns else F.lit(None).cast("array<int>").alias("_halves"),
        F.when(is_bad, F.make_valid_utf8("_text")).alias("_raw"),
        F.when(is_bad, F.when(broken, F.col("_broken")).otherwise(reason)).alias("_reason"),
        F.when(is_bad, F.when(broken, line_fault).otherwise(kinds)).alias("_kinds"),
    )


def _forgotten(forgotten: ForgottenValues, table: Table) -> Column:
    """Return whether a row has a forgotten value: as it is typed, as it is written, or in a line that is no row."""
    places = {c.name: i for i, c in enumerate(table.columns)}
    is_forgotten = F.lit(False)
    for name in forgotten.columns:
        is_forgotten = (
            is_forgotten | forgotten.spark(name, column_of(name)) | forgotten.spark(name, F.col(f"_t{places[name]}"))
        )
        is_forgotten = is_forgotten | (F.col("_broken").isNotNull() & forgotten.spark_line(name, F.col("_text")))
    return is_forgotten


def _wrong(frame: DataFrame, source: AnySource, table: Table, ids: Collection[str]) -> list[Wrong]:
    faults = []
    columns = set(frame.columns)
    for i, c in enumerate(table.columns):
        text = F.col(f"_t{i}")
        example = F.substring(text, 1, SHOWN_CHARACTERS)
        name = F.lit(c.name)
        unread = _unread(i, c, f"_v{i}" in columns)
        if unread is not None:
            reason = F.concat(name, F.lit(": '"), example, F.lit(f"' is not {a_type(c.type)}"))
            faults.append(Wrong(unread, kind_unreadable(c), reason, example))
        if c.required:
            faults.append(missing(c, text.isNull(), example))
    return [*faults, *unfit_texts(table, ids), *out_of_range(table), *untimely(source, table)]


def _cast(frame: DataFrame, i: int, column: Declared, source: AnySource) -> Column:
    ready = F.col(f"_v{i}" if f"_v{i}" in frame.columns else f"_t{i}")
    if column.type.startswith("array"):
        return list_from_texts(ready, column.type, source)
    return from_text(ready, column.type, source, source.epoch_unit(column.name))


def _unread(i: int, column: Declared, has_value: bool) -> Column | None:
    """Return the condition that a text did not become a value; None where any text is one."""
    text, value = F.col(f"_t{i}"), column_of(column.name)
    if not column.type.startswith("array"):
        return None if column.type == "string" and not has_value else text.isNotNull() & value.isNull()
    items = F.col(f"_v{i}")
    unread = text.isNotNull() & value.isNull()
    if column.type == "array<string>":
        return unread
    lost = F.size(F.filter(items, F.isnull)) != F.size(F.filter(value, F.isnull))
    return unread | F.coalesce(lost, F.lit(False))
