"""What a pass over the lake's files computes for a fit: the statistics that the chains' next operators ask for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from headrace.features.engines.arrow.aggregate import TrainRows, aggregate
from headrace.features.engines.arrow.dictionary import DictionaryColumn, apply_op
from headrace.features.engines.arrow.handed_table import HandedTable
from headrace.features.engines.arrow.lake_file import LakeRowGroup
from headrace.features.engines.arrow.lake_rows import concatenated
from headrace.features.engines.arrow.text_counts import in_parts
from headrace.features.learn.merge import merge
from headrace.features.learn.statistics import Partial, Statistic
from headrace.features.ops.base import FittedState, no_lookup
from headrace.features.ops.categories import Categorify
from headrace.features.vocabulary.keyed_tables import keyed_of
from headrace.features.workflow.workflow import Workflow
from headrace.storage import Location

#: Most of a file's statistic that is merged: long keys are more than memory has, and an array.
_MERGED_BYTES = 256 << 20
#: (chain, step, name of the statistic).
Name = tuple[int, int, str]


@dataclass(frozen=True)
class AggregateTask:
    """What to aggregate of a file, in a task (headrace.features.engines.arrow.lake_rows.FileVisitor)."""

    workflow: Workflow
    #: By chain: what its first steps have learned, where the next one needs statistics.
    learned: tuple[tuple[FittedState, ...], ...]
    requested: Mapping[tuple[int, int], Mapping[str, Statistic]]
    folder: Location
    turn: int
    #: Tables of `learned` that are not in it.
    handed: Mapping[Name, HandedTable] = field(default_factory=dict)

    def __call__(self, number: int, found: Iterable[tuple[LakeRowGroup, TrainRows]]) -> dict[str, Any]:
        names: list[Name] = []

        def made() -> Iterator[Partial]:
            for name, part in self.partials(found):
                names.append(name)
                yield in_parts(part) if self.counts_values(name) else part

        path = self.folder / f"partial-{self.turn}-{number}.arrow"
        starts = concatenated(made(), path)
        return {"path": path.name, "parts": [[*n, start] for n, start in zip(names, starts, strict=True)]}

    def partials(self, found: Iterable[tuple[LakeRowGroup, TrainRows]]) -> Iterator[tuple[Name, Partial]]:
        """Values with their counts as they come, for there may be many; others merged, as long as they are small."""
        parts: dict[Name, list[Partial]] = {}
        for row_group, rows in found:
            for (i, j), statistics in self.requested.items():
                chain = self.workflow.chains[i]
                columns = self._arriving(i, j, row_group, rows)
                for name, statistic in statistics.items():
                    part = aggregate(statistic, columns, chain.steps[j].inputs, rows)
                    if self.counts_values((i, j, name)):
                        yield (i, j, name), part
                    else:
                        mine = parts.setdefault((i, j, name), [])
                        mine.append(part)
                        if sum(p.nbytes for p in mine) > _MERGED_BYTES:
                            # The new part alone may be nearly all that an array holds.
                            if waiting := parts.pop((i, j, name))[:-1]:
                                yield (i, j, name), merge(waiting)
                            yield (i, j, name), part
        yield from ((name, merge(mine)) for name, mine in parts.items())

    def counts_values(self, name: Name) -> bool:
        """Whether it is for a vocabulary."""
        return isinstance(self.workflow.chains[name[0]].steps[name[1]].op, Categorify)

    def _arriving(self, i: int, j: int, row_group: LakeRowGroup, rows: TrainRows) -> dict[str, DictionaryColumn]:
        """The columns of chain i as they arrive at its step j."""
        chain = self.workflow.chains[i]
        columns = {name: row_group.column(name) for name in chain.columns}
        for k, (step, learned) in enumerate(zip(chain.steps[:j], self.learned[i], strict=True)):
            tables = {name: keyed_of(table) for name, table in learned.tables.items()}
            tables |= {name: table.open() for (*at, name), table in self.handed.items() if at == [i, k]}
            identity = rows.training_identity if step.op.out_of_fold else None
            columns = apply_op(step, columns, learned.states, no_lookup, tables.__getitem__, identity)
        return columns
