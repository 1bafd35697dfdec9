"""`make quality`: run the (case, seed)s that are missing, one after the other, and print what there is."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from bench.quality.cases import QualityPart, load_parts, use_ranks
from bench.quality.page import Results, lines_of, machine, quality_folder, show
from headrace.errors import EXIT_USER_ERROR, UserError
from headrace.storage import local


def run_part(name: str, part: QualityPart, seeds: Sequence[int], results: Results) -> int:
    """Run what is missing of a part, the first seed of all cases first. Returns how many (case, seed)s failed."""
    reason = part.missing()
    if reason is not None:
        print(f"{name}: skipped: {reason}", flush=True)
        return 0
    folder = quality_folder() / "work" / name
    todo = [(seed, case) for seed in seeds for case in part.cases if results.load(name, case, seed) is None]
    have = len(seeds) * len(part.cases) - len(todo)
    print(f"{name}: {have} of {have + len(todo)} results are there", flush=True)
    failed = 0
    for number, (seed, case) in enumerate(todo, 1):
        print(f"{name} [{number}/{len(todo)}] {case.name}, seed {seed}", flush=True)
        try:
            result = case.run(seed, folder)
        except UserError as e:
            print(f"{name}: {case.name}, seed {seed} failed: {e}", file=sys.stderr, flush=True)
            failed += 1
            continue
        results.save(name, case, seed, result)
        metrics_text = ", ".join(f"{m} {result.metrics[m]:.4f}" for m in part.shown_metrics(case, list(result.metrics)))
        print(f"{name}: {case.name}, seed {seed}: {metrics_text}", flush=True)
    return failed


def write_record(parts: dict[str, QualityPart], seeds: Sequence[int], results: Results) -> None:
    """Write build/quality/quality.json: the lines of all parts, and this machine."""
    lines = {name: [line.record() for line in lines_of(name, part, results, seeds)] for name, part in parts.items()}
    record = {"machine": machine(), "parts": lines}
    local(quality_folder() / "quality.json").put_text(json.dumps(record, indent=1) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code: 1 where something failed."""
    parser = argparse.ArgumentParser(prog="make quality", description=__doc__)
    parser.add_argument("--parts", default="", help="names with commas between them; all without")
    parser.add_argument("--seeds", default="1,2,3", help="with commas between them")
    parser.add_argument("--ranks", type=int, help="train on so many ranks, whatever the specs say")
    parser.add_argument("--threads", type=int, help="threads of each rank")
    parser.add_argument("--show", action="store_true", help="print what there is and run nothing")
    args = parser.parse_args(arguments)
    use_ranks(args.ranks, args.threads)
    try:
        seeds = [int(s) for s in args.seeds.split(",")]
        chosen = load_parts([n for n in args.parts.split(",") if n])
        results, failed = Results.default(), 0
        for name, part in chosen.items():
            failed += 0 if args.show else run_part(name, part, seeds, results)
            show(part, lines_of(name, part, results, seeds))
        write_record(load_parts(), seeds, results)
    except (UserError, ValueError) as e:
        print(f"make quality: {e}", file=sys.stderr)
        return EXIT_USER_ERROR
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
