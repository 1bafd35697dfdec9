"""A day's scores in each kind of warehouse that runs here, read by other code than that which wrote them."""

from __future__ import annotations

import json
import sqlite3
import zlib
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pandas as pd
import pyarrow.parquet as pq
from deltalake import DeltaTable

from headrace.config import Warehouse
from headrace.config.workspace import Workspace
from headrace.lake.spark.session import iceberg_jars
from headrace.lake.tables.iceberg_metadata import newest_metadata, snapshot_files
from headrace.publish.postgres.server import connect
from headrace.storage import local

COLUMNS = ["ds", "user_id", "item_id", "rank", "score", "model_version"]
#: Of a frame of scores, with the types of the keys left open.
SCHEMA = "ds string, user_id {user}, item_id {item}, rank int, score float, model_version string"


def scores(users: int, seed: int = 0, ds: str = "2026-01-10", k: int = 4, text_keys: bool = False) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame(
        {
            "ds": ds,
            "user_id": np.repeat(np.arange(users, dtype=np.int64) - 2, k),
            "item_id": np.concatenate([rng.permutation(50)[:k] for _ in range(users)]).astype(np.int64),
            "rank": np.tile(np.arange(1, k + 1, dtype=np.int32), users),
            "score": -np.sort(-rng.random((users, k), dtype=np.float32), axis=1).ravel(),
            "model_version": f"model{seed}",
        }
    )
    if text_keys:
        frame["user_id"] = "u, \"'" + frame["user_id"].astype(str)
        frame["item_id"] = "é\n" + frame["item_id"].astype(str)
    return frame


def same(left: pd.DataFrame, right: pd.DataFrame) -> None:
    order = ["ds", "user_id", "rank"]
    pd.testing.assert_frame_equal(
        left.sort_values(order).reset_index(drop=True), right.sort_values(order).reset_index(drop=True)
    )


def in_warehouse(ws: Workspace, table: str = "clicks_scores", ds: str = "2026-01-10") -> pd.DataFrame:
    with connect(Warehouse(), ws) as conn:
        cursor = conn.execute(
            f"SELECT ds::text, user_id, item_id, rank, score, model_version FROM {table} "
            f"WHERE ds = %s ORDER BY ds, user_id, rank",
            [ds],
        )
        frame = pd.DataFrame(cursor.fetchall(), columns=[c.name for c in cursor.description or ()])
    return frame.astype({"score": np.float32, "rank": np.int32})


class Warehouses:
    """A warehouse of each kind that runs here: what the spec says of it, and its rows, read by other code than ours."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.settings = {
            "embedded": [],
            "duckdb": [f"path={folder / 'scores.duckdb'}"],
            "sqlalchemy": [f"url=sqlite:///{folder / 'scores.sqlite'}"],
            "parquet": [f"path={folder / 'parquet'}"],
            "delta": [f"path={folder / 'delta'}"],
        }
        # A session keeps a catalog as it was when it was first asked for: each folder has one of its own.
        catalog = f"shop_{zlib.crc32(str(folder).encode())}"
        self.properties = {
            f"spark.sql.catalog.{catalog}": "org.apache.iceberg.spark.SparkCatalog",
            f"spark.sql.catalog.{catalog}.type": "hadoop",
            f"spark.sql.catalog.{catalog}.warehouse": str(folder / "iceberg"),
        }
        if iceberg_jars():
            self.settings["iceberg"] = [f"catalog={catalog}", "schema=served"]

    def overrides(self, kind: str) -> list[str]:
        options = [f"publish.warehouse.{text}" for text in [f"kind={kind}", *self.settings[kind]]]
        if kind == "iceberg":
            options += [f"spark.properties={json.dumps(self.properties)}"]
        return options

    def read(self, kind: str, ws: Workspace, ds: str, current: bool = False) -> pd.DataFrame:
        name = "clicks_scores_current" if current else "clicks_scores"
        rows: Any
        if kind == "embedded":
            return in_warehouse(ws, name, ds)
        if kind in ("duckdb", "sqlalchemy"):
            file = self.folder / ("scores.duckdb" if kind == "duckdb" else "scores.sqlite")
            with duckdb.connect(str(file)) if kind == "duckdb" else sqlite3.connect(file) as db:
                rows = db.execute(f"SELECT {', '.join(COLUMNS)} FROM {name}").fetchall()
            frame = pd.DataFrame(rows, columns=COLUMNS)
        elif kind == "parquet":
            table = self.folder / "parquet" / "clicks_scores"
            manifest = json.loads((table / "manifest.json").read_text())
            days = [manifest["current"]] if current else list(manifest["days"])
            files = [table / file for day in days for file in manifest["days"][day]["files"]]
            frame = pd.concat([pq.ParquetFile(file).read().to_pandas() for file in files])
        elif kind == "delta":
            parts = []
            for path in map(Path, DeltaTable(str(self.folder / "delta" / name)).file_uris()):
                part = pq.ParquetFile(path).read().to_pandas()
                parts.append(part if current else part.assign(ds=path.parent.name.removeprefix("ds=")))
            frame = pd.concat(parts)
        else:
            metadata = newest_metadata(local(self.folder / "iceberg" / "served" / name / "metadata"))
            assert metadata.current is not None
            files = [f.path.local_path() for f in snapshot_files(metadata, metadata.current)]
            frame = pd.concat([pq.ParquetFile(file).read().to_pandas() for file in files])
        frame = frame.assign(ds=frame["ds"].astype(str)).astype({"score": np.float32, "rank": np.int32})
        return frame[frame["ds"] == ds][COLUMNS]
