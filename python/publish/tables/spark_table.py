"""Tables of files: records of publications, rows of Parquet files, and days that Spark writes as one commit."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.config import Spec
from headrace.config.workspace import Workspace
from headrace.errors import UserError, known_keys
from headrace.publish.files import FilesTarget, Record, StagedFiles
from headrace.publish.target import Key, Publication
from headrace.stage import RunLock
from headrace.storage import Fence, Location
from headrace.storage.location import put_fenced

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame


#: Key in a record's file: token of the writer, by lease.
_FENCES = "fences"
#: Key in a record's file: its day's rows are changing, and `rows` counts those before the change.
_CHANGES = "changes"
_KEYS = frozenset(f.name for f in fields(Record))


class Records:
    """A folder of `DAY.json`. A day's file is written after its rows: until then the day counts as the run before's.

    With a fence, LeaseLost is raised where a later holder of the lease has written a day's file.
    """

    def __init__(self, folder: Location, fence: Fence | None = None) -> None:
        self._folder, self._fence = folder, fence

    def save(self, ds: str, record: Record) -> None:
        """Record a day."""
        self._put(ds, asdict(record))

    def published(self, ds: str) -> Publication | None:
        """Return the record of a day; None where there is none.

        Raises UserError where a newer release has written it.
        """
        file = self._folder / f"{ds}.json"
        if not file.is_file():
            return None
        record = Record(**known_keys(self._record_of(ds), _KEYS, str(file)))
        return Publication(record.key, record.rows, record.audit)

    def rows_by_day(self) -> dict[str, int]:
        """Day -> rows."""
        return {ds: publication.rows for ds in self._days() if (publication := self.published(ds)) is not None}

    def begin_change(self, days: Iterable[str]) -> None:
        """Note that days' rows change now: `changing` names them until `set_rows` does, also after a kill."""
        for ds in days:
            self._put(ds, {**self._record_of(ds), _CHANGES: True})

    def changing(self) -> list[str]:
        """Return the days of which nobody has said yet how many rows they have after their change."""
        return [ds for ds in self._days() if self._text(ds).get(_CHANGES)]

    def set_rows(self, rows: Mapping[str, int]) -> None:
        """Record the current number of rows of days."""
        for ds, count in rows.items():
            self._put(ds, self._record_of(ds) | {"rows": count})

    def forget(self, days: Sequence[str]) -> None:
        """Remove the records of days."""
        for ds in days:
            (self._folder / f"{ds}.json").remove()

    def _days(self) -> list[str]:
        return sorted(f.stem for f in self._folder.entries() if f.suffix == ".json") if self._folder.is_dir() else []

    def _text(self, ds: str) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((self._folder / f"{ds}.json").read_text())
        return content

    def _record_of(self, ds: str) -> dict[str, Any]:
        """Return the record alone."""
        return {name: value for name, value in self._text(ds).items() if name not in (_FENCES, _CHANGES)}

    def _put(self, ds: str, record: Mapping[str, Any]) -> None:
        fences = () if self._fence is None else (self._fence,)
        content = {**record, **({_FENCES: {f.lease: f.token for f in fences}} if fences else {})}
        text = json.dumps(content, indent=1) + "\n"
        put_fenced(
            self._folder / f"{ds}.json", text, fences, lambda current_text: json.loads(current_text).get(_FENCES, {})
        )


def first_rows(files: Sequence[Path], ds: str, user: str, rows: int) -> list[dict[str, Any]]:
    """Return the first rows of the first file that has any, by key: column -> value, the day first.

    Args:
        files: of the day.
        ds: the day, where the files have no column of it.
        user: name of the user key.
        rows: how many.
    """
    import pyarrow.parquet as pq

    for file in files:
        table = pq.ParquetFile(file).read()
        if table.num_rows:
            records = table.sort_by([(user, "ascending"), ("rank", "ascending")]).slice(0, rows).to_pylist()
            return [{"ds": ds} | row for row in records]
    return []


def rows_having(files: Sequence[Path], column: str, keys: Sequence[Key]) -> int:
    """Count the rows of some files that have one of these keys in a column."""
    import pyarrow.parquet as pq

    return sum(without_keys(column, keys, pq.ParquetFile(file).read([column]))[1] for file in files)


def without_keys(column: str, keys: Sequence[Key], rows: pa.Table) -> tuple[pa.Table, int]:
    """Rows without those that have one of these keys in a column; and how many these were."""
    import pyarrow as pa
    import pyarrow.compute as pc

    values = rows.column(column)
    numbers = pa.types.is_integer(values.type)
    known = pa.array(keys, pa.int64() if numbers else pa.string())
    is_erased = pc.fill_null(pc.is_in(values.cast(known.type), value_set=known), False)
    count = int(pc.sum(is_erased).as_py() or 0)
    return (rows.filter(pc.invert(is_erased)), count) if count else (rows, 0)


#: The columns of a table that a run has claimed before its first day.
CLAIMED = ["ds"]
#: Spark's types -> those that the formats store.
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
        # The table first, so that its newest day is never older than the copy's.
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
        # Rows of a day without a record, of a killed run, are erased but not counted.
        affected = set(self.rows_with(column, keys)) & set(self.days())
        self.records.begin_change(sorted(affected - begun))
        yield
        self.records.set_rows({ds: self.count(ds) for ds in sorted(affected | begun)})

    def grant(self, grants: Mapping[str, Sequence[str]]) -> None:
        if grants:
            raise UserError(f"publish.grants: a table of files ({self.kind}) has no roles: give them to its storage")

    @abstractmethod
    def write_day(self, rows: DataFrame, ds: str, key: str) -> None:
        """Replace the day's rows by one commit."""

    @abstractmethod
    def write_current(self, rows: DataFrame, key: str) -> None:
        """Replace the copy of the newest day by one commit."""
