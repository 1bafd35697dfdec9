"""Negatives drawn anew in every epoch, for logs that hold positives only.

He et al., Neural Collaborative Filtering (2017), section 4.1: for each observed interaction, a few copies with another
item drawn uniformly, label 0. A drawn value may be one the user has seen elsewhere: where logs are sparse that is rare,
and knowing it needs the split's pairs in every rank (`exclude_seen`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq

from headrace import config
from headrace.dataset.loader.seen_pairs import SeenPairs
from headrace.dataset.parquet.layout import RowGroup, SplitLayout
from headrace.errors import UserError
from headrace.schema import FIRST_CODE, NULL_CODE, DatasetSchema, Feature, Kind

#: Draws that a user has seen are made again so often: a user who has seen half of all keeps 0.1 % of them.
_TRIES = 10


@dataclass(frozen=True)
class NegativeSampler:
    """`per_positive` copies of each positive row, with another code in column `column` of a batch's `codes`."""

    column: int
    cardinality: int
    per_positive: int
    #: The first code that is a known value's.
    first: int = FIRST_CODE
    #: Draw from the codes that are given, not from all.
    in_batch: bool = False
    #: The column holds raw ids: any integers (0 is null), of which only those that are given are known.
    raw: bool = False
    #: The user's column in `codes`, and what is not drawn for a user.
    user: int | None = None
    seen: SeenPairs | None = None

    @staticmethod
    def of(
        schema: DatasetSchema, negatives: config.Negatives | None, layout: SplitLayout | None = None
    ) -> NegativeSampler | None:
        """The plan for a dataset; None where none are asked for.

        Args:
            schema: the dataset's.
            negatives: `train.negatives`.
            layout: the split, whose pairs are read for `exclude_seen`; None: to check the settings alone.

        Raises:
            UserError: the column is not a scalar categorical feature, or has no other code to draw, or has raw ids,
                which come from the batch alone; or the user's column is none of codes.
        """
        if negatives is None or negatives.form != "rows":
            return None
        feature, column = drawn_column(schema, negatives)
        fed = (*schema.of(Kind.CONTINUOUS), *schema.of(Kind.CATEGORICAL))
        kept = [f.name for f in fed if f.name != feature.name and not set(f.sources).isdisjoint(feature.sources)]
        if kept:
            raise UserError(
                f"train.negatives.column: {', '.join(kept)} is made of {', '.join(feature.sources)} too and would "
                f"keep the positive's value; leave it out, or draw rows with `negatives` in features.prepare"
            )
        cardinality = feature.cardinality or 0
        user, seen = None, None
        if negatives.exclude_seen is not None:
            user = _user_column(schema, negatives.exclude_seen, feature)
            if layout is not None:
                columns = (negatives.exclude_seen, feature.name, schema.label.name)
                seen = SeenPairs.read(layout.row_groups, *columns, items=cardinality)
        if feature.dynamic:
            return NegativeSampler(column, 0, negatives.per_positive, in_batch=True, raw=True)
        in_batch = negatives.method == "in_batch"
        return NegativeSampler(
            column, cardinality, negatives.per_positive, feature.first_code, in_batch=in_batch, user=user, seen=seen
        )

    def copies(self, labels: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
        """Rows that each row [N] becomes, itself included: [N]."""
        return np.where(labels > 0, 1 + self.per_positive, 1).astype(np.int64)

    def draw(
        self, own: npt.NDArray[np.int64], generator: np.random.Generator, users: npt.NDArray[np.int64] | None = None
    ) -> npt.NDArray[np.int64]:
        """For each of N codes, `per_positive` others, uniform over [first, cardinality): [N, per_positive].

        With `seen` none that the user beside it, [N], has seen, where a few draws find one.

        A null or out-of-vocabulary code (below `first`) has all known codes as its others. In the batch: uniform over
        the known ones of the N codes, as often as they are there (sampled softmax's in-batch negatives: Yi et al.,
        "Sampling-Bias-Corrected Neural Modeling for Large Corpus Item Recommendations", 2019); where the draw is the
        code itself, another one of all. Of raw ids: uniform over those of the N that are another id; null where there
        are none.
        """
        if self.raw:
            return self._draw_raw(own, generator)
        drawn = self._draw(own, generator)
        if self.seen is None:
            return drawn
        assert users is not None
        for _ in range(_TRIES):
            row, place = np.nonzero(
                self.seen.has(np.repeat(users, self.per_positive), drawn.ravel()).reshape(drawn.shape)
            )
            if not len(row):
                break
            drawn[row, place] = replace(self, per_positive=1)._draw(own[row], generator)[:, 0]
        return drawn

    def _draw(self, own: npt.NDArray[np.int64], generator: np.random.Generator) -> npt.NDArray[np.int64]:
        known = own[:, None] >= self.first
        drawn = generator.integers(self.first, self.cardinality - known, size=(len(own), self.per_positive))
        drawn = drawn + (known & (drawn >= own[:, None]))
        pool = own[own >= self.first]
        if self.in_batch and len(pool):
            others = pool[generator.integers(0, len(pool), size=drawn.shape)]
            drawn = np.where(others == own[:, None], drawn, others)
        return drawn

    def _draw_raw(self, own: npt.NDArray[np.int64], generator: np.random.Generator) -> npt.NDArray[np.int64]:
        pool = np.sort(own[own != NULL_CODE])
        first = np.searchsorted(pool, own)[:, None]
        alike = np.searchsorted(pool, own, side="right")[:, None] - first
        others = len(pool) - alike
        place = generator.integers(0, np.maximum(others, 1), size=(len(own), self.per_positive))
        place += np.where(place >= first, alike, 0)  # past the row's own
        drawn = np.append(pool, NULL_CODE)[np.minimum(place, len(pool))]
        return np.where(others > 0, drawn, NULL_CODE)


def drawn_column(schema: DatasetSchema, negatives: config.Negatives) -> tuple[Feature, int]:
    """The feature whose values are drawn, and its place among a batch's codes.

    Raises:
        UserError: it is not a scalar categorical feature, or has no other code to draw, or has raw ids, which come from
            the batch alone.
    """
    scalars = {f.name: f for f in schema.of(Kind.CATEGORICAL) if not f.is_list}
    found = scalars.get(negatives.column)
    if found is None:
        raise UserError(
            f"train.negatives.column: '{negatives.column}' is not a categorical feature with one value "
            f"a row (there are: {', '.join(scalars) or 'none'})"
        )
    if found.dynamic and negatives.method != "in_batch":
        raise UserError(
            f"train.negatives.column: '{negatives.column}' has raw ids, and so no vocabulary to draw another one "
            f"from: set train.negatives.method to in_batch, give it codes (categorify), or draw rows with "
            f"`negatives` in features.prepare"
        )
    known = max((found.cardinality or 0) - found.first_code, 0)
    if not found.dynamic and known < 2:
        raise UserError(
            f"train.negatives.column: '{negatives.column}' has {known} known values; drawing another one needs 2"
        )
    return found, list(scalars).index(found.name)


def _user_column(schema: DatasetSchema, name: str, item: Feature) -> int:
    """The place of the user's codes among a batch's."""
    scalars = [f for f in schema.of(Kind.CATEGORICAL) if not f.is_list]
    codes = {f.name for f in scalars if not f.dynamic and f.name != item.name}
    if item.dynamic or name not in codes:
        raise UserError(
            f"train.negatives.exclude_seen: '{name}' is no categorical feature of codes with one value a row beside "
            f"'{item.name}'{' (which has raw ids)' if item.dynamic else ''}; there are: "
            f"{', '.join(sorted(codes)) or 'none'}"
        )
    return [f.name for f in scalars].index(name)


def expanded_sizes(groups: Sequence[RowGroup], schema: DatasetSchema, plan: NegativeSampler | None) -> tuple[int, ...]:
    """Rows that each row group gives with its negatives; reads the label column alone, and only with a plan."""
    if plan is None:
        return tuple(g.rows for g in groups)
    label = schema.label.name
    sizes = []
    for g in groups:
        with pq.ParquetFile(g.path) as file:
            labels = file.read_row_group(g.index, columns=[label]).column(label).to_numpy()
        sizes.append(int(plan.copies(labels).sum()))
    return tuple(sizes)
