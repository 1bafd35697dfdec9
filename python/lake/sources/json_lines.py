"""JSON lines: one object a line."""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from headrace.lake.blocks.json_paths import ListPathsTask
from headrace.lake.blocks.surrogates import SurrogatesTask
from headrace.lake.sources.frame import NOT_JSON, mask_names, presence_masks, schema_of, with_line_faults, without
from headrace.lake.sources.lines import LandingBatch
from headrace.lake.sources.nested import NestedTexts
from headrace.lake.sources.reader import LandingReader
from headrace.lake.sources.values import ambiguous_member, declared_members, only_object, parse_object


class JsonLinesReader(LandingReader):
    """The format `jsonl`."""

    by_arrow = True

    def read(self, batch: LandingBatch) -> list[DataFrame]:
        """Read all files as JSON lines."""
        return [json_lines(batch, range(len(batch.files)))]

    def form(self, batch: LandingBatch, number: int) -> None:
        return None


def json_lines(batch: LandingBatch, files: Sequence[int]) -> DataFrame:
    """One JSON object a line. Nested values of undeclared columns are kept as JSON text."""
    columns = batch.table.columns
    lines = batch.lines(files)
    task = SurrogatesTask(tuple(c.steps for c in columns))
    lines = lines.mapInArrow(task, f"{schema_of(lines)}, _sound string, _halves array<int>")
    nested = {i: c.steps for i, c in enumerate(columns) if len(c.steps) > 1}
    if nested:
        by_lists = ListPathsTask("_sound", nested)
        lines = lines.mapInArrow(by_lists, f"{schema_of(lines)}, {by_lists.schema}")
    lines = lines.select("*", parse_object(F.col("_sound")).alias("_json"))
    lines = lines.select(*without(lines, "_json", "_sound"), only_object(F.col("_json")).alias("_members"))
    declared = list(dict.fromkeys(c.steps[0] for c in columns))
    lines = lines.select(
        *without(lines, "_members"),
        declared_members(F.col("_members"), declared).alias("_map"),
        ambiguous_member(F.col("_members"), declared).alias("_ambiguous"),
    )
    texts = NestedTexts(lines, columns, lambda key: F.try_element_at("_map", F.lit(key)))

    def by_list(kind: str, i: int, otherwise: Column) -> Column:
        """What a path that goes through a list leads to, else what one through objects alone does."""
        return F.when(F.col(f"_list_has{i}").isNotNull(), F.col(f"_list_{kind}{i}")).otherwise(otherwise)

    shown = [texts.shown(c.steps) for c in columns]
    lines = texts.frame.select(
        "*",
        *((by_list("shown", i, x) if i in nested else x).alias(f"_t{i}") for i, x in enumerate(shown)),
        *(by_list("text", i, texts.text(steps)).alias(f"_n{i}") for i, steps in nested.items()),
        *(by_list("has", i, texts.has(steps)).alias(f"_h{i}") for i, steps in nested.items()),
    )
    lines = lines.select(*without(lines, *(by_lists.types if nested else ())))
    halves = [
        F.when(F.array_contains("_halves", i), F.lit(f"{c.name}: an id has half a surrogate pair"))
        for i, c in enumerate(columns)
        if c.name in batch.ids
    ]
    faults = F.array_compact(F.array("_ambiguous", *texts.faults, *halves)).alias("_faults")
    lines = lines.select(*without(lines, "_ambiguous", *texts.parsed), faults)
    has = [
        F.col(f"_h{i}") if len(c.steps) > 1 else F.col(f"_t{i}").isNotNull() | F.map_contains_key("_map", c.steps[0])
        for i, c in enumerate(columns)
    ]
    ready = []
    for i, c in enumerate(columns):
        text = f"_n{i}" if len(c.steps) > 1 else f"_t{i}"
        if c.type.startswith("array"):
            ready.append(F.from_json(F.col(text), "array<string>").alias(f"_v{i}"))
        elif len(c.steps) > 1:
            ready.append(F.col(text).alias(f"_v{i}"))
    inner = [f"_{kind}{i}" for kind in "nh" for i in nested]
    lines = lines.select(*without(lines, *inner), *presence_masks(has), *ready)
    extra = F.map_filter("_map", lambda key, _: ~key.isin(declared))
    if declared == [c.steps[0] for c in columns] and not nested:
        present = sum((F.bit_count(name) for name in mask_names(len(columns))), start=F.lit(0))
        # Looked for only where there is more than what is declared.
        extra = F.when(F.size("_map") > present, extra)
    else:
        extra = F.when(F.exists(F.map_keys("_map"), lambda key: ~key.isin(declared)), extra)
    frame = lines.select(*without(lines, "_map"), extra.alias("_extra"), F.col("_map").isNull().alias("_unread"))
    return with_line_faults(frame, F.when(F.col("_unread"), F.lit(NOT_JSON))).drop("_unread")
