"""The Spark engine's fit: as few passes over the training rows as it can be done in."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import pyarrow as pa
from pyspark import StorageLevel
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from headrace.features.engines.spark.aggregate import ColumnStatistic, RowColumns, aggregate
from headrace.features.engines.spark.count_values import ValueColumn, count_values
from headrace.features.engines.spark.joins import BROADCAST_ROWS, Joins, keyed_side
from headrace.features.functions.spark_expressions import col, input_column
from headrace.features.learn.statistics import IDENTITY, Partials
from headrace.features.ops.base import FittedState, State, no_lookup
from headrace.features.ops.categorify import Categorify
from headrace.features.ops.estimator import EstimatorOp
from headrace.features.vocabulary.delta_table import Vocabularies
from headrace.features.vocabulary.keyed_table import KeyedTable, keyed_of
from headrace.features.vocabulary.lookup import Lookup, lookup_of
from headrace.features.workflow.binding import BoundOp
from headrace.features.workflow.fitted import FittedWorkflow
from headrace.features.workflow.workflow import Workflow

_LOG = logging.getLogger("headrace.features")


def fit(workflow: Workflow, train: DataFrame, vocabularies: Vocabularies, day: Column | None = None) -> FittedWorkflow:
    """Learn from the training rows.

    All chains go on at once: each over operators that learn nothing (they only extend its expressions) until one wants
    statistics; then all that are wanted in this turn are computed together (headrace.features.engines.spark.aggregate).
    Values are counted in one further pass for all vocabularies. So the number of passes is that of the longest chain's
    turns, not that of the columns.

    Args:
        train: has the input columns with their declared types, and the label where an operator learns from it;
            `_source_file` and `_source_line` (or IDENTITY, a hash of them) where one has folds.
        vocabularies: keeps codes from one fit to the next.
        day: an integer or text that orders the days on which values were first seen; None: all on one day.
    """
    joins = Joins(train, BROADCAST_ROWS)
    identity = _identity(train)
    chains = [_ChainFit(workflow, i, joins, identity) for i in range(len(workflow.chains))]
    label = workflow.label_column
    row_columns = RowColumns(col(label), workflow.input_type(label), day, identity)
    values: list[ValueColumn] = []
    passes = 0
    while learning := [(c, step) for c in chains if (step := c.step) is not None]:
        # With the values of keyed tables that the last turn learned, where operators behind them learn.
        frame = joins.apply()
        wanted: list[ColumnStatistic] = []
        names: list[list[str]] = []
        for chain, step in learning:
            names.append([])
            if isinstance(step.op, Categorify):
                values += [ValueColumn(step.op.vocabulary_of(n), chain.columns[n], t) for n, t in step.inputs.items()]
                continue
            assert isinstance(step.op, EstimatorOp)
            for name, statistic in step.op.statistics(step.inputs).items():
                names[-1].append(name)
                wanted.append(ColumnStatistic(statistic, chain.columns, step.inputs))
        partials, took = aggregate(frame, wanted, row_columns) if wanted else ([], 0)
        passes += took
        rest = iter(partials)
        for (chain, _), mine in zip(learning, names, strict=True):
            chain.learn({name: next(rest) for name in mine})
    pinned: Mapping[str, pa.Table | Lookup] = {}
    if values:
        counted = count_values(joins.apply(), values, workflow.rules, day).persist(StorageLevel.DISK_ONLY)
        try:
            pinned = vocabularies.update(counted, workflow.rules)
        finally:
            counted.unpersist()
        passes += 1
    _LOG.info("fitted %d chains in %d passes over the training rows", len(chains), passes)
    tables = {name: table for chain in chains for name, table in chain.tables.items()}
    return FittedWorkflow(workflow, [c.states for c in chains], {n: lookup_of(t) for n, t in pinned.items()}, tables)


def _identity(train: DataFrame) -> Column | None:
    if IDENTITY in train.columns:
        return F.col(IDENTITY)
    if {"_source_file", "_source_line"} <= set(train.columns):
        return F.xxhash64("_source_file", "_source_line")
    return None


class _ChainFit:
    """One chain: what its first operators have learned, and its columns as they arrive at the next that learns."""

    def __init__(self, workflow: Workflow, index: int, joins: Joins, identity: Column | None) -> None:
        self._chain, self._index, self._joins, self._identity = workflow.chains[index], index, joins, identity
        self.columns: dict[str, Column] = {c: input_column(c, workflow.input_type(c)) for c in self._chain.columns}
        self.states: list[Mapping[str, State]] = []
        self.tables: dict[str, KeyedTable] = {}
        self._skip()

    @property
    def step(self) -> BoundOp | None:
        """The next operator that learns; None behind the last."""
        steps = self._chain.steps
        return steps[len(self.states)] if len(self.states) < len(steps) else None

    def learn(self, partials: Partials) -> None:
        """What the statistics of the next operator teach; none of a vocabulary, which comes last."""
        assert self.step is not None
        op = self.step.op
        assert isinstance(op, EstimatorOp)
        self._add(FittedState({}) if isinstance(op, Categorify) else op.finish(partials, self.step.inputs))
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
            keyed = tables[name]
            side = keyed_side(keyed, self._joins.frame, None, name)
            return dict(zip(keyed.values, self._joins.add(side, key).values(), strict=True))

        self.columns = step.spark(self.columns, learned.states, no_lookup, table, self._identity)
