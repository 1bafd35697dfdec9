"""Chains written in Python: `["price"] >> FillMissing() >> LogOp() >> AddTags("item")` is the YAML's chain.

cats = ["user_id", "item_id"] >> Categorify(min_count=2)
conts = ["price"] >> FillMissing() >> LogOp() >> Normalize()
Workflow(cats + conts, columns=..., label="clicked")
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from pydantic import ValidationError

from headrace.config import Chain, OpSpec
from headrace.errors import UserError


class Operator(Protocol):
    """The part of an operator (headrace.features.ops.base.Op) that a selection needs."""

    @classmethod
    def reference(cls) -> str:
        """Return the operator's name in a spec."""
        ...

    def model_dump(self, *, mode: str, exclude_unset: bool) -> dict[str, Any]:
        """Return the parameters that were given."""
        ...

    def __rrshift__(self, columns: Selection) -> Selection:
        """Return the selection with the operator behind its others."""
        ...


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
    ops: tuple[Operator, ...] = ()
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

    def append(self, op: Operator) -> Selection:
        """Add an operator after the others."""
        return replace(self, ops=(*self.ops, op))

    def __rshift__(self, more: Operator | AddTags | AddMetadata) -> Selection:
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
