"""Check published scores, after `headrace` commands, by code that knows nothing of the one that published them.

    python -m scripts.published_scores warehouses [--home DIR]
    python -m scripts.published_scores filters [--home DIR] [--rows-per-day N]

`warehouses`: a day of the pipeline `clicks` is made, and then published to PostgreSQL, DuckDB, SQLite, Parquet, Delta
and, where its jar is (`make iceberg`), Iceberg: each time by `headrace publish`, with another `publish.warehouse`. The
rows are read back by psycopg, duckdb, sqlite3, pyarrow and delta-rs. Prints the number of rows and the SHA-256 of them
all, in order; ends with 1 where one of them differs from the score stage's table.

`filters`: published scores have no item that a filter leaves out. A day of the pipeline `clicks` with
conf/overlays/candidates.yaml is published twice: without filters, and with eight. Orders, blocked pairs and items, and
users who want no lists are drawn from the lists of the first run, so that each filter has something to leave out.
DuckDB then reads the events, the landing files and the rows in PostgreSQL, and counts for each filter the rows of both
runs that break it. Ends with 1 where a row of the second does, or none of the first.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pandas as pd
import pyarrow.parquet as pq
from deltalake import DeltaTable

from headrace.config import Warehouse
from headrace.config.installation import checkout
from headrace.config.workspace import Workspace
from headrace.publish.postgres.server import connect
from headrace.stage.manifest import Manifest
from tests.warehouses import COLUMNS, Warehouses

DS = "2026-01-08"
_PIPELINE = "clicks"


def headrace(*words: str, check: bool = True) -> None:
    """Run `headrace WORDS...`; what it prints is shown where it fails.

    Args:
        words: the command and its arguments.
        check: end this process where it fails.

    Raises:
        SystemExit: it failed.
    """
    command = [sys.executable, "-m", "headrace.cli", *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if check and done.returncode:
        sys.exit(f"headrace {' '.join(words)} ended with {done.returncode}:\n{done.stdout[-4000:]}")


def compare_warehouses(home: Path, folder: Path) -> int:
    """Publish a day to each kind of warehouse below a folder; print digests of their rows. Returns the exit code."""
    words = [_PIPELINE, "--home", str(home)]
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
    files = [Path(file) for file in DeltaTable(str(ws.table(_PIPELINE, "scores"))).file_uris()]
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


#: The first day of the window: the overlay's `features.window_days: 3` before the day of validation.
FIRST = "2026-01-05"
_FILTERS = [
    {"kind": "seen"},
    {"kind": "seen", "from": "orders", "where": "not returned"},
    {"kind": "table", "path": "blocked/pairs.parquet", "format": "parquet", "user": "user_id", "item": "item_id"},
    {"kind": "table", "path": "blocked/items.parquet", "format": "parquet", "item": "item_id"},
    {"kind": "table", "path": "blocked/users.parquet", "format": "parquet", "user": "user_id"},
    {"kind": "where", "where": "item_price is not null"},
    {"kind": "where", "where": "user_age is null or user_age >= 21 or item_price < 50"},
    {"kind": "where", "where": "user_country <> 'US' or item_id % 10 <> 0"},
]
_ORDERS = {
    "source": {"format": "jsonl", "path": "landing/orders/{ds}/*"},
    "table": {
        "columns": [
            {"name": "user_id", "type": "bigint", "required": True},
            {"name": "item_id", "type": "bigint", "required": True},
            {"name": "returned", "type": "boolean"},
        ]
    },
}
#: By filter: of rows `s`, users `u` and items `i`, those that must not be there.
_BROKEN = {
    "seen": "EXISTS (FROM events e WHERE e.user_id = s.user_id AND e.item_id = s.item_id AND e.clicked = 1)",
    "bought": "EXISTS (FROM orders o WHERE o.user_id = s.user_id AND o.item_id = s.item_id AND NOT o.returned)",
    "blocked for the user": "EXISTS (FROM pairs b WHERE b.user_id = s.user_id AND b.item_id = s.item_id)",
    "blocked for all": "s.item_id IN (SELECT item_id FROM items_out)",
    "users who get nothing": "s.user_id IN (SELECT user_id FROM users_out)",
    "items without a price": "i.item_price IS NULL",
    "younger than 21, 50 or more": "u.user_age < 21 AND i.item_price >= 50",
    "not in the user's country": "coalesce(u.user_country = 'US', true) AND s.item_id % 10 = 0",
}


def show_filters(home: Path, rows_per_day: int) -> int:
    """Publish a day without filters and with them; print the rows that break each. Returns the exit code."""
    words = ["--home", str(home), "--set", f"generate.rows_per_day={rows_per_day}"]
    headrace("generate", _PIPELINE, *words, "--until", DS)
    run = ["run", _PIPELINE, *words, "--ds", DS, "--overlay", str(checkout() / "conf/overlays/candidates.yaml")]
    headrace(*run, "--set", "score.filters=[]")
    rows_before, _ = _published(home)
    _write_tables(home, rows_before)
    headrace(*run, "--set", f"score.filters={json.dumps(_FILTERS)}", "--set", f"sources.orders={json.dumps(_ORDERS)}")
    rows_after, facts = _published(home)
    with duckdb.connect() as db:
        _read(db, home)
        broken = {name: (_count(db, rows_before, rule), _count(db, rows_after, rule)) for name, rule in _BROKEN.items()}
    print(f"{'left out':<28} {'without filters':>16} {'with filters':>13}")
    for name, (unfiltered, filtered) in {"rows": (len(rows_before), len(rows_after)), **broken}.items():
        print(f"{name:<28} {unfiltered:>16,} {filtered:>13,}")
    print(f"\nfacts.candidates.violations: {facts['violations']}, candidates: {facts['candidates']:,}")
    print(f"{'source':<10} {'fetched':>10} {'filtered':>10}  users asked, by round; of them with too few")
    for name, counts in facts["sources"].items():
        rounds = ", ".join(f"{r['users']:,} ({r['lacking']:,})" for r in counts["rounds"])
        print(f"{name:<10} {counts['fetched']:>10,} {counts['filtered']:>10,}  {rounds}")
    held = not facts["violations"] and all(unfiltered and not filtered for unfiltered, filtered in broken.values())
    return 0 if held else 1


def _published(home: Path) -> tuple[pd.DataFrame, dict[str, Any]]:
    """Return the day's rows in PostgreSQL, and the score stage's facts of candidates."""
    ws = Workspace(home)
    with connect(Warehouse(), ws) as conn:
        rows = conn.execute("SELECT user_id, item_id, rank FROM clicks_scores WHERE ds = %s", [DS]).fetchall()
    manifest = Manifest.load(ws.manifest(_PIPELINE, DS, "score"))
    assert manifest is not None
    assert len(rows) == manifest.rows["scores"]
    return pd.DataFrame(rows, columns=["user_id", "item_id", "rank"]), manifest.facts["candidates"]


def _write_tables(home: Path, lists: pd.DataFrame) -> None:
    """Write orders, and what is blocked: of rows that were published without filters."""
    lists = lists.sort_values(["user_id", "rank"]).reset_index(drop=True)
    drawn = np.random.default_rng(17).random(len(lists))
    orders = lists[drawn < 0.1][["user_id", "item_id"]]
    orders = orders.assign(returned=np.arange(len(orders)) % 4 == 0)
    for ds, part in ((FIRST, orders[::2]), (DS, orders[1::2])):
        folder = home / "landing" / "orders" / ds
        folder.mkdir(parents=True, exist_ok=True)
        part.to_json(folder / "orders.json", orient="records", lines=True)
    blocked = home / "blocked"
    blocked.mkdir(exist_ok=True)
    lists[drawn > 0.8][["user_id", "item_id"]].to_parquet(blocked / "pairs.parquet", index=False)
    items = lists["item_id"].value_counts(sort=False).sort_index().nlargest(5).index
    pd.DataFrame({"item_id": items}).to_parquet(blocked / "items.parquet", index=False)
    users = lists["user_id"].drop_duplicates()[::50]
    pd.DataFrame({"user_id": users}).to_parquet(blocked / "users.parquet", index=False)


def _read(db: duckdb.DuckDBPyConnection, home: Path) -> None:
    """Create views of what was written, and of the newest columns of users and items."""
    events = DeltaTable(Workspace(home).events(_PIPELINE).local_path()).file_uris()
    db.execute(f"CREATE VIEW lake AS FROM read_parquet({events})")
    db.execute(f"CREATE VIEW events AS FROM lake WHERE ts >= '{FIRST}' AND ts < DATE '{DS}' + 1")
    for view, place in (("pairs", "pairs"), ("items_out", "items"), ("users_out", "users")):
        db.execute(f"CREATE VIEW {view} AS FROM '{home}/blocked/{place}.parquet'")
    db.execute(f"CREATE VIEW orders AS FROM read_json('{home}/landing/orders/*/*.json')")
    newest = "ORDER BY ts DESC, _source_file DESC, _source_line DESC"
    for view, key, columns in (("i", "item_id", "item_price"), ("active", "user_id", "user_age, user_country")):
        db.execute(
            f"CREATE TABLE {view} AS SELECT {key}, {columns}, bool_or(ts < '{DS}') OVER (PARTITION BY {key}) trained "
            f"FROM events QUALIFY row_number() OVER (PARTITION BY {key} {newest}) = 1"
        )
    # Who came before the window: of the newest landing day's rows of the visitors the greatest.
    known = "user_id BIGINT, user_age INT, user_country VARCHAR"
    landed = f"{home}/landing/clicks/*/*"
    columns = "{" + ", ".join(f"{n}: '{t}'" for n, t in (c.split(" ") for c in known.split(", "))) + "}"
    selected = "TRY_CAST(user_id AS BIGINT) user_id, TRY_CAST(user_age AS INT) user_age, user_country, filename"
    texts = columns.replace("BIGINT", "VARCHAR").replace("INT'", "VARCHAR'")
    db.execute(
        f"CREATE TABLE visitors AS SELECT {selected} FROM read_json('{landed}.json.gz', columns={texts}, "
        f"filename=true, ignore_errors=true) UNION ALL SELECT {selected} FROM "
        f"read_csv('{landed}.csv.gz', all_varchar=true, filename=true, ignore_errors=true, null_padding=true)"
    )
    db.execute(
        "CREATE TABLE u AS SELECT user_id, user_age, user_country FROM active WHERE trained UNION ALL "
        "SELECT user_id, user_age, user_country FROM visitors WHERE user_id NOT IN (SELECT user_id FROM active WHERE "
        "trained) QUALIFY row_number() OVER (PARTITION BY user_id ORDER BY filename.split('/')[-2] DESC, "
        "user_age DESC NULLS LAST, user_country DESC NULLS LAST) = 1"
    )


def _count(db: duckdb.DuckDBPyConnection, rows: pd.DataFrame, broken: str) -> int:
    db.register("lists", rows)
    every = "FROM lists s LEFT JOIN u ON u.user_id = s.user_id LEFT JOIN i ON i.item_id = s.item_id"
    ((known, violations),) = db.execute(f"SELECT count(u.user_id), count(*) FILTER (WHERE {broken}) {every}").fetchall()
    assert known == len(rows), f"{len(rows) - known} rows of users that nobody knows"
    return int(violations)


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("check", choices=("warehouses", "filters"))
    parser.add_argument("--home", type=Path, help="kept at the end; default: a temporary folder")
    parser.add_argument("--rows-per-day", type=int, default=60_000, metavar="N", help="filters: events a day")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        home = (args.home or Path(folder) / "home").resolve()
        try:
            if args.check == "filters":
                return show_filters(home, args.rows_per_day)
            return compare_warehouses(home, Path(folder) / "warehouses")
        finally:
            headrace("warehouse", "stop", "--home", str(home))


if __name__ == "__main__":
    sys.exit(main())
