"""The contract of candidate sources: their context, expressions of the spec as conditions, and pairs of events."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from pyspark.errors import AnalysisException, ParseException, PySparkException
from pyspark.errors.exceptions.base import QueryContextType
from pyspark.logger import PySparkLogger
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from headrace.config import PairEvents, Score
from headrace.config.source import following
from headrace.errors import UserError, nearest
from headrace.features.build.rows import end_of_day
from headrace.features.functions.spark_expressions import col
from headrace.features.functions.timestamps import DAY_MICROS, spark_micros
from headrace.features.layout.split import SPLIT
from headrace.features.table_ops.base import SourceRead
from headrace.features.table_ops.preparation import ExternalReader, midnight
from headrace.features.table_ops.spark_windows import EVENT_MICROS
from headrace.features.types import declared
from headrace.score.entities import ActiveEvents
from headrace.score.items import ITEM_ROW
from headrace.score.scoring_model import ScoringModel
from headrace.stage import Context
from headrace.storage import Location
from headrace.storage.host_scratch import HostPlace

#: Columns of the users that a source receives: number of items to fetch for the user (int, 0 for none), and the items
#: that are blocked for the user (array<int>, not null), which the source may leave out.
FETCH, BLOCKED = "__fetch", "__blocked"


@dataclass(frozen=True)
class CandidateContext:
    """Context that all sources of a run share."""

    ctx: Context
    spark: SparkSession
    active: ActiveEvents
    #: One row for each user: `score.user.key` and the user's columns.
    users: DataFrame
    #: The items that may be candidates, those that filters leave out for all users left out: `item_row` (int),
    #: `score.item.key`, the item's columns, `events` (bigint, in the training window; 0 or null where there are none)
    #: and `first_event` (timestamp).
    items: DataFrame
    #: Reads tables given by their paths, at the versions that the run has pinned.
    reader: ExternalReader
    #: The model that scores.
    model: ScoringModel
    #: Folder of the run: visible to all executors, removed at the end.
    run_folder: Location
    #: Where tasks map models.
    maps: HostPlace
    #: Frames that were computed once, by name.
    frames: dict[Hashable, DataFrame] = field(default_factory=dict)

    def keep(self, name: Hashable, make: Callable[[], DataFrame]) -> DataFrame:
        """Return a frame for several uses: computed once, now, and read from Parquet files until the run ends.

        Not cached by Spark: what is made of it would have all of its plan, and plans of rounds upon rounds grow until
        the driver has no memory to print them.
        """
        if name not in self.frames:
            self.frames[name] = stored(self.spark, make(), self.folder / f"{len(self.frames)}.parquet")
        return self.frames[name]

    def release(self) -> None:
        """Remove what was kept."""
        self.frames.clear()
        self.folder.remove_quietly()

    @property
    def folder(self) -> Location:
        """Return the folder of kept frames."""
        return self.run_folder / "candidates"

    @property
    def user_key(self) -> str:
        """The column of `users` that says which one."""
        return self.score.user.key

    @property
    def score(self) -> Score:
        """The section."""
        assert self.ctx.spec.score is not None
        return self.ctx.spec.score


def stored(spark: SparkSession, frame: DataFrame, folder: Location) -> DataFrame:
    """Compute the frame's rows now, and return them as read from Parquet files in a folder, which are replaced."""
    # Parquet does not allow every column name.
    numbered = frame.toDF(*[f"c{i}" for i in range(len(frame.columns))])
    numbered.write.mode("overwrite").parquet(folder.spark_path)
    return spark.read.schema(numbered.schema).parquet(folder.spark_path).toDF(*frame.columns)


class ItemRanking(Protocol):
    """A source of candidates, prepared: for each user an order of (some of) the items of `CandidateContext.items`.

    It is made once a run, as `RANKINGS[kind](context, source)` of headrace.score.candidates.candidates, and asked
    several times: first for what most users need, then for more for those of whose items filters left out too many.
    One with a true attribute `leaves_out_blocked` gives no item that is blocked for the user.
    """

    def first(self, users: DataFrame, limit: int) -> DataFrame:
        """Return the first items of each user's order.

        Args:
            users: one row for each user: the key, `CandidateContext.users`' columns, FETCH, BLOCKED, and more.
            limit: no FETCH is greater.

        Returns:
            The rows of `users`, all columns kept, with `__items`: array<int>, not null, distinct, best first. FETCH of
            them; fewer where the order has no more items; asked again for more, it begins with the same ones.
        """
        ...


def condition(frame: DataFrame, expression: str, spec_path: str) -> Column:
    """Return whether an expression is true of a row: boolean, never null.

    Args:
        frame: has the columns.
        expression: Spark SQL.
        spec_path: its place in the spec, for messages.

    Raises:
        UserError: it is no expression, is no truth value, or names an unknown column, with the nearest.
    """
    if (fault := fault_of(frame, expression)) is not None:
        raise UserError(f"{spec_path}: {fault}")
    return F.coalesce(F.expr(expression), F.lit(False))


def fault_of(frame: DataFrame, expression: str) -> str | None:
    """Return why an expression is no condition on a frame's rows, or None. Runs no Spark job."""
    try:
        # `where` would accept texts that can be cast. `select` analyses the plan, which finds the fault.
        with _unlogged():
            selected = frame.select(F.expr(expression).alias("__condition"))
        kind = dict(selected.dtypes)["__condition"]
    except ParseException as e:
        return f"'{expression}' is no Spark SQL expression: {_first_line(e)}"
    except AnalysisException as e:
        name = (e.getMessageParameters() or {}).get("objectName")
        if name is not None and str(e.getCondition()).startswith("UNRESOLVED_COLUMN"):
            column = name.replace("`.`", ".").strip("`")
            known = [c for c in frame.columns if not c.startswith("_")]
            return f"there is no column '{column}'{nearest(column, known)} (there are: {', '.join(known)})"
        return f"'{expression}': {_first_line(e)}"
    return None if kind == "boolean" else f"'{expression}' is {kind}, not true or false"


@contextmanager
def expression_errors(score: Score) -> Iterator[None]:
    """Attribute Spark's errors about values to the section's expression that cannot take them.

    Raises:
        UserError: such a value, such as a divisor of 0 or a text that is no number.
    """
    try:
        with _unlogged():
            yield
    except PySparkException as e:
        for context in e.getQueryContext():
            for spec_path, expression in _expressions(score):
                if context.contextType() is QueryContextType.SQL and context.fragment() in expression:
                    message = _first_line(e).partition(" If necessary set ")[0]
                    raise UserError(f"{spec_path}: '{expression}': {message}") from None
        raise


def _expressions(score: Score) -> Iterator[tuple[str, str]]:
    """Yield (place in the spec, Spark SQL)."""
    entries: list[tuple[str, object]] = [(f"score.filters[{i}]", entry) for i, entry in enumerate(score.filters)]
    if score.candidates is not None:
        entries += [(f"score.candidates.sources.{n}", source) for n, source in score.candidates.sources.items()]
    for spec_path, entry in entries:
        if isinstance(expression := getattr(entry, "where", None), str):
            yield f"{spec_path}.where", expression


@contextmanager
def _unlogged() -> Iterator[None]:
    """Silence PySpark's log of unresolved expressions, with the JVM's stack trace: here they are an answer."""
    # Create it by PySpark's class: a plain logger of that name would reject PySpark's arguments.
    log = PySparkLogger.getLogger("SQLQueryContextLogger")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)


def _first_line(error: PySparkException) -> str:
    return str(error).strip().splitlines()[0]


#: The columns of pairs besides ITEM_ROW: the user's key, and the time of the pair's newest event in microseconds
#: (bigint; 0 where the events have no time).
USER, PAIR_TIME = "__user", "__at"


def pairs_of(context: CandidateContext, events: PairEvents, spec_path: str) -> DataFrame:
    """Return (USER, ITEM_ROW, PAIR_TIME): a row for each user and item of `context.items` with such an event.

    Args:
        context: of the run.
        events: which events count.
        spec_path: the section's place in the spec, for messages.

    Returns:
        A frame that is computed once for all who ask for the same.

    Raises:
        UserError: the expression is none of the events' columns, or they lack a key's column.
    """
    request = (events.from_, events.where, events.days, events.user, events.item)
    return context.keep(("pairs", *request), lambda: _pairs(context, events, spec_path))


def _pairs(context: CandidateContext, events: PairEvents, spec_path: str) -> DataFrame:
    rows, event_time = (
        _window_events(context, events, spec_path)
        if events.from_ is None
        else _source_events(context, events, spec_path)
    )
    score = context.score
    if events.days is not None:
        rows = rows.where(event_time >= F.lit(_end(context, events, following(context.ctx.ds, -events.days))))
    types = dict(context.users.dtypes) | dict(context.items.dtypes)
    names = {"user": events.user or score.user.key, "item": events.item or score.item.key}
    for key, name in names.items():
        if name not in rows.columns:
            known = [c for c in rows.columns if not c.startswith("_")]
            raise UserError(
                f"{spec_path}.{key}: the events have no column '{name}'{nearest(name, known)} (there are: "
                f"{', '.join(known)})"
            )
    # A text that is no number cannot be a key of integers: it becomes null.
    user = col(names["user"]).try_cast(types[score.user.key])
    item = col(names["item"]).try_cast(types[score.item.key])
    # Group before the join, so that a pair with a thousand events is one row.
    pairs = rows.select(user.alias(USER), item.alias("__item"), event_time.alias(PAIR_TIME)).where(
        F.col(USER).isNotNull() & F.col("__item").isNotNull()
    )
    pairs = pairs.groupBy(USER, "__item").agg(F.max(PAIR_TIME).alias(PAIR_TIME))
    keys = context.items.select(col(score.item.key).alias("__item"), F.col(ITEM_ROW))
    return pairs.join(keys, "__item").select(USER, ITEM_ROW, PAIR_TIME)


def _window_events(context: CandidateContext, events: PairEvents, spec_path: str) -> tuple[DataFrame, Column]:
    """Return events of the training window up to ds, validation included; with a split by column those of train."""
    spec, rows = context.ctx.spec, context.active.events
    if spec.features.split.by == "column":
        rows = rows.where(F.col(SPLIT) == "train")
    if events.where is None:
        rows = rows.where(col(spec.features.label).cast("double") == 1.0)
    else:
        rows = rows.where(condition(rows, events.where, f"{spec_path}.where"))
    time = spec.table.event_time
    if time is None:
        return rows, F.lit(0).cast("bigint")
    type_ = next(declared(c) for c in spec.table.columns if c.name == time)
    return rows, F.coalesce(spark_micros(col(time), type_), F.lit(0).cast("bigint"))


def _source_events(context: CandidateContext, events: PairEvents, spec_path: str) -> tuple[DataFrame, Column]:
    assert events.from_ is not None
    # `features.history_days` limits features, not these events.
    lookback = None if events.days is None else events.days * DAY_MICROS
    rows = context.active.sources(SourceRead(events.from_, "all_events", lookback))
    # Events up to the end of ds.
    rows = rows.where(F.col(EVENT_MICROS) < F.lit(_end(context, events, context.ctx.ds)))
    if events.where is not None:
        rows = rows.where(condition(rows, events.where, f"{spec_path}.where"))
    return rows, F.col(EVENT_MICROS)


def _end(context: CandidateContext, events: PairEvents, ds: str) -> int:
    """Return the first microsecond after a day, in terms of the events' times."""
    return midnight(ds, 1) if events.from_ is None else end_of_day(context.ctx.spec.sources[events.from_], ds)
