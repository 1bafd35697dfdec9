"""`mapInArrow` by tasks that ask a model for vectors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from headrace.score.joined.parts import Parts
from headrace.score.vectors.model_vectors import ModelVectors


def map_vectors(
    spark: SparkSession,
    vectors: ModelVectors,
    frame: DataFrame,
    names: Sequence[str],
    parts: Callable[[], Parts],
    work: Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]],
    schema: StructType | str,
) -> DataFrame:
    """`frame.mapInArrow(work, schema)`, where rows of the model's tables are joined in with those of each part.

    Args:
        spark: the session.
        vectors: the model, of which `work` asks the vectors of its rows.
        frame: users or items, with columns c0, c1, ...
        names: what these are called, to `work`.
        parts: says how the frame is cut; asked where rows are joined in. Else it is left as it is.
        work: what a task does.
        schema: of what that makes.
    """
    called = tuple(names)
    if vectors.joined:
        # And torch, which no other driver needs.
        from headrace.score.joined.frames import map_with_table_rows
        from headrace.score.vectors.codes import CodesOfVectors

        needed = partial(CodesOfVectors, vectors)
        return map_with_table_rows(spark, vectors, needed, frame, called, parts(), work, schema)

    def named(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from work(pa.RecordBatch.from_arrays(batch.columns, list(called)) for batch in batches)

    return frame.mapInArrow(named, schema)
