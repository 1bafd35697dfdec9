"""From candidates to lists: make bench-score. Each figure beside its floor, in the same run.

A case is a module with `figures()`; CASES names them: `make bench-score`, or `python -m bench.bench_score ranking`. The
case `million` takes some 20 minutes of two cores; one that is stopped goes on where it was.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module

from bench.report import Figure, publish

#: By name of the case its module.
CASES: Mapping[str, str] = {
    "ranking": "bench.score_ranking",
    "retrieval": "bench.score_retrieval",
    "million": "bench.score_million",
}


def main() -> None:
    asked = sys.argv[1:] or list(CASES)
    found: list[Figure] = []
    for name in asked:
        figures: Callable[[], list[Figure]] = import_module(CASES[name]).figures
        found += figures()
    publish("score" if asked == list(CASES) else f"score-{'-'.join(asked)}", found)


if __name__ == "__main__":
    main()
