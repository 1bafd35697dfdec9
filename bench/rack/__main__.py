"""`python -m bench.rack [SCENARIO ...]`: a rack of hosts, a day over it, and what goes wrong."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from bench.rack import scenarios
from bench.rack.hosts import NoRack
from headrace.config.installation import checkout

_KNOWN = [*scenarios.DAYS, *scenarios.FAULTS]


def main() -> int:
    """Run scenarios; 1 where one failed, 2 where there can be no rack."""
    parser = argparse.ArgumentParser(prog="python -m bench.rack", description=__doc__)
    parser.add_argument("scenario", nargs="*", default=["day"], help=f"of: {', '.join(_KNOWN)}, all (default: day)")
    parser.add_argument("--rows", type=int, default=5000, help="events of a generated day")
    parser.add_argument("--ds", default="2026-01-03")
    parser.add_argument("--keep", type=Path, help="keep the hosts' files and logs in this folder")
    args = parser.parse_args()
    names = _KNOWN if args.scenario == ["all"] else args.scenario
    if unknown := set(names) - set(_KNOWN):
        parser.error(f"no scenario {', '.join(sorted(unknown))}; known: {', '.join(_KNOWN)}, all")
    with ExitStack() as stack:
        folder = args.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rack-", dir=_build())))
        try:
            results = _run(names, scenarios.ScenarioPlan(folder.absolute(), args.ds, args.rows))
        except NoRack as e:
            print(f"no rack here: {e}", file=sys.stderr)
            return 2
    scenarios.publish(results)
    return int(len(results) < len(names))


def _run(names: Sequence[str], plan: scenarios.ScenarioPlan) -> list[scenarios.ScenarioResult]:
    """Run the scenarios and return the rows of those that did not fail."""
    results = []

    def attempt(name: str, act: Callable[[], scenarios.ScenarioResult]) -> None:
        try:
            results.append(act())
            print(results[-1], flush=True)
        except (RuntimeError, subprocess.TimeoutExpired) as e:
            print(f"| {name} | FAILED | {str(e)[:2000]} |", flush=True)

    for name in (n for n in scenarios.DAYS if n in names):
        attempt(name, lambda name=name: scenarios.DAYS[name](plan.below(name)))
    disturbed = [n for n in names if n in scenarios.FAULTS]
    if disturbed:
        with scenarios.start_lab(plan.below("faults")) as lab:
            for name in disturbed:
                attempt(name, lambda name=name: scenarios.FAULTS[name](lab))
    return results


def _build() -> Path:
    folder = checkout() / "build" / "rack"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


if __name__ == "__main__":
    sys.exit(main())
