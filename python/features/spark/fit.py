"""The Spark engine's fit: as few passes over the training rows as it can be done in."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from tempfile import TemporaryDirectory

import pyarrow as pa
from pyspark import StorageLevel
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from headrace.features.functions.spark_expressions import col, input_column
from headrace.features.learn.statistics import IDENTITY, Partials, Statistic
from headrace.features.ops.base import EstimatorOp, FittedState, State, no_lookup
from headrace.features.ops.categories import Categorify
from headrace.features.spark.aggregate import Aggregated, ColumnStatistic, RowColumns, aggregate
from headrace.features.spark.transform import BROADCAST_ROWS, Joins, keyed_side
from headrace.features.transport import KeyedStep, is_by_key, keyed_tables
from headrace.features.types import ValueType
from headrace.features.vocabulary.codes import Vocabularies, VocabularyRule
from headrace.features.vocabulary.keyed_tables import FileKeyedTable, KeyedTable, keyed_of
from headrace.features.vocabulary.lookup import Lookup, lookup_of
from headrace.features.workflow.fitted import FittedWorkflow, copy_table
from headrace.features.workflow.workflow import BoundOp, Workflow
from headrace.storage import Location, local

_LOG = logging.getLogger("headrace.features")


def fit(
    workflow: Workflow,
    train: DataFrame,
    vocabularies: Vocabularies,
    day: Column | None = None,
    folder: Location | None = None,
    shared_folder: Location | None = None,
) -> FittedWorkflow:
    """Learn from the training rows.

    All chains go on at once: each over operators that learn nothing (they only extend its expressions) until one wants
    statistics; then all that are wanted in this turn are computed together (headrace.features.spark.aggregate).
    Values are counted in one further pass for all vocabularies. So the number of passes is that of the longest chain's
    turns, not that of the columns.

    Args:
        train: has the input columns with their declared types, and the label where an operator learns from it;
            `_source_file` and `_source_line` (or IDENTITY, a hash of them) where one has folds.
        vocabularies: keeps codes from one fit to the next.
        day: an integer or text that orders the days on which values were first seen; None: all on one day.
        folder: a local one, for tables by key that are too large for this process; None: all are in memory.
        shared_folder: one that executors see, for those of these tables from which later operators learn; None: they
            are read into this process for that.
    """
    joins = Joins(train, BROADCAST_ROWS)
    identity = _identity(train)
    chains = [_ChainFit(workflow, i, joins, identity, shared_folder) for i in range(len(workflow.chains))]
    label = workflow.label_column
    row_columns = RowColumns(col(label), workflow.input_type(label), day, identity)
    values: list[ValueColumn] = []
    passes = 0
    while learning := [(c, step) for c in chains if (step := c.step) is not None]:
        # With the values of keyed tables that the last turn learned, where operators behind them learn.
        frame = joins.apply()
        requested: list[ColumnStatistic] = []
        #: By step: places of its statistics among those wanted.
        names: list[dict[str, int]] = []
        by_key: list[int] = []
        for chain, step in learning:
            names.append({})
            if isinstance(step.op, Categorify):
                values += [ValueColumn(step.op.vocabulary_of(n), chain.columns[n], t) for n, t in step.inputs.items()]
                continue
            assert isinstance(step.op, EstimatorOp)
            for name, statistic in step.op.statistics(step.inputs).items():
                if folder is not None and chain.keeps_by_key(statistic):
                    by_key.append(len(requested))
                names[-1][name] = len(requested)
                requested.append(ColumnStatistic(statistic, chain.columns, step.inputs))
        aggregated = aggregate(frame, requested, row_columns, by_key) if requested else Aggregated({}, None, 0)
        passes += aggregated.passes
        tables = _large_tables(learning, names, aggregated, folder)
        for number, ((chain, _), places) in enumerate(zip(learning, names, strict=True)):
            if number in tables:
                chain.take(tables[number])
            else:
                chain.learn({name: aggregated.partials[i] for name, i in places.items()})
    pinned: Mapping[str, pa.Table | Lookup] = {}
    if values:
        counted = count_values(joins.apply(), values, workflow.rules, day).persist(StorageLevel.DISK_ONLY)
        try:
            pinned = vocabularies.update(counted, workflow.rules)
        finally:
            counted.unpersist()
        passes += 1
    _LOG.info("fitted %d chains in %d passes over the training rows", len(chains), passes)
    learned = {name: table for chain in chains for name, table in chain.tables.items()}
    return FittedWorkflow(workflow, [c.states for c in chains], {n: lookup_of(t) for n, t in pinned.items()}, learned)


def _large_tables(
    learning: Sequence[tuple[_ChainFit, BoundOp]],
    names: Sequence[Mapping[str, int]],
    aggregated: Aggregated,
    folder: Location | None,
) -> dict[int, FittedState]:
    """Return what steps learn by statistics that the driver does not hold, by their places among those that learn."""
    if aggregated.large is None:
        return {}
    assert folder is not None
    try:
        steps = {}
        for number, ((_, step), places) in enumerate(zip(learning, names, strict=True)):
            large = {i: name for name, i in places.items() if i in aggregated.large.names}
            if large:
                assert isinstance(step.op, EstimatorOp)
                ungrouped = {name: aggregated.partials[i] for name, i in places.items() if i not in large}
                steps[number, 0] = KeyedStep(step.op, step.inputs, large, ungrouped)
        folder.make_dir()
        # The files live as long as who looks into them.
        files = TemporaryDirectory(prefix="tables-", dir=folder.local_path())
        learned = keyed_tables(aggregated.large.statistics, steps, local(files.name), files)
    finally:
        aggregated.large.release()
    return {number: state for (number, _), state in learned.items()}


def _identity(train: DataFrame) -> Column | None:
    if IDENTITY in train.columns:
        return F.col(IDENTITY)
    if {"_source_file", "_source_line"} <= set(train.columns):
        return F.xxhash64("_source_file", "_source_line")
    return None


class _ChainFit:
    """One chain: what its first operators have learned, and its columns as they arrive at the next that learns."""

    def __init__(
        self, workflow: Workflow, index: int, joins: Joins, identity: Column | None, shared_folder: Location | None
    ) -> None:
        self._chain, self._index, self._joins, self._identity = workflow.chains[index], index, joins, identity
        self._shared_folder = shared_folder
        self.columns: dict[str, Column] = {c: input_column(c, workflow.input_type(c)) for c in self._chain.columns}
        self.states: list[Mapping[str, State]] = []
        self.tables: dict[str, KeyedTable] = {}
        self._skip()

    @property
    def step(self) -> BoundOp | None:
        """The next operator that learns; None behind the last."""
        steps = self._chain.steps
        return steps[len(self.states)] if len(self.states) < len(steps) else None

    def keeps_by_key(self, statistic: Statistic) -> bool:
        """Return whether a statistic of the next operator may stay with Spark."""
        return self.step is not None and is_by_key(self.step, statistic)

    def learn(self, partials: Partials) -> None:
        """Finish the next operator with its statistics; a vocabulary's codes come last."""
        assert self.step is not None
        op = self.step.op
        assert isinstance(op, EstimatorOp)
        self.take(FittedState({}) if isinstance(op, Categorify) else op.finish(partials, self.step.inputs))

    def take(self, learned: FittedState) -> None:
        """Go on with what the next operator has learned."""
        self._add(learned)
        self._skip()

    def _skip(self) -> None:
        while self.step is not None and not self.step.op.learns:
            self._add(FittedState({}))

    def _add(self, learned: FittedState) -> None:
        step, scope = self._chain.steps[len(self.states)], f"{self._index}.{len(self.states)}"
        self.states.append(learned.states)
        tables = {name: keyed_of(table) for name, table in learned.tables.items()}
        self.tables |= {f"{scope}.{name}": table for name, table in tables.items()}
        if not any(s.op.learns for s in self._chain.steps[len(self.states) :]):
            return  # nobody learns from its columns: they are not made

        def table(name: str, key: Column) -> Mapping[str, Column]:
            keyed, full, folder = tables[name], f"{scope}.{name}", None
            if self._shared_folder is not None and isinstance(keyed, FileKeyedTable):
                copy_table(keyed, self._shared_folder, full)
                folder = self._shared_folder
            side = keyed_side(keyed, self._joins.frame, folder, full)
            return dict(zip(keyed.values, self._joins.add(side, key).values(), strict=True))

        self.columns = step.spark(self.columns, learned.states, no_lookup, table, self._identity)


@dataclass(frozen=True)
class ValueColumn:
    """A column whose values belong into a vocabulary."""

    vocabulary: str
    column: Column
    type: ValueType


def count_values(
    rows: DataFrame, columns: Sequence[ValueColumn], rules: Mapping[str, VocabularyRule], day: Column | None
) -> DataFrame:
    """Count how often each value is present and when first, for all vocabularies in one pass.

    Returns:
        (name string, value string, count bigint, day): values seen `min_count` times or more.
    """
    names = list(dict.fromkeys(c.vocabulary for c in columns))
    entries = [_entries(c, names.index(c.vocabulary)) for c in columns]
    scalars = [entry for entry, c in zip(entries, columns, strict=True) if not c.type.is_list]
    lists = [entry for entry, c in zip(entries, columns, strict=True) if c.type.is_list]
    together = [F.array(*scalars)] if scalars else []
    entry = F.explode(F.concat(*together, *lists) if len(together) + len(lists) > 1 else (together + lists)[0])
    counted = (
        rows.select(entry.alias("entry"), (day if day is not None else F.lit(0)).alias("day"))
        .where(F.col("entry.value").isNotNull())
        .groupBy("entry.v", "entry.value")
        .agg(F.count(F.lit(1)).alias("count"), F.min("day").alias("day"))
    )
    name = F.element_at(F.array(*[F.lit(n) for n in names]), F.col("v") + 1)
    least = F.element_at(F.array(*[F.lit(rules[n].min_count) for n in names]), F.col("v") + 1)
    return counted.where(F.col("count") >= least).select(name.alias("name"), "value", "count", "day")


def _entries(c: ValueColumn, index: int) -> Column:
    """Return a struct (vocabulary's index, value as text), or an array of them for a list."""

    def entry(x: Column) -> Column:
        return F.struct(F.lit(index).alias("v"), x.cast("string").alias("value"))

    return F.transform(c.column, entry) if c.type.is_list else entry(c.column)
