"""Rows that go from an Iceberg table for good: from its newest snapshot, from live files that delete files hide them
in, from the files of older snapshots.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from headrace.publish.tables.iceberg_expiry import SnapshotExpiry, load_table
from headrace.publish.tables.spark_sql import literal, quoted
from headrace.publish.target import Key
from headrace.storage import Location

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: By path: the format of a file.
_Files = dict[str, str]
#: Contents of files: rows; values of rows that are deleted. (Others: positions of such.)
_DATA, _EQUALITY = 0, 2
#: Of a rewrite of all data files, after which delete files have nothing to hide and go.
_REWRITE = {"rewrite-all": "true", "use-starting-sequence-number": "false", "remove-dangling-deletes": "true"}
#: Commits within which Iceberg drops delete files that hide nothing, and then the manifests that say so.
_EMPTY_COMMITS = 3


class _Entry(NamedTuple):
    path: str
    format: str
    content: int
    #: Whether the newest snapshot has it.
    is_live: bool


class IcebergErasure:
    """Rows with some values of a column."""

    def __init__(self, spark: SparkSession, name: str, column: str, keys: Sequence[Key], record: Location) -> None:
        """
        Args:
            spark: a session with the table's catalog.
            name: the table's, quoted.
            column: of the values.
            keys: the values.
            record: see `SnapshotExpiry`.
        """
        self._spark, self._name, self._column, self._keys = spark, name, column, keys
        self._expiry = SnapshotExpiry(spark, name, record)

    def files(self) -> int:
        """Files that have such rows where no reader of the table sees them, or that are to be deleted."""
        return self._having(self._unseen(of_newest=False)) + len(self._expiry.pending())

    def run(self) -> str:
        """Remove the rows, and what has them; may be killed, and done again.

        Returns:
            what is left to be done by hand, if anything.
        """
        values = ", ".join(map(literal, self._keys))
        self._spark.sql(f"DELETE FROM {self._name} WHERE {quoted(self._column)} IN ({values})")
        if self._having(self._unseen(of_newest=True)):
            self._rewrite()
        self._write_manifests()
        return self._expiry.run()

    def _unseen(self, of_newest: bool) -> _Files:
        """Files in which there can be rows that no reader of the table sees, or values of such.

        Those of older snapshots; and, where delete files hide rows of the newest one (merge-on-read), all of its data
        files, and the delete files that have values.
        """
        what = "SELECT file_path, file_format, content"
        query = f"{what}, true FROM {self._name}.files"
        if not of_newest:
            query += f" UNION ALL {what}, false FROM {self._name}.all_files"
        found = {_Entry(*row) for row in self._spark.sql(query).collect()}
        live = {f.path for f in found if f.is_live}
        hides = any(f.is_live and f.content != _DATA for f in found)
        read = (f for f in found if f.content in (_DATA, _EQUALITY))
        return {f.path: f.format for f in read if f.path not in live or hides}

    def _having(self, files: _Files) -> int:
        """How many have such rows, whether deleted or not."""
        from pyspark.sql import functions as F
        from pyspark.sql.types import StructType

        parquet = [path for path, kind in files.items() if kind == "PARQUET"]
        # Of another format than this table is made with nobody looks into: it may have some.
        found = len(files) - len(parquet)
        if parquet:
            field = self._spark.table(self._name).schema[self._column]
            rows = self._spark.read.schema(StructType([field])).parquet(*parquet)
            rows = rows.where(F.col(quoted(self._column)).isin(list(self._keys)))
            found += rows.select(F.input_file_name()).distinct().count()
        return found

    def _rewrite(self) -> None:
        jvm = self._spark._jvm
        assert jvm is not None, "a session has one"
        action = jvm.org.apache.iceberg.spark.actions.SparkActions.get(self._spark._jsparkSession)
        action = action.rewriteDataFiles(load_table(self._spark, self._name))
        for name, value in _REWRITE.items():
            action = action.option(name, value)
        action.execute()

    def _write_manifests(self) -> None:
        """Manifests name removed files with their smallest and largest values until they are written again."""
        table = load_table(self._spark, self._name)
        if table.currentSnapshot() is None:
            return
        for _ in range(_EMPTY_COMMITS):
            if not table.currentSnapshot().deleteManifests(table.io()):
                break
            table.newAppend().commit()
            table.refresh()
        jvm = self._spark._jvm
        assert jvm is not None, "a session has one"
        # All of them: Iceberg's action for Spark leaves one alone where there is but one.
        together = jvm.com.google.common.base.Functions.constant("all")
        table.rewriteManifests().clusterBy(together).commit()
