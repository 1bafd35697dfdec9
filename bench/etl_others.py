"""What the Arrow engine is measured beside: floors (copies that understand nothing) and peers."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from bench.etl_lake import MIN_COUNT, Lake
from bench.memory import peak_of_tree
from headrace.workspace import checkout

PEERS = ("nvtabular", "textbook")
NVTABULAR = checkout() / "build" / "peers" / "nvtabular" / "bin" / "python"
#: NVTabular's schedulers that are tried: one process, and two worker processes.
SCHEDULERS = ("synchronous", "2")
#: A peer that takes longer is stopped and left out.
_PATIENCE_S = 1_800


def seconds(work: Callable[[], object]) -> float:
    """How long it takes."""
    tick = time.perf_counter()
    work()
    return time.perf_counter() - tick


def seconds_apart(work: Callable[..., object], *arguments: object) -> float:
    """How long it takes in a process of its own, whose memory goes with it: Arrow keeps what was freed."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_seconds_of, work, arguments).result()


def _seconds_of(work: Callable[..., object], arguments: tuple[object, ...]) -> float:
    return seconds(lambda: work(*arguments))


def decode(paths: Sequence[str], texts: Sequence[str]) -> None:
    """All of the files by pyarrow as it reads at its fastest, on all cores."""
    for path in paths:
        pq.read_table(path, read_dictionary=list(texts))


def decode_and_write(paths: Sequence[str], texts: Sequence[str], numbers: Sequence[str], out: Path) -> None:
    """Each file decoded by pyarrow and as many bytes written as the dataset has, on all cores: nothing is looked up,
    no row is moved.

    A text becomes its number in the row group's own dictionary, a number a float32; Parquet pages as the dataset's,
    neither compressed nor dictionaries.
    """
    out.mkdir(parents=True)

    def one(pair: tuple[int, str]) -> None:
        number, path = pair
        file = pq.ParquetFile(path, memory_map=True, read_dictionary=list(texts))
        target = out / f"{number}.parquet"
        writer = None
        for group in range(file.num_row_groups):
            table = file.read_row_group(group, columns=[*numbers, *texts], use_threads=False)
            columns: list[pa.Array] = []
            for name in numbers:
                columns.append(pc.fill_null(table.column(name), 0).cast(pa.float32(), safe=False))
            for name in texts:
                chunks = table.column(name).unify_dictionaries().chunks
                columns.append(pa.chunked_array([pc.fill_null(c.indices, 0) for c in chunks]))
            made = pa.table(columns, names=[*numbers, *texts])
            writer = writer or pq.ParquetWriter(target, made.schema, compression="none", use_dictionary=False)
            writer.write_table(made)
        if writer is not None:
            writer.close()

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(one, enumerate(paths)))


def nvtabular(
    lake: Lake, out: Path, categories: Sequence[str], counts: Sequence[str], least: int = MIN_COUNT
) -> dict[str, float] | None:
    """Seconds of `fit` and `write` and peak MiB of NVTabular's better scheduler; None, and the reason printed, where it
    did not run."""
    if not NVTABULAR.exists():
        print("left out: NVTabular is not installed: make bench-etl-peers")
        return None
    found = []
    for scheduler in SCHEDULERS:
        ran = _nvtabular(lake, out / scheduler, scheduler, categories, counts, least)
        if isinstance(ran, str):
            print(f"left out: {ran}")
        else:
            found.append(ran)
    return min(found, key=lambda f: f["fit"] + f["write"]) if found else None


def _nvtabular(
    lake: Lake, out: Path, scheduler: str, categories: Sequence[str], counts: Sequence[str], least: int
) -> dict[str, float] | str:
    script = checkout() / "bench" / "peers" / "etl_nvtabular.py"
    files = [",".join(lake.paths(False)), ",".join(lake.paths(True))]
    workflow = [",".join(categories), ",".join(counts), str(least)]
    command = [str(NVTABULAR), str(script), str(out), scheduler, *files, *workflow]
    name = f"NVTabular (scheduler {scheduler})"
    with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
        process = subprocess.Popen(command, stdout=stdout, stderr=stderr, text=True, start_new_session=True)
        try:
            with peak_of_tree(process.pid) as peak:
                code = process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            return f"{name} took more than {_PATIENCE_S} s"
        finally:  # its workers too, whatever ended the wait
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        stdout.seek(0)
        stderr.seek(0)
        if code:
            return f"{name} ended with {code}: {stderr.read().strip().splitlines()[-1:]}"
        found: dict[str, float] = json.loads(stdout.read().strip().splitlines()[-1])
    return found | {"peak": peak.mib}
