"""Ids that are changed as rows are read: negatives drawn anew in every epoch, ids trained as out of vocabulary.

Negatives are for logs that hold positives only. He et al., Neural Collaborative Filtering (2017), section 4.1: for each
observed interaction, a few copies with another item drawn uniformly, label 0. A drawn value may be one the user has
seen elsewhere: where logs are sparse that is rare, and knowing it needs the split's pairs in every rank
(`exclude_seen`).

Unknown ids are `train.unknown_rate`. Where the vocabulary is made of the training rows themselves, the vector of what
is out of vocabulary is hardly ever looked up in training, and the other features are hardly ever asked about a row
whose id says nothing. Taking the id from some rows teaches both (Volkovs, Yu and Poutanen, "DropoutNet: Addressing Cold
Start in Recommender Systems", 2017).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq

from headrace import config
from headrace.config.schema import FIRST_CODE, NULL_CODE, OOV_CODE, DatasetSchema, Feature, Kind
from headrace.dataset.layout import RowGroup, SplitLayout
from headrace.dataset.native import OutputColumns
from headrace.errors import UserError, nearest

#: Most attempts to redraw an item that the user has seen: of a user who has seen half of all items, 0.1 % remain.
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
    def from_config(
        schema: DatasetSchema, negatives: config.Negatives | None, layout: SplitLayout | None = None
    ) -> NegativeSampler | None:
        """Return the plan for a dataset; None where none are asked for.

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
        leaking = [f.name for f in fed if f.name != feature.name and not set(f.sources).isdisjoint(feature.sources)]
        if leaking:
            raise UserError(
                f"train.negatives.column: {', '.join(leaking)} is made of {', '.join(feature.sources)} too and would "
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
        """Return rows that each row [N] becomes, itself included: [N]."""
        return np.where(labels > 0, 1 + self.per_positive, 1).astype(np.int64)

    def draw(
        self, codes: npt.NDArray[np.int64], generator: np.random.Generator, users: npt.NDArray[np.int64] | None = None
    ) -> npt.NDArray[np.int64]:
        """Draw `per_positive` others for each of N codes, uniform over [first, cardinality): [N, per_positive].

        With `seen`, items that the user beside the code, [N], has seen are redrawn a few times.

        A null or out-of-vocabulary code (below `first`) has all known codes as its others. In the batch: uniform over
        the known ones of the N codes, as often as they are there (sampled softmax's in-batch negatives: Yi et al.,
        "Sampling-Bias-Corrected Neural Modeling for Large Corpus Item Recommendations", 2019); where the draw is the
        code itself, another one of all. Of raw ids: uniform over those of the N that are another id; null where there
        are none.
        """
        if self.raw:
            return self._draw_raw(codes, generator)
        drawn = self._draw(codes, generator)
        if self.seen is None:
            return drawn
        assert users is not None
        for _ in range(_TRIES):
            row, place = np.nonzero(
                self.seen.has(np.repeat(users, self.per_positive), drawn.ravel()).reshape(drawn.shape)
            )
            if not len(row):
                break
            drawn[row, place] = replace(self, per_positive=1)._draw(codes[row], generator)[:, 0]
        return drawn

    def _draw(self, codes: npt.NDArray[np.int64], generator: np.random.Generator) -> npt.NDArray[np.int64]:
        known = codes[:, None] >= self.first
        drawn = generator.integers(self.first, self.cardinality - known, size=(len(codes), self.per_positive))
        drawn = drawn + (known & (drawn >= codes[:, None]))
        pool = codes[codes >= self.first]
        if self.in_batch and len(pool):
            in_batch = pool[generator.integers(0, len(pool), size=drawn.shape)]
            drawn = np.where(in_batch == codes[:, None], drawn, in_batch)
        return drawn

    def _draw_raw(self, codes: npt.NDArray[np.int64], generator: np.random.Generator) -> npt.NDArray[np.int64]:
        pool = np.sort(codes[codes != NULL_CODE])
        first = np.searchsorted(pool, codes)[:, None]
        alike = np.searchsorted(pool, codes, side="right")[:, None] - first
        different = len(pool) - alike
        place = generator.integers(0, np.maximum(different, 1), size=(len(codes), self.per_positive))
        place += np.where(place >= first, alike, 0)  # past the row's own
        drawn = np.append(pool, NULL_CODE)[np.minimum(place, len(pool))]
        return np.where(different > 0, drawn, NULL_CODE)


def drawn_column(schema: DatasetSchema, negatives: config.Negatives) -> tuple[Feature, int]:
    """Return the feature whose values are drawn, and its place among a batch's codes.

    Raises:
        UserError: it is not a scalar categorical feature, or has no other code to draw, or has raw ids, which come from
            the batch alone.
    """
    scalars = {f.name: f for f in schema.of(Kind.CATEGORICAL) if not f.is_list}
    feature = scalars.get(negatives.column)
    if feature is None:
        raise UserError(
            f"train.negatives.column: '{negatives.column}' is not a categorical feature with one value "
            f"a row (there are: {', '.join(scalars) or 'none'})"
        )
    if feature.dynamic and negatives.method != "in_batch":
        raise UserError(
            f"train.negatives.column: '{negatives.column}' has raw ids, and so no vocabulary to draw another one "
            f"from: set train.negatives.method to in_batch, give it codes (categorify), or draw rows with "
            f"`negatives` in features.prepare"
        )
    known = max((feature.cardinality or 0) - feature.first_code, 0)
    if not feature.dynamic and known < 2:
        raise UserError(
            f"train.negatives.column: '{negatives.column}' has {known} known values; drawing another one needs 2"
        )
    return feature, list(scalars).index(feature.name)


def _user_column(schema: DatasetSchema, name: str, item: Feature) -> int:
    """Return the place of the user's codes among a batch's."""
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
    """Return rows that each row group gives with its negatives; reads the label column alone, and only with a plan."""
    if plan is None:
        return tuple(g.rows for g in groups)
    label = schema.label.name
    sizes = []
    for g in groups:
        with pq.ParquetFile(g.path) as file:
            labels = file.read_row_group(g.index, columns=[label]).column(label).to_numpy()
        sizes.append(int(plan.copies(labels).sum()))
    return tuple(sizes)


I64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class SeenPairs:
    """Pairs (user, item) of codes.

    keys: user * items + item, ascending, each once: int64 [pairs].
    items: codes of items.
    """

    keys: I64
    items: int

    @staticmethod
    def read(groups: Sequence[RowGroup], user: str, item: str, label: str, items: int) -> SeenPairs:
        """Read the pairs of the rows with a positive label; reads these three columns.

        Args:
            groups: the split's row groups.
            user: column of codes.
            item: column of codes.
            label: its column.
            items: codes of items.
        """
        keys_of_groups = []
        for g in groups:
            with pq.ParquetFile(g.path) as file:
                columns = file.read_row_group(g.index, columns=[user, item, label])
            positive = columns.column(label).to_numpy() > 0
            users, chosen = (columns.column(c).to_numpy().astype(np.int64)[positive] for c in (user, item))
            keys_of_groups.append(np.unique(users * items + chosen))
        return SeenPairs(np.unique(np.concatenate(keys_of_groups)) if keys_of_groups else np.empty(0, np.int64), items)

    def has(self, users: I64, items: I64) -> npt.NDArray[np.bool_]:
        """Return whether a user [N] has seen the item beside it [N]."""
        keys = users * self.items + items
        place = np.searchsorted(self.keys, keys)
        is_seen: npt.NDArray[np.bool_] = np.append(self.keys, -1)[place] == keys
        return is_seen


@dataclass(frozen=True)
class UnknownIds:
    """A column of a batch's `codes` where the share `rate` of the known ids, codes from `first` on, becomes unknown."""

    column: int
    rate: float
    first: int

    @staticmethod
    def from_rates(schema: DatasetSchema, rates: Mapping[str, float]) -> tuple[UnknownIds, ...]:
        """Return the plan for a dataset, in the schema's order.

        Args:
            schema: the dataset's.
            rates: `train.unknown_rate`.

        Raises:
            UserError: a name is not that of a categorical feature of codes with one value a row.
        """
        scalars = [f for f in schema.of(Kind.CATEGORICAL) if not f.is_list]
        names = [f.name for f in scalars if not f.dynamic]
        for name in rates:
            if name not in names:
                raise UserError(
                    f"train.unknown_rate: '{name}' is no categorical feature of codes with one value a row"
                    f"{nearest(name, names)}; there are: {', '.join(names) or 'none'}"
                )
        return tuple(UnknownIds(i, rates[f.name], f.first_code) for i, f in enumerate(scalars) if f.name in rates)

    def write(self, generator: np.random.Generator, rows: int, skip: int, codes: OutputColumns) -> None:
        """Give the codes of out-of-vocabulary buckets, any as likely as the others, to the rows that are drawn.

        Args:
            generator: of the row group in the epoch.
            rows: of the row group, those passed over included: a run that goes on draws the same.
            skip: rows that are passed over.
            codes: what is written to, int64 [S, n] a part, in all `rows` - `skip` rows.
        """
        is_drawn = generator.random(rows, np.float32) < self.rate
        buckets = generator.integers(OOV_CODE, self.first, rows)
        row = skip
        for part in codes.views:
            column = part[self.column]
            place = slice(row, row + len(column))
            is_replaced = is_drawn[place] & (column >= self.first)
            column[is_replaced] = buckets[place][is_replaced]
            row = place.stop
