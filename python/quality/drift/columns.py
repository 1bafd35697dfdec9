"""Columns to measure: every input column and every feature, split by split.

A sample of the training rows fixes the bins; then `count_rows` counts all rows in them. A task returns as much as there
are bins, so nothing grows with rows or vocabularies.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from headrace.compute import pc
from headrace.config.schema import NULL_CODE, OOV_CODE, Feature, Kind
from headrace.features.arrow.kernels import DictionaryColumn
from headrace.features.functions.arrays import nan_to_null
from headrace.features.ops.numbers import decimal_doubles
from headrace.features.types import ValueType
from headrace.features.vocabulary.lookup import Lookup
from headrace.quality.drift.column_statistics import I64, Bins, ColumnStatistics, NumberBins, ValueBins, describe

#: Number of rows from which the bins are chosen.
SAMPLE_ROWS = 65_536
#: The name of the bin of all codes that the vocabulary does not have.
UNKNOWN = "(not in the vocabulary)"

#: category: values are names. number: values have an order and a size. time: it changes every day by nature, so only
#: its ends and its missing values are compared.
ColumnKind = Literal["number", "category", "time"]
#: By (split, column): their positions.
StatisticsByColumn = dict[tuple[int, int], ColumnStatistics]


@dataclass(frozen=True)
class MeasuredColumn:
    """Column to measure."""

    side: Literal["input", "feature"]
    name: str
    kind: ColumnKind
    is_list: bool = False
    #: Features: number of columns in a batch.
    length: int = 0
    #: Features: values are codes, 0 means missing.
    coded: bool = False
    #: Features: the vocabulary of the codes. Values outside it have the codes 1..unknown, which count as one.
    vocabulary: str | None = None
    unknown: int = 0

    def values(self, arrays: Sequence[pa.Array]) -> tuple[pa.Array, int]:
        """Return the values of a batch, flat and without nulls, and how many rows have none.

        Missing is null, NaN, a list without elements; of codes, 0 in all columns. A number feature is never missing.
        Moments become seconds since 1970.
        """
        if self.coded:
            codes = np.stack([a.to_numpy(zero_copy_only=False) for a in arrays], axis=1)
            has_value = codes != NULL_CODE
            if self.unknown > 1:
                codes[has_value & (codes <= self.unknown)] = OOV_CODE
            return pa.array(codes[has_value]), int(np.count_nonzero(~has_value.any(axis=1)))
        if self.side == "feature":
            return pa.concat_arrays([a.cast(pa.float64()) for a in arrays]), 0
        (x,) = arrays
        if self.is_list:
            missing = len(x) - int(pc.sum(pc.greater(pc.list_value_length(x), 0)).as_py() or 0)
            return _drop(pc.list_flatten(x)), missing
        values = _drop(_plain(x))
        return values, len(x) - len(values)

    def weighed(
        self, column: DictionaryColumn, mask: np.ndarray[Any, np.dtype[np.bool_]] | None
    ) -> tuple[pa.Array, int, I64 | None]:
        """`values` of some rows of a column whose values are kept once each, and how often each is there (None: once).

        Args:
            column: of an input column.
            mask: the rows; None: all.
        """
        if column.indices is None or self.is_list:
            x = column.decode()
            return *self.values([x if mask is None else x.filter(pa.array(mask))]), None
        times = np.bincount(column.indices if mask is None else column.indices[mask], minlength=len(column.values))
        x = _plain(column.values)
        has_value = x.is_valid().to_numpy(zero_copy_only=False)
        missing = int(times[~has_value].sum())
        has_value &= times > 0
        return x.filter(pa.array(has_value)), missing, times[has_value]


def input_columns(types: Mapping[str, ValueType], features: Sequence[Feature]) -> list[MeasuredColumn]:
    """Return the raw columns that features are made of, in their order.

    Integers that only become codes are categories (ids, an hour); other integers, and decimals, are numbers.
    """
    coded: dict[str, bool] = {}
    for feature in features:
        for source in feature.sources:
            coded[source] = coded.get(source, True) and feature.kind is Kind.CATEGORICAL
    columns = []
    for name, only_codes in coded.items():
        type_ = types[name]
        kind: ColumnKind = "number"
        if type_.element in ("timestamp", "date"):
            kind = "time"
        elif type_.element in ("string", "boolean") or (type_.is_integer and only_codes):
            kind = "category"
        columns.append(MeasuredColumn("input", name, kind, type_.is_list))
    return columns


def feature_columns(features: Sequence[Feature]) -> list[MeasuredColumn]:
    """Return the features, in the dataset's order."""
    return [
        MeasuredColumn(
            "feature",
            f.name,
            "category" if f.kind is Kind.CATEGORICAL else "number",
            f.is_list,
            len(f.physical),
            f.kind is Kind.CATEGORICAL,
            f.vocabulary,
            f.oov_buckets if f.vocabulary else 0,
        )
        for f in features
    ]


def bins_of(measured: MeasuredColumn, sample: Sequence[pa.Array], quantiles: int, top: int) -> Bins:
    """Return the bins of a column.

    Args:
        measured: the column.
        sample: what `measured.values` takes, of training rows.
        quantiles: bins of a number, about.
        top: values of a category that get a bin.
    """
    values, _ = measured.values(sample)
    if measured.kind == "category":
        return ValueBins.from_sample(values, top, (OOV_CODE,) if measured.vocabulary else ())
    x = values.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
    if measured.kind == "time":
        return NumberBins((), float(np.median(x)) if len(x) else 0.0)
    return NumberBins.from_sample(x, quantiles)


@dataclass(frozen=True)
class SplitStatistics:
    """Statistics of a day before they are written."""

    measured: tuple[MeasuredColumn, ...]
    bins: tuple[Bins, ...]
    splits: tuple[str, ...]
    tallies: StatisticsByColumn

    def rows(self, vocabularies: Mapping[str, Lookup]) -> Iterator[dict[str, Any]]:
        """Yield a record for each split and column: those of `count_day`, without day and ranges."""
        for i, (measured, bins) in enumerate(zip(self.measured, self.bins, strict=True)):
            names = _names(bins, vocabularies[measured.vocabulary]) if measured.vocabulary else None
            for split, name in enumerate(self.splits):
                tally = self.tallies.get((split, i), ColumnStatistics(bins))
                number = isinstance(bins, NumberBins)
                yield {
                    "split": name,
                    "side": measured.side,
                    "column": measured.name,
                    "kind": measured.kind,
                    "rows": tally.rows,
                    "missing": tally.missing,
                    "values": tally.values,
                    # Unknown codes have the first bin where there is a vocabulary.
                    "oov": int(tally.counts[0]) if measured.vocabulary else None,
                    "distinct": tally.distinct,
                    "min": tally.low if number and tally.finite else None,
                    "max": tally.high if number and tally.finite else None,
                    "mean": tally.mean,
                    "std": tally.std,
                    "histogram": [] if measured.kind == "time" else describe(bins, tally.counts, names),
                }


def _names(bins: Bins, vocabulary: Lookup) -> dict[str | int | bool, str]:
    """Return what the codes of a feature's bins stand for."""
    assert isinstance(bins, ValueBins)
    names = vocabulary.values_of([int(v) for v in bins.values if v != OOV_CODE])
    return dict([(OOV_CODE, UNKNOWN), *names.items()])


def _drop(x: pa.Array) -> pa.Array:
    """Drop nulls and NaN."""
    if pa.types.is_floating(x.type):
        x = nan_to_null(x)
    return x.drop_null()


def _plain(x: pa.Array) -> pa.Array:
    """Convert timestamps to seconds since 1970 and decimals to doubles; keep other values."""
    if pa.types.is_decimal(x.type):
        return decimal_doubles(x)
    if pa.types.is_timestamp(x.type):
        return pc.divide(x.cast(pa.timestamp("us", x.type.tz)).cast(pa.int64()).cast(pa.float64(), safe=False), 1e6)
    if pa.types.is_date(x.type):
        return pc.multiply(x.cast(pa.int32()).cast(pa.float64()), 86_400.0)
    return x
