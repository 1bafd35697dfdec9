"""Fitting a workflow with as few Spark passes as it can be done in."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from headrace.features.engines.spark.aggregate import Asked, Facts, spark_partials
from headrace.features.engines.spark.transform import Joins, col, enter, keyed_side
from headrace.features.learn.statistics import IDENTITY
from headrace.features.ops.base import Aggregates, Collect, Fit, Learned, Request, State, ValueColumn, Values, no_lookup
from headrace.features.vocabulary.delta_table import Vocabularies, count_values
from headrace.features.vocabulary.keyed_table import KeyedTable
from headrace.features.workflow.workflow import BROADCAST_ROWS, Workflow

_LOG = logging.getLogger("headrace.features")

States = list[list[Mapping[str, State]]]


def fit_states(
    workflow: Workflow, train: DataFrame, vocabularies: Vocabularies, day: Column | None
) -> tuple[States, dict[str, pa.Table], dict[str, KeyedTable]]:
    """States by chain, step and column, the pinned vocabularies (value, code), and keyed tables as `CHAIN.STEP.NAME`.

    All chains walk at once: each goes on over operators that learn nothing (they only extend its expressions) until one
    asks for something; then everything asked in this turn is answered together: one pass for all plain aggregates, a
    few for all statistics (headrace.features.engines.spark.aggregate). Values are counted in one further pass for all
    vocabularies. So the number of passes is that of the longest chain's turns, not that of the columns.
    """
    joins = Joins(train, BROADCAST_ROWS)
    identity = _identity(train)
    walks = [_Walk(workflow, i, joins, identity) for i in range(len(workflow.chains))]
    facts = Facts(col(workflow.label_column), workflow.input_type(workflow.label_column), day, identity)
    values: list[ValueColumn] = []
    passes = 0
    while asking := [w for w in walks if w.request is not None]:
        # With the values of keyed tables that the last turn learned, where operators behind them ask.
        frame = joins.apply()
        columns: dict[str, Column] = {}
        asked: list[Asked] = []
        names: list[list[tuple[str, str]]] = []
        statistics: list[list[tuple[str, int]]] = []
        for walk in asking:
            request = walk.request
            names.append([])
            statistics.append([])
            if isinstance(request, Aggregates):
                for name, column in request.columns.items():
                    names[-1].append((name, f"a{len(columns)}"))
                    columns[names[-1][-1][1]] = column
            elif isinstance(request, Collect):
                for name, statistic in request.statistics.items():
                    statistics[-1].append((name, len(asked)))
                    asked.append(Asked(statistic, request.columns, request.types))
            elif isinstance(request, Values):
                values += request.columns
        row: Mapping[str, Any] = {}
        if columns:
            passes += 1
            row = frame.agg(*[column.alias(alias) for alias, column in columns.items()]).collect()[0].asDict()
        partials, took = spark_partials(frame, asked, facts) if asked else ([], 0)
        passes += took
        for walk, mine, counted in zip(asking, names, statistics, strict=True):
            walk.answer({name: row[alias] for name, alias in mine} | {name: partials[i] for name, i in counted})
    pinned: dict[str, pa.Table] = {}
    if values:
        pinned = vocabularies.update(count_values(joins.apply(), values, workflow.rules, day), workflow.rules)
        passes += 1
    _LOG.info("fitted %d chains in %d passes over the training rows", len(walks), passes)
    tables = {name: table for walk in walks for name, table in walk.tables.items()}
    return [w.states for w in walks], pinned, tables


def _identity(train: DataFrame) -> Column | None:
    if IDENTITY in train.columns:
        return F.col(IDENTITY)
    if {"_source_file", "_source_line"} <= set(train.columns):
        return F.xxhash64("_source_file", "_source_line")
    return None


class _Walk:
    """One chain on its way: expressions so far, the operator that is asking, what it asks."""

    def __init__(self, workflow: Workflow, index: int, joins: Joins, identity: Column | None) -> None:
        self._chain, self._index, self._joins, self._identity = workflow.chains[index], index, joins, identity
        self._columns: dict[str, Column] = {c: enter(c, workflow.input_type(c)) for c in self._chain.columns}
        self.states: list[Mapping[str, State]] = []
        self.tables: dict[str, KeyedTable] = {}
        self.request: Request | None = None
        self._fit: Fit | None = None
        self._go_on()

    def answer(self, values: Mapping[str, Any]) -> None:
        """Hand the asking operator its answer; go on to the next question or the end."""
        assert self._fit is not None
        try:
            self.request = self._fit.send(values)
        except StopIteration as end:
            self._learned(end.value)
            self._go_on()

    def _go_on(self) -> None:
        self.request = self._fit = None
        while len(self.states) < len(self._chain.steps):
            step = self._chain.steps[len(self.states)]
            if not step.op.learns:  # behind the last that learns, its columns have not been made
                self._learned({})
                continue
            fit = step.fit(self._columns)
            try:
                self.request = next(fit)
            except StopIteration as end:
                self._learned(end.value)
                continue
            self._fit = fit
            return

    def _learned(self, found: Mapping[str, State] | Learned) -> None:
        step, scope = self._chain.steps[len(self.states)], f"{self._index}.{len(self.states)}"
        learned = found if isinstance(found, Learned) else Learned(found)
        self.states.append(learned.states)
        tables = {name: KeyedTable(table) for name, table in learned.tables.items()}
        self.tables |= {f"{scope}.{name}": table for name, table in tables.items()}
        rest = self._chain.steps[len(self.states) :]
        if any(s.op.learns for s in rest):

            def table(name: str, key: Column) -> Mapping[str, Column]:
                keyed = tables[name]
                side = keyed_side(keyed, self._joins.frame, None, name)
                return dict(zip(keyed.values, self._joins.add(side, key).values(), strict=True))

            self._columns = step.spark(self._columns, learned.states, no_lookup, table, self._identity)
