"""Features of Criteo-shaped rows: the Arrow engine's fit, transform and write beside its floors and its peers.

    make bench-etl                               # 1 and 2 million rows, vocabularies, real lines; all peers
    python -m bench.bench_etl 1 4 8              # millions of rows, each a part of its own
    python -m bench.bench_etl 4 16 --peers duckdb,polars
    python -m bench.bench_etl 8 --peers none     # or some of nvtabular, duckdb, polars, textbook
    python -m bench.bench_etl pairs-4 pairs-16   # ours and DuckDB in turns, five times each
    python -m bench.bench_etl vocabulary real    # the other parts
    python -m bench.bench_etl 1 2 4 8 --resume   # only what this checkout has not measured yet

Workflow: 26 categories by categorify (min_count 15), 13 counts by fill_missing, clip, log, normalize; eight days in a
Delta table, the last validates. Figures are rows a second over all rows (the higher the better) unless they say MiB,
values or s, which is processor time; of the best of three tries, as are DuckDB's and Polars's (one above 8 million
rows; of NVTabular, of its two schedulers). Floors: a plain Spark copy of the same files in the same session, and
pyarrow's bare decode and write of as many bytes. Peers: as named, on the same files. One that is not there is left out,
with the reason. What DuckDB and Polars wrote is compared with ours, row by row; where it differs, the part fails.

A part runs in a process of its own, with a warmed session, and leaves build/bench/etl/PART.json; etl.json beside that
folder has the figures of all parts. So a part that is stopped loses only itself.
"""

from __future__ import annotations

import argparse
import re
import signal
import sys
import tempfile
from pathlib import Path

from bench.criteo_data import write_days
from bench.etl_lake import DAYS, MIN_COUNT, Lake, spec_of
from bench.etl_pairs import of_pairs
from bench.etl_parts import of_real_lines, of_size, of_vocabulary
from bench.etl_peers import APART
from bench.etl_table import markdown
from bench.parts import FigureParts
from bench.peers.etl_textbook import textbook
from bench.report import Figure, publish
from headrace.config import load_spec
from headrace.errors import UserError
from headrace.lake.spark.session import session
from headrace.workspace import Workspace

OTHER_PARTS = ("vocabulary", "real")
PEERS = (*APART, "textbook")
_WARM_ROWS = 40_000
_PARTS = FigureParts.named("etl")
#: Before the millions of rows of a part of pairs.
_PAIRS = "pairs-"
_TOTAL = re.compile(r"^fit, transform and write, ([0-9.]+) M rows$")


def measure(part: str, peers: set[str]) -> list[Figure]:
    """Measure one part in a session that a small day has warmed."""
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as name:
        work = Path(name)
        with session(load_spec("criteo").spark, Workspace(work), "bench-etl") as spark:
            warm = Lake(spark, work / "warm", write_days(work / "warm" / "raw", _WARM_ROWS, DAYS), _WARM_ROWS)
            for _ in range(2):
                warm.features(spec_of(), work / "warm" / "out")
                warm.forget()
            spark.read.parquet(*warm.paths(False)).write.parquet(str(work / "warm" / "copy"))
            if "textbook" in peers and part != "vocabulary":
                textbook(spark, warm.paths(False), warm.paths(True), work / "warm" / "textbook", MIN_COUNT)
            if part == "vocabulary":
                return of_vocabulary(spark, peers, work / part)
            if part == "real":
                return of_real_lines(spark, peers, work / part)
            if part.startswith(_PAIRS):
                return of_pairs(spark, float(part.removeprefix(_PAIRS)), work / part)
            return of_size(spark, float(part), peers, work / part)


def combined(parts: FigureParts = _PARTS) -> list[Figure]:
    """Return the figures of all parts that were measured, by size, then the others; and how the rate grows with the
    rows.
    """
    measured = parts.measured()
    pairs = sorted(p for p in measured if p.startswith(_PAIRS))
    sizes = sorted(set(measured) - {*OTHER_PARTS, *pairs}, key=float)
    figures = [f for part in [*sizes, *(p for p in OTHER_PARTS if p in measured), *pairs] for f in parts.figures(part)]
    totals = {match[1]: f.value for f in figures if (match := _TOTAL.match(f.name))}
    smallest = next(iter(totals), "")
    grown = [
        Figure(f"growth with rows: {size} M against {smallest} M", rate, "rows/s", peer=totals[smallest])
        for size, rate in totals.items()
        if size != smallest
    ]
    return figures + grown


def main(parts: list[str], peers: list[str], resume: bool) -> int:
    """Measure the parts, each in a process of its own. Returns how many failed."""
    failed = _PARTS.run(parts, ["--peers", ",".join(peers) or "none"], resume)
    figures = combined()
    publish("etl", figures)
    print(markdown(figures))
    return failed


def part_named(text: str) -> str:
    """Return the name of a part: `vocabulary`, `real`, or millions of rows as `2`, `0.25`, `pairs-16`."""
    if text in OTHER_PARTS:
        return text
    pairs = _PAIRS if text.startswith(_PAIRS) else ""
    try:
        millions = float(text.removeprefix(pairs))
    except ValueError:
        raise UserError(f"'{text}' is no part: give millions of rows, {_PAIRS}16, {' or '.join(OTHER_PARTS)}") from None
    if not 0.001 <= millions <= 1_000:
        raise UserError(f"{text} million rows: give 0.001 to 1000")
    return f"{pairs}{millions:g}"


if __name__ == "__main__":
    # So that sessions end and folders are removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=["1", "2", *OTHER_PARTS])
    parser.add_argument("--peers", default=",".join(PEERS), help="none, or some of " + ",".join(PEERS))
    parser.add_argument("--resume", action="store_true", help="skip parts that this commit has measured")
    parser.add_argument("--in-process", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    try:
        parts = [part_named(part) for part in args.parts]
        named = [p for p in args.peers.split(",") if p != "none"]
        if unknown := set(named) - set(PEERS):
            raise UserError(f"--peers {args.peers}: there is no {', '.join(sorted(unknown))}; write {', '.join(PEERS)}")
    except UserError as e:
        parser.error(str(e))
    if not args.in_process:
        sys.exit(1 if main(parts, named, args.resume) else 0)
    for part in parts:
        _PARTS.save(part, measure(part, set(named)))
