"""`headrace generate`: days of a click log, with a bar, and what is known about them."""

from __future__ import annotations

from datetime import date, timedelta

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from headrace.commands.screen import err, log_to_screen, out, table
from headrace.config import Spec, parse_ds
from headrace.errors import UserError
from headrace.quality.report import facts
from headrace.workspace import Workspace


def wanted_days(spec: Spec, days: int | None, start: str | None, until: str | None, default: int = 8) -> list[str]:
    """Return the requested days: from `start` (default: the log's first) to `until`, or `days` of them.

    Raises:
        UserError: all three are given and disagree, or the end is before the start.
    """
    if spec.generate is None:
        raise UserError(f"pipeline '{spec.pipeline}' has no 'generate' section, so there is nothing to generate")
    if days is not None and days < 1:
        raise UserError(f"--days {days}: at least 1")
    last = None if until is None else date.fromisoformat(parse_ds(until))
    if start is None and last is not None and days is not None:
        first = last - timedelta(days=days - 1)
    else:
        first = date.fromisoformat(parse_ds(start or spec.generate.start))
    if last is None:
        last = first + timedelta(days=(days or default) - 1)
    if last < first:
        raise UserError(f"the last day {last} is before the first day {first}")
    count = (last - first).days + 1
    if start is not None and until is not None and days is not None and days != count:
        raise UserError(f"--start {start} --until {until} are {count} days, not {days}: leave one of the three out")
    return [(first + timedelta(days=i)).isoformat() for i in range(count)]


def generate(spec: Spec, ws: Workspace, days: list[str], force: bool, spark: bool | None) -> None:
    """Make the days that are not there yet, and print a line about each.

    Raises:
        UserError: see headrace.generate.generate.
    """
    from headrace.generate import GenerationProgress as Step
    from headrace.generate import generate as make

    log_to_screen()
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("files"),
        TimeRemainingColumn(),
        console=err,
        transient=True,
        disable=not err.is_terminal,
    )
    with bar:
        task = bar.add_task("generate", total=None)

        def step(p: Step) -> None:
            total = p.days * p.files
            done = min(total, p.days_done * p.files + p.files_done % p.files)
            bar.update(task, description=p.ds, total=total, completed=done)

        truths = make(spec, ws, days, force=force, spark=spark, progress=step)
    rows_table = table("ds", ">rows", ">lines", ">MiB", ">users", ">items", ">click rate", ">best AUC")
    for t in truths:
        size = sum(f.bytes for f in t.files) / 2**20
        rows_table.add_row(
            t.ds,
            f"{t.rows:,}",
            f"{t.lines:,}",
            f"{size:,.1f}",
            f"{t.users:,}",
            f"{t.items:,}",
            facts.percent(t.base_rate),
            facts.decimals(t.auc_ceiling),
        )
    out.print(rows_table)
    out.print(f"landing files: {ws.landing(spec.pipeline)}", markup=False, soft_wrap=True)
