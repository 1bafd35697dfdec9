"""Operators beside the job's: the day's sensor, commands, a day's model event, a backfill's next day, a fault."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import date, timedelta
from typing import TYPE_CHECKING, Any

from airflow.providers.standard.operators.trigger_dagrun import TriggerDagRunOperator
from airflow.sdk import Asset, BaseOperator
from airflow.sdk.exceptions import AirflowFailException, AirflowSkipException

from headrace_airflow.ends import end
from headrace_airflow.local_command import LocalCommand
from headrace_airflow.outside import command, master
from headrace_airflow.pipelines import POOL, Pipeline
from headrace_airflow.remote_command import RemoteCommand
from headrace_airflow.settings import ERRORS, SETTINGS
from headrace_airflow.triggers import DayComplete, look

if TYPE_CHECKING:
    from airflow.sdk import Context


class WaitForDay(RemoteCommand, BaseOperator):
    """Wait until a day's data are complete, as far as markers and files tell (`source.complete`), in the triggerer.

    It asks `headrace run --from ingest --to ingest --dry-run`, whose exit code is 75 until then. What needs the rows to
    be known, `ingest` finds out, and waits with the same exit code.
    """

    template_fields: Sequence[str] = ("ds",)

    def __init__(self, *, pipeline: Pipeline, ds: str, timeout: timedelta, **kwargs: Any) -> None:
        super().__init__(task_id="complete", pool=POOL, **kwargs)
        self.pipeline, self.ds, self.timeout = pipeline, ds, timeout

    def execute(self, context: Context) -> None:
        """Look once, then leave it to the triggerer. Raises AirflowException as `headrace_airflow.ends.end`."""
        words = ("--ds", self.ds, "--from", "ingest", "--to", "ingest", "--dry-run")
        argv = command("run", str(self.pipeline.path), *words)
        place = master(self.pipeline)
        if place.is_remote:  # each look is one there; between two of them the task waits for its time
            self.run_remotely(context, place, argv, self.timeout)
            return
        code, message = asyncio.run(look(argv))
        if code == ERRORS.EXIT_INCOMPLETE:
            self.log.info("%s", message)
            trigger = DayComplete(argv, SETTINGS.wait_seconds)
            self.defer(trigger=trigger, method_name="complete", timeout=self.timeout)
        self.complete(context, {"code": code, "said": message})

    def complete(self, context: Context, event: dict[str, Any]) -> None:
        """Finish the task: the day is complete, or the command has failed."""
        self.handle_end(context, event["code"], event["said"])

    def handle_end(self, context: Context, code: int | None, message: str) -> None:
        """Handle the end of a look. Raises AirflowException as `headrace_airflow.ends.end`."""
        self.log.info("%s", message)
        if code != ERRORS.EXIT_DONE:
            end(code, f"a look at the day {self.ds} of '{self.pipeline.name}'", message)


class HeadraceCommand(RemoteCommand, LocalCommand, BaseOperator):
    """`headrace WORDS... --home HOME` in the pipelines' environment; its exit code means what a job's does."""

    template_fields: Sequence[str] = ("words", "ds")

    def __init__(self, *, pipeline: Pipeline, words: Sequence[str], ds: str, **kwargs: Any) -> None:
        super().__init__(pool=POOL, **kwargs)
        self.pipeline, self.words, self.ds = pipeline, list(words), ds

    def execute(self, context: Context) -> None:
        """Run it. Raises AirflowException as `headrace_airflow.ends.end`."""
        argv, place = command(*self.words), master(self.pipeline)
        if place.is_remote:
            self.run_remotely(context, place, argv, None)
        else:
            self.handle_end(context, *self.run_locally(context, argv))

    def handle_end(self, context: Context, code: int | None, message: str) -> None:
        """Handle the command's end. Raises AirflowException as `headrace_airflow.ends.end`."""
        if code != ERRORS.EXIT_DONE:
            end(code, f"headrace {' '.join(self.words)}", message)

    def on_kill(self) -> None:
        """Stop the command with its task."""
        self.stop_process()


class ModelEvent(BaseOperator):
    """An event of the pipeline's asset for one day: that day is to be scored. One key, so one run of the scoring DAG.

    The key is the day, as an asset's partition: events of different days never end in one run.
    """

    template_fields: Sequence[str] = ("ds",)

    def __init__(self, *, pipeline: Pipeline, ds: str, **kwargs: Any) -> None:
        self.asset = model_asset(pipeline)
        super().__init__(task_id="model_event", outlets=[self.asset], **kwargs)
        self.pipeline, self.ds = pipeline, ds

    def execute(self, context: Context) -> None:
        """Name the day."""
        context["outlet_events"][self.asset].add_partitions(self.ds)


def model_asset(pipeline: Pipeline) -> Asset:
    """Return the asset that schedules the DAG of the scores."""
    return Asset(name=f"headrace_{pipeline.name}_model", uri=f"headrace://models/{pipeline.name}")


class BackfillRange(BaseOperator):
    """See that a range of days may be worked on: days, the right way round, not too many."""

    template_fields: Sequence[str] = ("first", "last", "ds")

    def __init__(self, *, pipeline: Pipeline, first: str, last: str, **kwargs: Any) -> None:
        super().__init__(task_id="range", **kwargs)
        self.pipeline, self.first, self.last = pipeline, first, last
        self.ds = first

    def execute(self, context: Context) -> None:
        """Fail the task with the file's fault. Raises AirflowFailException."""
        days = (date.fromisoformat(self.last) - date.fromisoformat(self.first)).days + 1
        if not 1 <= days <= SETTINGS.backfill_days:
            raise AirflowFailException(
                f"{self.first} to {self.last} is {days} days; a backfill has 1 to {SETTINGS.backfill_days} "
                f"(HEADRACE_BACKFILL_DAYS)"
            )
        self.log.info("%s days to go, the oldest first", days)


class NextDay(TriggerDagRunOperator):
    """Start the run of a backfill's next day; skipped after the last."""

    def __init__(self, *, pipeline: Pipeline, dag_id: str, **kwargs: Any) -> None:
        following = "{{ macros.ds_add(params.first, 1) }}"
        super().__init__(
            task_id="next_day",
            trigger_dag_id=dag_id,
            # A day that is cleared starts the next one again.
            trigger_run_id=f"backfill__{{{{ params.last }}}}__{following}",
            reset_dag_run=True,
            conf={"first": following, "last": "{{ params.last }}"},
            logical_date=None,
            fail_when_dag_is_paused=True,
            openlineage_inject_parent_info=False,
            **kwargs,
        )
        self.pipeline, self.ds = pipeline, "{{ params.first }}"

    def execute(self, context: Context) -> None:
        """Start the run of the next day. Raises AirflowSkipException after the last day."""
        if self.conf["first"] > self.conf["last"]:
            raise AirflowSkipException("that was the last day")
        super().execute(context)


class Fault(BaseOperator):
    """Say what is wrong with a pipeline's file."""

    def __init__(self, *, pipeline: Pipeline, ds: str, **kwargs: Any) -> None:
        super().__init__(task_id="pipeline_file", **kwargs)
        self.pipeline, self.ds = pipeline, ds

    def execute(self, context: Context) -> None:
        """Check the range of days. Raises AirflowFailException."""
        raise AirflowFailException(str(self.pipeline.fault))
