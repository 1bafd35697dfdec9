"""target_encoding: the label's mean over the rows with the same value, not counting the row's own fold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pyarrow as pa
from pydantic import Field

from headrace.features.functions.keys import check_keys, joint_key, spark_joint_key
from headrace.features.learn import exact_sums
from headrace.features.learn.exact_sums import F64, I64
from headrace.features.learn.folds import folds_of, spark_fold
from headrace.features.learn.statistics import LABEL, Number, Partial, Partials, Statistic, counts, numbers
from headrace.features.ops.base import ArrowOpContext, FittedState, SparkOpContext
from headrace.features.ops.estimator import EstimatorOp
from headrace.features.types import ValueType

if TYPE_CHECKING:
    from pyspark.sql import Column

#: Of the label by fold alone.
_PRIOR = "prior"


class TargetEncoding(EstimatorOp):
    """Text, integers and booleans to `<column>_te`, double: (sum of y + m * prior) / (n + m), m being `smoothing`.

    Over the n rows of the training range with the same value, `prior` being the label's mean over all of the training
    range. Of a row of the training range its own fold (of `folds`, by a hash of its identity) is left out of all three:
    of sum, n *and* prior, so that its own label is nowhere in its feature. (NVTabular's TargetEncoding, which is this
    formula, keeps it in the prior.) Other rows see all folds. A value that is null, or that the rows looked at lack,
    has the prior. Smoothing: Micci-Barreca, "A Preprocessing Scheme for High-Cardinality Categorical Attributes", 2001.

    This looks at the label of later rows of the training range; for a variant in order of time, see the table operator
    target_encoding_past.
    """

    name: ClassVar[str] = "target_encoding"
    out_of_fold: ClassVar[bool] = True
    by_key: ClassVar[bool] = True

    folds: int = Field(default=5, ge=2, le=100)
    #: As many rows of the prior are added to each value's.
    smoothing: float = Field(default=20.0, ge=0, allow_inf_nan=False)
    #: One encoding of all of the chain's columns together (`<a>_<b>_te`) in place of one of each.
    together: bool = False

    def types(self, inputs: Mapping[str, ValueType]) -> dict[str, ValueType]:
        check_keys(inputs)
        return {name: ValueType("double") for name in self.sources(inputs)}

    def sources(self, inputs: Mapping[str, ValueType]) -> dict[str, tuple[str, ...]]:
        keys = [tuple(inputs)] if self.together else [(name,) for name in inputs]
        return {f"{'_'.join(key)}_te": key for key in keys}

    def statistics(self, types: Mapping[str, ValueType]) -> dict[str, Statistic]:
        label = (Number(LABEL, sum=True),)
        out = {name: Statistic(key=key, folds=self.folds, numbers=label) for name, key in self.sources(types).items()}
        return out | {_PRIOR: Statistic(folds=self.folds, numbers=label)}

    def finish(self, partials: Partials, types: Mapping[str, ValueType]) -> FittedState:
        n, sums = self._without_folds(partials[_PRIOR], np.zeros(partials[_PRIOR].num_rows, np.int64), 1)
        y = [exact_sums.floats(s, 1) for s in sums]
        priors = [float(y[f][0] / n[f][0]) if n[f][0] else 0.0 for f in range(self.folds + 1)]
        tables = {}
        for name in self.sources(types):
            encoded = partials[name].column("key").combine_chunks().dictionary_encode()
            size = len(encoded.dictionary)
            n, sums = self._without_folds(partials[name], encoded.indices.to_numpy().astype(np.int64), size)
            values = {
                _column(f): self._smooth(exact_sums.floats(sums[f], size), n[f], priors[f]) for f in range(len(n))
            }
            tables[name] = pa.table({"key": encoded.dictionary, **values})
        return FittedState({name: {"priors": priors} for name in tables}, tables)

    def _without_folds(self, partial: Partial, keys: I64, size: int) -> tuple[list[I64], list[dict[int, I64]]]:
        """Counts and sums (digits) by key: of all rows first, then without fold 0, 1, ... [folds + 1][size]."""
        fold = np.asarray(partial.column("fold").to_numpy(), np.int64)

        def by_key(x: I64) -> list[I64]:
            each = np.zeros((self.folds, size), np.int64)
            np.add.at(each, (fold, keys), x)
            whole = each.sum(axis=0)
            return [whole, *(whole - mine for mine in each)]

        digits = {place: by_key(x) for place, x in numbers(partial, 0, "sum").items()}
        sums = [exact_sums.carried({place: x[f] for place, x in digits.items()}) for f in range(self.folds + 1)]
        return by_key(counts(partial, "0.count")), sums

    def _smooth(self, y: F64, n: I64, prior: float) -> F64:
        weight = n + self.smoothing
        return np.where(weight > 0, (y + self.smoothing * prior) / np.where(weight > 0, weight, 1.0), prior)

    def spark(self, columns: Mapping[str, Column], context: SparkOpContext) -> dict[str, Column]:
        from pyspark.sql import functions as F

        out = {}
        for name, key in self.sources(context.types).items():
            found = context.table(name, spark_joint_key([columns[c] for c in key]))
            priors = context.state[name]["priors"]
            values = [F.coalesce(found[_column(f)], F.lit(float(prior))) for f, prior in enumerate(priors)]
            x = values[0]
            if context.identity is not None:
                own = spark_fold(context.identity, self.folds)
                for f in range(self.folds):
                    x = F.when(own == f, values[f + 1]).otherwise(x)
            out[name] = x
        return out

    def arrow(self, columns: Mapping[str, pa.Array], context: ArrowOpContext) -> dict[str, pa.Array]:
        out = {}
        for name, key in self.sources(context.types).items():
            table = context.table(name)
            rows = table.rows(joint_key([columns[c] for c in key]))
            which = self._which(context.identity, len(rows))
            x = np.empty(len(rows), np.float64)
            for f, prior in enumerate(context.state[name]["priors"]):
                mine = np.flatnonzero(which == f)
                x[mine] = table.take(_column(f), rows[mine], float(prior)).to_numpy(zero_copy_only=False)
            out[name] = pa.array(x)
        return out

    def _which(self, identity: pa.Array | None, n: int) -> Any:
        """0 for a row that is in no fold, else its fold and one."""
        if identity is None:
            return np.zeros(n, np.int64)
        fold = folds_of(identity.fill_null(0).to_numpy(zero_copy_only=False), self.folds)
        return np.where(identity.is_valid().to_numpy(zero_copy_only=False), fold + 1, 0)


def _column(fold: int) -> str:
    """A column of the keyed table: of all folds, or without fold 0, 1, ..."""
    return "all" if fold == 0 else f"without_{fold - 1}"
