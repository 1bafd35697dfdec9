"""Operators: parameters, types, and two bodies, for Spark and for Arrow, that give the same bits.

To add one, write a class in the module of its family in headrace.features.ops and name it in that package's registry.
One of your own can be in any module that is installed: a spec names it as `module:Class` (headrace.features.types),
and headrace.testing checks that its two bodies agree.

    class Halve(Elementwise):
        name = "halve"
        def type_of(self, input_type): return number(input_type, "double")
        def spark_value(self, x, input_type, state): return x / 2.0
        def arrow_value(self, x, input_type, state): return pc.divide(x, 2.0)

In Python chains of operators are written as `["price"] >> FillMissing() >> LogOp() >> AddTags("item")`:

    cats = ["user_id", "item_id"] >> Categorify(min_count=2)
    conts = ["price"] >> FillMissing() >> LogOp() >> Normalize()
    Workflow(cats + conts, columns=..., label="clicked")
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import pyarrow as pa
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from headrace.config import Chain, OpSpec
from headrace.errors import UserError
from headrace.features.functions.arrays import with_elements
from headrace.features.learn.statistics import Partials, Statistic
from headrace.features.types import Element, OpError, ValueType, element_of
from headrace.plugins import faults_of

if TYPE_CHECKING:
    from pyspark.sql import Column

    from headrace.features.vocabulary.codes import VocabularyRule
    from headrace.features.vocabulary.keyed_tables import KeyedTable
    from headrace.features.vocabulary.lookup import Lookup

#: The name of a column that an operator makes. Two underscores in front are the writer's.
NewName = Annotated[str, StringConstraints(min_length=1, pattern=r"^([^_]|_[^_]|_$)")]
#: What fit learned for a column. JSON values only; empty for operators that learn nothing.
State = Mapping[str, Any]


@dataclass(frozen=True)
class FittedState:
    """The result of a fit."""

    #: By column.
    states: Mapping[str, State]
    #: Keyed tables by name: `key` (string, no null, none twice) and columns of values; see vocabulary.keyed_tables.
    tables: Mapping[str, pa.Table | KeyedTable] = field(default_factory=dict)


def no_table(*_: Any) -> Any:
    """Refuse: stands for the keyed tables of an operator that learned none."""
    raise RuntimeError("the operator learned no keyed table")


def no_lookup(vocabulary: str, *_: Any) -> Any:
    """Refuse: stands for vocabularies while a workflow is fitted, when `workflow.bind` lets no operator ask."""
    raise RuntimeError(f"vocabulary '{vocabulary}' is looked up before it has codes")


@dataclass(frozen=True)
class SparkOpContext:
    """Inputs of an operator's Spark expressions besides its columns."""

    types: Mapping[str, ValueType]
    state: Mapping[str, State]
    #: (vocabulary, its key as text) -> code; null where the vocabulary lacks it. A left join in the plan.
    lookup: Callable[[str, Column], Column]
    #: By column that comes out: how many leading elements of a list the rest of the chain looks at; None: all.
    reads: Mapping[str, int | None] = field(default_factory=dict)
    #: (keyed table that the operator learned, the key as text) -> its values by name, null where it lacks the key. A
    #: left join in the plan.
    table: Callable[[str, Column], Mapping[str, Column]] = no_table
    #: A hash of the row's identity where it is of the training range, null where not; None: no row is of it.
    identity: Column | None = None


@dataclass(frozen=True)
class ArrowOpContext:
    """Inputs of an operator's Arrow kernels besides its columns."""

    types: Mapping[str, ValueType]
    state: Mapping[str, State]
    lookup: Callable[[str], Lookup]
    #: A keyed table that the operator learned.
    table: Callable[[str], KeyedTable] = no_table
    #: int64: see SparkOpContext.
    identity: pa.Array | None = None


class Op(BaseModel):
    """An operator over the columns of a chain. Its fields are its parameters; unknown ones are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: ClassVar[str]
    #: Its ONNX body as `module:function` (headrace.export.features.operators). Without one, an export computes it by
    #: its Arrow body, in the Python step. A subclass does not inherit it.
    onnx: ClassVar[str] = ""
    #: Whether it learns from the training rows: see headrace.features.ops.base.
    learns: ClassVar[bool] = False
    #: Whether rows of the training range, which bring their identity, are transformed otherwise than others.
    out_of_fold: ClassVar[bool] = False
    #: Whether it also takes columns that are `final` or padded, which pass by other operators.
    takes_final: ClassVar[bool] = False
    #: Whether it has a Spark expression for each element of a list, so that their number must have a bound.
    unrolls: ClassVar[bool] = False
    #: Whether each column that comes out depends on one column alone, value by value: then its Arrow kernel can take
    #: each distinct value once, in columns of different lengths.
    by_value: ClassVar[bool] = False

    def __init__(self, **parameters: Any) -> None:
        """Raise UserError for an unknown parameter, or a wrong value of one."""
        try:
            super().__init__(**parameters)
        except ValidationError as e:
            raise UserError(f"{type(self).__name__}: {faults_of(type(self), e)}") from None

    # What a spec says is validated without it: the message then names the place in the spec.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    @classmethod
    def reference(cls) -> str:
        """Return the name of the class in a spec: `name` for headrace's own, `module:Class` for the user's."""
        is_builtin = cls.__module__.startswith(f"{__name__.rpartition('.')[0]}.")
        return cls.name if is_builtin else f"{cls.__module__}:{cls.__qualname__}"

    def types(self, inputs: Mapping[str, ValueType]) -> dict[str, ValueType]:
        """Return types of the columns that come out. Raises OpError for a column that it cannot take."""
        raise NotImplementedError

    def sources(self, inputs: Mapping[str, ValueType]) -> dict[str, tuple[str, ...]]:
        """Return the columns of which each column that comes out is made.

        This answer is right where columns of the same name are made of each other, and others of all; an operator of
        which less is true says so itself. What depends on fewer columns can be scored by side, without the pairs.
        """
        return {name: (name,) if name in inputs else tuple(inputs) for name in self.types(inputs)}

    def vocabularies(self, inputs: Mapping[str, ValueType]) -> dict[str, VocabularyRule]:
        """Return the vocabularies that it gives codes of, by name."""
        return {}

    def spark(self, columns: Mapping[str, Column], context: SparkOpContext) -> dict[str, Column]:
        """Return columns as Spark expressions: no Python function, so that Catalyst and RAPIDS see all of it."""
        raise NotImplementedError

    def arrow(self, columns: Mapping[str, pa.Array], context: ArrowOpContext) -> dict[str, pa.Array]:
        """Return columns as Arrow arrays, each as long as its input."""
        raise NotImplementedError

    def reads(self, needed: int | None) -> int | None:
        """Return how many leading elements of a list the first `needed` of its output depend on.

        None stands for all of them.
        """
        return needed

    def __rrshift__(self, columns: str | Sequence[str] | Selection) -> Selection:
        """`["price"] >> LogOp()`; a `Selection` in place of the columns is one more operator behind its others."""
        return Selection.from_columns(columns).append(self)


class Elementwise(Op):
    """An operator that treats each column, and each element of a list, alone."""

    by_value: ClassVar[bool] = True

    def type_of(self, input_type: ValueType) -> ValueType:
        """Return the type that comes out of a scalar or of an element (never called with a list)."""
        raise NotImplementedError

    def spark_value(self, x: Column, input_type: ValueType, state: State) -> Column:
        """Return the Spark expression for a scalar; `input_type` is its type."""
        raise NotImplementedError

    def arrow_value(self, x: pa.Array, input_type: ValueType, state: State) -> pa.Array:
        """Return the Arrow kernel for a flat array, nulls where values are missing."""
        raise NotImplementedError

    def types(self, inputs: Mapping[str, ValueType]) -> dict[str, ValueType]:
        out = {}
        for name, value in inputs.items():
            try:
                out[name] = replace(
                    self.type_of(element_of(value)), is_list=value.is_list, length=value.length, most=value.most
                )
            except OpError as e:
                raise OpError(f"column '{name}': {e}") from None
        return out

    def spark(self, columns: Mapping[str, Column], context: SparkOpContext) -> dict[str, Column]:
        from pyspark.sql import functions as F

        out = {}
        for name, x in columns.items():
            input_type, state = context.types[name], context.state.get(name, {})
            if input_type.is_list:
                out[name] = F.transform(x, self._lambda(element_of(input_type), state))
            else:
                out[name] = self.spark_value(x, input_type, state)
        return out

    def _lambda(self, input_type: ValueType, state: State) -> Callable[[Column], Column]:
        return lambda x: self.spark_value(x, input_type, state)

    def arrow(self, columns: Mapping[str, pa.Array], context: ArrowOpContext) -> dict[str, pa.Array]:
        out = {}
        for name, x in columns.items():
            input_type, state = context.types[name], context.state.get(name, {})
            if input_type.is_list:
                out[name] = with_elements(x, self.arrow_value(x.flatten(), element_of(input_type), state))
            else:
                out[name] = self.arrow_value(x, input_type, state)
        return out


def scalars(inputs: Mapping[str, ValueType]) -> Mapping[str, ValueType]:
    """Return the same types; raises OpError for a list."""
    for name, value in inputs.items():
        if value.is_list:
            raise OpError(f"column '{name}': takes scalars, not {value}")
    return inputs


def number(input_type: ValueType, element: Element) -> ValueType:
    """`element` as the type that comes out, where a number goes in."""
    if not input_type.is_number:
        raise OpError(f"takes numbers, not {input_type}")
    return ValueType(element)


class EstimatorOp(Op):
    """An operator that learns by statistics of parts."""

    learns: ClassVar[bool] = True
    #: Whether `finish` makes each row of its tables of the groups of its key alone, and states of the statistics that
    #: have no key: then it is called with parts of the keys where there are many. The tables' values are int64 or
    #: float64.
    by_key: ClassVar[bool] = False

    def statistics(self, types: Mapping[str, ValueType]) -> dict[str, Statistic]:
        """Return the statistics to collect of the columns as they arrive at this operator."""
        raise NotImplementedError

    def finish(self, partials: Partials, types: Mapping[str, ValueType]) -> FittedState:
        """Learn from the statistics of all training rows. The result does not depend on the order of groups."""
        raise NotImplementedError


class QuantileOp(Elementwise, EstimatorOp):
    """An operator over numbers that learns from how often each value is there."""

    #: Values are counted with so many significant bits: a quantile's relative error is at most 2**-significant_bits,
    #: and whole numbers up to 2**significant_bits are exact. 53: exact, and as many counters as there are distinct
    #: values.
    significant_bits: int = Field(default=16, ge=2, le=53)

    def types(self, inputs: Mapping[str, ValueType]) -> dict[str, ValueType]:
        return super().types(scalars(inputs))

    def statistics(self, types: Mapping[str, ValueType]) -> dict[str, Statistic]:
        return {name: Statistic(key=(name,), kind="number", bits=self.significant_bits) for name in types}


class AddTags:
    """Tags for the features of a chain: `>> AddTags("user", "id")`; in YAML `tags: [user, id]`. NVTabular's AddTags."""

    def __init__(self, *tags: str | Iterable[str]) -> None:
        self.tags = tuple(t for tag in tags for t in ((tag,) if isinstance(tag, str) else tag))

    def __rrshift__(self, columns: str | Sequence[str] | Selection) -> Selection:
        selection = Selection.from_columns(columns)
        return replace(selection, tags=tuple(dict.fromkeys((*selection.tags, *self.tags))))


class AddMetadata:
    """JSON values for the features of a chain: `>> AddMetadata(unit="EUR")`; in YAML `metadata: {unit: EUR}`.

    They are written to the dataset's schema, in the manifest. NVTabular's AddMetadata.
    """

    def __init__(self, **metadata: Any) -> None:
        self.metadata = metadata

    def __rrshift__(self, columns: str | Sequence[str] | Selection) -> Selection:
        selection = Selection.from_columns(columns)
        return replace(selection, metadata=tuple((dict(selection.metadata) | self.metadata).items()))


@dataclass(frozen=True)
class Selection:
    """Columns and what was put behind them so far; immutable, so that a part can be used twice."""

    columns: tuple[str, ...]
    ops: tuple[Op, ...] = ()
    tags: tuple[str, ...] = ()
    metadata: tuple[tuple[str, Any], ...] = ()

    @staticmethod
    def from_columns(columns: str | Sequence[str] | Selection) -> Selection:
        """Return the selection of one column or several, by name; a selection is itself.

        Raises:
            UserError: something that is no name.
        """
        if isinstance(columns, Selection):
            return columns
        names = (columns,) if isinstance(columns, str) else tuple(columns)
        if not all(isinstance(name, str) for name in names):
            raise UserError(f"a chain begins with names of columns, not {columns!r}")
        return Selection(names)

    def append(self, op: Op) -> Selection:
        """Add an operator after the others."""
        return replace(self, ops=(*self.ops, op))

    def __rshift__(self, more: Op | AddTags | AddMetadata) -> Selection:
        combine = getattr(type(more), "__rrshift__", None)
        combined = combine(more, self) if combine is not None else None
        if isinstance(combined, Selection):
            return combined
        hint = f"; write {more.__name__}()" if isinstance(more, type) and hasattr(more, "__rrshift__") else ""
        raise UserError(f"`>>` takes an operator, AddTags or AddMetadata, not {more!r}{hint}")

    def __add__(self, other: Selection | Chains) -> Chains:
        return Chains((self,)) + other

    @property
    def chain(self) -> Chain:
        """The spec that YAML would give."""
        # What was not said is left out: a default may change, and YAML leaves it out too.
        ops = tuple(OpSpec(op=op.reference(), params=op.model_dump(mode="json", exclude_unset=True)) for op in self.ops)
        try:
            return Chain(columns=self.columns, ops=ops, tags=self.tags, metadata=dict(self.metadata))
        except ValidationError as e:
            raise UserError(f"chain of {', '.join(self.columns)}: {e.errors()[0]['msg']}") from None


@dataclass(frozen=True)
class Chains:
    """Several chains: `a + b`."""

    parts: tuple[Selection, ...]

    def __add__(self, other: Selection | Chains) -> Chains:
        return Chains((*self.parts, *((other,) if isinstance(other, Selection) else other.parts)))


def as_chains(chains: Selection | Chains | Sequence[Chain | Selection | Mapping[str, Any]]) -> tuple[Chain, ...]:
    """Return the specs of chains, however they were written.

    Raises:
        UserError: something that is no chain.
    """
    parts: Sequence[Any] = (
        (chains,) if isinstance(chains, Selection) else chains.parts if isinstance(chains, Chains) else chains
    )
    out = []
    for part in parts:
        if isinstance(part, Selection):
            out.append(part.chain)
        elif isinstance(part, Chain):
            out.append(part)
        else:
            raise UserError(f"a workflow is made of chains (columns >> operator), not {part!r}")
    return tuple(out)
