"""Peers that run in an environment of their own: the same workflow over the same files, time and peak memory."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.cpu import cpu_of_children
from bench.etl_lake import Lake
from bench.memory import peak_of_tree
from headrace.workspace import checkout

#: A peer that takes longer is stopped and left out.
_PATIENCE_S = 1_800


@dataclass(frozen=True)
class Peer:
    """A program of bench/peers: what it is called in figures, its environment, its script, and ways to run it."""

    title: str
    environment: str
    script: str
    #: Leading arguments of each try besides the folder; the fastest counts.
    ways: tuple[tuple[str, ...], ...] = ((),)
    #: Whether it leaves what `bench.etl_check` compares.
    checked: bool = False

    @property
    def python(self) -> Path:
        """Return the Python of the peers' environment."""
        return checkout() / "build" / "peers" / self.environment / "bin" / "python"


APART = {
    # NVTabular's schedulers: one process, and two worker processes.
    "nvtabular": Peer("NVTabular 23.8", "nvtabular", "etl_nvtabular.py", (("synchronous",), ("2",))),
    "duckdb": Peer("DuckDB 2.0", "duckdb-polars", "etl_duckdb.py", checked=True),
    "polars": Peer("Polars 2.1", "duckdb-polars", "etl_polars.py", checked=True),
}


@dataclass(frozen=True)
class Ran:
    """Time and memory that a peer took."""

    fit_s: float
    write_s: float
    peak_mib: float
    #: Processor time of all of it, the start of its Python included.
    cpu_s: float
    #: Where its dataset and its vocabularies are.
    folder: Path

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.fit_s + self.write_s


def run_apart(
    name: str, lake: Lake, out: Path, categories: Sequence[str], counts: Sequence[str], least: int, tries: int = 1
) -> Ran | None:
    """Return a peer's best try; None, and the reason printed, where it did not run.

    Args:
        name: one of APART.
        out: a new folder.
        least: rows that a value needs to get a code.
        tries: of each of the peer's ways.
    """
    peer = APART[name]
    if not peer.python.exists():
        print(f"left out: {peer.title} is not installed: make bench-etl-peers")
        return None
    runs = []
    for number, way in enumerate(peer.ways * tries):
        ran = _run(peer, way, lake, out / str(number), categories, counts, least)
        if isinstance(ran, str):
            print(f"left out: {ran}")
        else:
            runs.append(ran)
    return min(runs, key=lambda f: f.seconds) if runs else None


def _run(
    peer: Peer,
    way: tuple[str, ...],
    lake: Lake,
    out: Path,
    categories: Sequence[str],
    counts: Sequence[str],
    least: int,
) -> Ran | str:
    script = checkout() / "bench" / "peers" / peer.script
    files = [",".join(lake.paths(False)), ",".join(lake.paths(True))]
    workflow = [",".join(categories), ",".join(counts), str(least)]
    command = [str(peer.python), str(script), str(out), *way, *files, *workflow]
    name = " ".join((peer.title, *way))
    with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
        process = subprocess.Popen(command, stdout=stdout, stderr=stderr, text=True, start_new_session=True)
        try:
            with peak_of_tree(process.pid) as peak, cpu_of_children() as cpu:
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
        answer = json.loads(stdout.read().strip().splitlines()[-1])
    if answer["rows"] != lake.rows:
        return f"{name} wrote {answer['rows']} rows of {lake.rows}"
    return Ran(answer["fit"], answer["write"], peak.mib, cpu.seconds, out)
