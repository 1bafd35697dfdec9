"""The program that spark-submit runs: one stage of a pipeline for one day.

spark-submit python/jobs/run_stage.py STAGE PIPELINE --ds DATE --home DIR
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence

from headrace.config import load_spec, parse_ds
from headrace.errors import EXIT_DONE, EXIT_FAILURE, UserError
from headrace.stage import run_stage
from headrace.stages import ORDER, STAGES
from headrace.storage import local_folder
from headrace.workspace import Workspace

_PARENT_CHECK_SECONDS = 2.0


def main(argv: Sequence[str] | None = None) -> None:
    """Run the stage and exit.

    0: done or nothing to do. 2: what the user can mend (one message). 69: another run of the pipeline is at work, try
    later. 75: the day is not complete yet, try later. 1: a failure (with a trace).
    """
    args = _arguments(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("py4j").setLevel(logging.WARNING)
    _leave_with_parent()
    sys.exit(_run(args))


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="run_stage",
        description="Run one stage of a pipeline for one day.",
        epilog="\n".join(f"{entry.name:<10}{entry.help}" for entry in STAGES.values()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("stage", choices=ORDER, help="the stage", metavar="STAGE")
    parser.add_argument("pipeline", help="a shipped pipeline's name or the path of a .yaml file", metavar="PIPELINE")
    parser.add_argument("--ds", help="the day, YYYY-MM-DD (default: the spec's)")
    parser.add_argument("--home", default="var", help="the workspace's folder (default: %(default)s)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key of the spec")
    return parser.parse_args(argv)


def _run(args: argparse.Namespace) -> int:
    # Late: `--help` and a misspelt option answer at once.
    from headrace.jobs.stages import load_stage, require_stage

    try:
        spec = load_spec(args.pipeline, args.set)
        ds = parse_ds(args.ds) if args.ds else spec.ds
        if ds is None:
            raise UserError(f"pipeline '{spec.pipeline}' needs a day: --ds YYYY-MM-DD")
        require_stage(spec, args.stage)
        outcome = run_stage(load_stage(args.stage), spec, Workspace(local_folder(args.home, "--home")), ds)
    except UserError as e:
        print(f"error: {e}", file=sys.stderr)
        return e.exit_code
    except Exception:  # the process's last line of defence: anything else is a failure with its trace
        traceback.print_exc()
        return EXIT_FAILURE
    if outcome.skipped:
        print(f"{args.stage}: {outcome.reason}; nothing to do")
    else:
        print(f"{args.stage}: done in {outcome.manifest.seconds:.1f} s")
    return EXIT_DONE


def _leave_with_parent() -> None:
    """A submitter that is killed (a task's time-out) must not leave this process at work behind its back."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_PARENT_CHECK_SECONDS)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


if __name__ == "__main__":
    main()
