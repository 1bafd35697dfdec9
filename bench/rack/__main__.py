"""`python -m bench.rack [SCENARIO ...]`: a rack of hosts, a day over it, and what goes wrong."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from bench.rack import scenarios
from bench.rack.hosts import NoRack
from headrace.workspace import checkout


def main() -> int:
    """Run scenarios; 2 where there can be no rack."""
    parser = argparse.ArgumentParser(prog="python -m bench.rack", description=scenarios.__doc__)
    known = sorted(scenarios.ALL)
    parser.add_argument("scenario", nargs="*", default=["train"], help=f"of: {', '.join(known)}, all (default: train)")
    parser.add_argument("--rows", type=int, default=5000, help="events of a generated day")
    parser.add_argument("--ds", default="2026-01-03")
    parser.add_argument("--keep", type=Path, help="keep the hosts' files and logs in this folder")
    args = parser.parse_args()
    names = known if args.scenario == ["all"] else args.scenario
    if unknown := set(names) - set(known):
        parser.error(f"no scenario {', '.join(sorted(unknown))}; known: {', '.join(known)}, all")
    failed = 0
    for name in names:
        with tempfile.TemporaryDirectory(prefix="rack-", dir=_build()) as temporary:
            folder = (args.keep / name if args.keep else Path(temporary)).absolute()
            try:
                row = scenarios.ALL[name](scenarios.Day(folder, args.ds, args.rows))
            except NoRack as e:
                print(f"no rack here: {e}", file=sys.stderr)
                return 2
            except RuntimeError as e:
                print(f"| {name} | FAILED | {str(e)[:2000]} |", flush=True)
                failed = 1
                continue
        print(row, flush=True)
    return failed


def _build() -> Path:
    folder = checkout() / "build" / "rack"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


if __name__ == "__main__":
    sys.exit(main())
