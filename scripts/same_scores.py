"""Publish a day's scores to each kind of warehouse that runs here, and compare what they hold.

    .venv/bin/python -m scripts.same_scores [--home DIR]

A day of the pipeline `clicks` is made, and then published to PostgreSQL, DuckDB, SQLite, Parquet, Delta and, where its
jar is (`make iceberg`), Iceberg: each time by `headrace publish`, with another `publish.warehouse`. The rows are read
back by psycopg, duckdb, sqlite3, pyarrow and delta-rs. Prints the number of rows and the SHA-256 of them all, in order;
ends with 1 where one of them differs from the score stage's table.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
from deltalake import DeltaTable

from headrace.workspace import Workspace
from scripts.commands import headrace
from tests.warehouses import COLUMNS, Warehouses

DS = "2026-01-08"


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--home", type=Path, help="kept at the end; default: a temporary folder")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        home = (args.home or Path(folder) / "home").resolve()
        try:
            return _compare(home, Path(folder) / "warehouses")
        finally:
            headrace("warehouse", "stop", "--home", str(home))


def _compare(home: Path, folder: Path) -> int:
    words = ["clicks", "--home", str(home)]
    headrace("generate", *words, "--until", DS)
    headrace("run", *words, "--ds", DS, "--to", "score")
    folder.mkdir()
    ws, places = Workspace(home), Warehouses(folder)
    rows_by_place = {"score stage": _scores(ws)}
    for kind in places.settings:
        sets = [word for text in places.overrides(kind) for word in ("--set", text)]
        headrace("publish", *words, "--ds", DS, *sets)
        rows_by_place[kind] = places.read(kind, ws, DS)
    print(f"{'':<12} {'rows':>8}  SHA-256")
    digests = set()
    for name, rows in rows_by_place.items():
        digests.add(digest(rows))
        print(f"{name:<12} {len(rows):>8,}  {digest(rows)}")
    return 0 if len(digests) == 1 else 1


def _scores(ws: Workspace) -> pd.DataFrame:
    """Read the day's rows of the score stage's Delta table with delta-rs."""
    files = [Path(file) for file in DeltaTable(str(ws.table("clicks", "scores"))).file_uris()]
    day = [pq.ParquetFile(file).read().to_pandas() for file in files if file.parent.name == f"ds={DS}"]
    return pd.concat(day).assign(ds=DS)


def digest(rows: pd.DataFrame) -> str:
    """Return the SHA-256 of all columns, in order of user and rank: keys and ranks as int64, scores by their bits."""
    rows = rows.sort_values(["user_id", "rank"])
    digested = hashlib.sha256()
    for column in COLUMNS:
        values = rows[column].to_numpy()
        if values.dtype == object:
            digested.update("\n".join(map(str, values)).encode())
        else:
            digested.update(values.astype(np.float32 if column == "score" else np.int64).tobytes())
    return digested.hexdigest()


if __name__ == "__main__":
    sys.exit(main())
