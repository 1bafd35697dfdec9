"""The Spark engine's write: one plan from the rows to the Parquet files, which a GPU can run whole.

Spark names its files as it likes. So it writes a folder for each file that is wanted, below a folder of its own, and
this process moves each file to its name; it reads footers, never rows.
"""

from __future__ import annotations

import logging
import math
import operator
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial, reduce

import pyarrow.parquet as pq
from pyspark.sql import Column, DataFrame, SparkSession, Window
from pyspark.sql import functions as F

from headrace.config.schema import NULL_CODE, OOV_CODE, Feature, Kind
from headrace.features.functions.spark_expressions import col, is_missing
from headrace.features.layout.files import (
    ColumnCounts,
    DatasetFile,
    FilePlan,
    WrittenDataset,
    carried_columns,
    source_sets,
)
from headrace.features.layout.split import SPLIT, identity, of_part, part_key, part_of
from headrace.features.spark.transform import transform, zero_of
from headrace.features.workflow.fitted import FittedWorkflow
from headrace.storage import Location

_LOG = logging.getLogger("headrace.features")

#: The layout that the readers are fastest with: no compression, no dictionary.
_OPTIONS = {
    "compression": "none",
    "parquet.enable.dictionary": "false",
    "mapreduce.fileoutputcommitter.marksuccessfuljobs": "false",
}
#: A carried text may be long; no more than this is reckoned with.
_TEXT_BYTES = 256
_LEAST_BLOCK = 1 << 27
#: A file has more text than `_most_text` says in one of 5 x 10^8: -ln of that.
_RARELY = 20
_FOOTERS_AT_ONCE = 16


def write(
    fitted: FittedWorkflow, rows: DataFrame, plans: list[FilePlan], folder: Location, workflow: Location
) -> WrittenDataset:
    """Transform the rows of all splits and write them.

    Args:
        rows: events with `__split`, `_source_file`, `_source_line`.
        plans: from `plan_files`, in which every split of `rows` has a part.
        folder: the dataset's (partial) folder, which the executors see, too.
        workflow: `fitted`, saved: where executors load it from.
    """
    for split in {p.split for p in plans}:
        (folder / split).make_dir()
    parts, texts, longest, counts = _count_parts(fitted, rows, plans)
    spark_folder = folder / ".spark"
    frame = dataset_frame(fitted, rows, plans, parts, workflow)
    options = _OPTIONS | {"parquet.block.size": str(_block_bytes(fitted, plans, parts, texts, longest))}
    frame.write.options(**options).partitionBy("__part", "__group").parquet(str(spark_folder))
    _count_codes(fitted, rows.sparkSession, plans, spark_folder, counts)
    files = _named(spark_folder, folder, plans, parts)
    spark_folder.remove()
    return WrittenDataset(files, counts)


def _block_bytes(
    fitted: FittedWorkflow, plans: list[FilePlan], parts: list[int], texts: list[int], longest: list[int]
) -> int:
    """Return a limit of a row group's size that no file reaches, so that the CPU writer makes one of each file.

    Not simply a huge one: the writer warns where all tasks' limits together are above the heap's size.

    Args:
        parts: rows of each part.
        texts: bytes of each part's carried texts.
        longest: the most of them that a row of the part has.
    """
    width = sum((_TEXT_BYTES if f.dtype == "string" else 8) * len(f.physical) for f in fitted.schema.features)
    text = max(
        (_most_text(t, m, p.groups_of(n)) for p, n, t, m in zip(plans, parts, texts, longest, strict=True)), default=0
    )
    return max(2 * (width * max(p.group_rows for p in plans) + text), _LEAST_BLOCK)


def _most_text(text: int, longest: int, files: int) -> int:
    """Return bytes of text that hardly a file of a part exceeds: its rows are drawn by hash.

    With texts of about one length that is little more than an even share; of a few long ones it may be all.
    (Bernstein's inequality, of numbers from 0 to `longest`, whose squares add up to `text * longest` at most.)
    """
    even = text / max(files, 1)
    return min(text, math.ceil(even + math.sqrt(2 * _RARELY * even * longest) + 2 / 3 * _RARELY * longest))


def _count_parts(
    fitted: FittedWorkflow, rows: DataFrame, plans: list[FilePlan]
) -> tuple[list[int], list[int], list[int], dict[str, dict[str, ColumnCounts]]]:
    """Count rows of each part, bytes of its carried texts, the most of a row, and missing values: one pass over the
    rows.
    """
    w = fitted.workflow
    flags = {sources: f"m{i}" for i, sources in enumerate(source_sets(fitted))}
    missing = {c: is_missing(c, w.input_type(c)) for c in w.input_columns}
    texts = [c for c in w.carried_columns if str(w.input_type(c)) == "string"]
    size = reduce(operator.add, [F.coalesce(F.octet_length(col(c)), F.lit(0)) for c in texts], F.lit(0).cast("bigint"))
    frame = rows.select(
        *[reduce(operator.or_, [missing[c] for c in sources]).alias(flag) for sources, flag in flags.items()],
        F.col(SPLIT),
        F.xxhash64("_source_file", "_source_line").alias("__hash"),
        size.alias("__text"),
    )
    missed = [F.count(F.when(F.col(m), 1)).alias(m) for m in flags.values()]
    answers = (
        frame.select(*flags.values(), "__text", part_of(plans).alias("__part"))
        .groupBy("__part")
        .agg(F.count(F.lit(1)).alias("rows"), F.sum("__text").alias("text"), F.max("__text").alias("longest"), *missed)
    )
    parts, text, longest = ([0] * len(plans) for _ in range(3))
    counts: dict[str, dict[str, ColumnCounts]] = {
        p.split: {f.name: ColumnCounts() for f in fitted.features} for p in plans
    }
    for row in answers.collect():
        part = row["__part"]
        parts[part], text[part], longest[part] = row["rows"], row["text"], row["longest"]
        for feature in fitted.features:
            counts[plans[part].split][feature.name].missing += row[flags[feature.sources]]
    return parts, text, longest, counts


def dataset_frame(
    fitted: FittedWorkflow, rows: DataFrame, plans: list[FilePlan], parts: list[int], workflow: Location
) -> DataFrame:
    """Return the dataset's rows, each part in one partition, in order: its columns, then `__part` and `__group`.

    Args:
        parts: rows of each part.
        workflow: `fitted`, saved.
    """
    w = fitted.workflow
    carried = carried_columns(w)
    frame = rows.select(*[col(c) for c in w.input_columns], *identity(w))
    further_columns = ["__label", *carried, SPLIT, "__hash", "__source_file", "__source_line"]
    frame = transform(fitted, frame, further_columns, workflow, lists=True)
    frame = frame.withColumn("__part", part_of(plans))
    frame = frame.withColumn("__key", part_key(plans)).repartition(len(plans), "__key")
    order = ("__hash", "__source_file", "__source_line")
    # Places from 1 on: place p of n rows is in file (p * groups - 1) div n, see FilePlan.groups_of.
    place = F.row_number().over(Window.partitionBy("__key").orderBy(*order))
    groups = [plan.groups_of(n) for plan, n in zip(plans, parts, strict=True)]
    frame = frame.select(
        "*",
        place.cast("bigint").alias("__place"),
        of_part([F.lit(g).cast("bigint") for g in groups]).alias("__groups"),
        of_part([F.lit(n).cast("bigint") for n in parts]).alias("__rows"),
    ).withColumn("__group", F.expr("cast((__place * __groups - 1) div __rows as int)"))
    return frame.sortWithinPartitions("__part", "__group", *order).select(
        *_columns(fitted, tuple(carried)), "__part", "__group"
    )


def _columns(fitted: FittedWorkflow, carried: tuple[str, ...]) -> list[Column]:
    """Return the dataset's columns. Those that are never null say so in their Parquet type, as readers expect."""
    out = []
    on_the_way = iter(carried)
    for feature in fitted.schema.features:
        if feature.kind is Kind.CARRIED:
            out.append(F.col(next(on_the_way)).alias(feature.name))
            continue
        zero = zero_of(feature)
        if feature.is_list:
            out.append(_stored_list(col(feature.name), zero).alias(feature.name))
        else:
            x = F.col("__label") if feature.kind is Kind.LABEL else col(feature.name)
            out.append(F.coalesce(x, zero).alias(feature.name))
    return out


def _count_codes(
    fitted: FittedWorkflow,
    spark: SparkSession,
    plans: list[FilePlan],
    written: Location,
    counts: dict[str, dict[str, ColumnCounts]],
) -> None:
    """Add how many codes there are, and how many that say out of vocabulary: one pass over the codes written."""
    features = fitted.schema.of(Kind.CATEGORICAL)
    if not features:
        return
    aggregates: dict[str, Column] = {}
    for i, feature in enumerate(features):
        aggregates[f"n{i}"] = _count(feature, lambda x: x != NULL_CODE)
        if feature.vocabulary is not None:
            aggregates[f"o{i}"] = _count(feature, partial(_is_oov, feature))
    answers = spark.read.parquet(str(written)).groupBy("__part").agg(*[c.alias(name) for name, c in aggregates.items()])
    for row in answers.collect():
        split_counts = counts[plans[row["__part"]].split]
        for i, feature in enumerate(features):
            split_counts[feature.name].coded += row[f"n{i}"]
            split_counts[feature.name].oov += row[f"o{i}"] if f"o{i}" in aggregates else 0


def _is_oov(feature: Feature, code: Column) -> Column:
    return (code >= OOV_CODE) & (code < feature.first_code)


def _named(written: Location, folder: Location, plans: list[FilePlan], parts: list[int]) -> list[DatasetFile]:
    """Move each file to its name."""

    def move(group: Location) -> DatasetFile:
        plan = plans[int(group.parent.name.removeprefix("__part="))]
        files = [f for f in group.entries() if f.suffix == ".parquet" and not f.name.startswith(".")]
        if len(files) != 1:
            raise RuntimeError(f"Spark wrote {len(files)} files into {group}, not 1")
        footer = pq.read_metadata(files[0].local_path())
        name = plan.file(int(group.name.removeprefix("__group=")))
        if footer.num_row_groups != 1:
            _LOG.warning("%s has %d row groups, not 1", name, footer.num_row_groups)
        files[0].move_to(folder / name)
        return DatasetFile(name, footer.num_rows, footer.num_row_groups, (folder / name).size())

    with ThreadPoolExecutor(_FOOTERS_AT_ONCE) as pool:
        parted = [p for p in written.entries() if p.name.startswith("__part=")]
        groups = [g for p in parted for g in p.entries() if g.name.startswith("__group=")]
        return sorted(pool.map(move, groups), key=lambda f: f.name)


def _stored_list(x: Column, zero: Column) -> Column:
    """Return a list as it is stored: without nulls, up to its last element that is not 0."""
    x = F.transform(x, lambda value: F.coalesce(value, zero))
    ends = F.transform(x, lambda value, i: F.when(value != zero, i + F.lit(1)).otherwise(F.lit(0)))
    return F.slice(x, F.lit(1), F.coalesce(F.array_max(ends), F.lit(0)))


def _count(feature: Feature, is_counted: Callable[[Column], Column]) -> Column:
    """Return the number of stored codes of a feature for which `is_counted` holds, over all rows."""
    x = col(feature.name)
    return F.sum(F.size(F.filter(x, is_counted))) if feature.is_list else F.count(F.when(is_counted(x), 1))
