"""Polars 2.1, its streaming engine: the Criteo workflow over the same files. Runs in its own environment (make
bench-etl-peers).

    python etl_polars.py OUT TRAIN_FILES VALID_FILES CATEGORIES COUNTS MIN_COUNT

Files and columns are separated by commas. Writes OUT/vocabulary/COLUMN.parquet (value, code) and OUT/{train,valid}.
Prints {"fit": s, "write": s, "rows": n}.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

#: Rows of a row group, as ours.
_ROW_GROUP = 131_072


def main(out: str, train_files: str, valid_files: str, categories: str, counts: str, min_count: str) -> None:
    """Fit on train, transform and write both."""
    import polars as pl

    folder = Path(out)
    (folder / "vocabulary").mkdir(parents=True)
    frames = {
        split: pl.scan_parquet(paths.split(",")) for split, paths in (("train", train_files), ("valid", valid_files))
    }
    texts, numbers = categories.split(","), counts.split(",") if counts else []
    logs = {name: pl.col(name).fill_null(0).clip(lower_bound=0).cast(pl.Float64).log1p() for name in numbers}
    tick = time.perf_counter()
    queries = [
        frames["train"].select(
            *(
                f.alias(f"{prefix}.{name}")
                for name, x in logs.items()
                for prefix, f in (("m", x.mean()), ("s", x.std()))
            )
        )
    ]
    for name in texts:
        queries.append(
            frames["train"]
            .select(pl.col(name).alias("value"))
            .drop_nulls()
            .group_by("value")
            .len("count")
            .filter(pl.col("count") >= int(min_count))
            .sort("count", "value", descending=[True, False])
            .select("value")
            .with_row_index("code", 2)
            .with_columns(pl.col("code").cast(pl.Int32))
        )
    results = [query.collect(engine="streaming") for query in queries]
    learned = results[0].row(0, named=True) if numbers else {}
    vocabularies = dict(zip(texts, results[1:], strict=True))
    for name, vocabulary in vocabularies.items():
        vocabulary.select("value", "code").write_parquet(folder / "vocabulary" / f"{name}.parquet")
    fitted = time.perf_counter()
    rows = 0
    columns = [((x - learned[f"m.{n}"]) / learned[f"s.{n}"]).cast(pl.Float32).alias(n) for n, x in logs.items()]
    for name in texts:
        code = pl.col(f"code.{name}").fill_null(1)
        columns.append(pl.when(pl.col(name).is_null()).then(0).otherwise(code).cast(pl.Int32).alias(name))
    for split, frame in frames.items():
        joined = frame.select(*numbers, *texts, "label")
        for name, vocabulary in vocabularies.items():
            codes = vocabulary.lazy().select(pl.col("value").alias(name), pl.col("code").alias(f"code.{name}"))
            joined = joined.join(codes, on=name, how="left", maintain_order="none")
        path = folder / split / "part.parquet"
        joined.select(*columns, pl.col("label").cast(pl.Float32)).sink_parquet(
            path, compression="uncompressed", row_group_size=_ROW_GROUP, mkdir=True, engine="streaming"
        )
        rows += pl.scan_parquet(path).select(pl.len()).collect().item()
    print(json.dumps({"fit": fitted - tick, "write": time.perf_counter() - fitted, "rows": rows}))


if __name__ == "__main__":
    main(*sys.argv[1:])
