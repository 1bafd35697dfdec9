"""A whole day with lake and store in S3, and the same day on local files: equal scores, to the bit.

    PYTHONPATH=. python scripts/s3_day.py [--rows N] [--ds DATE] [--folder DIR] [--set KEY=VALUE]

Starts an S3 server (S3Proxy, `make s3proxy`), generates the same click log into both lakes, runs `headrace run clicks`
on each, and compares the datasets, the models' weights and the scores, row by row. Prints what each stage took.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from headrace.lake.delta.log import DeltaLog
from headrace.manifest import Manifest
from headrace.stages import ORDER
from headrace.storage import Location
from headrace.workspace import Workspace
from tests.s3_server import BUCKET, s3_server

_PIPELINE = "clicks"


def headrace(words: Sequence[str], environ: Mapping[str, str]) -> float:
    """Run a command; seconds."""
    began = time.perf_counter()
    done = subprocess.run([str(Path(sys.executable).with_name("headrace")), *words], env={**os.environ, **environ})
    if done.returncode:
        raise SystemExit(f"headrace {' '.join(words)}: exit code {done.returncode}")
    return time.perf_counter() - began


def digests(folder: Location) -> dict[str, str]:
    """SHA-256 of each file below a folder."""
    return {f.below(folder): hashlib.sha256(f.read_bytes()).hexdigest() for f in folder.files()}


def scores(ws: Workspace, ds: str) -> pa.Table:
    """A day's scores, in an order that does not depend on files."""
    table = ws.table(_PIPELINE, "scores")
    log = DeltaLog(table)
    state = log.state(log.version or 0)
    assert state is not None
    files = [f for f in state.data_files(table) if f.partition["ds"] == ds]
    rows = pa.concat_tables([pq.read_table(f.path.local_path(), partitioning=None) for f in files])
    return rows.sort_by([(name, "ascending") for name in rows.column_names if not pa.types.is_nested(rows[name].type)])


def manifests(ws: Workspace, ds: str) -> dict[str, Manifest]:
    """Those of a day, by stage."""
    return {s: m for s in ORDER if (m := Manifest.load(ws.manifest(_PIPELINE, ds, s))) is not None}


def compare(one: Workspace, other: Workspace, ds: str) -> None:
    """Raises SystemExit where the days differ."""
    a, b = manifests(one, ds), manifests(other, ds)
    print(f"\n{'stage':<12}{'local s':>10}{'S3 s':>10}")
    for stage in a:
        print(f"{stage:<12}{a[stage].seconds:>10.1f}{b[stage].seconds:>10.1f}")
    faults = [f"stages: {list(a)} and {list(b)}"] if list(a) != list(b) else []
    for stage, kind in (("features", "dataset"), ("train", "model")):
        mine, theirs = (digests(ws.locate(m[stage].output(kind).name)) for ws, m in ((one, a), (other, b)))
        data = {name for name in mine if name.endswith((".parquet", ".safetensors", ".arrow"))}
        differ = sorted(name for name in data if mine[name] != theirs.get(name))
        print(f"{kind}: {len(mine)} files, {len(data)} of data, {len(differ)} differ")
        faults += differ + sorted(set(mine) ^ set(theirs))
    mine, theirs = scores(one, ds), scores(other, ds)
    print(f"scores: {mine.num_rows:,} rows, {'equal' if mine.equals(theirs) else 'they differ'}")
    if not mine.equals(theirs) or not mine.num_rows:
        faults.append("scores")
    if faults:
        raise SystemExit(f"the days differ: {', '.join(faults[:10])}")


def main() -> None:
    """Run both days."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=20_000, help="events of a generated day")
    parser.add_argument("--ds", default="2026-01-08")
    parser.add_argument("--folder", type=Path, help="keep everything here; default: a folder that goes at the end")
    parser.add_argument("--set", action="append", default=[], help="override a key of the spec", metavar="KEY=VALUE")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder: Path = (args.folder or Path(temporary)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        with s3_server(folder) as server:
            environ = {**server.environ, "HEADRACE_LAKE": f"s3://{BUCKET}/lake"}
            environ |= {"HEADRACE_STORE": f"s3://{BUCKET}/store", "HEADRACE_SCRATCH": str(folder / "scratch")}
            sets = [word for given in args.set for word in ("--set", given)]
            for home, where in (("local", {}), ("s3", environ)):
                words = ["--home", str(folder / home), *sets]
                headrace(["generate", _PIPELINE, "--until", args.ds, "--rows-per-day", str(args.rows), *words], where)
                took = headrace(["run", _PIPELINE, "--ds", args.ds, *words], where)
                again = headrace(["run", _PIPELINE, "--ds", args.ds, *words], where)
                print(f"{home}: the day {took:.1f} s, run again {again:.1f} s", flush=True)
            os.environ.update(environ)
            compare(Workspace(folder / "local"), Workspace.at(folder / "s3", environ), args.ds)


if __name__ == "__main__":
    main()
