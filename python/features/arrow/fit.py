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
    HandedTable,
    Merged,
    Name,
    StatisticsFile,
    Tables,
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
from headrace.features.workflow.fitted import FittedWorkflow
from headrace.features.workflow.saved import MOST_TEXT, hand_on
from headrace.features.workflow.workflow import BoundOp, Workflow
from headrace.storage import Location, local

_LOG = logging.getLogger("headrace.features")

#: What a pass found: by file, or merged on its way.
Scanned: TypeAlias = Sequence[Mapping[str, Any]] | Merged
#: Each has a table of what it merges.
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
        self, workflow: Workflow, rows: LakeRows, base: FittedWorkflow | None = None, handed: Location | None = None
    ) -> None:
        """Begin.

        Args:
            workflow: what is fitted.
            rows: the files.
            base: what was learned by the same workflow, taken over; then only values are counted.
            handed: a folder that all hosts see, for tables by key that the driver does not hold and operators behind
                them learn from; None: these come into its memory for it.
        """
        self._base, self._handed_folder = base, handed
        self._handed: dict[Name, HandedTable] = {}
        self._spark: SparkSession | None = None
        self._workflow, self._rows, self._folder, self._turn = workflow, rows, rows.scratch, 0
        self._learned: list[list[FittedState]] = [[] for _ in workflow.chains]
        #: Steps (chain, step) that learn in this turn.
        self._learning: tuple[tuple[int, int], ...] = ()
        self._values: list[pa.Table] = []
        self._merged: list[Merged] = []

    def next_task(self) -> AggregateTask | None:
        """What to aggregate next of each file; None: nothing more."""
        for i, chain in enumerate(self._workflow.chains):
            mine = self._learned[i]
            while len(mine) < len(chain.steps) and (known := self._known(i, len(mine))) is not None:
                mine.append(known)
        requested: dict[tuple[int, int], Mapping[str, Statistic]] = {}
        later = self._later_vocabularies()
        for i, step in self._next_steps():
            if not isinstance(step.op, Categorify) or later.isdisjoint(step.op.vocabularies(step.inputs)):
                assert isinstance(step.op, EstimatorOp)
                requested[i, len(self._learned[i])] = step.op.statistics(step.inputs)
        if not requested:
            return None
        self._turn += 1
        self._learning = tuple(requested)
        # Of chains that need nothing the tasks need not be told what they have learned.
        asking = {i for i, _ in requested}
        handed = {name: table for i in asking for name, table in self._handed_on(i)}
        learned = tuple(
            tuple(_sent(found, [name for (*at, name) in handed if at == [i, j]]) for j, found in enumerate(mine))
            if i in asking
            else ()
            for i, mine in enumerate(self._learned)
        )
        return AggregateTask(self._workflow, learned, requested, self._folder, self._turn, handed)

    def _handed_on(self, i: int) -> Iterator[tuple[Name, HandedTable]]:
        """The tables of chain i that hosts map: those in files."""
        for j, found in enumerate(self._learned[i]):
            for name, table in found.tables.items():
                if (at := (i, j, name)) not in self._handed and isinstance(table, FileKeyedTable):
                    own, full = self._rows.folder, f"{i}.{j}.{name}"
                    host = own if isinstance(own, HostFolder) else self._folder
                    if host is self._folder and local(table.path).is_below(self._folder):  # where tasks see it
                        self._handed[at] = HandedTable(local(table.path), full, host)
                    elif self._handed_folder is not None:
                        self._handed[at] = HandedTable(hand_on(table, self._handed_folder, full), full, host)
                if at in self._handed:
                    yield at, self._handed[at]

    def _next_steps(self) -> Iterator[tuple[int, BoundOp]]:
        """By chain that is not done: its next step."""
        for i, chain in enumerate(self._workflow.chains):
            if len(self._learned[i]) < len(chain.steps):
                yield i, chain.steps[len(self._learned[i])]

    def _later_vocabularies(self) -> set[str]:
        """Those that a chain comes to behind its next step, which learns something else and so is of this turn."""
        return {
            name
            for i, step in self._next_steps()
            if not isinstance(step.op, Categorify)
            for later in self._workflow.chains[i].steps[len(self._learned[i]) + 1 :]
            if isinstance(later.op, Categorify)
            for name in later.op.vocabularies(later.inputs)
        }

    def _known(self, i: int, j: int) -> FittedState | None:
        """What step j of chain i has learned, where nothing need be aggregated."""
        op = self._workflow.chains[i].steps[j].op
        if not op.learns:
            return FittedState({})
        if self._base is None or isinstance(op, Categorify):
            return None
        of = f"{i}.{j}."
        tables = {n.removeprefix(of): t for n, t in self._base.tables.items() if n.startswith(of)}
        return FittedState(self._base.states[i][j], tables)

    def scan(self, spark: SparkSession | None, task: AggregateTask | None) -> Scanned:
        """What the files hold, which the rows' `counts` say then, and what `merge` takes of them."""
        self._spark = spark
        if task is None or not isinstance(self._rows.folder, HostFolder):
            return self._rows.scan(spark, task)
        assert spark is not None
        return scan_merged(self._rows, spark, task)

    def merge(self, results: Scanned) -> None:
        """What `scan` found; its files in scratch are gone then."""
        if isinstance(results, Merged):
            self._merge_merged(results)
            return
        parts: dict[Name, list[Partial]] = {}
        for result in results:
            for i, j, name, start in result["parts"]:
                parts.setdefault((i, j, name), []).append(table_at(self._folder / result["path"], start))
        vocabularies: dict[str, list[Partial]] = {}
        partials: dict[tuple[int, int], dict[str, list[Partial]]] = {}
        for (i, j, name), mine in parts.items():
            op = self._workflow.chains[i].steps[j].op
            if isinstance(op, Categorify):
                vocabularies.setdefault(op.vocabulary_of(name), []).extend(mine)
            else:
                partials.setdefault((i, j), {})[name] = mine
        large = self._beyond_arrays(partials)
        held = {at: mine for at, mine in partials.items() if at not in large}
        with ThreadPoolExecutor(_MERGING_THREADS) as pool:
            merged = pool.map(self._counted, vocabularies, vocabularies.values())
            self._values += merged
            finished = pool.map(self._finish, held, held.values())
            learned = dict(zip(held, finished, strict=True))
        if large:
            learned |= self._by_spark(results, {at: partials[at] for at in large})
        for result in results:  # before they are written to the disk
            (self._folder / result["path"]).remove_quietly()
        self._learn(learned)

    def _beyond_arrays(
        self, partials: Mapping[tuple[int, int], Mapping[str, Sequence[Partial]]]
    ) -> list[tuple[int, int]]:
        """Steps that learn tables of more text than is taken into memory: Spark merges their statistics."""
        if self._spark is None or self._handed_folder is None:
            return []
        return [at for at, mine in partials.items() if sum(map(_text_of, self._keyed(at, mine).values())) > MOST_TEXT]

    def _keyed(self, at: tuple[int, int], partials: Mapping[str, Sequence[Partial]]) -> Mapping[str, Sequence[Partial]]:
        """Those of a step's statistics of which tasks can make tables, key by key."""
        step = self._workflow.chains[at[0]].steps[at[1]]
        assert isinstance(step.op, EstimatorOp)
        wanted = step.op.statistics(step.inputs)
        return {name: mine for name, mine in partials.items() if is_by_key(step, wanted[name])}

    def _by_spark(
        self, results: Sequence[Mapping[str, Any]], partials: Mapping[tuple[int, int], Mapping[str, Sequence[Partial]]]
    ) -> dict[tuple[int, int], FittedState]:
        """What steps learn, their statistics merged in tasks, which see the files, and their tables in files."""
        assert self._spark is not None
        names = [(*at, name) for at, mine in partials.items() for name in self._keyed(at, mine)]
        number = {name: i for i, name in enumerate(names)}
        files = [
            StatisticsFile(
                r["path"], tuple((number[i, j, n], start) for i, j, n, start in r["parts"] if (i, j, n) in number)
            )
            for r in results
        ]
        steps = {}
        for at, mine in partials.items():
            keyed = self._keyed(at, mine)
            whole = {name: parts for name, parts in mine.items() if name not in keyed}
            steps[at] = self._keyed_step(at, {number[*at, name]: name for name in keyed}, whole)
        size = sum(part.nbytes for mine in partials.values() for parts in mine.values() for part in parts)
        found = merged_by_key(self._spark, self._folder, files, Tables(tuple(names), ()), size)
        return keyed_tables(found, steps, self._folder / f"tables-{self._turn}")

    def _merge_merged(self, found: Merged) -> None:
        partials: dict[tuple[int, int], dict[str, list[Partial]]] = {}
        for (i, j, name), mine in found.statistics.items():
            partials.setdefault((i, j), {})[name] = [mine]
        large: dict[tuple[int, int], dict[int, str]] = {}
        for (i, j, name), number in found.keyed.items():
            large.setdefault((i, j), {})[number] = name
        if found.values is not None:
            self._merged.append(found)
        try:
            learned = {at: self._finish(at, mine) for at, mine in partials.items() if at not in large}
            if large:
                steps = {at: self._keyed_step(at, names, partials.get(at, {})) for at, names in large.items()}
                learned |= keyed_tables(found.partials, steps, self._folder / f"tables-{self._turn}")
        finally:
            if found.values is None:
                found.release()
        self._learn(learned)

    def _keyed_step(
        self, at: tuple[int, int], names: Mapping[int, str], whole: Mapping[str, Sequence[Partial]]
    ) -> KeyedStep:
        step = self._workflow.chains[at[0]].steps[at[1]]
        assert isinstance(step.op, EstimatorOp)
        return KeyedStep(step.op, step.inputs, names, {name: merge(parts) for name, parts in whole.items()})

    def _learn(self, learned: Mapping[tuple[int, int], FittedState]) -> None:
        """What the steps of this turn have learned; that of a vocabulary comes last."""
        for at in self._learning:
            self._learned[at[0]].append(learned.get(at, FittedState({})))

    def finish(self, vocabularies: Vocabularies) -> FittedWorkflow:
        """Give codes and put together what was learned."""
        pinned: Mapping[str, pa.Table | Lookup] = {}
        if self._workflow.rules:
            try:
                pinned = vocabularies.update(self._all_counts(), self._workflow.rules)
            finally:
                for found in self._merged:
                    found.release()
        tables = {
            f"{i}.{j}.{name}": keyed_of(table)
            for i, steps in enumerate(self._learned)
            for j, learned in enumerate(steps)
            for name, table in learned.tables.items()
        }
        _LOG.info("fitted %d chains in %d passes over the lake files", len(self._learned), self._turn)
        states = [[learned.states for learned in steps] for steps in self._learned]
        return FittedWorkflow(self._workflow, states, {n: lookup_of(t) for n, t in pinned.items()}, tables)

    def _finish(self, at: tuple[int, int], partials: Mapping[str, Sequence[Partial]]) -> FittedState:
        step = self._workflow.chains[at[0]].steps[at[1]]
        assert isinstance(step.op, EstimatorOp)
        return step.op.finish({name: merge(parts) for name, parts in partials.items()}, step.inputs)

    def _counted(self, vocabulary: str, parts: Sequence[Partial]) -> pa.Table:
        """(name, value, count, day) of the values that are there often enough."""
        least = self._workflow.rules[vocabulary].min_count
        whole = counted_values(parts, least)
        return pa.table(
            {
                "name": pa.repeat(vocabulary, whole.num_rows),
                "value": whole.column("key"),
                "count": whole.column("rows"),
                "day": whole.column("day"),
            }
        )

    def _all_counts(self) -> pa.Table | DataFrame:
        if frames := [found.values for found in self._merged if found.values is not None]:
            return reduce(DataFrame.unionAll, frames)
        return pa.concat_tables(self._values)


def _text_of(partials: Sequence[Partial]) -> int:
    """Bytes of the keys."""
    return sum(int(part.column("key").nbytes) for part in partials)


def _sent(learned: FittedState, without: Collection[str]) -> FittedState:
    """The same for tasks, which do not see this host's files; `without` some tables."""
    mine = {name: table for name, table in learned.tables.items() if name not in without}
    tables = {name: t.table if isinstance(t, KeyedTable) else t for name, t in mine.items()}
    return FittedState(learned.states, tables)
