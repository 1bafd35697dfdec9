"""DuckDB 2.0 or Polars 2.1: text files to Parquet, as fast as the program does it by itself. Runs in an environment of
its own (make bench-etl-peers).

    python ingest_text.py {duckdb,polars} {jsonl,csv,criteo} OUT FILES COLUMNS

Files are separated by commas; COLUMNS is JSON, name to Spark's type. Prints {"seconds": s, "rows": n}.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from typing import Any

_DUCKDB = {"int": "INTEGER", "bigint": "BIGINT", "double": "DOUBLE", "string": "VARCHAR", "timestamp": "TIMESTAMP"}


def duckdb_(form: str, out: str, files: list[str], columns: Mapping[str, str]) -> int:
    """Ingest by DuckDB; return its rows."""
    import duckdb

    con = duckdb.connect()
    con.execute("SET preserve_insertion_order = false")
    types = "{" + ", ".join(f"'{name}': '{_DUCKDB[type_]}'" for name, type_ in columns.items()) + "}"
    if form == "jsonl":
        read = f"read_json({files!r}, format = 'newline_delimited', columns = {types})"
    else:
        rest = "delim = '\t', header = false, quote = ''" if form == "criteo" else "delim = ',', header = true"
        read = f"read_csv({files!r}, {rest}, columns = {types}, auto_detect = false)"
    con.execute(f"COPY (SELECT * FROM {read}) TO '{out}' (FORMAT parquet, COMPRESSION snappy)")
    row = con.execute(f"SELECT count(*) FROM read_parquet('{out}')").fetchone()
    return int(row[0]) if row else 0


def polars_(form: str, out: str, files: list[str], columns: Mapping[str, str]) -> int:
    """Ingest by Polars, streaming; return its rows."""
    import polars as pl

    types: dict[str, Any] = {"int": pl.Int32, "bigint": pl.Int64, "double": pl.Float64, "string": pl.String}
    schema = {name: types.get(type_, pl.String) for name, type_ in columns.items()}
    frame: Any
    if form == "jsonl":
        frame = pl.scan_ndjson(files, schema=schema)
    elif form == "criteo":
        frame = pl.scan_csv(files, separator="\t", has_header=False, quote_char=None, schema=schema)
    else:
        frame = pl.scan_csv(files, schema=schema)
    for name, type_ in columns.items():
        if type_ == "timestamp":
            frame = frame.with_columns(pl.col(name).str.to_datetime(time_unit="us", time_zone="UTC"))
    frame.sink_parquet(out, compression="snappy")
    return int(pl.scan_parquet(out).select(pl.len()).collect().item())


if __name__ == "__main__":
    program, form_, out_, files_, columns_ = sys.argv[1:]
    tick = time.perf_counter()
    run = duckdb_ if program == "duckdb" else polars_
    rows = run(form_, out_, files_.split(","), json.loads(columns_))
    print(json.dumps({"seconds": time.perf_counter() - tick, "rows": rows}))
