"""`headrace run` and the stages' own verbs: what is pending, in as few applications as can be; then what came out."""

from __future__ import annotations

import signal
from collections.abc import Sequence

from rich.markup import escape

from headrace.commands import summary
from headrace.commands.screen import out
from headrace.config import Spec, load_spec, parse_ds
from headrace.errors import EXIT_BUSY, EXIT_DONE, EXIT_FAILURE, EXIT_INCOMPLETE, EXIT_USER_ERROR, UserError
from headrace.jobs.events import StageEvent
from headrace.stage import check_stage
from headrace.stages import ORDER, STAGES
from headrace.storage import Location
from headrace.workspace import Workspace

#: Exit codes of jobs that have said in one message what is the matter.
_EXPLAINED = (EXIT_USER_ERROR, EXIT_BUSY, EXIT_INCOMPLETE)


def resolve(pipeline: str, ds: str | None, overrides: Sequence[str]) -> tuple[Spec, str]:
    """The spec and the day.

    Raises:
        UserError: the spec has faults; no day is given and the spec has none.
    """
    spec = load_spec(pipeline, overrides)
    if ds is not None:
        return spec, parse_ds(ds)
    if spec.ds is not None:
        return spec, spec.ds
    start = f", for example --ds {spec.generate.start} (the generator's first day)" if spec.generate else ""
    raise UserError(f"pipeline '{spec.pipeline}' has new data every day, so say which: --ds YYYY-MM-DD{start}")


def run(
    pipeline: str,
    ws: Workspace,
    ds: str | None,
    overrides: Sequence[str] = (),
    first: str = ORDER[0],
    last: str = ORDER[-1],
    isolated: bool = False,
    show_results: bool = True,
) -> int:
    """Bring the stages from `first` to `last` up to date, in order; stop at the first that fails.

    What needs no work before the first stage that does is found out here, from manifests and the lake's log, without
    starting a JVM; after it, by the application.

    Args:
        pipeline: a shipped pipeline's name or a YAML file.
        ws: the workspace.
        ds: the day; None: the spec's.
        overrides: `key=value` for the spec.
        first: the first stage.
        last: the last stage.
        isolated: each stage as an application of its own, instead of one for those whose Spark settings agree.
        show_results: show the day's results at the end.

    Returns:
        the exit code.

    Raises:
        UserError: what the user can mend, found before anything was started.
    """
    spec, day = resolve(pipeline, ds, overrides)
    # Late: jobs bring the stages, and with them pyspark; a misspelt key should be told at once.
    from headrace.jobs.applications import applications
    from headrace.jobs.stages import load_stage, require_stage
    from headrace.jobs.submit import submit

    named = between(first, last)
    stages = [name for name in named if STAGES[name].applies(spec)]
    if not stages:
        require_stage(spec, named[0])
    progress = _Progress(stages)
    for group in applications(stages, spec, isolated):
        pending = list(group)
        while pending and check_stage(load_stage(pending[0]), spec, ws, day) is None:
            progress.show(StageEvent(pending.pop(0), "skip"))
        if not pending:
            continue
        progress.stage = pending[0]
        code = submit(pending, pipeline, spec, ws, day, overrides, progress.show)
        if code != EXIT_DONE:
            _explain_failure(progress.stage, code, ws.log(spec.pipeline, day, progress.stage))
            return code if code in _EXPLAINED else EXIT_FAILURE
    if show_results:
        summary.show(spec, ws, day, progress.states)
    return EXIT_DONE


class _Progress:
    """What became of each stage, and a line about it when its turn comes."""

    def __init__(self, stages: Sequence[str]) -> None:
        self._stages = list(stages)
        #: Whose turn it is.
        self.stage = self._stages[0]
        #: What is said at the end.
        self.states: dict[str, str] = {}

    def show(self, event: StageEvent) -> None:
        self.stage = event.stage
        label = f"[{self._stages.index(event.stage) + 1}/{len(self._stages)}] {event.stage}"
        if event.kind == "skip":
            self.states[event.stage] = "nothing to do"
            out.print(f"{label}: already done with the same inputs; nothing to do", markup=False)
        elif event.kind == "run":
            out.print(f"[bold]{escape(label)}[/]: {escape(event.reason)}", soft_wrap=True)
        elif event.kind == "done":
            self.states[event.stage] = "done"


def between(first: str, last: str) -> tuple[str, ...]:
    """The stages from one to another.

    Raises:
        UserError: one is unknown, or they are the wrong way round.
    """
    for name in (first, last):
        if name not in ORDER:
            raise UserError(f"no stage '{name}'; stages, in order: {', '.join(ORDER)}")
    if ORDER.index(first) > ORDER.index(last):
        raise UserError(f"stage '{first}' comes after '{last}'; stages, in order: {', '.join(ORDER)}")
    return ORDER[ORDER.index(first) : ORDER.index(last) + 1]


def _explain_failure(stage: str, code: int, log: Location) -> None:
    how = "see the message above" if code in _EXPLAINED else f"exit code {code}"
    if code == 128 + signal.SIGTERM:
        how = "it was asked to stop"
    elif code > 128:
        how = f"killed by signal {code - 128}" + (" (out of memory?)" if code == 137 else "")
    out.print(f"[red]{stage} did not finish[/]: {how}. Its whole output: {escape(str(log))}")
    out.print("Finished stages are kept: the same command goes on from here.")
