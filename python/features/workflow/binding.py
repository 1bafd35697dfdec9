"""Chains bound to declared columns: every operator built, every type known, before any data is seen."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from headrace.config import Chain
from headrace.errors import UserError, nearest
from headrace.features.ops import REGISTRY
from headrace.features.ops.base import ArrowPlace, Op, SparkPlace, State, no_table
from headrace.features.registry import build
from headrace.features.types import OpError, ValueType, least
from headrace.features.vocabulary.keyed_table import KeyedTable
from headrace.features.vocabulary.lookup import Lookup

if TYPE_CHECKING:
    from pyspark.sql import Column as SparkColumn


@dataclass(frozen=True)
class Step:
    """An operator in its place.

    Columns are named: an operator may give back others, and more or fewer, than it took.
    """

    op: Op
    #: The columns that it takes.
    types: Mapping[str, ValueType]
    #: The columns that pass by it, being final.
    passing: Mapping[str, ValueType]
    #: The columns that come out, those that pass by among them.
    gives: Mapping[str, ValueType]
    #: By column that comes out: leading elements of a list that the rest of the chain looks at; None: all.
    reads: Mapping[str, int | None]

    def spark(
        self,
        columns: Mapping[str, SparkColumn],
        state: Mapping[str, State],
        lookup: Callable[[str, SparkColumn], SparkColumn],
        table: Callable[[str, SparkColumn], Mapping[str, SparkColumn]] = no_table,
        identity: SparkColumn | None = None,
    ) -> dict[str, SparkColumn]:
        """The chain's columns after the operator, by its Spark body."""
        place = SparkPlace(self.types, state, lookup, self.reads, table, identity)
        out = self.op.spark({name: columns[name] for name in self.types}, place)
        return out | {name: columns[name] for name in self.passing}

    def arrow(
        self,
        columns: Mapping[str, pa.Array],
        state: Mapping[str, State],
        lookup: Callable[[str], Lookup],
        table: Callable[[str], KeyedTable] = no_table,
        identity: pa.Array | None = None,
    ) -> dict[str, pa.Array]:
        """The chain's columns after the operator, by its Arrow body."""
        place = ArrowPlace(self.types, state, lookup, table, identity)
        out = self.op.arrow({name: columns[name] for name in self.types}, place)
        return out | {name: columns[name] for name in self.passing}


@dataclass(frozen=True)
class BoundChain:
    """A chain whose every step has been checked against the declared columns."""

    #: The columns that go in.
    columns: tuple[str, ...]
    steps: tuple[Step, ...]
    #: Types of the columns at the end: numbers or codes, lists with a length. Their names are the features'.
    ends: Mapping[str, ValueType]
    #: By column at the end: the columns that go in that it is made of.
    sources: Mapping[str, tuple[str, ...]]
    tags: tuple[str, ...]
    metadata: Mapping[str, Any]


def bind(chain: Chain, declared: Mapping[str, ValueType], label: str, where: str) -> BoundChain:
    """Check a chain.

    Args:
        declared: the columns that there are, by name.
        label: the one of them that no feature may be made of.
        where: the chain's place in the spec.

    Raises:
        UserError: no or an unknown column, an unknown operator or parameter, a column that an operator cannot take, two
            columns of one name, an end that no model can take.
    """
    if not chain.columns:
        raise UserError(f"{where}: names no column")
    for column in chain.columns:
        if column not in declared:
            raise UserError(
                f"{where}.columns: column '{column}' is not declared in table.columns{nearest(column, declared)}"
            )
        if column == label:
            raise UserError(f"{where}.columns: '{column}' is the label; a feature made of it would leak it")
        if chain.columns.count(column) > 1:
            raise UserError(f"{where}.columns: names '{column}' twice")
    walked: list[_Walked] = []
    types: dict[str, ValueType] = {c: declared[c] for c in chain.columns}
    sources: dict[str, tuple[str, ...]] = {c: (c,) for c in chain.columns}
    ops = [build(REGISTRY, spec.op, spec.params, f"{where}.ops[{j}]", "operator") for j, spec in enumerate(chain.ops)]
    for j, op in enumerate(ops):
        walked.append(_walk(op, types, f"{where}.ops[{j}] ({op.name})"))
        types = walked[-1].gives
        sources = {n: tuple(dict.fromkeys(s for m in walked[-1].of[n] for s in sources[m])) for n in types}
    for column, end in types.items():
        _check_end(where, column, end)
    return BoundChain(chain.columns, _steps(walked, types), types, sources, chain.tags, chain.metadata)


@dataclass(frozen=True)
class _Walked:
    """An operator whose types are known, but not yet how much of lists the rest looks at."""

    op: Op
    at: str
    taken: dict[str, ValueType]
    passing: dict[str, ValueType]
    gives: dict[str, ValueType]
    #: By column that comes out, those that it is made of.
    of: dict[str, tuple[str, ...]]


def _walk(op: Op, types: Mapping[str, ValueType], at: str) -> _Walked:
    """One operator on. `types`: of the columns that arrive."""
    passing = {} if op.takes_final else {n: t for n, t in types.items() if t.final}
    taken = {n: t for n, t in types.items() if n not in passing}
    if not op.takes_final and any(t.length is not None for t in taken.values()):
        raise UserError(f"{at}: nothing can follow `pad`; put it last")
    coded = [n for n, t in taken.items() if t.vocabulary]
    if op.learns and coded:
        raise UserError(
            f"{at}: column '{coded[0]}' has been through categorify, whose codes are given when all values have been "
            f"counted, so nothing can be learned from them; begin another chain with the column itself"
        )
    try:
        out, of = op.types(taken), op.sources(taken)
    except OpError as e:
        raise UserError(f"{at}: {e}") from None
    for name in out:
        if name in passing:
            raise UserError(f"{at}: makes a column '{name}', but the chain has one of that name; rename one")
    return _Walked(op, at, taken, passing, out | passing, of | {n: (n,) for n in passing})


def _steps(walked: Sequence[_Walked], ends: Mapping[str, ValueType]) -> tuple[Step, ...]:
    """From the end back: how many elements of its lists each operator must give."""
    steps: list[Step] = []
    needed: dict[str, int | None] = {n: t.length or 1 for n, t in ends.items()}
    for w in reversed(walked):
        needed = {n: least(count, w.gives[n].most) for n, count in needed.items()}
        if w.op.unrolls and any(t.is_list and needed[n] is None for n, t in w.gives.items()):
            raise UserError(
                f"{w.at}: what follows looks at lists from their end or as a whole, so their length must have a bound "
                f"here; put list_slice: {{length: N, keep: last}} before it"
            )
        steps.append(Step(w.op, w.taken, w.passing, w.gives, needed))
        before: dict[str, int | None] = {}
        for n, parts in w.of.items():
            reads = needed[n] if n in w.passing else w.op.reads(needed[n])
            for part in parts:
                known = before.get(part, 0)
                before[part] = None if reads is None or known is None else max(known, reads)
        needed = {n: before.get(n, 1) for n in (*w.taken, *w.passing)}
    return tuple(reversed(steps))


def _check_end(where: str, column: str, end: ValueType) -> None:
    if end.is_list and end.length is None:
        raise UserError(f"{where}: column '{column}' ends as {end}; end the chain with pad: {{length: N}}")
    if end.element in ("timestamp", "date"):
        raise UserError(
            f"{where}: column '{column}' ends as {end}, which no model can take; add cyclic or age to the chain"
        )
    if not end.is_categorical and not end.is_number:
        raise UserError(
            f"{where}: column '{column}' ends as {end}, which no model can take; "
            f"add categorify or hash_bucket to the chain"
        )
