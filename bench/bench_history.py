"""Measure what an ingest asks of a table's history of loads, after 100 commits and after 10,000: locally and in S3.

    PYTHONPATH=. python -m bench.bench_history

Each commit loads a day of its own, as ten years of days do (two files of 1,000 rows and 30 columns); each tenth commit
leaves a checkpoint, as Delta's writers do. A process begins anew for each measurement, and asks what `headrace ingest`
asks: the records and the states of the last ten days, what must be loaded again, what a run has loaded. S3 is S3Proxy
on this machine. The floor is the same with 100 commits.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from bench.report import Figure, publish
from headrace.lake.delta.log import DeltaLog
from headrace.lake.landing.load_history import LoadHistory, LoadRecord
from headrace.storage import Location, location_of
from tests.s3_server import BUCKET, s3_server

_FEW, _MANY = 100, 10_000
_COLUMNS = 30
_TURNS = 5
_CHECKPOINT_COMMITS = 10
_LAST_DAY = datetime.date(2026, 1, 1)
_ADD = pa.struct(
    [
        ("path", pa.string()),
        ("partitionValues", pa.map_(pa.string(), pa.string())),
        ("size", pa.int64()),
        ("modificationTime", pa.int64()),
        ("dataChange", pa.bool_()),
        ("stats", pa.string()),
    ]
)


def main() -> None:
    """Run the benchmark, or the part of it that is a process of its own."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--ask", metavar="TABLE", help="ask a table once, and print the seconds")
    arguments = parser.parse_args()
    if arguments.ask:
        print(json.dumps(ask(location_of(arguments.ask))))
        return
    figures = []
    with tempfile.TemporaryDirectory(prefix="headrace-history-") as name:
        folder = Path(name)
        with s3_server(folder / "s3") as server:
            tables = {commits: folder / "s3" / "buckets" / BUCKET / f"t{commits}" for commits in (_FEW, _MANY)}
            # S3Proxy serves a folder: what is written to it is in the bucket.
            for commits, table in tables.items():
                write_table(table, commits)
            for place, address in (("local", str), ("S3", lambda table: f"s3://{BUCKET}/{table.name}")):
                environ = server.environ if place == "S3" else {}
                seconds = {n: measure(address(table), environ) for n, table in tables.items()}
                for unit in ("s", "s of processor"):
                    value, floor = seconds[_MANY][unit], seconds[_FEW][unit]
                    figures.append(Figure(f"{place}: after {_MANY:,} commits", value, unit, floor))
    publish("history", figures)


def measure(table: str, environ: Mapping[str, str]) -> dict[str, float]:
    """Return the median seconds and processor seconds of processes that ask a table; the first makes the summary."""
    command = [sys.executable, "-m", "bench.bench_history", "--ask", table]
    runs: list[dict[str, float]] = []
    for _ in range(_TURNS + 1):
        ran = subprocess.run(command, env={**os.environ, **environ}, capture_output=True, text=True, check=True)
        runs.append(json.loads(ran.stdout))
    return {unit: statistics.median(measured[unit] for measured in runs[1:]) for unit in runs[0]}


def ask(table: Location) -> dict[str, float]:
    """Ask what an ingest of the last day asks; return the seconds that it took."""
    begin, processor = time.monotonic(), time.process_time()
    history = LoadHistory(DeltaLog(table))
    days = [str(_LAST_DAY - datetime.timedelta(days=n)) for n in range(10)]
    assert all(history.records[ds].rows["kept"] == history.state(ds).rows for ds in days)
    assert not history.to_load_again()
    assert [record.ds for record in history.loaded_by(_key(days[0]))] == days[:1]
    assert history.removed_by_others(history.last_change(days[1]), days[0]) is None
    history.log.column_types(history.version)
    seconds = {"s": time.monotonic() - begin, "s of processor": time.process_time() - processor}
    history.save_summary()
    return seconds


def write_table(table: Path, commits: int) -> None:
    """Write the log of a table of so many days and the files of the last ten, without rows."""
    log = table / "_delta_log"
    log.mkdir(parents=True)
    fields = [{"name": f"c{i}", "type": "string", "nullable": True, "metadata": {}} for i in range(_COLUMNS)]
    fields.append({"name": "ds", "type": "date", "nullable": True, "metadata": {}})
    metadata = {
        "id": "bench",
        "format": {"provider": "parquet"},
        "schemaString": json.dumps({"type": "struct", "fields": fields}),
        "partitionColumns": ["ds"],
        "configuration": {},
    }
    protocol = {"minReaderVersion": 1, "minWriterVersion": 2}
    _put(log, 0, {"commitInfo": {"operation": "CREATE TABLE"}}, {"protocol": protocol}, {"metaData": metadata})
    adds: list[dict[str, Any]] = []
    for version in range(1, commits + 1):
        ds = str(_LAST_DAY - datetime.timedelta(days=commits - version))
        new = [_add(ds, version, number) for number in range(2)]
        info = {"operation": "WRITE", "timestamp": version, "userMetadata": _record(ds, version).metadata()}
        _put(log, version, {"commitInfo": info}, *({"add": add} for add in new))
        adds += new
        if commits - version < _CHECKPOINT_COMMITS:
            for add in new:
                (table / add["path"]).parent.mkdir(parents=True, exist_ok=True)
                (table / add["path"]).write_bytes(bytes(add["size"]))
    # The older checkpoints are there by name alone: nobody reads them.
    newest = (commits - 1) // _CHECKPOINT_COMMITS * _CHECKPOINT_COMMITS
    for version in range(_CHECKPOINT_COMMITS, newest, _CHECKPOINT_COMMITS):
        (log / f"{version:020d}.checkpoint.parquet").write_bytes(b"PAR1")
    live = [{**add, "partitionValues": list(add["partitionValues"].items())} for add in adds[: 2 * newest]]
    columns = {
        "protocol": pa.array([protocol, None, *(None for _ in live)]),
        "metaData": pa.array(
            [None, {k: v for k, v in metadata.items() if k != "configuration"}, *(None for _ in live)]
        ),
        "add": pa.array([None, None, *live], _ADD),
    }
    pq.write_table(pa.table(columns), log / f"{newest:020d}.checkpoint.parquet")
    (log / "_last_checkpoint").write_text(json.dumps({"version": newest, "size": len(live) + 2}))


def _put(log: Path, version: int, *actions: Mapping[str, Any]) -> None:
    (log / f"{version:020d}.json").write_text("".join(json.dumps(action) + "\n" for action in actions))


def _key(ds: str) -> str:
    return f"{ds:0<64}"


def _record(ds: str, version: int) -> LoadRecord:
    names = [f"part-{number}.csv" for number in range(4)]
    return LoadRecord(
        ds,
        _key(ds),
        "d" * 16,
        "j" * 16,
        [[name, 100_000, "a" * 64] for name in names],
        {"read": 2_010, "kept": 2_000, "quarantined": 10, "duplicates": 0},
        modified=dict.fromkeys(names, 1),
        quarantine=version,
        expectations=[{"name": "rows", "held": True, "value": 2_010}],
    )


def _add(ds: str, version: int, number: int) -> dict[str, Any]:
    names = [f"c{i}" for i in range(_COLUMNS)]
    bounds = {"minValues": dict.fromkeys(names, "a"), "maxValues": dict.fromkeys(names, "z")}
    stats = {"numRecords": 1_000, **bounds, "nullCount": dict.fromkeys(names, 0)}
    return {
        "path": f"ds={ds}/part-{number}-{version:08d}.parquet",
        "partitionValues": {"ds": ds},
        "size": 64,
        "modificationTime": 1,
        "dataChange": True,
        "stats": json.dumps(stats),
    }


if __name__ == "__main__":
    main()
