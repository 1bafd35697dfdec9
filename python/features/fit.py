"""Fitting a workflow with as few Spark passes as it can be done in."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
from pyspark.sql import Column, DataFrame

from headrace.features.op import Aggregates, Fit, Request, State, ValueColumn
from headrace.features.spark_plan import enter
from headrace.features.vocabulary import Vocabularies, count_values
from headrace.features.workflow import Workflow

_LOG = logging.getLogger("headrace.features")

States = list[list[Mapping[str, State]]]


def fit_states(
    workflow: Workflow, train: DataFrame, vocabularies: Vocabularies, day: Column | None
) -> tuple[States, dict[str, pa.Table]]:
    """States by chain, step and column, and the pinned vocabularies (value, code).

    All chains walk at once: each goes on over operators that learn nothing (they only extend its expressions) until one
    asks for something; then everything asked in this turn is answered by one pass for all aggregates. Values are
    counted in one further pass for all vocabularies. So the number of passes is that of the longest chain's turns,
    not that of the columns.
    """
    walks = [_Walk(workflow, i) for i in range(len(workflow.chains))]
    values: list[ValueColumn] = []
    passes = 0
    while asking := [w for w in walks if w.request is not None]:
        columns: dict[str, Column] = {}
        names: list[list[tuple[str, str]]] = []
        for walk in asking:
            request, mine = walk.request, []
            if isinstance(request, Aggregates):
                for name, column in request.columns.items():
                    mine.append((name, f"a{len(columns)}"))
                    columns[mine[-1][1]] = column
            elif request is not None:
                values += request.columns
            names.append(mine)
        row: Mapping[str, Any] = {}
        if columns:
            passes += 1
            row = train.agg(*[column.alias(alias) for alias, column in columns.items()]).collect()[0].asDict()
        for walk, mine in zip(asking, names, strict=True):
            walk.answer({name: row[alias] for name, alias in mine})
    tables: dict[str, pa.Table] = {}
    if values:
        tables = vocabularies.update(count_values(train, values, workflow.rules, day), workflow.rules)
        passes += 1
    _LOG.info("fitted %d chains in %d passes over the training rows", len(walks), passes)
    return [w.states for w in walks], tables


class _Walk:
    """One chain on its way: expressions so far, the operator that is asking, what it asks."""

    def __init__(self, workflow: Workflow, index: int) -> None:
        self._chain = workflow.chains[index]
        self._columns: dict[str, Column] = {c: enter(c, workflow.input_type(c)) for c in self._chain.columns}
        self.states: list[Mapping[str, State]] = []
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
            fit = step.fit(self._columns)
            try:
                self.request = next(fit)
            except StopIteration as end:
                self._learned(end.value)
                continue
            self._fit = fit
            return

    def _learned(self, state: Mapping[str, State]) -> None:
        step = self._chain.steps[len(self.states)]
        self.states.append(state)
        rest = self._chain.steps[len(self.states) :]
        if any(s.op.learns for s in rest):
            self._columns = step.spark(self._columns, state, _no_lookup)


def _no_lookup(vocabulary: str, key: Column) -> Column:
    raise NotImplementedError(f"an operator after categorify ('{vocabulary}') that learns from codes")
