"""The spec's request for an evaluation, resolved by the dataset's schema, and slices of rows. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow.compute as pc

from headrace import config
from headrace.config.schema import CARRIED_SUFFIX, DatasetSchema, Feature, Kind
from headrace.errors import UserError
from headrace.features.table_ops.row_expression import RowExpression
from headrace.train.carried_columns import carried_types, columns_of, evaluate_expression, parse_carried
from headrace.train.evaluation.ranks import I64, Dimension, Ranks, by_id


class Request:
    """Metrics to compute, and the columns that they need.

    Args:
        train: settings with `evaluation`, `rank_group` and `rank_k`.
        schema: schema of the dataset.

    Raises:
        UserError: the dataset lacks a column or feature of a slice, the user or the item.
    """

    def __init__(self, train: config.Train, schema: DatasetSchema) -> None:
        settings, section = train.evaluation, "train.evaluation"
        self.settings, self.schema, self.k = settings, schema, train.rank_k
        #: The tasks except the first; they have metrics of their own.
        self.tasks = dict(list(train.tasks.items())[1:])
        #: Names of the carried columns of a row's list and of its user.
        self.group = None if train.rank_group is None else schema.carried_name(train.rank_group)
        self.user = None if settings.user is None else schema.carried_name(settings.user)
        self.item = None if settings.item is None else coded_feature(schema, settings.item, f"{section}.item")
        #: Expression of each slice, or the feature whose codes in training it needs.
        self.expressions = {
            name: parse_slice(name, slice_.expression, schema)
            for name, slice_ in settings.slices.items()
            if slice_.expression is not None
        }
        self.ranked_by()
        self.seen_features = {
            name: coded_feature(schema, slice_.seen, f"{section}.slices.{name}.seen").name
            for name, slice_ in settings.slices.items()
            if slice_.seen is not None
        }

        self.policy = settings.off_policy
        #: Feature of the actions that the model chooses from, and the features that depend on it.
        self.action: Feature | None = None
        self.action_features: tuple[Feature, ...] = ()
        if self.policy is not None:
            section = f"{section}.off_policy"
            for key, column in (("propensity", self.policy.propensity), ("reward", self.policy.reward)):
                if column is not None:
                    check_number(schema, column, f"{section}.{key}")
            self.action = coded_feature(schema, self.policy.action, f"{section}.action")
            self.action_features = tuple(
                scalar_feature(schema, name, f"{section}.action_features") for name in self.policy.action_features
            )

    @property
    def is_basic(self) -> bool:
        """True if the spec requests only the basic metrics."""
        return self.settings == config.Evaluation() and not self.tasks

    def carried(self, lists: bool = False) -> list[str]:
        """Return the carried columns that predictions need; `lists`: of the split `rank`."""
        key = self.group if lists else self.user
        columns = self.sliced_by()
        if self.policy is not None and not lists:
            logged = (self.policy.propensity, self.policy.reward)
            columns += [self.schema.carried_name(c) for c in logged if c is not None]
        return list(dict.fromkeys([*([] if key is None else [key]), *columns]))

    def sliced_by(self) -> list[str]:
        """Return the carried columns of slices."""
        return [self.schema.carried_name(c) for c in columns_of(self.expressions.values())]

    def ranked_by(self) -> tuple[str | None, str | None]:
        """Return the carried columns `user` and `order_by` of full rankings, by their names in the dataset.

        Raises:
            UserError: `order_by` is not carried, or is not a number.
        """
        ranking = self.settings.full_ranking
        if ranking is None:
            return None, None
        user, order_by = (None if c is None else self.schema.carried_name(c) for c in (ranking.user, ranking.order_by))
        if ranking.order_by is not None:
            check_number(self.schema, ranking.order_by, "train.evaluation.full_ranking.order_by")
        return user, order_by

    def codes(self, lists: bool = False) -> list[str]:
        """Return the features whose codes predictions need."""
        item = [self.item.name] if lists and self.item is not None else []
        action = [self.action.name] if not lists and self.action is not None else []
        return list(dict.fromkeys([*item, *action, *self.seen_features.values()]))


def parse_slice(name: str, text: str, schema: DatasetSchema) -> RowExpression:
    """Parse an expression over carried columns with values of text.

    Raises:
        UserError: a column is not carried, or the expression is not supported.
    """
    prefix = f"train.evaluation.slices.{name}: '{text}'"
    # The parser does not cast a single number column to text, since each real number would be a slice.
    expression = parse_carried(text, schema, "string")
    if expression is None:
        known = ", ".join(carried_types(schema)) or "there are none"
        raise UserError(
            f"{prefix} is no expression over the carried columns ({known}); write a column "
            f"of features.carried, or such as `age < 30`, `case when ... then 'a' else 'b' end` "
            f"(headrace reference: lambda)"
        )
    return expression


def check_number(schema: DatasetSchema, column: str, key: str) -> None:
    """Check that a column of the lake's table is carried, and is not text.

    Args:
        key: key of the spec that names it.

    Raises:
        UserError: the column is not carried, or is text.
    """
    numbers = [c for c, f in schema.carried_columns.items() if f.dtype != "string"]
    if column not in numbers:
        raise UserError(f"{key}: '{column}' is no carried column of numbers; there are: {', '.join(numbers) or 'none'}")


def scalar_feature(schema: DatasetSchema, name: str, key: str) -> Feature:
    """Return a feature of one number or code a row.

    Args:
        key: the key of the spec that names it.

    Raises:
        UserError: there is none of this name, or it is a list or of raw ids.
    """
    features = [*schema.of(Kind.CONTINUOUS), *schema.of(Kind.CATEGORICAL)]
    known = {f.name: f for f in features if not f.is_list and not f.dynamic}
    if name not in known:
        raise UserError(f"{key}: '{name}' is no feature with one value a row; there are: {', '.join(known) or 'none'}")
    return known[name]


def coded_feature(schema: DatasetSchema, name: str, key: str) -> Feature:
    """Return a categorical feature of one code a row.

    Args:
        key: the key of the spec that names it.

    Raises:
        UserError: there is none of this name, or it is a list or of raw ids.
    """
    known = {f.name: f for f in schema.of(Kind.CATEGORICAL) if not f.is_list and not f.dynamic}
    if name not in known:
        raise UserError(
            f"{key}: '{name}' is no categorical feature with one code a row; there are: {', '.join(known) or 'none'}"
        )
    return known[name]


#: Values of the slices of rarer values, and of rows without a value.
OTHER_VALUES, NULL = "(others)", "(null)"
#: Values of a slice by whether a feature's code was in the training rows.
SEEN = ("known", "new")


def slice_values(
    expression: RowExpression, carried: Mapping[str, npt.NDArray[Any]], schema: DatasetSchema
) -> npt.NDArray[np.object_]:
    """Return each row's value: text, `NULL` without one. [n].

    Raises:
        UserError: an overflow or a division by zero.
    """
    texts = evaluate_expression(expression, carried, schema, "train.evaluation.slices")
    values: npt.NDArray[np.object_] = pc.fill_null(texts, NULL).to_numpy(zero_copy_only=False)
    return values


def make_dimension(ranks: Ranks, name: str, values: npt.NDArray[np.object_], most: int) -> tuple[Dimension, I64]:
    """Find the most frequent values over all ranks, and each row's position among them.

    Args:
        values: texts of this rank's rows, [n].
        most: largest number of slices; all further values become one, `OTHER_VALUES`.

    Returns:
        the dimension, with the most frequent value first; and the position of each row's value, int64 [n].
    """
    codes, distinct = pd.factorize(values)
    hashes = hash_ids(np.asarray(distinct, object))
    counts = np.bincount(codes, minlength=len(distinct)).astype(np.int64)
    # Send all counts of a value to one rank, which then knows the most frequent of its values.
    ids, (parts,) = by_id(ranks, hashes, [counts])
    local_ids, id_of = np.unique(ids, return_inverse=True)
    totals = np.bincount(id_of, weights=parts, minlength=len(local_ids)).astype(np.int64)
    best = np.lexsort((local_ids, -totals))[:most]
    gathered = ranks.gather_json([len(local_ids), [[int(totals[i]), int(local_ids[i])] for i in best]])
    # Equally frequent values are ordered by their hashes.
    chosen = [h for _, h in sorted((p for _, pairs in gathered for p in pairs), key=lambda p: (-p[0], p[1]))[:most]]
    known = dict(zip(hashes.tolist(), (str(v) for v in distinct), strict=True))
    texts: dict[int, str] = {}
    for part in ranks.gather_json([[h, known[h]] for h in chosen if h in known]):
        texts |= dict(part)
    names = [texts[h] for h in chosen]
    position = {h: i for i, h in enumerate(chosen)}
    of_value = np.array([position.get(h, len(chosen)) for h in hashes.tolist()], np.int64)
    if sum(n for n, _ in gathered) > len(chosen):
        names.append(OTHER_VALUES)
    return Dimension(name, tuple(names)), of_value[codes] if len(codes) else np.zeros(0, np.int64)


def hash_ids(values: npt.NDArray[Any]) -> I64:
    """Return integers as they are, else a hash of 64 bits, the same on all ranks: [n] -> int64 [n]."""
    if values.dtype.kind in "iub":
        return values.astype(np.int64)
    if not len(values):
        return np.empty(0, np.int64)
    return pd.util.hash_array(values.astype(object), categorize=False).view(np.int64)


def carried_ids(ranks: Ranks, values: npt.NDArray[Any], name: str, schema: DatasetSchema) -> I64:
    """Return `ids_here`, and check that each row has one. Collective.

    Raises:
        UserError: the column has integers, and some rows have none; all ranks raise it.
    """
    ids, nulls = ids_here(values, name, schema)
    check_no_nulls(ranks, nulls, name)
    return ids


def ids_here(values: npt.NDArray[Any], name: str, schema: DatasetSchema) -> tuple[I64, int]:
    """Return `hash_ids` of a carried column, and the number of rows whose integer is missing."""
    (dtype,) = (f.dtype for f in schema.of(Kind.CARRIED) if f.name == name)
    if not dtype.startswith("int"):
        return hash_ids(values), 0
    # NumPy stores such a column as floats on ranks that have a null.
    missing = np.isnan(values.astype(np.float64)) if values.dtype.kind == "f" else np.zeros(len(values), bool)
    return np.where(missing, 0, values).astype(np.int64), int(missing.sum())


def check_no_nulls(ranks: Ranks, nulls: int, name: str) -> None:
    """Raise UserError on all ranks if a rank has rows without a value. Collective."""
    if missing := int(ranks.add_up(np.array(nulls))):
        column = name.removesuffix(CARRIED_SUFFIX)
        raise UserError(
            f"the carried column '{column}' is null in {missing:,} rows, which then belong to nobody: let ingest "
            f"quarantine them (`required: true`), or fill them"
        )
