"""Declared columns that stand inside JSON objects of a landing file's fields: `path: user.geo.country`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from headrace.lake.sources.values import ambiguous_member, declared_members, only_object, parse_object
from headrace.schema import TableColumn

Steps = tuple[str, ...]


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
            found = [parse_object(self.text(steps)).alias(f"{name}_found") for steps, name in names.items()]
            members = [only_object(F.col(f"{name}_found")).alias(f"{name}_members") for name in names.values()]
            before = frame.columns
            frame = frame.select("*", *found).select(*before, *members)
            named = []
            for steps, name in names.items():
                through = [c.steps for c in columns if c.steps[:depth] == steps and len(c.steps) > depth]
                inside = dict.fromkeys(inner[depth] for inner in through)
                given = F.col(f"{name}_members")
                named.append(declared_members(given, inside).alias(name))
                named.append(ambiguous_member(given, inside).alias(f"{name}_ambiguous"))
            frame = frame.select(*before, *named)
            self._objects |= {steps: F.col(name) for steps, name in names.items()}
        self.frame = frame

    @property
    def parsed(self) -> list[str]:
        """The columns that were added to the frame, to be dropped when the texts are read."""
        return [name for i in range(len(self._objects)) for name in (f"_o{i}", f"_o{i}_ambiguous")]

    @property
    def faults(self) -> list[Column]:
        """Why an object's members cannot be told from each other: strings, null where they can."""
        return [F.col(f"_o{i}_ambiguous") for i in range(len(self._objects))]

    def text(self, steps: Steps) -> Column:
        """The text that a path leads to; null where there is none, or null."""
        if len(steps) == 1:
            return self._field(steps[0])
        return F.try_element_at(self._objects[steps[:-1]], F.lit(steps[-1]))

    def has(self, steps: Steps) -> Column:
        """Whether the object that a nested path leads through has its last key, be its value null."""
        return F.coalesce(F.map_contains_key(self._objects[steps[:-1]], steps[-1]), F.lit(False))

    def shown(self, steps: Steps) -> Column:
        """`text`, or what stands where the path expects an object and is none: that is a value that cannot be read."""
        outer = [steps[:k] for k in range(1, len(steps))]
        faults = [F.when(self._objects[o].isNull(), self.text(o)) for o in outer]
        return reduce(lambda a, b: F.coalesce(a, b), faults, self.text(steps))
