"""`headrace run` and the stages' own verbs: what is pending, in as few applications as can be; then what came out."""

from __future__ import annotations

import signal
from collections.abc import Sequence

from rich.markup import escape

from headrace import logs
from headrace.commands import summary
from headrace.commands.screen import out
from headrace.commands.verdict import tell_refusals
from headrace.config import Spec, load_spec, parse_ds
from headrace.errors import (
    EXIT_BUSY,
    EXIT_DONE,
    EXIT_FAILURE,
    EXIT_INCOMPLETE,
    EXIT_REFUSED,
    EXIT_USER_ERROR,
    RefusedError,
    UserError,
)
from headrace.jobs.events import StageEvent
from headrace.jobs.observe.whole_run import whole_run
from headrace.stage import check_stage
from headrace.stages import ORDER, STAGES
from headrace.storage import Location
from headrace.workspace import Workspace

#: Exit codes of jobs that have said in one message what is the matter.
_EXPLAINED = (EXIT_USER_ERROR, EXIT_REFUSED, EXIT_BUSY, EXIT_INCOMPLETE)


def resolve(pipeline: str, ds: str | None, overrides: Sequence[str]) -> tuple[Spec, str]:
    """Read the spec and the day.

    Raises:
        UserError: the spec has faults, those included that a stage would come to; no day is given and the spec has
            none.
    """
    spec = load_spec(pipeline, overrides)
    # Late: with the operators come pyarrow and pandas; a misspelt key should be told at once.
    from headrace.jobs.spec_check import check_spec

    check_spec(spec)
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
    until: str | None = None,
) -> int:
    """Bring the stages from `first` to `last` up to date, in order; stop at the first that fails.

    Of a range of days each application serves its stages for all of them, so that all days' features are made in one,
    and then all days are trained; with a gate or a challenger, day by day (headrace.jobs.day_range).

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
        show_results: show the day's results at the end; of a range, the last day's.
        until: the last day of a range that begins with `ds`; None: that day alone.

    Returns:
        the exit code; 3 where all is done, and the gate has refused a day's model, and where there is no champion to
        score with for that reason.

    Raises:
        UserError: what the user can mend, found before anything was started.
    """
    spec, day = resolve(pipeline, ds, overrides)
    ws = ws.of(spec)
    # Late: jobs bring the stages, and with them pyspark; a misspelt key should be told at once.
    from headrace.jobs.applications import applications
    from headrace.jobs.day_range import days_of, submissions, turns
    from headrace.jobs.stages import load_stage, require_stage
    from headrace.jobs.submit import submit

    named = between(first, last)
    stages = [name for name in named if STAGES[name].applies(spec)]
    if not stages:
        require_stage(spec, named[0])
    days = days_of(spec, day, until)
    progress = _Progress(stages, days)
    with whole_run(spec, ws, day) as observed:
        for group, of in submissions(applications(stages, spec, isolated), days, spec):
            pending = list(group)
            try:
                while pending and all(check_stage(load_stage(pending[0]), spec, ws, ds) is None for ds in of):
                    for ds in of:
                        progress.show(StageEvent(pending[0], "skip", ds=ds))
                    pending.pop(0)
            except RefusedError:  # no champion to score with
                tell_refusals(spec, ws, stages, days)
                raise
            if not pending:
                continue
            progress.stage, progress.day = next(turns(pending, of, spec))
            last_day = of[-1] if len(of) > 1 else None
            observed.start()
            code = submit(pending, pipeline, spec, ws, of[0], overrides, progress.show, until=last_day)
            if code != EXIT_DONE:
                how = _explain_failure(progress.stage, code, ws.log(spec.pipeline, progress.day, progress.stage))
                observed.fail(f"{progress.stage} of {progress.day} did not finish: {how}")
                if progress.unended:
                    observed.fail_stage(progress.stage, progress.day, progress.unended, how)
                if code == EXIT_REFUSED:
                    tell_refusals(spec, ws, stages, days)
                return code if code in _EXPLAINED else EXIT_FAILURE
    if show_results and not logs.is_json():
        summary.show(spec, ws, days[-1], progress.states)
    return tell_refusals(spec, ws, stages, days)


class _Progress:
    """Results of the stages, and a line about each."""

    def __init__(self, stages: Sequence[str], days: Sequence[str]) -> None:
        self._stages, self._days = list(stages), list(days)
        #: Whose turn it is.
        self.day = self._days[0]
        #: Whose turn it is.
        self.stage = self._stages[0]
        #: What is said at the end.
        self.states: dict[str, str] = {}
        #: The id of the attempt that has begun and said nothing of its end; empty: there is none.
        self.unended = ""

    def show(self, event: StageEvent) -> None:
        self.stage, self.day = event.stage, event.ds or self._days[0]
        self.unended = event.run_id if event.kind == "run" else ""
        if logs.is_json():
            self._log(event)
            return
        label = f"[{self._stages.index(event.stage) + 1}/{len(self._stages)}] {event.stage}"
        if len(self._days) > 1:
            label += f" of {self.day}"
        if event.kind == "skip":
            self.states[event.stage] = "nothing to do"
            out.print(f"{label}: already done with the same inputs; nothing to do", markup=False)
        elif event.kind == "run":
            out.print(f"[bold]{escape(label)}[/]: {escape(event.reason)}", soft_wrap=True)
        elif event.kind == "done":
            self.states[event.stage] = "done"

    def _log(self, event: StageEvent) -> None:
        told = {"run": event.reason, "skip": "already done with the same inputs; nothing to do", "done": "done"}
        if event.kind in told:
            fields = {"stage": event.stage, "ds": self.day, "run_id": event.run_id, "event": event.kind}
            out.print(logs.json_line(told[event.kind], "INFO", "headrace.run", fields), markup=False, soft_wrap=True)


def between(first: str, last: str) -> tuple[str, ...]:
    """Return the stages from one to another.

    Raises:
        UserError: one is unknown, or they are the wrong way round.
    """
    if first == last and first in STAGES:
        return (first,)
    for name in (first, last):
        if name not in ORDER:
            raise UserError(f"no stage '{name}'; stages, in order: {', '.join(ORDER)}")
    if ORDER.index(first) > ORDER.index(last):
        raise UserError(f"stage '{first}' comes after '{last}'; stages, in order: {', '.join(ORDER)}")
    return ORDER[ORDER.index(first) : ORDER.index(last) + 1]


def _explain_failure(stage: str, code: int, log: Location) -> str:
    """Say it, and return how it ended."""
    how = "see the message above" if code in _EXPLAINED else f"exit code {code}"
    if code == 128 + signal.SIGTERM:
        how = "it was asked to stop"
    elif code > 128:
        how = f"killed by signal {code - 128}" + (" (out of memory?)" if code == 137 else "")
    if logs.is_json():
        line = logs.json_line(
            f"{stage} did not finish: {how}", "ERROR", "headrace.run", {"stage": stage, "log": str(log)}
        )
        out.print(line, markup=False, soft_wrap=True)
        return how
    out.print(f"[red]{stage} did not finish[/]: {how}. Its whole output: {escape(str(log))}")
    out.print("Finished stages are kept: the same command goes on from here.")
    return how
