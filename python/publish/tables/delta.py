"""A Delta table as the warehouse: a day is one commit that replaces its partition."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.config import Spec
from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.lake.delta.erase import Change, erase
from headrace.lake.delta.log import DeltaLog, file_path
from headrace.lake.delta.log_files import replaced, replacements
from headrace.lake.delta.redact import Values, exactly, redact_log
from headrace.lake.delta.transaction import Transaction, claim, create_table
from headrace.lake.delta.with_spark import save_delta
from headrace.publish.tables.spark_table import CLAIMED, SparkTableTarget, first_rows, rows_having, without_keys
from headrace.publish.target import SCORES, Key, Target, table_name
from headrace.stage import RunLock
from headrace.storage import Location, local

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


class DeltaTarget(SparkTableTarget):
    """A folder with a Delta table partitioned by `ds`."""

    def __init__(self, spec: Spec, ws: Workspace, root: Location, lock: RunLock | None = None) -> None:
        name, label = table_name(spec), f"{root / table_name(spec)}"
        super().__init__(spec, ws, "delta_table", label, "files", root / "headrace_publications" / name, lock)
        self.folder, self.current = root / name, root / f"{name}_current"

    def claim(self) -> None:
        if self.fence is None:
            return
        for table in (self.current, self.folder):
            # Before the table exists, too: a paused run may be about to make the first publication.
            if DeltaLog(table).version is not None or not self._make(table):
                claim(table, self.fence)

    def _make(self, table: Location) -> bool:
        """Make a table of the day alone, whose first commit has the token; False where there is one by now."""
        day = {"name": "ds", "type": "date", "nullable": True, "metadata": {}}
        days = ["ds"] if table == self.folder else []
        return create_table(table, [day], days, fence=self.fence, configuration={})

    def create_table(self) -> None:
        log = DeltaLog(self.folder)
        if log.version is None:
            return
        existing = list(log.columns())
        if existing != CLAIMED and (missing := [c for c, _ in self.columns[:SCORES] if c not in existing]):
            raise UserError(f"the Delta table {self.folder} does not fit the scores: it has no {', '.join(missing)}")

    def write_day(self, rows: DataFrame, ds: str, key: str) -> None:
        self.check_lease()
        writer = self._writer(rows, key).option("replaceWhere", f"ds = '{ds}'").option("mergeSchema", "true")
        save_delta(writer.partitionBy("ds"), self.folder, self.fence, rows.schema)

    def write_current(self, rows: DataFrame, key: str) -> None:
        self.check_lease()
        save_delta(self._writer(rows, key).option("overwriteSchema", "true"), self.current, self.fence, rows.schema, ())

    @staticmethod
    def _writer(rows: DataFrame, key: str) -> Any:
        return rows.write.format("delta").mode("overwrite").option("userMetadata", key)

    def count(self, ds: str) -> int:
        import pyarrow.parquet as pq

        return sum(pq.read_metadata(f).num_rows for f in self._files(ds))

    def sample(self, ds: str, rows: int) -> list[dict[str, Any]]:
        log = DeltaLog(self.folder)
        if log.version is None or list(log.columns()) == CLAIMED:
            raise UserError(f"there is no table {self.label} yet")
        return first_rows(self._files(ds), ds, self.user, rows)

    def _files(self, ds: str) -> list[Path]:
        log = DeltaLog(self.folder)
        state = None if log.version is None else log.state(log.version, current=False)
        if state is None:
            return []
        instead = replacements(self.folder)

        def is_gone(path: str) -> bool:
            # A replacement counts only once it is committed, and the commit may have been refused. After a restore of
            # an older version by people, its files are gone.
            return path in instead and not file_path(self.folder, path).is_file()

        adds = [replaced(add, instead) if is_gone(str(add["path"])) else add for add in state.adds]
        files = replace(state, adds=adds).data_files(self.folder)
        return sorted(f.path.local_path() for f in files if f.partition["ds"] == ds)

    def rows_with(self, column: str, keys: Sequence[Key]) -> dict[str, int]:
        return {ds: n for ds in self.days() if (n := rows_having(self._files(ds), column, keys))}

    def leftovers(self, column: str, keys: Sequence[Key]) -> int:
        count = 0
        for table, change, values in self._erasures(column, keys):
            erasure = erase(table, change, "forget", False)
            count += erasure.removed + len(erasure.left) + redact_log(table, values, False)
        return count + len(self.records.changing())

    def _erasures(self, column: str, keys: Sequence[Key]) -> Iterator[tuple[Location, Change, Values]]:
        """Yield for both tables the change of their rows, and the values to remove from their logs."""
        change = Change((column,), partial(without_keys, column, keys))
        for table in (self.current, self.folder):
            yield table, change, {column: exactly(frozenset(map(str, keys)))}

    def erase(self, column: str, keys: Sequence[Key]) -> str:
        left = []
        with self.erasing(column, keys):
            for table, change, values in self._erasures(column, keys):
                left += erase(table, change, "forget", True, self.fence).left
                redact_log(table, values, True, self.check_lease)
        return "; ".join(left)

    def drop_days(self, days: Sequence[str]) -> None:
        if days:
            # Without Spark, since `headrace gc` has no session. The records go last, so that a rerun finds the days.
            Transaction(self.folder, fence=self.fence).replace(
                "ds", days, [], json.dumps({"headrace.publish": {"dropped": list(days)}})
            )
            self.records.forget(days)


@contextmanager
def open_delta(spec: Spec, ws: Workspace, lock: RunLock | None = None) -> Iterator[Target]:
    """See `headrace.publish.opening.open_target`."""
    assert spec.publish is not None
    path = spec.publish.warehouse.path
    yield DeltaTarget(spec, ws, local(path) if path else ws.lake / "warehouse", lock)
