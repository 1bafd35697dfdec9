"""Frames that readers of landing files return: names of the columns, states of a row, and how they are made.

A reader returns frames with the columns of `LandingBatch.lines` and
  `_broken` string     why the line as a whole cannot be read; null where it can
  `_skip` boolean      a header or an empty line: no row at all
  `_t<i>` string       declared column i as the file spells it; null where it is null or absent
  `_v<i>`              the same ready to be cast, where that differs: a string, or array<string> for list columns
  `_present<k>` bigint bit b: the row has a key (a field) for declared column 60 k + b, be it null
  `_extra` map         undeclared columns of the row, name to text; null without any
  `_halves` array      declared columns that have U+FFFD for half a surrogate pair, int; may be left out
  `_faults` array      further reasons why the row is bad, strings; may be left out
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from headrace.config import Table
from headrace.lake.faults import NOT_UTF8, WRONG_FIELDS
from headrace.lake.landing.reader import LandingBatch
from headrace.lake.landing.spellings import Spelling, SpellingsTask
from headrace.lake.values import EXTRA_TYPE, ambiguous_member, declared_members, only_object, parse_object
from headrace.schema import TableColumn

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
