"""The native column functions: rows a second beside Spark's own expressions for the same, and a copy of the column.

    make bench-udfs

- arrow: the C interface by ctypes over one Arrow batch, one thread; floor: a copy of the column's buffers (the same
  bytes in), peer: the Spark UDF of the same function;
- spark: the Java UDF, which Spark calls row by row in local[2], from a Parquet file to a sum over the results; floor:
  the same scan and sum over the column's lengths alone, peer: Spark's own expressions, which give the same codes (the
  sums are compared).

Rows a second, more is better; every figure is the best of several turns.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from bench.report import Figure, publish
from headrace.config import Spark
from headrace.config.workspace import Workspace
from headrace.lake.spark.session import session
from headrace.udfs import arrow
from headrace.udfs import spark as udfs

ROWS, TURNS = 400_000, 3
N, BUCKETS, HASHES, MOST = 3, 1 << 20, 16, 64
FUNCTIONS = ("ngrams", "cross", "minhash")


def catalogue_and_history() -> pa.Table:
    """Draw titles of 1 to 8 words, lists of 0 to 16 ids, and an id: as a catalogue and a click's history have them."""
    rng = np.random.default_rng(0)
    letters = rng.choice(list("etaoinshrdlcumwfgypbvkéü"), (5000, 9))
    words = ["".join(letters[i, : rng.integers(2, 10)]) for i in range(5000)]
    word_ids = rng.zipf(1.3, (ROWS, 8)) % 5000
    count = rng.integers(1, 9, ROWS)
    titles = [" ".join(words[w] for w in row[:c]) for row, c in zip(word_ids, count, strict=True)]
    offsets = np.concatenate([[0], np.cumsum(rng.integers(0, 17, ROWS))]).astype(np.int32)
    ids = pa.ListArray.from_arrays(pa.array(offsets), pa.array(rng.integers(0, 10**9, offsets[-1])))
    return pa.table({"title": titles, "ids": ids, "user": rng.integers(0, 10**7, ROWS)})


def seconds(work: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(TURNS):
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return best


def copied(column: pa.Array) -> None:
    """Return a copy of the column's buffers."""
    for buffer in column.buffers():
        if buffer is not None:
            np.frombuffer(buffer, np.uint8).copy()


def total(frame: DataFrame, codes: str) -> int:
    """Return the sum of all results: every one is computed, none is kept."""
    row = frame.selectExpr(f"aggregate({codes}, 0L, (a, x) -> a + pmod(x, 1000003L)) AS s").agg(F.sum("s")).collect()[0]
    return int(row[0])


#: The same function in Spark's expressions.
EXPRESSIONS = {
    "ngrams": f"transform(sequence(1, length(title) - {N - 1}), "
    f"i -> cast(pmod(xxhash64(substring(title, i, {N})), {BUCKETS}) + 1 as int))",
    "cross": f"transform(ids, i -> cast(pmod(xxhash64(user, i), {BUCKETS}) + 1 as int))",
    "minhash": f"transform(sequence(0, {HASHES - 1}), "
    "j -> array_min(transform(ids, i -> xxhash64(cast(j as bigint), i))))",
}
#: The rows whose results the expressions give too: of shorter titles and empty lists they make other things.
FILTER = f"length(title) >= {N} and size(ids) > 0"


def main() -> None:
    table = catalogue_and_history()
    title, ids, user = (table[name].combine_chunks() for name in ("title", "ids", "user"))
    by_arrow = {
        "ngrams": (lambda: arrow.ngrams(title, N, BUCKETS), [title]),
        "cross": (lambda: arrow.cross([user, ids], BUCKETS, MOST), [user, ids]),
        "minhash": (lambda: arrow.minhash(ids, HASHES), [ids]),
    }
    figures = []
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        pq.write_table(table, Path(folder) / "rows.parquet", row_group_size=ROWS // 4, compression="none")
        with session(Spark(master="local[2]", driver_memory="3g"), Workspace(Path(folder)), "bench udfs") as spark:
            rows = spark.read.parquet(f"{folder}/rows.parquet").where(FILTER)
            row_count = rows.count()
            native = {
                "ngrams": udfs.ngrams(F.col("title"), N, BUCKETS),
                "cross": udfs.cross([F.col("user"), F.col("ids")], BUCKETS, MOST),
                "minhash": udfs.minhash(F.col("ids"), HASHES),
            }
            for name in FUNCTIONS:
                by_udf = rows.select(native[name].alias("codes"))
                by_expression = rows.select(F.expr(EXPRESSIONS[name]).alias("codes"))
                assert total(by_udf, "codes") == total(by_expression, "codes"), name
                column = "length(title)" if name == "ngrams" else "size(ids)"
                floor = row_count / seconds(lambda c=column: total(rows, f"array({c})"))  # type: ignore[misc]
                udf = row_count / seconds(lambda f=by_udf: total(f, "codes"))  # type: ignore[misc]
                peer = row_count / seconds(lambda f=by_expression: total(f, "codes"))  # type: ignore[misc]
                work, columns = by_arrow[name]
                bare = ROWS / seconds(lambda c=columns: [copied(x) for x in c])  # type: ignore[misc]
                figures.append(Figure(f"{name}, spark", round(udf), "rows/s", round(floor), round(peer)))
                figures.append(Figure(f"{name}, arrow", round(ROWS / seconds(work)), "rows/s", round(bare), round(udf)))
    publish("udfs", figures)


if __name__ == "__main__":
    main()
