"""DuckDB 2.0: the Criteo workflow over the same files. Runs in its own environment (make bench-etl-peers).

    python etl_duckdb.py OUT TRAIN_FILES VALID_FILES CATEGORIES COUNTS MIN_COUNT

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
    import duckdb

    folder = Path(out)
    (folder / "vocabulary").mkdir(parents=True)
    con = duckdb.connect()
    # The order of the rows is of no interest, and keeping it costs memory.
    con.execute("SET preserve_insertion_order = false")
    con.execute(f"SET temp_directory = '{folder / 'spilled'}'")
    files = {"train": train_files.split(","), "valid": valid_files.split(",")}
    for split, paths in files.items():
        con.execute(f"CREATE VIEW {split} AS SELECT * FROM read_parquet({paths!r})")
    texts, numbers = categories.split(","), counts.split(",") if counts else []
    logs = {name: f"ln(1 + greatest(coalesce({name}, 0), 0)::DOUBLE)" for name in numbers}
    tick = time.perf_counter()
    learned: tuple[float, ...] = ()
    if numbers:
        averages = ", ".join(f"avg({x}), stddev_samp({x})" for x in logs.values())
        learned = con.execute(f"SELECT {averages} FROM train").fetchone() or ()
    for name in texts:
        con.execute(
            f"CREATE TABLE of_{name} AS SELECT {name} AS value, "
            f"(row_number() OVER (ORDER BY count(*) DESC, {name}) + 1)::INTEGER AS code "
            f"FROM train WHERE {name} IS NOT NULL GROUP BY {name} HAVING count(*) >= {int(min_count)}"
        )
        con.execute(f"COPY of_{name} TO '{folder}/vocabulary/{name}.parquet' (FORMAT parquet)")
    fitted = time.perf_counter()
    rows = 0
    columns = [
        f"(({x} - {learned[2 * i]!r}) / {learned[2 * i + 1]!r})::FLOAT AS {name}"
        for i, (name, x) in enumerate(logs.items())
    ]
    columns += [f"CASE WHEN r.{name} IS NULL THEN 0 ELSE coalesce(of_{name}.code, 1) END AS {name}" for name in texts]
    joins = " ".join(f"LEFT JOIN of_{name} ON r.{name} = of_{name}.value" for name in texts)
    for split in files:
        (written,) = con.execute(
            f"COPY (SELECT {', '.join(columns)}, label::FLOAT AS label FROM {split} r {joins}) TO '{folder}/{split}' "
            f"(FORMAT parquet, COMPRESSION uncompressed, ROW_GROUP_SIZE {_ROW_GROUP}, PER_THREAD_OUTPUT true)"
        ).fetchone() or (0,)
        rows += written
    print(json.dumps({"fit": fitted - tick, "write": time.perf_counter() - fitted, "rows": rows}))


if __name__ == "__main__":
    main(*sys.argv[1:])
