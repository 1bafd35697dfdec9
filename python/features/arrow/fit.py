"""The Arrow engine's fit: statistics of each lake file by Arrow, merged here.

The operators say which statistics they need (learn.statistics) and finish from the merged statistics of the
files, so a fit here learns the same bits as one over a frame.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from typing import Any, TypeAlias

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from headrace.features.arrow.collect import (
    AggregateTask,
    Merged,
    Name,
    SharedKeyedTable,
    StatisticNumbers,
    StatisticsFile,
    counted_values,
    merged_by_key,
    scan_merged,
)
from headrace.features.arrow.decode import HostFolder
from headrace.features.arrow.scan import LakeRows, table_at
from headrace.features.learn.statistics import Partial, Statistic, merge
from headrace.features.ops.base import EstimatorOp, FittedState
from headrace.features.ops.categories import Categorify
from headrace.features.transport import KeyedStep, is_by_key, keyed_tables
from headrace.features.vocabulary.codes import Vocabularies
from headrace.features.vocabulary.keyed_tables import FileKeyedTable, KeyedTable, keyed_of
from headrace.features.vocabulary.lookup import Lookup, lookup_of
from headrace.features.workflow.fitted import MOST_TEXT, FittedWorkflow, copy_table
from headrace.features.workflow.workflow import BoundOp, Workflow
from headrace.storage import Location, local

_LOG = logging.getLogger("headrace.features")

#: Statistics of a pass: by file, or merged in tasks.
Scanned: TypeAlias = Sequence[Mapping[str, Any]] | Merged
#: Threads that merge; each holds a table.
_MERGING_THREADS = min(4, len(os.sched_getaffinity(0)))


class LakeFit:
    """A fit in turns: `next_task` is what to aggregate of each file, `merge` takes the results; then `finish`.

        fit = LakeFit(workflow, rows)
        while (task := fit.next_task()) is not None:
            fit.merge(fit.scan(spark, task))
        fitted = fit.finish(vocabularies)

    All chains go on together, each over operators that learn nothing until one needs statistics. So there are as many
    turns as the longest chain has operators that learn, most often one. The values of a vocabulary are counted in one
    turn, when all chains that share it have come to them: `min_count` is of all of them together.
    """

    def __init__(
        self,
        workflow: Workflow,
        rows: LakeRows,
        base: FittedWorkflow | None = None,
        shared_folder: Location | None = None,
    ) -> None:
        """Prepare the first pass.

        Args:
            workflow: what is fitted.
            rows: the files.
            base: what was learned by the same workflow, taken over; then only values are counted.
            shared_folder: one that all hosts see, for tables by key that are not in the driver's memory and from which
                later operators learn. None: they are read into its memory for that.
        """
        self._base, self._shared_folder = base, shared_folder
        self._shared: dict[Name, SharedKeyedTable] = {}
        self._spark: SparkSession | None = None
        self._workflow, self._rows, self._folder, self._pass_number = workflow, rows, rows.scratch, 0
        self._learned: list[list[FittedState]] = [[] for _ in workflow.chains]
        #: Steps (chain, step) that learn in this turn.
        self._learning: tuple[tuple[int, int], ...] = ()
        self._values: list[pa.Table] = []
        self._merged: list[Merged] = []

    def next_task(self) -> AggregateTask | None:
        """Return what to aggregate next of each file; None when the fit is complete."""
        for i, chain in enumerate(self._workflow.chains):
            learned_steps = self._learned[i]
            while len(learned_steps) < len(chain.steps) and (known := self._known(i, len(learned_steps))) is not None:
                learned_steps.append(known)
        requested: dict[tuple[int, int], Mapping[str, Statistic]] = {}
        later = self._later_vocabularies()
        for i, step in self._next_steps():
            if not isinstance(step.op, Categorify) or later.isdisjoint(step.op.vocabularies(step.inputs)):
                assert isinstance(step.op, EstimatorOp)
                requested[i, len(self._learned[i])] = step.op.statistics(step.inputs)
        if not requested:
            return None
        self._pass_number += 1
        self._learning = tuple(requested)
        # Tasks need the learned states only of chains that have requests.
        asking = {i for i, _ in requested}
        shared = {name: table for i in asking for name, table in self._shared_tables(i)}
        learned = tuple(
            tuple(
                _sent(state, [name for (*place, name) in shared if place == [i, j]])
                for j, state in enumerate(learned_steps)
            )
            if i in asking
            else ()
            for i, learned_steps in enumerate(self._learned)
        )
        return AggregateTask(self._workflow, learned, requested, self._folder, self._pass_number, shared)

    def _shared_tables(self, i: int) -> Iterator[tuple[Name, SharedKeyedTable]]:
        """Yield the tables of chain i that hosts map: those in files."""
        for j, state in enumerate(self._learned[i]):
            for name, table in state.tables.items():
                if (place := (i, j, name)) not in self._shared and isinstance(table, FileKeyedTable):
                    row_groups_folder, full = self._rows.folder, f"{i}.{j}.{name}"
                    host = row_groups_folder if isinstance(row_groups_folder, HostFolder) else self._folder
                    if host is self._folder and local(table.path).is_below(self._folder):  # where tasks see it
                        self._shared[place] = SharedKeyedTable(local(table.path), full, host)
                    elif self._shared_folder is not None:
                        self._shared[place] = SharedKeyedTable(copy_table(table, self._shared_folder, full), full, host)
                if place in self._shared:
                    yield place, self._shared[place]

    def _next_steps(self) -> Iterator[tuple[int, BoundOp]]:
        """Yield each chain that is not complete, with its next step."""
        for i, chain in enumerate(self._workflow.chains):
            if len(self._learned[i]) < len(chain.steps):
                yield i, chain.steps[len(self._learned[i])]

    def _later_vocabularies(self) -> set[str]:
        """Return vocabularies that a later pass counts: `categorify` follows another estimator in a chain."""
        return {
            name
            for i, step in self._next_steps()
            if not isinstance(step.op, Categorify)
            for later in self._workflow.chains[i].steps[len(self._learned[i]) + 1 :]
            if isinstance(later.op, Categorify)
            for name in later.op.vocabularies(later.inputs)
        }

    def _known(self, i: int, j: int) -> FittedState | None:
        """Return what step j of chain i has learned, where nothing need be aggregated; else None."""
        op = self._workflow.chains[i].steps[j].op
        if not op.learns:
            return FittedState({})
        if self._base is None or isinstance(op, Categorify):
            return None
        prefix = f"{i}.{j}."
        tables = {n.removeprefix(prefix): t for n, t in self._base.tables.items() if n.startswith(prefix)}
        return FittedState(self._base.states[i][j], tables)

    def scan(self, spark: SparkSession | None, task: AggregateTask | None) -> Scanned:
        """Count the rows of the files, into the rows' `counts`, and return what `merge` takes."""
        self._spark = spark
        if task is None or not isinstance(self._rows.folder, HostFolder):
            return self._rows.scan(spark, task)
        assert spark is not None
        return scan_merged(self._rows, spark, task)

    def merge(self, results: Scanned) -> None:
        """Merge the results of `scan`, and remove their files in scratch."""
        if isinstance(results, Merged):
            self._merge_merged(results)
            return
        parts: dict[Name, list[Partial]] = {}
        for result in results:
            for i, j, name, start in result["parts"]:
                parts.setdefault((i, j, name), []).append(table_at(self._folder / result["path"], start))
        vocabularies: dict[str, list[Partial]] = {}
        partials: dict[tuple[int, int], dict[str, list[Partial]]] = {}
        for (i, j, name), partials_of_name in parts.items():
            op = self._workflow.chains[i].steps[j].op
            if isinstance(op, Categorify):
                vocabularies.setdefault(op.vocabulary_of(name), []).extend(partials_of_name)
            else:
                partials.setdefault((i, j), {})[name] = partials_of_name
        large = self._beyond_arrays(partials)
        held = {place: partials_of_name for place, partials_of_name in partials.items() if place not in large}
        with ThreadPoolExecutor(_MERGING_THREADS) as pool:
            merged = pool.map(self._counted, vocabularies, vocabularies.values())
            self._values += merged
            finished = pool.map(self._finish, held, held.values())
            learned = dict(zip(held, finished, strict=True))
        if large:
            learned |= self._by_spark(results, {place: partials[place] for place in large})
        for result in results:  # removed before the kernel writes them to the disk
            (self._folder / result["path"]).remove_quietly()
        self._learn(learned)

    def _beyond_arrays(
        self, partials: Mapping[tuple[int, int], Mapping[str, Sequence[Partial]]]
    ) -> list[tuple[int, int]]:
        """Return steps that learn tables of more text than is taken into memory: Spark merges their statistics."""
        if self._spark is None or self._shared_folder is None:
            return []
        return [
            place
            for place, by_name in partials.items()
            if sum(map(_text_of, self._keyed(place, by_name).values())) > MOST_TEXT
        ]

    def _keyed(
        self, place: tuple[int, int], partials: Mapping[str, Sequence[Partial]]
    ) -> Mapping[str, Sequence[Partial]]:
        """Return those of a step's statistics of which tasks can make tables, key by key."""
        step = self._workflow.chains[place[0]].steps[place[1]]
        assert isinstance(step.op, EstimatorOp)
        statistics = step.op.statistics(step.inputs)
        return {name: parts for name, parts in partials.items() if is_by_key(step, statistics[name])}

    def _by_spark(
        self, results: Sequence[Mapping[str, Any]], partials: Mapping[tuple[int, int], Mapping[str, Sequence[Partial]]]
    ) -> dict[tuple[int, int], FittedState]:
        """Return what steps learn: their statistics merged in tasks, which see the files, and their tables in files."""
        assert self._spark is not None
        names = [(*place, name) for place, by_name in partials.items() for name in self._keyed(place, by_name)]
        number = {name: i for i, name in enumerate(names)}
        files = [
            StatisticsFile(
                r["path"], tuple((number[i, j, n], start) for i, j, n, start in r["parts"] if (i, j, n) in number)
            )
            for r in results
        ]
        steps = {}
        for place, by_name in partials.items():
            keyed = self._keyed(place, by_name)
            ungrouped = {name: parts for name, parts in by_name.items() if name not in keyed}
            steps[place] = self._keyed_step(place, {number[*place, name]: name for name in keyed}, ungrouped)
        size = sum(part.nbytes for by_name in partials.values() for parts in by_name.values() for part in parts)
        merged = merged_by_key(self._spark, self._folder, files, StatisticNumbers(tuple(names), ()), size)
        return keyed_tables(merged, steps, self._folder / f"tables-{self._pass_number}")

    def _merge_merged(self, merged: Merged) -> None:
        partials: dict[tuple[int, int], dict[str, list[Partial]]] = {}
        for (i, j, name), statistic in merged.statistics.items():
            partials.setdefault((i, j), {})[name] = [statistic]
        large: dict[tuple[int, int], dict[int, str]] = {}
        for (i, j, name), number in merged.keyed.items():
            large.setdefault((i, j), {})[number] = name
        if merged.values is not None:
            self._merged.append(merged)
        try:
            learned = {
                place: self._finish(place, statistic) for place, statistic in partials.items() if place not in large
            }
            if large:
                steps = {
                    place: self._keyed_step(place, names, partials.get(place, {})) for place, names in large.items()
                }
                learned |= keyed_tables(merged.partials, steps, self._folder / f"tables-{self._pass_number}")
        finally:
            if merged.values is None:
                merged.release()
        self._learn(learned)

    def _keyed_step(
        self, place: tuple[int, int], names: Mapping[int, str], ungrouped: Mapping[str, Sequence[Partial]]
    ) -> KeyedStep:
        step = self._workflow.chains[place[0]].steps[place[1]]
        assert isinstance(step.op, EstimatorOp)
        return KeyedStep(step.op, step.inputs, names, {name: merge(parts) for name, parts in ungrouped.items()})

    def _learn(self, learned: Mapping[tuple[int, int], FittedState]) -> None:
        """Add what the steps of this pass have learned; a vocabulary's codes come last."""
        for place in self._learning:
            self._learned[place[0]].append(learned.get(place, FittedState({})))

    def finish(self, vocabularies: Vocabularies) -> FittedWorkflow:
        """Give codes and put together what was learned."""
        pinned: Mapping[str, pa.Table | Lookup] = {}
        if self._workflow.rules:
            try:
                pinned = vocabularies.update(self._all_counts(), self._workflow.rules)
            finally:
                for merged in self._merged:
                    merged.release()
        tables = {
            f"{i}.{j}.{name}": keyed_of(table)
            for i, steps in enumerate(self._learned)
            for j, learned in enumerate(steps)
            for name, table in learned.tables.items()
        }
        _LOG.info("fitted %d chains in %d passes over the lake files", len(self._learned), self._pass_number)
        states = [[learned.states for learned in steps] for steps in self._learned]
        return FittedWorkflow(self._workflow, states, {n: lookup_of(t) for n, t in pinned.items()}, tables)

    def _finish(self, place: tuple[int, int], partials: Mapping[str, Sequence[Partial]]) -> FittedState:
        step = self._workflow.chains[place[0]].steps[place[1]]
        assert isinstance(step.op, EstimatorOp)
        return step.op.finish({name: merge(parts) for name, parts in partials.items()}, step.inputs)

    def _counted(self, vocabulary: str, parts: Sequence[Partial]) -> pa.Table:
        """Return (name, value, count, day) of the values that are there often enough."""
        least = self._workflow.rules[vocabulary].min_count
        values = counted_values(parts, least)
        return pa.table(
            {
                "name": pa.repeat(vocabulary, values.num_rows),
                "value": values.column("key"),
                "count": values.column("rows"),
                "day": values.column("day"),
            }
        )

    def _all_counts(self) -> pa.Table | DataFrame:
        if frames := [merged.values for merged in self._merged if merged.values is not None]:
            return reduce(DataFrame.unionAll, frames)
        return pa.concat_tables(self._values)


def _text_of(partials: Sequence[Partial]) -> int:
    """Return bytes of the keys."""
    return sum(int(part.column("key").nbytes) for part in partials)


def _sent(learned: FittedState, left_out: Collection[str]) -> FittedState:
    """Return the state for tasks, which do not see this host's files, without the tables `left_out`."""
    sent_tables = {name: table for name, table in learned.tables.items() if name not in left_out}
    tables = {name: t.table if isinstance(t, KeyedTable) else t for name, t in sent_tables.items()}
    return FittedState(learned.states, tables)
