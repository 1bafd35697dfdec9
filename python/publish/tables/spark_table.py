"""What Delta and Iceberg tables have in common: Spark writes a day as one commit, and a copy of the newest day."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from headrace.config import Spec
from headrace.errors import UserError
from headrace.publish.files.staging import StagedFiles
from headrace.publish.files.target import FilesTarget, Record
from headrace.publish.tables.records import Records
from headrace.publish.target import Key, Publication
from headrace.stage import RunLock
from headrace.storage import Location
from headrace.workspace import Workspace

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

#: The columns of a table that a run has claimed before its first day.
CLAIMED = ["ds"]
#: What the formats take, by the names that both have for them.
TYPES = {name: name for name in ("bigint", "int", "string", "float", "double", "boolean", "date", "timestamp")} | {
    "smallint": "int",
    "tinyint": "int",
}


class SparkTableTarget(FilesTarget):
    """A table that Spark writes, `<table>`, and `<table>_current` with the rows of the newest day."""

    def __init__(
        self,
        spec: Spec,
        ws: Workspace,
        kind: str,
        label: str,
        address: str,
        records: Location,
        lock: RunLock | None = None,
    ) -> None:
        super().__init__(spec, ws, kind, label, address, lock)
        self.records = Records(records, self.fence)

    @property
    def types(self) -> Mapping[str, str]:
        return TYPES

    def publish_files(self, staged: StagedFiles, record: Record) -> None:
        from pyspark.sql import functions as F

        kinds = {c: "date" if c == "ds" else self.types[t] for c, t in self.columns}
        rows = staged.frame().select(*[F.col(staged.quote(c)).cast(t).alias(c) for c, t in kinds.items()])
        rows = rows.sortWithinPartitions(staged.quote(self.user), "rank")
        self.write_day(rows, staged.ds, staged.key)
        # The table first: its newest day is then at least as new as the copy's.
        if staged.ds >= max(self.rows_by_day(), default=staged.ds):
            self.write_current(rows, staged.key)
        self.check_lease()
        self.records.save(staged.ds, record)

    def published(self, ds: str) -> Publication | None:
        return self.records.published(ds)

    def rows_by_day(self) -> dict[str, int]:
        return self.records.rows_by_day()

    @contextmanager
    def erasing(self, column: str, keys: Sequence[Key]) -> Iterator[None]:
        """Around the removal of such rows: afterwards the days' records say how many rows are left.

        Until then a record says what was published, and that its day's rows change. So it is right where the table's
        commit is refused; where a process is killed after that commit the same call, made again, sets it right.
        """
        begun = set(self.records.changing())
        # A day that a killed run has not recorded is erased as well.
        found = set(self.rows_with(column, keys)) & set(self.days())
        self.records.begin_change(sorted(found - begun))
        yield
        self.records.set_rows({ds: self.count(ds) for ds in sorted(found | begun)})

    def grant(self, grants: Mapping[str, Sequence[str]]) -> None:
        if grants:
            raise UserError(f"publish.grants: a table of files ({self.kind}) has no roles: give them to its storage")

    @abstractmethod
    def write_day(self, rows: DataFrame, ds: str, key: str) -> None:
        """Replace the day's rows by one commit."""

    @abstractmethod
    def write_current(self, rows: DataFrame, key: str) -> None:
        """Replace the copy of the newest day by one commit."""
