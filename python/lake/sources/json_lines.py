"""JSON lines: one object a line."""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from headrace.lake.sources.frame import EXTRA_TYPE, NOT_JSON, mask_names, presence_masks, with_line_faults, without
from headrace.lake.sources.lines import LandingBatch


def read_jsonl(batch: LandingBatch) -> list[DataFrame]:
    """The format `jsonl`: all files are JSON lines."""
    return [json_lines(batch, range(len(batch.files)))]


def json_lines(batch: LandingBatch, files: Sequence[int]) -> DataFrame:
    """One JSON object a line. Nested values of undeclared columns are kept as JSON text."""
    lines = batch.lines(files)
    # As the one element of a list: so that text after the object, or a second one, is an error and not ignored.
    parsed = F.from_json(F.concat(F.lit("["), F.col("_text"), F.lit("]")), f"array<{EXTRA_TYPE}>")
    whole = F.rtrim("_text").endswith("}")
    lines = lines.select("*", F.when(whole & (F.length("_text") > 0), parsed).alias("_json"))
    lines = lines.select(*without(lines, "_json"), F.when(F.size("_json") == 1, F.col("_json")[0]).alias("_map"))
    columns = batch.table.columns
    lines = lines.select("*", *(F.try_element_at("_map", F.lit(c.name)).alias(f"_t{i}") for i, c in enumerate(columns)))
    has = [F.col(f"_t{i}").isNotNull() | F.map_contains_key("_map", c.name) for i, c in enumerate(columns)]
    declared = [c.name for c in columns]
    lists = [
        F.from_json(F.col(f"_t{i}"), "array<string>").alias(f"_v{i}")
        for i, c in enumerate(columns)
        if c.type.startswith("array")
    ]
    lines = lines.select("*", *presence_masks(has), *lists)
    present = sum((F.bit_count(name) for name in mask_names(len(columns))), start=F.lit(0))
    extra = F.map_filter("_map", lambda key, _: ~key.isin(declared))
    frame = lines.select(
        *without(lines, "_map"),
        # Looked for only where there is more than what is declared.
        F.when(F.size("_map") > present, extra).alias("_extra"),
        F.col("_map").isNull().alias("_unread"),
    )
    return with_line_faults(frame, F.when(F.col("_unread"), F.lit(NOT_JSON))).drop("_unread")
