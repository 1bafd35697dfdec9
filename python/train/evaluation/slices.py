"""Slices of an evaluation: each row's value of an expression, and the values that become slices. Collective."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow.compute as pc

from headrace.errors import UserError
from headrace.features.table_ops.row_expression import RowExpression
from headrace.schema import CARRIED_SUFFIX, DatasetSchema, Kind
from headrace.train.carried_columns import evaluate_expression
from headrace.train.evaluation.partition import by_id
from headrace.train.evaluation.ranks import I64, Ranks
from headrace.train.evaluation.rows import Dimension

#: Rows whose value is among the rarer ones, and rows without a value.
OTHERS, NULL = "(others)", "(null)"
#: Values of a slice by what a feature's code was in training.
SEEN = ("known", "new")


def slice_values(
    expression: RowExpression, carried: Mapping[str, npt.NDArray[Any]], schema: DatasetSchema
) -> npt.NDArray[np.object_]:
    """Each row's value: text, `NULL` without one. [n].

    Raises:
        UserError: an overflow or a division by zero.
    """
    texts = evaluate_expression(expression, carried, schema, "train.evaluation.slices")
    found: npt.NDArray[np.object_] = pc.fill_null(texts, NULL).to_numpy(zero_copy_only=False)
    return found


def make_dimension(ranks: Ranks, name: str, values: npt.NDArray[np.object_], most: int) -> tuple[Dimension, I64]:
    """The most frequent values over all ranks, and each row's position among them.

    Args:
        values: text of this rank's rows, [n].
        most: slices at most; the values beyond become one, `OTHERS`.

    Returns:
        The dimension, the most frequent first; int64 [n].
    """
    codes, distinct = pd.factorize(values)
    hashes = hash_ids(np.asarray(distinct, object))
    counts = np.bincount(codes, minlength=len(distinct)).astype(np.int64)
    # All counts of a value meet on one rank, which knows the most frequent of its values.
    ids, (parts,) = by_id(ranks, hashes, [counts])
    mine, of = np.unique(ids, return_inverse=True)
    totals = np.bincount(of, weights=parts, minlength=len(mine)).astype(np.int64)
    best = np.lexsort((mine, -totals))[:most]
    told = ranks.gather_json([len(mine), [[int(totals[i]), int(mine[i])] for i in best]])
    # Of equally frequent ones the order is that of their hashes.
    chosen = [h for _, h in sorted((p for _, pairs in told for p in pairs), key=lambda p: (-p[0], p[1]))[:most]]
    known = dict(zip(hashes.tolist(), (str(v) for v in distinct), strict=True))
    texts: dict[int, str] = {}
    for part in ranks.gather_json([[h, known[h]] for h in chosen if h in known]):
        texts |= dict(part)
    names = [texts[h] for h in chosen]
    position = {h: i for i, h in enumerate(chosen)}
    of_value = np.array([position.get(h, len(chosen)) for h in hashes.tolist()], np.int64)
    if sum(n for n, _ in told) > len(chosen):
        names.append(OTHERS)
    return Dimension(name, tuple(names)), of_value[codes] if len(codes) else np.zeros(0, np.int64)


def hash_ids(values: npt.NDArray[Any]) -> I64:
    """Whole numbers as they are, of others a hash of 64 bits, the same on all ranks: [n] -> int64 [n]."""
    if values.dtype.kind in "iub":
        return values.astype(np.int64)
    if not len(values):
        return np.empty(0, np.int64)
    return pd.util.hash_array(values.astype(object), categorize=False).view(np.int64)


def carried_ids(ranks: Ranks, values: npt.NDArray[Any], name: str, schema: DatasetSchema) -> I64:
    """`ids_here`, where each row has one. Collective.

    Raises:
        UserError: the column is of whole numbers, and some rows have none; all ranks raise it.
    """
    found, nulls = ids_here(values, name, schema)
    check_no_nulls(ranks, nulls, name)
    return found


def ids_here(values: npt.NDArray[Any], name: str, schema: DatasetSchema) -> tuple[I64, int]:
    """`hash_ids` of a carried column, and how many rows of whole numbers have none."""
    (dtype,) = (f.dtype for f in schema.of(Kind.CARRIED) if f.name == name)
    if not dtype.startswith("int"):
        return hash_ids(values), 0
    # NumPy has such a column as floats, on those ranks that have a null.
    missing = np.isnan(values.astype(np.float64)) if values.dtype.kind == "f" else np.zeros(len(values), bool)
    return np.where(missing, 0, values).astype(np.int64), int(missing.sum())


def check_no_nulls(ranks: Ranks, nulls: int, name: str) -> None:
    """Raise UserError on all ranks where a rank has rows without a value. Collective."""
    if missing := int(ranks.add_up(np.array(nulls))):
        column = name.removesuffix(CARRIED_SUFFIX)
        raise UserError(
            f"the carried column '{column}' is null in {missing:,} rows, which then belong to nobody: let ingest "
            f"quarantine them (`required: true`), or fill them"
        )
