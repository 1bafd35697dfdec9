"""Snapshots of an Iceberg table that go, with the files that they alone have; killed anywhere, the next call ends it.

Iceberg's own action commits that snapshots are gone and deletes their files afterwards: killed in between, it leaves
files that no metadata name. So their paths are written down before, and this record goes last.

By Iceberg's classes: its SQL procedures need an extension of Spark that a pipeline may be without.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from py4j.java_gateway import is_instance_of
from py4j.protocol import Py4JJavaError

from headrace.lake.spark.errors import store_away
from headrace.redaction import redact
from headrace.storage import Location

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: Paths that are handed to the JVM at once.
_BATCH = 1000
_BULK = "org.apache.iceberg.io.SupportsBulkOperations"


def load_table(spark: SparkSession, name: str) -> Any:
    """Iceberg's `Table` as its catalog has it now, by its quoted name."""
    jvm: Any = spark._jvm
    table = jvm.org.apache.iceberg.spark.Spark3Util.loadIcebergTable(spark._jsparkSession, name)
    table.refresh()
    return table


class SnapshotExpiry:
    """All snapshots of a table but the newest, and those that branches or tags keep."""

    def __init__(self, spark: SparkSession, name: str, record: Location) -> None:
        """
        Args:
            spark: a session with the table's catalog.
            name: the table's, quoted.
            record: a file for the paths of what is to be deleted; there is one only until that is done.
        """
        self._spark, self._name, self._record = spark, name, record

    def pending(self) -> list[str]:
        """Files of snapshots that went, which a process that was killed may have left."""
        recorded = self._recorded()
        return sorted(recorded - self._reachable()) if recorded else []

    def run(self) -> str:
        """Let them go.

        Returns:
            what is left to be done by hand, if anything.
        """
        table = load_table(self._spark, self._name)
        newest = table.currentSnapshot()
        if newest is not None:
            if str(table.properties().get("gc.enabled")).lower() == "false":
                return (
                    f"{self._name} keeps its old snapshots, whose files other tables may share (its property "
                    f"gc.enabled is false): set it to true where they do not, and run the same command again"
                )
            old = self._reachable() - self._reachable(table)
            self._record.put_text(json.dumps(sorted(self._recorded() | old)) + "\n")
            self._expire(table, newest.timestampMillis() + 1)
        try:
            self._delete(table.io(), self.pending())
        except Py4JJavaError as e:
            if store_away(e) is not None:
                raise
            said = redact(str(e.java_exception.getMessage()).split("\n", 1)[0])
            return (
                f"files of old snapshots of {self._name} cannot be deleted ({said}): see that this host may delete "
                f"them, and run the same command again"
            )
        self._record.remove()
        return ""

    def _expire(self, table: Any, before_ms: int) -> None:
        expiry = table.expireSnapshots().expireOlderThan(before_ms).retainLast(1)
        expiry.cleanExpiredFiles(False).commit()

    def _delete(self, io: Any, paths: Sequence[str]) -> None:
        """Files that are gone already count as deleted."""
        for at in range(0, len(paths), _BATCH):
            some = list(paths[at : at + _BATCH])
            if is_instance_of(self._spark.sparkContext._gateway, io, _BULK):
                io.deleteFiles(some)
                continue
            for path in some:
                if io.newInputFile(path).exists():
                    io.deleteFile(path)

    def _recorded(self) -> set[str]:
        return set(json.loads(self._record.read_text())) if self._record.is_file() else set()

    def _reachable(self, of_newest: Any = None) -> set[str]:
        """Paths of all files that the table's snapshots have, or (given the table) its newest alone: data files,
        delete files, manifests, their lists, statistics.
        """
        table = load_table(self._spark, self._name) if of_newest is None else of_newest
        newest = None if of_newest is None else of_newest.currentSnapshot().snapshotId()
        every = "all_" if newest is None else ""
        where = "" if newest is None else f" WHERE snapshot_id = {newest}"
        query = (
            f"SELECT file_path FROM {self._name}.{every}files "
            f"UNION ALL SELECT path FROM {self._name}.{every}manifests "
            f"UNION ALL SELECT manifest_list FROM {self._name}.snapshots{where}"
        )
        paths = {str(row[0]) for row in self._spark.sql(query).collect()}
        for file in (*table.statisticsFiles(), *table.partitionStatisticsFiles()):
            if newest is None or file.snapshotId() == newest:
                paths.add(str(file.path()))
        return paths
