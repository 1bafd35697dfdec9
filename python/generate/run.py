"""`headrace generate`: days of a click log as landing files, on this machine's cores or, when large, by Spark."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import date, timedelta

from headrace.config import Spec, parse_ds
from headrace.errors import UserError
from headrace.generate.click_model import ClickModel
from headrace.generate.landing_files import DayPlan, publish_truth, stale_reason
from headrace.generate.population import alive
from headrace.generate.truth import DayTruth, summarise
from headrace.generate.writers import Writer, write_locally, writer_on_spark
from headrace.manifest import fingerprint
from headrace.stage import run_lock
from headrace.workspace import Workspace

log = logging.getLogger("headrace.generate")

#: Raise it when the same parameters give other bytes: days of older code are then made again.
VERSION = 1
#: More rows a day than this are written by Spark unless the caller says otherwise.
SPARK_ROWS = 2_000_000
#: A landing line takes about this many bytes, compressed: to refuse what the disk cannot hold.
_BYTES_PER_LINE = 110


@dataclass(frozen=True)
class Progress:
    """How far a call of `generate` is; given to its `progress` each time a file or a day is done."""

    ds: str
    #: Days done (made, or there already), this one not counted until it is; days asked for.
    days_done: int
    days: int
    #: Files of this day.
    files_done: int
    files: int
    #: Good rows made by this call.
    rows_done: int


def days_between(start: str, end: str) -> list[str]:
    """All days from start to end, both included, as YYYY-MM-DD.

    Raises:
        UserError: one is not a date, or the end is before the start.
    """
    first, last = date.fromisoformat(parse_ds(start)), date.fromisoformat(parse_ds(end))
    if last < first:
        raise UserError(f"the last day {end} is before the first day {start}")
    return [(first + timedelta(days=d)).isoformat() for d in range((last - first).days + 1)]


def generate(
    spec: Spec,
    ws: Workspace,
    days: Sequence[str],
    *,
    force: bool = False,
    spark: bool | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> list[DayTruth]:
    """Write the landing files and truth files of days, unless they are there as these parameters make them.

    A day's bytes depend on (seed, parameters, day) alone: not on the days asked for, their order, or who writes. About
    a quarter of a day's duplicates repeat events that landed the day before, made with the same parameters.

    Args:
        spec: a pipeline with a `generate` section; `table.late_days` bounds how late events are.
        ws: writes `landing/<pipeline>/<ds>/part-NNNN.(json|csv).gz` and `landing/<pipeline>/truth/<ds>.json` below its
            home. With Spark on a cluster, every executor must see that folder.
        days: YYYY-MM-DD, none before `generate.start`.
        force: make days again that are there already.
        spark: whether Spark's tasks write the files; None: above 2,000,000 rows a day.
        progress: called in this thread after each file and day.

    Returns:
        a truth for each of `days`, in their order.

    Raises:
        UserError: the pipeline has no `generate` section, a day is no date or before the first day, the disk cannot
            hold the days, or another process is generating for this pipeline.
    """
    if spec.generate is None:
        raise UserError(f"pipeline '{spec.pipeline}' has no 'generate' section, so there is nothing to generate")
    model = ClickModel(spec.generate, spec.table.late_days)
    wanted = [_day(model, ds) for ds in dict.fromkeys(parse_ds(ds) for ds in days)]
    parameters = {**spec.generate.model_dump(mode="json", exclude={"site"}), "late_days": model.late_days}
    key = fingerprint({"generator": VERSION, **parameters})
    by_spark = model.params.rows_per_day > SPARK_ROWS if spark is None else spark
    landing = ws.landing(spec.pipeline)
    found: dict[str, DayTruth] = {}
    # The stack opens Spark at the first day that must be made, and closes it before the lock is let go.
    with run_lock(ws, f"{spec.pipeline}-generate"), ExitStack() as stack:
        write: Writer | None = None
        rows_done = 0
        for done, day in enumerate(wanted):
            reason, truth = stale_reason(landing, day.ds, key, parameters)
            if reason is None and truth is not None and not force:
                log.info("%s: %s rows exist already; nothing to do", day.ds, f"{truth.rows:,}")
                found[day.ds] = truth
            else:
                if write is None:
                    _check_disk(ws, [d for d in wanted if d.ds not in found])
                    write = stack.enter_context(writer_on_spark(spec.spark, ws)) if by_spark else write_locally
                log.info(
                    "%s: %s; writing %s rows to %d files%s",
                    day.ds,
                    reason or "exists, but is made again (force)",
                    f"{day.rows:,}",
                    day.files,
                    " with Spark" if by_spark else "",
                )

                def report(files: int, day: DayPlan = day, done: int = done, rows: int = rows_done) -> None:
                    if progress:
                        rows += day.rows * files // day.files
                        progress(Progress(day.ds, done, len(wanted), files, day.files, rows))

                with (landing / day.ds).new_folder() as folder:
                    truth = summarise(
                        day.ds, write(day, folder, report), _population(day), model.params.seed, parameters, key
                    )
                    publish_truth(landing, truth)
                found[day.ds] = truth
                rows_done += truth.rows
                log.info(
                    "%s: %s rows in %s lines, %.1f MiB; best AUC %s",
                    day.ds,
                    f"{truth.rows:,}",
                    f"{truth.lines:,}",
                    sum(f.bytes for f in truth.files) / 2**20,
                    "unknown (one class only)" if truth.auc_ceiling is None else f"{truth.auc_ceiling:.4f}",
                )
            if progress:
                progress(Progress(day.ds, done + 1, len(wanted), day.files, day.files, rows_done))
    return [found[parse_ds(ds)] for ds in days]


def _day(model: ClickModel, ds: str) -> DayPlan:
    start = date.fromisoformat(model.params.start)
    number = (date.fromisoformat(ds) - start).days
    if number < 0:
        raise UserError(
            f"{ds} is before the log's first day, {model.params.start} (generate.start): ask for later days, "
            f"or start the log earlier with --set generate.start={ds}"
        )
    return DayPlan(model, ds, start, number)


def _population(day: DayPlan) -> dict[str, int]:
    params = day.model.params
    counts: dict[str, int] = {}
    for name, first, growth in (("users", params.users, params.new_users), ("items", params.items, params.new_items)):
        now = alive(first, growth, day.number)
        counts[name] = now
        counts[f"new_{name}"] = now - alive(first, growth, day.number - 1) if day.number else now
    return counts


def _check_disk(ws: Workspace, days: Sequence[DayPlan]) -> None:
    """Refuse before hours of work what cannot fit.

    Raises:
        UserError: the file system of the workspace has less room than the days take, roughly.
    """
    needed = sum((d.rows + d.duplicates + d.malformed) * _BYTES_PER_LINE for d in days)
    free = ws.lake.free()
    if free is not None and needed > free:
        raise UserError(
            f"{len(days)} days of {days[0].rows:,} rows need about {needed / 2**30:.1f} GiB below {ws.lake}, which has "
            f"{free / 2**30:.1f} GiB free: lower generate.rows_per_day, ask for fewer days, or choose another --home"
        )
