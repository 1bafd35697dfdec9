"""The floors that the Arrow engine is measured beside: copies that understand nothing."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq


def seconds(work: Callable[[], object]) -> float:
    """Measure the seconds that a call takes."""
    tick = time.perf_counter()
    work()
    return time.perf_counter() - tick


def seconds_apart(work: Callable[..., object], *arguments: object) -> float:
    """Measure the seconds that a call takes in a process of its own, whose memory goes with it: Arrow keeps what was
    freed.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_seconds_of, work, arguments).result()


def _seconds_of(work: Callable[..., object], arguments: tuple[object, ...]) -> float:
    return seconds(lambda: work(*arguments))


def decode(paths: Sequence[str], texts: Sequence[str]) -> None:
    """Decode all of the files by pyarrow as it reads at its fastest, on all cores."""
    for path in paths:
        pq.read_table(path, read_dictionary=list(texts))


def decode_and_write(paths: Sequence[str], texts: Sequence[str], numbers: Sequence[str], out: Path) -> None:
    """Decode each file by pyarrow and write as many bytes as the dataset has, on all cores: nothing is looked up, no
    row is moved.

    A text becomes its number in the row group's own dictionary, a number a float32; Parquet pages as the dataset's,
    neither compressed nor dictionaries.
    """
    out.mkdir(parents=True)

    def write_one(pair: tuple[int, str]) -> None:
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
            part_table = pa.table(columns, names=[*numbers, *texts])
            writer = writer or pq.ParquetWriter(target, part_table.schema, compression="none", use_dictionary=False)
            writer.write_table(part_table)
        if writer is not None:
            writer.close()

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(write_one, enumerate(paths)))
