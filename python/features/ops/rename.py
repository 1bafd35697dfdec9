"""rename: other names for the chain's columns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import pyarrow as pa
from pydantic import model_validator

from headrace.features.ops.base import ArrowOpContext, NewName, Op, SparkOpContext
from headrace.features.types import OpError, ValueType

if TYPE_CHECKING:
    from pyspark.sql import Column


class Rename(Op):
    """Columns of any type under other names, as NVTabular's Rename: so that one column can begin several chains.

    Either `to` (the new name, for a chain of one column; or a mapping of old names to new ones, other columns keep
    theirs), or `prefix` and/or `suffix`. A vocabulary that `categorify` makes after it has the new name. It also
    renames columns that other operators do not touch any more (an indicator, a padded list).
    """

    name: ClassVar[str] = "rename"
    onnx: ClassVar[str] = "headrace.export.features.operators:rename"
    by_value: ClassVar[bool] = True
    takes_final: ClassVar[bool] = True

    to: NewName | Mapping[str, NewName] | None = None
    prefix: str = ""
    suffix: str = ""

    @model_validator(mode="after")
    def _one_way(self) -> Rename:
        if bool(self.to) == bool(self.prefix or self.suffix):
            raise ValueError("give either `to`, or `prefix` and/or `suffix`")
        return self

    def types(self, inputs: Mapping[str, ValueType]) -> dict[str, ValueType]:
        if isinstance(self.to, str) and len(inputs) != 1:
            raise OpError(f"here are several columns ({', '.join(inputs)}); write `to: {{old: new}}`, or `suffix`")
        for old in self.to if isinstance(self.to, Mapping) else ():
            if old not in inputs:
                raise OpError(f"there is no column '{old}' here (there are: {', '.join(inputs)})")
        out = {self._named(name): value for name, value in inputs.items()}
        if len(out) < len(inputs):
            raise OpError("gives two columns the same name")
        for new in out:
            if new.startswith("__"):
                raise OpError(f"'{new}': names that begin with two underscores are taken")
        return out

    def sources(self, inputs: Mapping[str, ValueType]) -> dict[str, tuple[str, ...]]:
        return {self._named(name): (name,) for name in inputs}

    def spark(self, columns: Mapping[str, Column], context: SparkOpContext) -> dict[str, Column]:
        return {self._named(name): x for name, x in columns.items()}

    def arrow(self, columns: Mapping[str, pa.Array], context: ArrowOpContext) -> dict[str, pa.Array]:
        return {self._named(name): x for name, x in columns.items()}

    def _named(self, name: str) -> str:
        if isinstance(self.to, str):
            return self.to
        return (self.to or {}).get(name) or f"{self.prefix}{name}{self.suffix}"
