"""The program of stages: one or several of a pipeline, one after another, for one day or a range of days.

spark-submit python/jobs/run_stage.py STAGE[,STAGE...] PIPELINE --ds DATE [--until DATE] --home DIR

Or by Python: the JVM then starts beside the imports, where a stage needs one. Stages that come together share a Spark
application; each takes the lock, works and commits as it would alone, and the first that fails ends the program.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from headrace import logs
from headrace.config import Spec, load_spec, parse_ds
from headrace.config.stages import ORDER, STAGES
from headrace.config.workspace import Workspace
from headrace.errors import EXIT_DONE, EXIT_FAILURE, UserError
from headrace.jobs.observe.application import Observation
from headrace.jobs.process import take_secrets, when_parent_ends
from headrace.jobs.stages import days_of, execution_order
from headrace.logs import hide
from headrace.stage import RunPlan, check_lock, run_stage, stage_entry
from headrace.storage import local_folder

if TYPE_CHECKING:
    from headrace.jobs.output import Kind


@contextmanager
def import_ahead(stages: Sequence[str]) -> Iterator[Callable[[], None]]:
    """Give a function that starts a thread, which imports `StageEntry.imports` in the order of the stages.

    What goes wrong is left to the stage, which imports it again. At the end the thread stops behind the module that it
    is in.

    Yields:
        what to call when the imports may begin.
    """
    over = threading.Event()

    def work() -> None:
        for name in stages:
            for imported in STAGES[name].imports if name in STAGES else ():
                if over.is_set():
                    return
                try:
                    _load(imported)
                except Exception as e:  # an import can fail with anything
                    log.debug("%s cannot be imported yet: %s", imported, e)

    # Not a daemon: an interpreter that ends in the middle of a library's initialisation may crash.
    thread = threading.Thread(target=work, name="import-ahead")
    begun = False

    def begin() -> None:
        nonlocal begun
        if not begun:
            begun = True
            thread.start()

    try:
        yield begin
    finally:
        over.set()
        if begun:
            thread.join()


def _load(name: str) -> None:
    module, _, function = name.partition(":")
    imported = import_module(module)
    if function:
        getattr(imported, function)()


log = logging.getLogger("headrace.jobs")


def main(argv: Sequence[str] | None = None) -> None:
    """Run the stages and exit.

    0: all are done or had nothing to do. 2: what the user can mend (one message). 69: another run of the pipeline is
    at work, try later. 75: the day is not complete yet, or the store is away, try later. 128 + N: signal N has ended
    the JVM. 1: another failure (with a trace).
    """
    args = _arguments(argv)
    for value in take_secrets(os.environ).values():
        hide(value)
    logs.configure(text="%(asctime)s %(name)s: %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("py4j").setLevel(logging.WARNING)
    # A submitter that is killed (a task's time-out) must not leave this process at work behind its back.
    when_parent_ends(lambda: os.kill(os.getpid(), signal.SIGKILL))
    sys.exit(_run(args))


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="run_stage",
        description="Run one stage of a pipeline for one day, or several that follow each other in one application.",
        epilog="\n".join(f"{entry.name:<10}{entry.help}" for entry in STAGES.values()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("stages", type=_stages, help="the stage; several with commas between", metavar="STAGE")
    parser.add_argument("pipeline", help="a shipped pipeline's name or the path of a .yaml file", metavar="PIPELINE")
    parser.add_argument("--ds", help="the day, YYYY-MM-DD (default: the spec's)")
    parser.add_argument("--until", help="the last day of a range that begins with --ds", metavar="DATE")
    parser.add_argument("--home", default="var", help="the workspace's folder (default: %(default)s)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key of the spec")
    parser.add_argument("--events", action="store_true", help="print lines about the stages for headrace.jobs.submit")
    return parser.parse_args(argv)


def _stages(text: str) -> list[str]:
    names = text.split(",")
    listed = [name for name in names if name in STAGES]  # a package's are known with the spec
    if listed != [name for name in ORDER if name in listed] and not (len(names) == 1 and listed):
        raise argparse.ArgumentTypeError(f"'{text}': write stages in the day's order: {','.join(ORDER)}")
    return names


def _run(args: argparse.Namespace) -> int:
    written: tuple[Path, ...] = ()
    try:
        spec = load_spec(args.pipeline, args.set)
        # Late, for the same reason as in `headrace run`.
        from headrace.jobs.check_specs import check_spec
        from headrace.jobs.stages import require_stage

        check_spec(spec)
        for name in args.stages:
            require_stage(spec, name)
        ds = parse_ds(args.ds) if args.ds else spec.ds
        if ds is None:
            raise UserError(f"pipeline '{spec.pipeline}' needs a day: --ds YYYY-MM-DD")
        ws = Workspace.from_environment(local_folder(args.home, "--home"), os.environ).of(spec)
        written = ws.written_folders
        days = days_of(spec, ds, args.until)
        with (
            closing(Observation(spec, ws)) as observation,
            _session(args, spec, ws, ds) as release_memory,
            import_ahead(args.stages[1:]) as begin,
        ):
            previous = None
            for number, (name, day) in enumerate(execution_order(args.stages, days, spec)):
                if previous is not None and stage_entry(spec, previous).spark:
                    release_memory()
                _run_one(name, spec, ws, day, args.events, time.time() if number else None, begin, observation)
                previous = name
    except Exception as e:  # the process's last line of defence: what cannot be told is a failure with its trace
        from headrace.errors.translate import exit_message

        if (message := exit_message(e, written)) is not None:
            logs.print_error(message[0])
            return message[1]
        logs.print_trace(e, log.name)
        return _killed_jvm() or EXIT_FAILURE
    return EXIT_DONE


@contextmanager
def _session(args: argparse.Namespace, spec: Spec, ws: Workspace, ds: str) -> Iterator[Callable[[], None]]:
    """Open the session that the stages share, if one of them needs it; give a function to call between two of them."""
    if not any(stage_entry(spec, name).spark for name in args.stages):
        yield lambda: None
        return
    # Late: `--help` and a misspelt option answer at once, and what needs no Spark does not wait for it.
    from headrace.jobs.stages import applications, spark_settings_of
    from headrace.lake.spark.session import shared_session

    groups = applications(args.stages, spec)
    if len(groups) > 1:
        listing = " and ".join(",".join(group) for group in groups)
        raise UserError(f"these stages need different Spark settings; run {listing}, each in an application of its own")
    conf = next(conf for name in args.stages if (conf := spark_settings_of(name, spec)) is not None)
    title = f"headrace {spec.pipeline} {','.join(args.stages)} {ds}"
    # A submitter that hears of the stages has looked: the first of them has work to do.
    first = stage_entry(spec, args.stages[0])
    begin = args.events and first.spark
    if begin:
        # The stage takes its lease beside the start of the session. One that would be refused starts none: on a cluster
        # it would take what the run that is at work may need.
        check_lock(ws, spec.pipeline, first.lease)
    with shared_session(conf, ws, title, begin) as release_memory:
        yield release_memory


def _run_one(
    name: str,
    spec: Spec,
    ws: Workspace,
    ds: str,
    events: bool,
    turn_start: float | None,
    works: Callable[[], None],
    observation: Observation,
) -> None:
    """Bring a stage up to date; `works`: called where it has work to do."""
    from headrace.jobs.stages import load_stage

    with observation.stage(name, ds) as observed:

        def tell(kind: Kind, reason: str = "") -> None:
            if events:
                from headrace.jobs.output import StageEvent

                StageEvent(name, kind, reason, ds, observed.run.run_id).send()

        def announce(plan: RunPlan) -> None:
            if plan.reason is None:
                tell("skip")
            else:
                observed.begin(plan)
                tell("run", plan.reason)
                works()

        tell("check")
        try:
            outcome = run_stage(load_stage(name, spec), spec, ws, ds, announce, turn_start)
        except Exception:
            tell("failed")
            raise
        if not outcome.skipped:
            observed.done(outcome.manifest)
            _say(f"{name}: done in {outcome.manifest.seconds:.1f} s")
            tell("done")
        elif not events:
            _say(f"{name}: {outcome.reason}; nothing to do")


def _say(text: str) -> None:
    if logs.is_json():
        log.info("%s", text)
    else:
        print(text, flush=True)


def _killed_jvm() -> int | None:
    """Return the exit code where the failure is a JVM ended by a signal."""
    if "headrace.lake.spark.session" not in sys.modules:
        return None
    from headrace.lake.spark.session import jvm_exit_code

    code = jvm_exit_code()
    return code if code is not None and code > 128 else None


if __name__ == "__main__":
    main()
