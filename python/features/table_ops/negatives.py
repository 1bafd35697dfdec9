"""negatives: for each positive row, rows with other items that the user was not shown."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from headrace.features.table_ops.base import FILE, LINE, QUERY, SparkTableContext, TableOp, TableSchema, refuse
from headrace.features.types import ValueType

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

#: The most places that a draw can fall on. Up to this sum of weights draws are exact; above, every item gets the places
#: that its share of the weights comes to, rounded up or down by where it stands (systematic sampling).
SLOTS = 1 << 20
_WEIGHT_OF_ONE = 64
_MARK = "#negative-"
#: What a negative row's `__query` says.
NEGATIVE = "negative"


class Negatives(TableOp):
    """Adds, for each row with label 1, rows with another item and label 0, for logs that hold positives only.

    Items are drawn from those of the training range with replacement: `uniform`; by `popularity`: their number of
    events there to the power `alpha` (0.75: Mikolov et al., word2vec, 2013); or `in_batch`: positives are dealt into
    batches of about `batch` by the hash of their identity, and a row's draws fall on the items of the training range's
    positives in its batch (Hidasi et al., GRU4Rec, 2016). A draw is refused that

    - is the row's own item,
    - had no event before the row's time: it may not have existed yet,
    - with `exclude_seen`, the row's `user` has clicked (label 1) in the training range, be it later than the row.

    Each wanted row has `tries` draws; where all are refused there is one negative less. Draws are hashes of the row's
    identity, the draw's number and `seed`: a rerun draws the same.

    A negative has the columns of its positive, but for the item, for `item_columns`, which are those of the item's
    newest event before the row's time, and for its identity: the source file with `#negative-N`. It is a query row:
    operators that follow give it what was before, and do not count it. So it comes before them: an operator that looked
    at the past first would have looked at the positive's item. Rows that are scored are not touched.

    Popularity and clicks are statistics of the training range, as vocabularies are. For negatives drawn anew in each
    epoch, by code alone, from the batch or from all, see `train.negatives`.

    Source: He et al., Neural Collaborative Filtering (2017), 4.1; word2vec's unigram distribution.
    """

    name: ClassVar[str] = "negatives"
    first_because: ClassVar[str] = "they would give a negative its positive's past"
    serves: ClassVar[bool] = False

    item: str
    #: Columns that belong to the item.
    item_columns: tuple[str, ...] = ()
    user: str | None = None
    per_positive: int = Field(default=4, ge=1, le=100)
    method: Literal["uniform", "popularity", "in_batch"] = "uniform"
    alpha: float = 0.75
    #: in_batch: positives a batch.
    batch: int = Field(default=4096, ge=2, le=1 << 20)
    exclude_seen: bool = False
    tries: int = Field(default=4, ge=1, le=100)
    seed: int = 0

    @field_validator("alpha")
    @classmethod
    def _quarters(cls, alpha: float) -> float:
        if alpha not in (0.25, 0.5, 0.75, 1.0):
            raise ValueError("must be 0.25, 0.5, 0.75 or 1: roots are the same on every machine, other powers are not")
        return alpha

    @model_validator(mode="after")
    def _user_given(self) -> Negatives:
        if self.exclude_seen and self.user is None:
            raise ValueError("exclude_seen needs `user`: the column that says who has seen it")
        if self.item in self.item_columns:
            raise ValueError(f"item_columns: '{self.item}' is the item itself")
        return self

    def columns(self, schema: TableSchema) -> dict[str, ValueType]:
        schema.needs_time()
        refuse(not schema.knows_train, "draws from the training range: features.split.by must be time or column")
        schema.key(self.item, ("string", "int", "bigint"))
        if self.user is not None:
            schema.key(self.user)
        for column in self.item_columns:
            schema.type_of(column)
            refuse(column in (schema.label, schema.time, self.user), f"item_columns: '{column}' is not of the item")
        label = schema.type_of(schema.label)
        refuse(label.is_list or not label.is_number, f"the label '{schema.label}' is {label}, not a number")
        return dict(schema.types)

    @property
    def _draws(self) -> int:
        return self.per_positive * self.tries

    def spark(self, frame: DataFrame, context: SparkTableContext) -> DataFrame:
        from pyspark.sql import Window
        from pyspark.sql import functions as F

        from headrace.features.functions.spark_expressions import col
        from headrace.features.table_ops.spark_windows import (
            EVENT_MICROS,
            VERSION,
            is_event,
            newest_version,
            with_time,
            without_helpers,
        )

        schema, train = context.schema, context.train
        assert train is not None
        frame = context.materialize(without_helpers(frame))
        columns, item = frame.columns, col(self.item)
        events = with_time(frame, context, [self.item]).where(is_event([self.item]))
        positive = col(schema.label).cast("double") == 1.0
        if train.column is not None:
            inside = col(train.column).cast("string") == "train"
        else:
            inside = (F.col(EVENT_MICROS) >= F.lit(train.start)) & (F.col(EVENT_MICROS) < F.lit(train.end))
        trained = events.where(inside)

        draws = events.where(positive)
        if self.method == "in_batch":
            slots, draws = spark_batches(trained.where(positive), draws, item, self.batch, self.seed)
            since = trained.groupBy(item.alias("__item")).agg(F.min(EVENT_MICROS).alias("__since"))
            slots = slots.join(since, "__item")
        else:
            slots, size = self._by_weight(trained)
            draws = draws.crossJoin(F.broadcast(size))

        draws = draws.withColumn("__j", F.explode(F.sequence(F.lit(0), F.lit(self._draws - 1))))
        name = F.concat(
            F.col(FILE),
            F.lit(":"),
            F.col(LINE).cast("string"),
            F.lit(":"),
            F.col("__j").cast("string"),
            F.lit(f":{self.seed}"),
        )
        draws = draws.withColumn("__slot", F.pmod(F.xxhash64(name), F.col("__size")))
        drawn = draws.join(slots, ["__b", "__slot"] if self.method == "in_batch" else ["__slot"])
        drawn = drawn.where((F.col("__item") != item) & (F.col("__since") < F.col(EVENT_MICROS)))
        if self.exclude_seen:
            assert self.user is not None
            seen = trained.where(positive & col(self.user).isNotNull())
            seen = seen.select(col(self.user).alias("__u"), item.alias("__i")).distinct()
            drawn = drawn.join(seen, (col(self.user) == F.col("__u")) & (F.col("__item") == F.col("__i")), "left_anti")
        number = F.row_number().over(Window.partitionBy(FILE, LINE).orderBy("__j"))
        drawn = drawn.withColumn("__n", number).where(F.col("__n") <= self.per_positive)
        changed = {
            self.item: F.col("__item"),
            schema.label: F.lit(0).cast(schema.types[schema.label].element),
            FILE: F.concat(F.col(FILE), F.lit(_MARK), F.col("__n").cast("string")),
            QUERY: F.lit(NEGATIVE),
        }
        negatives = drawn.select(*[changed.get(c, col(c)).alias(c) for c in columns])
        if self.item_columns:
            versions = events.select(item, EVENT_MICROS, FILE, LINE, *[col(c) for c in self.item_columns])
            negatives = newest_version(negatives, context, [self.item], versions, self.item_columns, inclusive=False)
            then = {c: F.col(VERSION)[str(i)] for i, c in enumerate(self.item_columns)}
            negatives = negatives.select(*[then.get(c, col(c)).alias(c) for c in columns])
        return frame.unionByName(negatives)

    def _by_weight(self, trained: DataFrame) -> tuple[DataFrame, DataFrame]:
        """(__slot, __item, __since): an item stands at as many slots as its weight says; their number, __size."""
        from pyspark.sql import Window
        from pyspark.sql import functions as F

        from headrace.features.functions.spark_expressions import col
        from headrace.features.table_ops.spark_windows import EVENT_MICROS, running

        weights = trained.groupBy(col(self.item).alias("__item")).agg(
            self._weight(F.count(F.lit(1))).alias("__w"),
            F.min(EVENT_MICROS).alias("__since"),
            F.min(F.lit(0)).alias("__all"),
        )
        # One row an item: a small table in one partition.
        everything = Window.partitionBy("__all")
        order = everything.orderBy(
            F.xxhash64(F.concat(F.col("__item").cast("string"), F.lit(f":{self.seed}"))), "__item"
        )
        slots = weights.select(
            "__item",
            "__since",
            F.col("__w"),
            F.sum("__w").over(running(order)).alias("__to"),
            F.sum("__w").over(everything).alias("__total"),
        ).withColumn("__size", F.least(F.col("__total"), F.lit(SLOTS).cast("bigint")))
        slots = slots.select(
            "__item",
            "__since",
            _slot(F.col("__to") - F.col("__w"), F.col("__size"), F.col("__total")).alias("__lo"),
            (_slot(F.col("__to"), F.col("__size"), F.col("__total")) - 1).alias("__hi"),
        ).where("__lo <= __hi")
        slots = slots.select("__item", "__since", F.explode(F.sequence("__lo", "__hi")).alias("__slot"))
        size = weights.agg(F.least(F.sum("__w"), F.lit(SLOTS).cast("bigint")).alias("__size"))
        return slots, size

    def _weight(self, count: Column) -> Column:
        """Return an integer weight by square roots alone, which are exact to the last bit everywhere, as pow is not."""
        from pyspark.sql import functions as F

        if self.method == "uniform":
            return F.when(count > 0, F.lit(1)).otherwise(F.lit(0)).cast("bigint")
        c = count.cast("double")
        power = {1.0: c, 0.5: F.sqrt(c), 0.25: F.sqrt(F.sqrt(c)), 0.75: F.sqrt(c) * F.sqrt(F.sqrt(c))}[self.alpha]
        return F.rint(power * F.lit(float(_WEIGHT_OF_ONE))).cast("bigint")


def _slot(weight: Column, size: Column, total: Column) -> Column:
    """Return the first place s of `size` whose middle, (s + 1/2) * total / size, is not below `weight`."""
    from pyspark.sql import functions as F

    a, b = weight * size * 2 - total, total * 2
    # Not negative, so that the quotient's floor is its truncation.
    return F.call_function("div", a + b - 1, b)


def spark_batches(pool: DataFrame, draws: DataFrame, item: Column, rows: int, seed: int) -> tuple[DataFrame, DataFrame]:
    """Return the pool's items by batch and place, and the draws of the batches that are not empty.

    Args:
        pool: positives of the training range, with META.
        draws: rows of positives, with META.
        item: the item's column of both.
        rows: positives a batch, about.

    Returns:
        (__b, __slot, __item), slots 0 .. __size - 1 of each batch __b; the draws with __b and __size.
    """
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    name = F.concat(F.col(FILE), F.lit(":"), F.col(LINE).cast("string"), F.lit(_salt(seed)))
    batch = F.pmod(F.xxhash64(name), F.col("__batches")).alias("__b")
    number = F.call_function("div", F.count(F.lit(1)) + F.lit(rows - 1).cast("bigint"), F.lit(rows).cast("bigint"))
    batches = pool.agg(F.greatest(number, F.lit(1).cast("bigint")).alias("__batches"))
    dealt = pool.crossJoin(F.broadcast(batches)).select(item.alias("__item"), batch, FILE, LINE)
    place = F.row_number().over(Window.partitionBy("__b").orderBy(FILE, LINE)) - 1
    slots = dealt.select("__b", place.cast("bigint").alias("__slot"), "__item")
    sizes = dealt.groupBy("__b").agg(F.count(F.lit(1)).alias("__size"))
    draws = draws.crossJoin(F.broadcast(batches)).select("*", batch).join(sizes, "__b")
    return slots, draws


def _salt(seed: int) -> str:
    """So that a row's batch says nothing of its draws."""
    return f":batch:{seed}"
