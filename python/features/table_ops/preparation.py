"""The list `features.prepare` of a spec: its operators checked, one after the other, and run by Spark.

prepared = Preparation.from_spec(spec)
prepared.columns                                # as if table.columns had them
prepared.spark(events, reader, train)           # DataFrame -> DataFrame
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import TYPE_CHECKING

from headrace.config import OpSpec, Spec
from headrace.errors import UserError, nearest
from headrace.features.registry import build
from headrace.features.table_ops import TABLE_OPS
from headrace.features.table_ops.base import (
    DAY,
    External,
    Given,
    TableOp,
    TableSpark,
    TrainRows,
    with_probe,
    with_types,
)
from headrace.features.table_ops.external import Reader
from headrace.features.table_ops.negatives import Negatives
from headrace.features.table_ops.rename import Rename
from headrace.features.types import OpError, declared
from headrace.schema import Column

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


@dataclass(frozen=True)
class Stand:
    """An operator in its place: what arrives at it, and where the spec names it."""

    op: TableOp
    given: Given
    where: str


class Preparation:
    """Table operators in order, checked against the declared columns."""

    def __init__(
        self,
        ops: Sequence[OpSpec],
        columns: Sequence[Column],
        label: str,
        time: str | None,
        knows_train: bool = False,
        where: str = "features.prepare",
    ) -> None:
        """Check everything that can be known without data.

        Raises:
            UserError: an unknown operator or parameter, a column that an operator cannot take, with its place
                `features.prepare[i]`.
        """
        types = {c.name: declared(c) for c in columns}
        if time is not None and (types[time].is_list or types[time].element not in ("timestamp", "date")):
            time = None
        given = Given(types, label, time, knows_train)
        stands: list[Stand] = []
        for i, spec in enumerate(ops):
            at = f"{where}[{i}]"
            op = build(TABLE_OPS, spec.op, spec.params, at, "table operator")
            past = [s.op.name for s in stands if s.op.keys_of()]
            if isinstance(op, Negatives) and past:
                raise UserError(
                    f"{at} (negatives): put it before {', '.join(past)}: they would tell a negative of its "
                    f"positive's past"
                )
            try:
                after = op.columns(given)
                op.external(given)
            except OpError as e:
                raise UserError(f"{at} ({op.name}): {e}") from None
            stands.append(Stand(op, given, at))
            given = with_types(given, after)
        self.stands, self.end = tuple(stands), given

    @staticmethod
    def from_spec(spec: Spec) -> Preparation:
        """The operators of a pipeline. Raises UserError, see `Preparation`."""
        f = spec.features
        return Preparation(f.prepare, spec.table.columns, f.label, spec.table.event_time, f.split.by != "position")

    @property
    def columns(self) -> tuple[Column, ...]:
        """The declared columns as they are after all operators."""
        return tuple(Column(name=n, type=str(t)) for n, t in self.end.types.items())

    @property
    def externals(self) -> tuple[External, ...]:
        """The other tables that are read."""
        found = (s.op.external(s.given) for s in self.stands)
        return tuple(e for e in found if e is not None)

    @property
    def lookback_days(self) -> int:
        """Days before a row that the longest window looks at, rounded up."""
        return max((-(-s.op.lookback() // DAY) for s in self.stands), default=0)

    def keys_behind(self, column: str) -> tuple[str, ...]:
        """The keys by whose past a column (of those at the end) was made; () for one of the row's own."""
        for i in range(len(self.stands) - 1, -1, -1):
            stand = self.stands[i]
            if column in stand.given.types:
                continue
            if isinstance(stand.op, Rename):
                old = next(a for a, b in stand.op.to.items() if b == column)
                return self._some(self.stands[:i]).keys_behind(old)
            before = self._some(self.stands[:i])
            behind = [before.keys_behind(k) or (k,) for k in stand.op.keys_of()]
            return tuple(dict.fromkeys(k for keys in behind for k in keys))
        return ()

    def split(self, serving: bool) -> tuple[Preparation, Preparation]:
        """(the leading operators that treat each row alone, the rest); `serving`: without what is for training."""
        stands = [s for s in self.stands if s.op.serves or not serving]
        leading = next((i for i, s in enumerate(stands) if not s.op.rowwise), len(stands))
        return self._some(stands[:leading]), self._some(stands[leading:])

    def _some(self, stands: Sequence[Stand]) -> Preparation:
        part = object.__new__(Preparation)
        part.stands, part.end = tuple(stands), self.end
        return part

    def spark(
        self,
        frame: DataFrame,
        reader: Reader,
        train: TrainRows | None = None,
        once: Callable[[DataFrame], DataFrame] | None = None,
    ) -> DataFrame:
        """Apply all operators to rows with `_source_file` and `_source_line`.

        The result has the column `__probe` besides: null for events, `negative` for drawn rows.

        Args:
            frame: the events; a column `__probe` marks rows that only ask.
            reader: of external tables.
            train: which rows are of the training range; for `negatives`.
            once: computes a frame once that is used several times.
        """
        from headrace.features.table_ops.spark_windows import without_helpers

        frame = with_probe(frame)
        spark = frame.sparkSession
        for stand in self.stands:
            place = TableSpark(stand.given, lambda table: reader.spark(spark, table), train, once or (lambda x: x))
            frame = stand.op.spark(frame, place)
        return without_helpers(frame)


def prepared_columns(spec: Spec) -> tuple[Column, ...]:
    """The columns that chains, label, split, carried columns and scoring may name.

    Raises:
        UserError: `features.prepare` has faults, or one of those names a column that is not there.
    """
    if not spec.features.prepare:
        return spec.table.columns
    columns = Preparation.from_spec(spec).columns
    names = [c.name for c in columns]
    wanted: dict[str, Sequence[str]] = {"features.carried": spec.features.carried}
    if spec.features.split.column:
        wanted["features.split.column"] = [spec.features.split.column]
    if spec.score:
        for side_name, side in (("user", spec.score.user), ("item", spec.score.item)):
            wanted[f"score.{side_name}"] = [side.key, *side.columns]
        wanted["score.context"] = list(spec.score.context)
    for where, some in wanted.items():
        for column in some:
            if column not in names:
                raise UserError(
                    f"{where}: column '{column}' is neither declared in table.columns nor made by "
                    f"features.prepare{nearest(column, names)}"
                )
    return columns


def train_rows(spec: Spec, first: str, after: str) -> TrainRows | None:
    """The training range for operators that draw from it: days [first, after); None where it is by position."""
    split = spec.features.split
    if split.by == "time":
        return TrainRows(midnight(first), midnight(after))
    return TrainRows(column=split.column) if split.column else None


def midnight(day: str, later: int = 0) -> int:
    """The first microsecond of a day (UTC), or of one `later` days on."""
    at = date.fromisoformat(day) + timedelta(days=later)
    return int(datetime(at.year, at.month, at.day, tzinfo=UTC).timestamp()) * 1_000_000
