"""What is the same for all warehouses that load files: staging, its audit by Spark, and what is kept."""

from __future__ import annotations

import logging
import time
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from headrace.config import Spec
from headrace.publish.columns import published_columns
from headrace.publish.files import staging
from headrace.publish.files.staging import StagedFiles
from headrace.publish.target import Check, StagedDay, Target, table_name
from headrace.stage import RunLock
from headrace.storage import Fence, Location
from headrace.workspace import Workspace

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

log = logging.getLogger("headrace.publish")


@dataclass(frozen=True)
class Record:
    """What is recorded of a publication."""

    key: str
    rows: int
    model: str
    source: str
    audit: list[dict[str, Any]]


class FilesTarget(Target):
    """A warehouse that takes a day as Parquet files."""

    def __init__(
        self, spec: Spec, ws: Workspace, kind: str, label: str, address: str, lock: RunLock | None = None
    ) -> None:
        assert spec.score is not None, "config refuses publish without score"
        self.kind, self.label, self.address = kind, label, address
        self.spec, self.ws, self.lock = spec, ws, lock
        self.name = table_name(spec)
        self.user, self.item = spec.score.user.key, spec.score.item.key
        #: (column, Spark's `simpleString`), set by `create`.
        self.columns: list[tuple[str, str]] = []

    @property
    def fence(self) -> Fence | None:
        """What its commits carry; None: there is no lease."""
        return self.lock.fence if self.lock is not None else None

    def check_lease(self) -> None:
        """Right before what carries no token. Raises LeaseLost where another process is at work."""
        if self.lock is not None:
            self.lock.check()

    @property
    @abstractmethod
    def types(self) -> Mapping[str, str]:
        """Spark's `simpleString` of the types that the warehouse takes -> its own."""

    @property
    def staging(self) -> Location:
        """The folder of the pipeline's staged days, which executors write to: below the lake."""
        return self.ws.staging(self.spec.pipeline)

    def create(self, spark_types: Sequence[tuple[str, str]]) -> None:
        self.columns = published_columns(self.user, self.item, spark_types, self.types)
        self.create_table()

    @contextmanager
    def stage(self, df: DataFrame, ds: str, key: str) -> Iterator[StagedDay]:
        from py4j.protocol import Py4JJavaError
        from pyspark.errors import PySparkException

        tick = time.perf_counter()
        # What others have staged is removed.
        self.check_lease()
        published = self.ws.table(self.spec.pipeline, "published"), self.rows_by_day()
        try:
            with staging.staged_files(df, [c for c, _ in self.columns], self.staging, ds, key, published) as staged:
                log.info("staged %s rows in %.1f s", f"{staged.rows:,}", time.perf_counter() - tick)
                yield staged
        except (Py4JJavaError, PySparkException, OSError):
            # A later run has removed the files, maybe.
            self.check_lease()
            raise

    def swap(self, staged: StagedDay, source: str, checks: Sequence[Check]) -> None:
        assert isinstance(staged, StagedFiles), "of stage()"
        record = Record(staged.key, staged.rows, staged.model(), source, [asdict(check) for check in checks])
        self.publish_files(staged, record)

    def keep(self, staged: StagedDay) -> None:
        assert isinstance(staged, StagedFiles), "of stage()"
        staging.keep(staged)

    def kept(self, days: Sequence[str] | None = None) -> list[str]:
        return [str(folder) for folder in staging.kept(self.staging, days)]

    def drop_kept(self, days: Sequence[str] | None = None) -> list[str]:
        return staging.drop_kept(self.staging, days)

    def days(self) -> list[str]:
        return sorted(self.rows_by_day())

    @abstractmethod
    def create_table(self) -> None:
        """Make the table of `columns`, and its current view; add columns that it lacks."""

    @abstractmethod
    def publish_files(self, staged: StagedFiles, record: Record) -> None:
        """Make the files' rows the day's rows, and record it."""

    @abstractmethod
    def rows_by_day(self) -> dict[str, int]:
        """Published day -> rows that were published; empty where there is no table."""
