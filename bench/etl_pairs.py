"""Ours and DuckDB in turns over the same files: the median of the pairs, where one try each says little of a machine
that others use, too.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from statistics import median

from pyspark.sql import SparkSession

from bench.cpu import cpu_of_tree
from bench.criteo_data import CATEGORIES, COUNTS, write_days
from bench.etl_lake import DAYS, MIN_COUNT, Lake, spec_of
from bench.etl_peers import APART, run_apart
from bench.report import Figure

#: Of ours and of DuckDB's each.
PAIRS = 5
_PEER = "duckdb"


def of_pairs(spark: SparkSession, millions: float, work: Path) -> list[Figure]:
    """Measure rates and processor time of five tries each, by turns: medians, and every pair as it was."""
    rows, title = int(millions * 1e6), APART[_PEER].title
    lake = Lake(spark, work, write_days(work / "raw", rows, DAYS), rows)
    shutil.rmtree(work / "raw")
    size, figures, rates, peer_rates, cpus, peer_cpus = f"{millions:g} M rows", [], [], [], [], []
    for pair in range(1, PAIRS + 1):
        with cpu_of_tree() as cpu:
            fit, write, _ = lake.features(spec_of(), work / "out")
        lake.forget()
        shutil.rmtree(work / "out")
        ran = run_apart(_PEER, lake, work / _PEER, CATEGORIES, COUNTS, MIN_COUNT)
        if ran is None:
            return []
        shutil.rmtree(work / _PEER)
        rates.append(rows / (fit + write))
        peer_rates.append(rows / ran.seconds)
        cpus.append(cpu.seconds)
        peer_cpus.append(ran.cpu_s)
        print(f"pair {pair}: {rates[-1]:,.0f} and {peer_rates[-1]:,.0f} rows/s", flush=True)
        figures.append(Figure(f"pair {pair} with {title}, {size}", rates[-1], "rows/s", peer=peer_rates[-1]))
    ratio = median(a / b for a, b in zip(rates, peer_rates, strict=True))
    return [
        *figures,
        Figure(f"median of {PAIRS} pairs with {title}, {size}", ratio, "times as fast"),
        Figure(f"processor time, median of {PAIRS} tries, {size}", median(cpus), "s", peer=median(peer_cpus)),
    ]
