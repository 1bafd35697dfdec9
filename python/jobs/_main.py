"""What all jobs share: arguments, logging, exit codes, and leaving when the submitter is gone."""

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
from headrace.errors import EXIT_DONE, EXIT_FAILURE, EXIT_USER_ERROR, UserError
from headrace.stage import Stage, run_stage
from headrace.storage import local_folder
from headrace.workspace import Workspace

_PARENT_CHECK_SECONDS = 2.0


def job_main(name: str, description: str | None, argv: Sequence[str] | None = None) -> None:
    """Run the stage of that name as a program: `spark-submit python/jobs/NAME.py PIPELINE --ds DATE --home DIR`.

    Exits 0 when done or nothing to do, 2 for what the user can mend (one message), 1 for a failure (with a trace).
    The stage is imported after the arguments are read, so that `--help` and a misspelt option answer at once.
    """
    args = _arguments(name, description, argv)
    from headrace.jobs.stages import load_stage

    _run(load_stage(name), args)


def stage_main(stage: Stage, argv: Sequence[str] | None = None) -> None:
    """`job_main` for a stage that is at hand."""
    _run(stage, _arguments(stage.name, (stage.__doc__ or "").split("\n")[0], argv))


def _arguments(name: str, description: str | None, argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=name, description=description)
    parser.add_argument("pipeline", help="a shipped pipeline's name or the path of a .yaml file")
    parser.add_argument("--ds", help="the day, YYYY-MM-DD (default: the spec's)")
    parser.add_argument("--home", default="var", help="the workspace's folder (default: %(default)s)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key of the spec")
    return parser.parse_args(argv)


def _run(stage: Stage, args: argparse.Namespace) -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("py4j").setLevel(logging.WARNING)
    _leave_with_parent()
    sys.exit(_guarded(stage, args))


def _guarded(stage: Stage, args: argparse.Namespace) -> int:
    try:
        spec = load_spec(args.pipeline, args.set)
        ds = parse_ds(args.ds) if args.ds else spec.ds
        if ds is None:
            raise UserError(f"pipeline '{spec.pipeline}' needs a day: --ds YYYY-MM-DD")
        outcome = run_stage(stage, spec, Workspace(local_folder(args.home, "--home")), ds)
    except UserError as e:
        print(f"error: {e}", file=sys.stderr)
        return EXIT_USER_ERROR
    except Exception:  # the process's last line of defence: anything else is a failure with its trace
        traceback.print_exc()
        return EXIT_FAILURE
    if outcome.skipped:
        print(f"{stage.name}: {outcome.reason}; nothing to do")
    else:
        print(f"{stage.name}: done in {outcome.manifest.seconds:.1f} s")
    return EXIT_DONE


def _leave_with_parent() -> None:
    """A submitter that is killed (a task's time-out) must not leave this process at work behind its back."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_PARENT_CHECK_SECONDS)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
