"""Workflows: chains of operators bound to declared columns, every type known and checked before any data is seen."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from headrace.config import Chain, Spec
from headrace.config.schema import MICROSECONDS, DatasetSchema, Feature, Kind, TableColumn
from headrace.errors import UserError, nearest
from headrace.features.ops import OPERATORS
from headrace.features.ops.base import ArrowOpContext, Chains, Op, Selection, SparkOpContext, State, as_chains, no_table
from headrace.features.ops.numbers import FromDecimal
from headrace.features.table_ops.preparation import Preparation, prepared_columns
from headrace.features.types import OpError, ValueType, build, declared, least

if TYPE_CHECKING:
    from pyspark.sql import Column as SparkColumn

    from headrace.features.vocabulary.codes import VocabularyRule
    from headrace.features.vocabulary.keyed_tables import KeyedTable
    from headrace.features.vocabulary.lookup import Lookup


#: NumPy's names of the types that a carried column may have.
_CARRIED = {
    "string": "string",
    "int": "int32",
    "bigint": "int64",
    "float": "float32",
    "double": "float64",
    "boolean": "bool",
    "timestamp": "int64",
}


class Workflow:
    """The chains of a spec, checked."""

    def __init__(
        self,
        chains: Sequence[Chain | Selection] | Selection | Chains,
        columns: Sequence[TableColumn],
        label: str,
        carried: Sequence[str] = (),
        section: str = "features",
    ) -> None:
        """Check everything that can be known without data.

        Raises:
            UserError: an unknown operator or parameter, a column that an operator cannot take, two features of one
                name; with its place `features.workflow[i].ops[j]`.
        """
        self.spec_chains = as_chains(chains)
        self.declared, self.label_column = tuple(columns), label
        self.carried_columns, self._section = tuple(carried), section
        self._types = {c.name: declared(c) for c in columns}
        self.chains: tuple[BoundChain, ...] = tuple(
            bind(chain, self._types, label, f"{section}.workflow[{i}]") for i, chain in enumerate(self.spec_chains)
        )
        self.rules = self._rules()
        self._check_names()

    @staticmethod
    def from_spec(spec: Spec) -> Workflow:
        """Return the workflow of a pipeline. Raises UserError, see `Workflow`."""
        f = spec.features
        preparation = Preparation.from_spec(spec)
        for label in dict.fromkeys((f.label, *(task.label for task in spec.train.tasks.values() if task.label))):
            sources = preparation.sources_of(label)
            for i, chain in enumerate(f.workflow):
                for column in chain.columns:
                    if column in sources:
                        raise UserError(
                            f"features.workflow[{i}].columns: the label '{label}' is made of '{column}'; a feature "
                            f"made of it would leak the label"
                        )
        return Workflow(f.workflow, prepared_columns(spec), f.label, f.carried)

    @property
    def input_columns(self) -> tuple[str, ...]:
        """Columns of the lake's table that the features are made of, each once; the label is not among them."""
        return tuple(dict.fromkeys(column for chain in self.chains for column in chain.columns))

    def input_type(self, column: str) -> ValueType:
        """Return the declared type of a column."""
        return self._types[column]

    @property
    def out_of_fold(self) -> bool:
        """True where rows of the training range are transformed otherwise than other rows: they must have IDENTITY."""
        return any(step.op.out_of_fold for chain in self.chains for step in chain.steps)

    def _check_names(self) -> None:
        seen: dict[str, int] = {}
        for i, chain in enumerate(self.chains):
            for name in chain.outputs:
                if name in seen:
                    raise UserError(
                        f"{self._section}.workflow[{i}]: '{name}' is already a feature of "
                        f"{self._section}.workflow[{seen[name]}]; rename one of them (rename: "
                        f"{{suffix: _2}}), or name its column in one chain"
                    )
                seen[name] = i
        for name, role in ((self.label_column, "label"), *((c, "carried") for c in self.carried_columns)):
            if name not in self._types:
                raise UserError(
                    f"{self._section}.{role}: column '{name}' is not declared in table.columns"
                    f"{nearest(name, self._types)}"
                )
        label = self._types[self.label_column]
        if not label.is_number or label.is_list:
            raise UserError(f"{self._section}.label: '{self.label_column}' is {label}; a label is a number, 0 or 1")
        for name in self.carried_columns:
            type_ = self._types[name]
            if type_.is_list or type_.element not in _CARRIED:
                raise UserError(
                    f"{self._section}.carried: column '{name}' is {type_}; one of {', '.join(_CARRIED)} can be carried"
                )
        if len(set(self.carried_columns)) < len(self.carried_columns):
            raise UserError(f"{self._section}.carried: names a column twice")
        physical = [column for feature in self.schema_of({}).features for column in feature.physical]
        for column in physical:
            if physical.count(column) > 1:
                raise UserError(
                    f"{self._section}: two columns of the dataset would be named '{column}'; rename a column"
                )

    def _rules(self) -> dict[str, VocabularyRule]:
        """Return rules of all vocabularies, by name."""
        rules: dict[str, VocabularyRule] = {}
        unnamed: set[str] = set()
        for i, chain in enumerate(self.chains):
            for j, step in chain.named_steps():
                place = f"{self._section}.workflow[{i}].ops[{j}] ({step.op.name})"
                for name, rule in step.op.vocabularies(step.inputs).items():
                    if rules.setdefault(name, rule) != rule:
                        raise UserError(
                            f"{place}: vocabulary '{name}' is shared with a chain that has another "
                            f"min_count, max_size or oov_buckets; give both the same"
                        )
                    if getattr(step.op, "vocabulary", None) is None:
                        if name in unnamed:
                            raise UserError(
                                f"{place}: another chain makes the vocabulary '{name}' too; if they are to "
                                f"share it (its values are counted in both), say `vocabulary: {name}` in "
                                f"both; else rename the column before"
                            )
                        unnamed.add(name)
        return rules

    def schema_of(self, cardinalities: Mapping[str, int], sizes: Mapping[str, int] | None = None) -> DatasetSchema:
        """Return the dataset's schema: features in the chains' order, the label, the carried columns.

        A carried column that is a feature too is stored beside it as `<column>__carried`.

        Args:
            cardinalities: by vocabulary, its highest code and one.
            sizes: by vocabulary, how many values it has: features that drop_low_cardinality drops are left out.
        """
        features = []
        for chain in self.chains:
            for column, end in chain.outputs.items():
                code, raw = end.is_categorical, end.element == "id"
                if sizes is not None and end.vocabulary and sizes[end.vocabulary] < end.min_cardinality:
                    continue
                cardinality = cardinalities.get(end.vocabulary) if end.vocabulary else end.cardinality
                features.append(
                    Feature(
                        name=column,
                        kind=Kind.CATEGORICAL if code else Kind.CONTINUOUS,
                        dtype="int64" if raw else "int32" if code else "float32",
                        length=end.length or 1,
                        is_list=end.is_list,
                        cardinality=cardinality if code and not raw else None,
                        dynamic=raw,
                        vocabulary=end.vocabulary,
                        oov_buckets=self.rules[end.vocabulary].oov_buckets if end.vocabulary else 1,
                        tags=chain.tags,
                        metadata=chain.metadata,
                        sources=chain.sources[column],
                    )
                )
        features.append(Feature(name=self.label_column, kind=Kind.LABEL, dtype="float32"))
        fed = DatasetSchema(features=tuple(features))
        carried = tuple(
            Feature(
                name=fed.carried_name(c),
                kind=Kind.CARRIED,
                dtype=_CARRIED[self._types[c].element],
                metadata={"unit": MICROSECONDS} if self._types[c].element == "timestamp" else {},
            )
            for c in self.carried_columns
        )
        return DatasetSchema(features=(*features, *carried))


@dataclass(frozen=True)
class BoundOp:
    """An operator in its place.

    Columns are named: an operator may give back others, and more or fewer, than it took.
    """

    op: Op
    #: The columns that it takes.
    inputs: Mapping[str, ValueType]
    #: The columns that pass by it, being final.
    passthrough: Mapping[str, ValueType]
    #: The columns that come out, those that pass by among them.
    outputs: Mapping[str, ValueType]
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
        """Return the chain's columns after the operator, by its Spark expressions."""
        context = SparkOpContext(self.inputs, state, lookup, self.reads, table, identity)
        out = self.op.spark({name: columns[name] for name in self.inputs}, context)
        return out | {name: columns[name] for name in self.passthrough}

    def arrow(
        self,
        columns: Mapping[str, pa.Array],
        state: Mapping[str, State],
        lookup: Callable[[str], Lookup],
        table: Callable[[str], KeyedTable] = no_table,
        identity: pa.Array | None = None,
    ) -> dict[str, pa.Array]:
        """Return the chain's columns after the operator, by its Arrow kernels."""
        context = ArrowOpContext(self.inputs, state, lookup, table, identity)
        out = self.op.arrow({name: columns[name] for name in self.inputs}, context)
        return out | {name: columns[name] for name in self.passthrough}


@dataclass(frozen=True)
class BoundChain:
    """A chain whose every step has been checked against the declared columns."""

    #: The columns that go in.
    columns: tuple[str, ...]
    steps: tuple[BoundOp, ...]
    #: Types of the columns at the end: numbers or codes, lists with a length. Their names are the features'.
    outputs: Mapping[str, ValueType]
    #: By column at the end: the columns that go in that it is made of.
    sources: Mapping[str, tuple[str, ...]]
    tags: tuple[str, ...]
    metadata: Mapping[str, Any]

    def named_steps(self) -> Iterator[tuple[int, BoundOp]]:
        """Yield the steps that the spec names, with their places in its list."""
        return enumerate(s for s in self.steps if not isinstance(s.op, FromDecimal))


def bind(chain: Chain, declared: Mapping[str, ValueType], label: str, place: str) -> BoundChain:
    """Check a chain.

    Args:
        declared: the columns that there are, by name.
        label: the one of them that no feature may be made of.
        place: the chain's place in the spec.

    Raises:
        UserError: no or an unknown column, an unknown operator or parameter, a column that an operator cannot take, two
            columns of one name, an end that no model can take.
    """
    if not chain.columns:
        raise UserError(f"{place}: names no column")
    for column in chain.columns:
        if column not in declared:
            raise UserError(
                f"{place}.columns: column '{column}' is not declared in table.columns{nearest(column, declared)}"
            )
        if column == label:
            raise UserError(f"{place}.columns: '{column}' is the label; a feature made of it would leak it")
        if chain.columns.count(column) > 1:
            raise UserError(f"{place}.columns: names '{column}' twice")
    if any(declared[c].element == "decimal" for c in chain.columns):
        try:
            return _bound(chain, declared, place, FromDecimal(to="double"))
        except UserError as as_number:
            try:
                return _bound(chain, declared, place, FromDecimal(to="string"))
            except UserError:
                raise as_number from None
    return _bound(chain, declared, place)


def _bound(chain: Chain, declared: Mapping[str, ValueType], place: str, entry: Op | None = None) -> BoundChain:
    """Return the chain's operators in their places, behind `entry` where there is one."""
    checked: list[_CheckedOp] = []
    coded: list[str] = []
    types: dict[str, ValueType] = {c: declared[c] for c in chain.columns}
    sources: dict[str, tuple[str, ...]] = {c: (c,) for c in chain.columns}
    ops = [build(OPERATORS, spec.op, spec.params, f"{place}.ops[{j}]") for j, spec in enumerate(chain.ops)]
    placed = [(op, f"{place}.ops[{j}] ({op.name})") for j, op in enumerate(ops)]
    for op, op_place in [(entry, place), *placed] if entry is not None else placed:
        checked.append(_check_op(op, types, op_place, coded))
        coded += [n for n, t in checked[-1].outputs.items() if t.vocabulary]
        types = checked[-1].outputs
        sources = {n: tuple(dict.fromkeys(s for m in checked[-1].made_of[n] for s in sources[m])) for n in types}
    for column, output in types.items():
        _check_output(place, column, output)
    return BoundChain(chain.columns, _steps(checked, types), types, sources, chain.tags, chain.metadata)


@dataclass(frozen=True)
class _CheckedOp:
    """An operator whose types are known, but not yet how much of lists the rest looks at."""

    op: Op
    place: str
    taken: dict[str, ValueType]
    passthrough: dict[str, ValueType]
    outputs: dict[str, ValueType]
    #: By column that comes out, those that it is made of.
    made_of: dict[str, tuple[str, ...]]


def _check_op(op: Op, types: Mapping[str, ValueType], place: str, coded: Sequence[str]) -> _CheckedOp:
    """Check one operator. `types`: of the columns that arrive; `coded`: columns with codes of a vocabulary."""
    passthrough = {} if op.takes_final else {n: t for n, t in types.items() if t.final}
    taken = {n: t for n, t in types.items() if n not in passthrough}
    if not op.takes_final and any(t.length is not None for t in taken.values()):
        raise UserError(f"{place}: nothing can follow `pad`; put it last")
    # Also where another operator has made something else of the codes.
    if op.learns and coded:
        raise UserError(
            f"{place}: column '{coded[0]}' has been through categorify, whose codes are given when all values have "
            f"been counted, so nothing can be learned from them; begin another chain with the column itself"
        )
    try:
        out, made_of = op.types(taken), op.sources(taken)
    except OpError as e:
        raise UserError(f"{place}: {e}") from None
    for name in out:
        if name in passthrough:
            raise UserError(f"{place}: makes a column '{name}', but the chain has one of that name; rename one")
    return _CheckedOp(op, place, taken, passthrough, out | passthrough, made_of | {n: (n,) for n in passthrough})


def _steps(checked: Sequence[_CheckedOp], outputs: Mapping[str, ValueType]) -> tuple[BoundOp, ...]:
    """Return the steps with how many elements of its lists each operator must give, from the end back."""
    steps: list[BoundOp] = []
    needed: dict[str, int | None] = {n: t.length or 1 for n, t in outputs.items()}
    for w in reversed(checked):
        needed = {n: least(count, w.outputs[n].most) for n, count in needed.items()}
        if w.op.unrolls and any(t.is_list and needed[n] is None for n, t in w.outputs.items()):
            raise UserError(
                f"{w.place}: what follows looks at lists from their end or as a whole, so their length must have a "
                f"bound here; put list_slice: {{length: N, keep: last}} before it"
            )
        steps.append(BoundOp(w.op, w.taken, w.passthrough, w.outputs, needed))
        earlier: dict[str, int | None] = {}
        for n, parts in w.made_of.items():
            reads = needed[n] if n in w.passthrough else w.op.reads(needed[n])
            for part in parts:
                known = earlier.get(part, 0)
                earlier[part] = None if reads is None or known is None else max(known, reads)
        needed = {n: earlier.get(n, 1) for n in (*w.taken, *w.passthrough)}
    return tuple(reversed(steps))


def _check_output(place: str, column: str, output: ValueType) -> None:
    if output.is_list and output.length is None:
        raise UserError(f"{place}: column '{column}' ends as {output}; end the chain with pad: {{length: N}}")
    if output.element in ("timestamp", "date"):
        raise UserError(
            f"{place}: column '{column}' ends as {output}, which no model can take; add cyclic or age to the chain"
        )
    if not output.is_categorical and not output.is_number:
        raise UserError(
            f"{place}: column '{column}' ends as {output}, which no model can take; "
            f"add categorify or hash_bucket to the chain"
        )
