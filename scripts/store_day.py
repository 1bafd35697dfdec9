"""A whole day with lake and store elsewhere, or on YARN, and the same day on this machine: equal scores, to the bit.

    PYTHONPATH=. python scripts/store_day.py --on s3|hdfs|local [--yarn] [--rows N] [--ds DATE] [--folder DIR]
                                             [--set KEY=VALUE]

Starts the servers (S3Proxy, `make s3proxy`; HDFS and YARN, `make hadoop`), generates the same click log into both
lakes, runs `headrace run clicks` on each, and compares the datasets, the models' weights and the scores, row by row.
Prints what each stage took. With `--yarn` the other day's tasks and ranks are in two containers of a real YARN, the
driver here (client mode); the day on this machine is by Spark's local master in both cases.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from headrace.config.stages import ORDER
from headrace.config.workspace import Workspace
from headrace.jobs.submit import spark_home
from headrace.lake.delta.log import DeltaLog
from headrace.stage.manifest import Manifest
from headrace.storage import Location, local
from tests.hadoop_servers import hdfs, yarn
from tests.s3_server import BUCKET, s3_server

_PIPELINE = "clicks"


@dataclass(frozen=True)
class RunPlace:
    """Environment and options with which `headrace run` works on the other day, in the lake and store under test."""

    environ: dict[str, str] = field(default_factory=dict)
    #: Of `headrace run`.
    words: tuple[str, ...] = ()


@contextmanager
def servers(on: str, on_yarn: bool, folder: Path) -> Iterator[RunPlace]:
    """Start what the other day needs, while the block runs."""
    with ExitStack() as stack:
        environ, words = dict[str, str](), tuple[str, ...]()
        conf = folder / "conf"
        if on == "s3":
            server = stack.enter_context(s3_server(folder))
            environ |= {**server.environ, **_roots(f"s3://{BUCKET}", folder)}
        elif on == "hdfs":
            place = stack.enter_context(hdfs(folder / "hdfs", conf))
            environ |= {"HADOOP_CONF_DIR": str(conf), **_roots(place.url, folder)}
        if on_yarn:
            cluster = stack.enter_context(yarn(folder / "yarn", conf, memory_mb=8192))
            environ |= cluster.environ
            local(folder / "yarn.yaml").put_text(yaml.safe_dump({"spark": _on_yarn(folder)}))
            words = ("--overlay", str(folder / "yarn.yaml"))
        yield RunPlace(environ, words)


def _roots(store: str, folder: Path) -> dict[str, str]:
    roots = {"HEADRACE_LAKE": f"{store}/lake", "HEADRACE_STORE": f"{store}/store"}
    return roots | {"HEADRACE_SCRATCH": str(folder / "scratch")}


def _on_yarn(folder: Path) -> dict[str, object]:
    """Start YARN with two containers of one core, one for each rank."""
    return {
        "master": "yarn",
        "properties": {
            # They lie where the containers run; without this each application brings 450 MB of them.
            "spark.yarn.jars": f"local:{spark_home()}/jars/*",
            "spark.yarn.stagingDir": f"file://{folder}/staging",
            # Not the driver's, which theirs need not see.
            "spark.executorEnv.HEADRACE_SCRATCH": str(folder / "containers"),
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.executor.instances": "2",
            "spark.executor.cores": "1",
            "spark.executor.memory": "1g",
            # Python's and the ranks': they are processes beside the JVM.
            "spark.executor.memoryOverhead": "2g",
            "spark.dynamicAllocation.enabled": "false",
            "spark.sql.shuffle.partitions": "4",
        },
    }


def headrace(words: Sequence[str], environ: Mapping[str, str]) -> float:
    """Run a command; seconds."""
    started = time.perf_counter()
    done = subprocess.run([str(Path(sys.executable).with_name("headrace")), *words], env={**os.environ, **environ})
    if done.returncode:
        raise SystemExit(f"headrace {' '.join(words)}: exit code {done.returncode}")
    return time.perf_counter() - started


def digests(folder: Location) -> dict[str, str]:
    """Return the SHA-256 of each file below a folder."""
    return {f.below(folder): hashlib.sha256(f.read_bytes()).hexdigest() for f in folder.files()}


def rows_of(name: str, ws: Workspace, ds: str) -> pa.Table:
    """Return a day's rows of a table, in an order that does not depend on files."""
    table = ws.table(_PIPELINE, name)
    log = DeltaLog(table)
    state = log.state(log.version or 0)
    assert state is not None
    files = [f for f in state.data_files(table) if f.partition["ds"] == ds]
    rows = pa.concat_tables([pq.read_table(f.path.local_path(), partitioning=None) for f in files])
    return rows.sort_by([(name, "ascending") for name in rows.column_names if not pa.types.is_nested(rows[name].type)])


def manifests(ws: Workspace, ds: str) -> dict[str, Manifest]:
    """Return the manifests of a day, by stage."""
    return {s: m for s in ORDER if (m := Manifest.load(ws.manifest(_PIPELINE, ds, s))) is not None}


def compare(local_ws: Workspace, store_ws: Workspace, ds: str, name: str) -> None:
    """Compare two days. Raises SystemExit where they differ."""
    a, b = manifests(local_ws, ds), manifests(store_ws, ds)
    print(f"\n{'stage':<12}{'local s':>10}{f'{name} s':>14}")
    for stage in a:
        print(f"{stage:<12}{a[stage].seconds:>10.1f}{b[stage].seconds:>14.1f}")
    faults = [f"stages: {list(a)} and {list(b)}"] if list(a) != list(b) else []
    for stage, kind in (("features", "dataset"), ("train", "model")):
        local_digests, store_digests = (
            digests(ws.locate(m[stage].output(kind).name)) for ws, m in ((local_ws, a), (store_ws, b))
        )
        data = {name for name in local_digests if name.endswith((".parquet", ".safetensors", ".arrow"))}
        differ = sorted(name for name in data if local_digests[name] != store_digests.get(name))
        print(f"{kind}: {len(local_digests)} files, {len(data)} of data, {len(differ)} differ")
        faults += differ + sorted(set(local_digests) ^ set(store_digests))
    local_rows, store_rows = (rows_of("scores", ws, ds) for ws in (local_ws, store_ws))
    print(f"scores: {local_rows.num_rows:,} rows, {'equal' if local_rows.equals(store_rows) else 'they differ'}")
    if not local_rows.equals(store_rows) or not local_rows.num_rows:
        faults.append("scores")
    if faults:
        raise SystemExit(f"the days differ: {', '.join(faults[:10])}")


def main() -> None:
    """Run both days."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--on", choices=("s3", "hdfs", "local"), required=True, help="where lake and store are")
    parser.add_argument("--yarn", action="store_true", help="tasks and ranks in containers of YARN")
    parser.add_argument("--rows", type=int, default=20_000, help="events of a generated day")
    parser.add_argument("--ds", default="2026-01-08")
    parser.add_argument("--folder", type=Path, help="keep everything here; default: a folder that goes at the end")
    parser.add_argument("--set", action="append", default=[], help="override a key of the spec", metavar="KEY=VALUE")
    args = parser.parse_args()
    if args.yarn and args.on == "s3":
        parser.error("--yarn: containers have no credentials of the S3 server's; take --on hdfs")
    name = "+".join([args.on, *(["yarn"] if args.yarn else [])])
    with tempfile.TemporaryDirectory() as temporary:
        folder: Path = (args.folder or Path(temporary)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        sets = [word for setting in args.set for word in ("--set", setting)]
        with servers(args.on, args.yarn, folder) as store_place:
            for home, place in (("here", RunPlace()), (name, store_place)):
                words = ["--home", str(folder / home), *sets]
                generated = ["generate", _PIPELINE, "--until", args.ds, "--rows-per-day", str(args.rows), *words]
                headrace(generated, place.environ)
                run = ["run", _PIPELINE, "--ds", args.ds, *place.words, *words]
                took, again = (headrace(run, place.environ) for _ in range(2))
                print(f"{home}: the day {took:.1f} s, run again {again:.1f} s", flush=True)
            os.environ.update(store_place.environ)
            compare(
                Workspace(folder / "here"),
                Workspace.from_environment(folder / name, store_place.environ),
                args.ds,
                name,
            )


if __name__ == "__main__":
    main()
