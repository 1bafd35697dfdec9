"""The section `features`: from the events table to the dataset."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from headrace.config.section import Section


class OpSpec(Section):
    """One operator: in YAML `name`, or `name: {parameter: value}`. Parameters are checked by headrace.features."""

    #: The operator's name.
    op: str
    #: Its parameters, by name.
    params: Mapping[str, Any] = Field(default_factory=dict)


def _op_spec(value: Any) -> Any:
    if isinstance(value, str):
        return {"op": value}
    if isinstance(value, Mapping) and len(value) == 1 and "op" not in value:
        ((op, params),) = value.items()
        return {"op": op, "params": {} if params is None else params}
    return value


class Chain(Section):
    """Columns and the operators they pass through, in order: `["price"] >> FillMissing() >> LogOp()`.

    A column may begin several chains; the names of the features that come out are unique.
    """

    #: Columns of the table, or columns that `prepare` makes.
    columns: tuple[str, ...]
    #: Operators, in order.
    ops: tuple[Annotated[OpSpec, BeforeValidator(_op_spec)], ...] = ()
    #: Tags of the chain's features. `ops: [{add_tags: [user, id]}]` is another way to write it.
    tags: tuple[str, ...] = ()
    #: Metadata of the chain's features, stored in the dataset's schema. `ops: [{add_metadata: {unit: EUR}}]` is the
    #: same.
    metadata: Mapping[str, Any] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _labels_as_ops(cls, data: Any) -> Any:
        """Take operators that only label out of the chain, wherever they are, so that equal chains are one spec."""
        if not isinstance(data, Mapping) or not isinstance(data.get("ops"), (list, tuple)):
            return data
        ops, tags, metadata = [], list(data.get("tags") or ()), dict(data.get("metadata") or {})
        for entry in data["ops"]:
            op = _op_spec(entry)
            name = op.get("op") if isinstance(op, Mapping) else None
            if name == "add_tags":
                added = op["params"].get("tags") if isinstance(op["params"], Mapping) else op["params"]
                if not isinstance(added, (list, tuple)) or not added:
                    raise ValueError("add_tags: write a list, for example add_tags: [user, id]")
                tags += [t for t in added if t not in tags]
            elif name == "add_metadata":
                if not isinstance(op["params"], Mapping) or not op["params"]:
                    raise ValueError("add_metadata: write a mapping, for example add_metadata: {unit: EUR}")
                metadata |= op["params"]
            else:
                ops.append(entry)
        return {**data, "ops": ops, "tags": tags, "metadata": metadata}


class Split(Section):
    """The split of rows into train and valid (and `test`, evaluated once at the end; and `rank`, for ranked lists).

    time: events of the last `test_days` days up to ds are test, of the `valid_days` before them valid, of those before
    train.
    position: the last `valid_fraction` of the rows, in source order.
    column: the value of `column` names the split (`train`, `valid`, `test`, `rank`).
    """

    #: Basis of the split.
    by: Literal["time", "position", "column"]
    #: time: days up to ds, or up to those of test, that validate.
    valid_days: int = Field(default=1, ge=1)
    #: time: days up to ds that are evaluated once, at the end of training. The newest model is then not trained on the
    #: newest days. 0: no split `test`.
    test_days: int = Field(default=0, ge=0)
    #: position: the share of the rows that validate.
    valid_fraction: float = Field(default=0.1, gt=0, lt=1)
    #: column: the column with the names of the splits.
    column: str | None = None

    @model_validator(mode="after")
    def _test_by_time(self) -> Split:
        if self.test_days and self.by != "time":
            raise ValueError("`test_days` goes with `by: time`; by column, `test` is a value of the column")
        return self

    @model_validator(mode="after")
    def _column_given(self) -> Split:
        if (self.by == "column") != (self.column is not None):
            raise ValueError("`column` is needed with `by: column`, and only there")
        return self


class Append(Section):
    """A day's dataset takes yesterday's files and adds the new day's rows; written `append: true` for the defaults.

    What numbers were normalized with stays as it was learned on the day that wrote everything, the base.
    """

    #: Days after which statistics are learned and all files written anew.
    rebase_days: int = Field(default=28, ge=1)
    #: Raise it to learn all statistics and write all files anew at the next run.
    generation: int = Field(default=0, ge=0)


def _append(value: Any) -> Any:
    return {True: {}, False: None}[value] if isinstance(value, bool) else value


#: Table operators that treat each row alone.
_ROWWISE = ("filter", "dropna", "rename", "lambda")


class Features(Section):
    """The dataset that is made of the events table."""

    #: The column with the label: 0 and 1, or numbers.
    label: str
    #: Type of the label: 0 and 1, or any numbers, which `model.loss: squared_error` learns to predict.
    label_type: Literal["binary", "number"] = "binary"
    #: Chains of operators that turn columns into features.
    workflow: tuple[Chain, ...]
    #: Which rows train and which validate.
    split: Split
    #: Train on this many days before the validation range (daily sources); statistics come from these rows alone.
    window_days: int = Field(default=14, ge=1)
    #: Table operators before the chains, in order: filters, joins, earlier events of a user.
    prepare: tuple[Annotated[OpSpec, BeforeValidator(_op_spec)], ...] = ()
    #: Days before the training range that `prepare` reads and that are then dropped (split by time of a daily source).
    #: None: as many as the longest window in `prepare` asks for.
    history_days: int | None = Field(default=None, ge=0)
    #: Columns that the dataset has unchanged, a timestamp as its microseconds since 1970 (UTC): labels of further
    #: tasks, and for evaluation and for reading the dataset (not fed to the model).
    carried: tuple[str, ...] = ()
    #: Rows of a Parquet row group, which the reader decodes at once.
    row_group_rows: int = Field(default=131_072, ge=1)
    #: The dataset has at least this many row groups a split where it has the rows, so that every stream gets some.
    min_row_groups: int = Field(default=12, ge=1)
    #: Engine that writes the dataset: Spark expressions or Arrow kernels (the same bits on CPUs). auto: spark with the
    #: profile `gpu`, else arrow.
    engine: Literal["auto", "spark", "arrow"] = "auto"
    #: Files by day; the next day's dataset reuses those whose rows are the same.
    append: Annotated[Append | None, BeforeValidator(_append, json_schema_input_type=Append | bool | None)] = None

    @model_validator(mode="after")
    def _append_fits(self) -> Features:
        if self.append is None:
            return self
        for is_wrong, conflict in (
            (self.split.by != "time", f"split by {self.split.by}: only days can be appended, so split by time"),
            (
                not all(op.op in _ROWWISE for op in self.prepare),
                "prepare: late events change what its table operators say of older rows",
            ),
            (self.engine == "spark", "engine: spark: only the Arrow engine appends"),
        ):
            if is_wrong:
                raise ValueError(f"append does not go with {conflict}; leave one of them out")
        return self
