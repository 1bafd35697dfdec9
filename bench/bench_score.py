"""Scoring from candidates to lists: make bench-score. Each figure beside its floor, in the same run.

    python -m bench.bench_score                              # all cases
    python -m bench.bench_score ranking retrieval            # some of them
    python -m bench.bench_score million --resume             # with the parts that other commits have left
    python -m bench.bench_score million --users 20000        # a slice, whose parts count for the whole

A case is a module with `figures`; CASES names them. The case `million` takes some 25 minutes of two cores; one that is
stopped goes on where it was.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from importlib import import_module

from bench.report import Figure, publish
from bench.score_million import PART, USERS

#: By name of the case its module.
CASES: Mapping[str, str] = {
    "ranking": "bench.score_ranking",
    "retrieval": "bench.score_retrieval",
    "million": "bench.score_million",
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.bench_score")
    parser.add_argument("cases", nargs="*", default=list(CASES), metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--resume", action="store_true", help="million: keep the parts that another commit has left")
    parser.add_argument("--users", type=int, default=USERS, help=f"million: so many users, a multiple of {PART:,}")
    args = parser.parse_args()
    unknown = [name for name in args.cases if name not in CASES]
    if unknown:
        parser.error(f"there is no case '{unknown[0]}'; cases: {', '.join(CASES)}")
    if args.users % PART or not 0 < args.users <= USERS:
        parser.error(f"--users is a multiple of {PART:,}, {USERS:,} at most")
    figures: list[Figure] = []
    for name in args.cases:
        options = {"resume": args.resume, "users": args.users} if name == "million" else {}
        figures += import_module(CASES[name]).figures(**options)
    publish("score" if args.cases == list(CASES) else f"score-{'-'.join(args.cases)}", figures)


if __name__ == "__main__":
    main()
