"""The split of each user's last events, as a table operator: a column that `features.split` names."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field, model_validator

from headrace.features.table_ops.base import FILE, LINE, QUERY, SparkTableContext, TableOp, TableSchema, refuse
from headrace.features.types import ValueType

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

#: Helper columns: the position of a row among its user's events, the newest first; the number of these events; and a
#: key that spreads the other rows over the partitions.
_POSITION, _EVENTS, _SPREAD_KEY = "__position", "__events", "__spread_key"


class LastEvents(TableOp):
    """Adds a column with the split of each row: each user's last events are held out; all other rows train.

        prepare: [{last_events: {user: user_id}}]
        split: {by: column, column: split}

    A user's newest `test` events are in the split `test`, the `rank` events before them in `rank`, and the `valid`
    events before those in `valid`. Events are ordered by time (with `table.event_time`), then by the columns of
    `order`, then by source file and line. A user with no more events than are held out has all of them in `train`.
    Rows without a user or a time, and query rows, are in `train`. Labels do not matter.

    The operator does not apply to rows that are scored: lists are made for all users, and `score.exclude_seen` leaves
    out the items that they have seen, in any split.

    Input: a user string, int, bigint, boolean or date; columns of `order` are single values. Source: the leave-one-out
    split of He et al., Neural Collaborative Filtering (2017), and of Kang and McAuley, SASRec (2018).
    """

    name: ClassVar[str] = "last_events"
    serves: ClassVar[bool] = False

    #: The column of users.
    user: str
    #: Events of each user in the split `valid`.
    valid: int = Field(default=1, ge=0, le=1_000)
    #: Events of each user in the split `rank`, whose lists are measured (`train.rank_group`); newer than those of
    #: `valid`.
    rank: int = Field(default=0, ge=0, le=1_000)
    #: Events of each user in the split `test`, which is evaluated once, at the end; the newest ones.
    test: int = Field(default=0, ge=0, le=1_000)
    #: Columns that order the events of one time, such as a time of day beside a date.
    order: tuple[str, ...] = ()
    #: The column that is added.
    to: str = "split"

    @model_validator(mode="after")
    def _holds_something_out(self) -> LastEvents:
        if not self.held_out:
            raise ValueError("valid, rank and test are all 0: nothing would be held out")
        return self

    @property
    def held_out(self) -> int:
        """Return the number of events of a user that do not train."""
        return self.valid + self.rank + self.test

    def columns(self, schema: TableSchema) -> dict[str, ValueType]:
        schema.key(self.user)
        refuse(self.user == schema.label, f"user: '{self.user}' is the label")
        for column in self.order:
            type_ = schema.type_of(column)
            refuse(type_.is_list, f"order: column '{column}' is {type_}, not a single value")
        return schema.adding({self.to: ValueType("string")})

    def spark(self, frame: DataFrame, context: SparkTableContext) -> DataFrame:
        from pyspark.sql import Window
        from pyspark.sql import functions as F

        from headrace.features.functions.spark_expressions import col
        from headrace.features.functions.timestamps import spark_micros

        schema = context.schema
        is_event = F.col(QUERY).isNull() & col(self.user).isNotNull()
        newest_first = [*(col(c).desc_nulls_last() for c in self.order), F.desc(FILE), F.desc(LINE)]
        if schema.time is not None:
            micros = spark_micros(col(schema.time), schema.types[schema.time])
            is_event &= micros.isNotNull()
            newest_first = [micros.desc(), *newest_first]
        # Without this key all rows without a user would meet in one partition.
        frame = frame.withColumn(_SPREAD_KEY, F.when(~is_event, F.xxhash64(FILE, LINE)))
        of_user = Window.partitionBy(col(self.user), F.col(_SPREAD_KEY))
        frame = frame.withColumns(
            {_POSITION: F.row_number().over(of_user.orderBy(*newest_first)), _EVENTS: F.count(F.lit(1)).over(of_user)}
        )
        position = F.col(_POSITION)
        split = (
            F.when(F.col(_SPREAD_KEY).isNotNull() | (F.col(_EVENTS) <= self.held_out), "train")
            .when(position <= self.test, "test")
            .when(position <= self.test + self.rank, "rank")
            .when(position <= self.held_out, "valid")
            .otherwise("train")
        )
        return frame.withColumn(self.to, split).drop(_SPREAD_KEY, _POSITION, _EVENTS)
