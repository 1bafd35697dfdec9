"""The Spark engine's transform: one select of expressions over left joins with the vocabularies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from headrace.features.engines.spark.joins import BROADCAST_ROWS, Joins, Side, keyed_side, vocabulary_side
from headrace.features.functions.spark_expressions import col, input_column
from headrace.features.learn.statistics import IDENTITY
from headrace.features.workflow.fitted import FittedWorkflow
from headrace.schema import Feature, Kind
from headrace.storage import Location


def transform(
    fitted: FittedWorkflow,
    frame: DataFrame,
    keep: Mapping[str, str] | Sequence[str] = (),
    saved: Location | None = None,
    broadcast_rows: int = BROADCAST_ROWS,
    *,
    lists: bool = False,
) -> DataFrame:
    """Rows of the lake's table to physical columns: joins with vocabularies, then one select.

    Args:
        frame: has the input columns in their declared types, and IDENTITY where some rows are of the training range.
        keep: further columns, taken along unchanged at the end; a mapping renames them (name of the result -> of the
            frame).
        saved: the folder that the workflow was saved in: Spark reads vocabularies and tables from its files, which GPUs
            can scan. Without, and where it was not loaded from one, they go to Spark from this process.
        broadcast_rows: the smallest vocabularies and tables are broadcast, of up to so many rows together.
        lists: a list feature as one column of arrays as long as its values are, not padded to physical columns.
    """
    folder = saved or fitted.folder
    kept = dict(keep) if isinstance(keep, Mapping) else {name: name for name in keep}
    joins = _ChainJoins(Joins(frame, broadcast_rows))
    vocabularies: dict[str, Side] = {}

    def lookup(at: tuple[int, int], vocabulary: str, key: Column) -> Column:
        if vocabulary not in vocabularies:
            vocabularies[vocabulary] = vocabulary_side(fitted.vocabularies[vocabulary], frame, folder, vocabulary)
        return joins.add(at, vocabularies[vocabulary], key)["code"].cast("int")

    def table(at: tuple[int, int], name: str, key: Column) -> Mapping[str, Column]:
        full = f"{at[0]}.{at[1]}.{name}"
        keyed = fitted.tables[full]
        return dict(zip(keyed.values, joins.add(at, keyed_side(keyed, frame, folder, full), key).values(), strict=True))

    identity = F.col(IDENTITY) if IDENTITY in frame.columns else None
    ends: dict[str, Column] = {}
    for i, (chain, states) in enumerate(zip(fitted.workflow.chains, fitted.states, strict=True)):
        columns = {name: input_column(name, fitted.workflow.input_type(name)) for name in chain.columns}
        for j, (step, state) in enumerate(zip(chain.steps, states, strict=True)):
            columns = step.spark(columns, state, partial(lookup, (i, j)), partial(table, (i, j)), identity)
        ends |= columns

    selected = []
    for feature in fitted.features:
        x, stored = ends[feature.name], partial(_stored, feature)
        if not feature.is_list:
            selected.append(stored(x).alias(feature.name))
        elif lists:
            selected.append(F.transform(x, stored).alias(feature.name))
        else:
            zero = zero_of(feature)
            elements = [F.coalesce(stored(F.get(x, F.lit(i))), zero) for i in range(feature.length)]
            selected += [e.alias(column) for e, column in zip(elements, feature.physical, strict=True)]
    selected += [col(source).alias(name) for name, source in kept.items()]

    return joins.apply().select(*selected)


class _ChainJoins:
    """The joins that chains ask for, those of a step below those of the chain's later steps."""

    def __init__(self, joins: Joins) -> None:
        self._joins = joins
        #: (chain, step) of the joins that are not in the frame yet.
        self._waiting: set[tuple[int, int]] = set()

    def add(self, at: tuple[int, int], side: Side, key: Column) -> dict[str, Column]:
        """See Joins; the key may be made of what earlier steps of the chain have joined."""
        if any(chain == at[0] and step < at[1] for chain, step in self._waiting):
            self.apply()
        self._waiting.add(at)
        return self._joins.add(side, key)

    def apply(self) -> DataFrame:
        """See Joins."""
        self._waiting.clear()
        return self._joins.apply()


def zero_of(feature: Feature) -> Column:
    """0 in the type that a feature is stored in."""
    return F.lit(0).cast({"int64": "bigint", "int32": "int"}.get(feature.dtype, "float"))


def _stored(feature: Feature, x: Column) -> Column:
    """A value of a feature in the type that it is stored in."""
    if feature.kind is Kind.CATEGORICAL:
        return x.cast("bigint" if feature.dynamic else "int")
    return _finite(x)


def _finite(x: Column) -> Column:
    """A number as float32; what is missing or not finite as float32 is 0."""
    single = x.cast("float")
    infinity = F.lit(float("inf")).cast("float")
    # NaN is above infinity in Spark's order, so it falls out too.
    return F.when((single < infinity) & (single > -infinity), single).otherwise(F.lit(0.0).cast("float"))
