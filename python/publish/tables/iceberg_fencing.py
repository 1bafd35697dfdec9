"""Changes of an Iceberg table that carry the token of a lease's holder: after one of a later holder, those of an
earlier one are refused.

Iceberg's own commits are made again upon whatever is newest then, so they ask nobody. So a change is written to a
branch of its own, which no reader looks at, and becomes the table's by one commit of metadata that rests on those that
were looked at: `main` is the branch's snapshot, and a property says the token. A catalog takes it only where nobody has
committed since (a REST catalog: where `main` is still the snapshot that it was), so a token that came in between is
seen, however long a process stood still.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from py4j.java_gateway import is_instance_of
from py4j.protocol import Py4JJavaError

from headrace.lake.delta.fencing import application_of
from headrace.publish.tables.iceberg_expiry import load_table
from headrace.publish.tables.spark_sql import quoted
from headrace.publish.target import lease_lost
from headrace.storage import Fence

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger("headrace.publish")

_MAIN = "main"
#: What the names of the branches begin with; behind it lease and token of who writes there, and a number of its own.
_BRANCHES = "headrace_write_"
_CONFLICT = "org.apache.iceberg.exceptions.CommitFailedException"


def change(spark: SparkSession, name: str, label: str, fence: Fence | None, write: Callable[[str], None]) -> None:
    """Change a table, in one step.

    Args:
        spark: a session with the table's catalog.
        name: the table's, quoted.
        label: the same for people.
        fence: of the holder of the lease under which the table is written; None: there is no lease.
        write: makes the change to a branch, whose quoted name it is given; also several times, each to a new branch:
            where somebody else has changed the table meanwhile.

    Raises:
        LeaseLost: a later holder has changed the table, or claimed it; nothing of this change is in it.
    """
    changing = _Change(spark, name, label, fence)
    while not changing.attempt(write):
        pass


def claim(spark: SparkSession, name: str, label: str, fence: Fence | None) -> None:
    """Have changes of earlier holders of a lease refused from now on, also where this one changes nothing else.

    Args and Raises: see `change`.
    """
    if fence is not None and _token(load_table(spark, name).properties(), fence) != fence.token:
        change(spark, name, label, fence, lambda branch: None)


class _Change:
    def __init__(self, spark: SparkSession, name: str, label: str, fence: Fence | None) -> None:
        self._spark, self._name, self._label, self._fence = spark, name, label, fence
        self._lease, self._mine = ("", 0) if fence is None else (fence.lease, fence.token)

    def attempt(self, write: Callable[[str], None]) -> bool:
        """Whether it is the table's now; else it is to be written again."""
        table = load_table(self._spark, self._name)
        self._check(table.properties())
        self._remove_left(table)
        head = table.currentSnapshot()
        start = None if head is None else int(head.snapshotId())
        branch = f"{_BRANCHES}{self._lease}_{self._mine}_{uuid.uuid4().hex}"
        manage = table.manageSnapshots()
        try:
            # Of a table without a snapshot: an empty one.
            (manage.createBranch(branch) if start is None else manage.createBranch(branch, start)).commit()
            write(f"{self._name}.{quoted(f'branch_{branch}')}")
            table.refresh()
            ref = table.refs().get(branch)
            if ref is not None and ref.snapshotId() == start:
                # Nothing was to be changed. A REST catalog compares snapshots: there has to be one.
                table.newAppend().toBranch(branch).commit()
            return self._commit(table.operations(), branch, start)
        except Exception as e:  # Spark's own errors are of several kinds
            # Of a later holder, most likely, which has removed the branch.
            self._check(load_table(self._spark, self._name).properties())
            if self._is_conflict(e):
                return False
            raise
        finally:
            _remove(load_table(self._spark, self._name), branch)

    def _commit(self, ops: Any, branch: str, start: int | None) -> bool:
        """Make the branch's snapshot the table's; False where the table has another one than when it was begun."""
        jvm: Any = self._spark._jvm
        while True:
            base = ops.refresh()
            self._check(base.properties())
            head, ref = base.currentSnapshot(), base.ref(branch)
            if ref is None or (None if head is None else int(head.snapshotId())) != start:
                return False
            new = int(ref.snapshotId())
            changed = jvm.org.apache.iceberg.TableMetadata.buildFrom(base)
            if self._fence is not None:
                changed = changed.setProperties({application_of(self._fence): str(self._fence.token)})
            changed = changed.setBranchSnapshot(new, _MAIN).removeRef(branch).build()
            try:
                ops.commit(base, changed)
            except Py4JJavaError as e:
                # An answer that was lost is one as well.
                head = ops.refresh().currentSnapshot()
                if head is not None and int(head.snapshotId()) == new:
                    return True
                if not self._is_conflict(e):
                    raise
            else:
                return True

    def _check(self, properties: Any) -> None:
        if self._fence is not None and _token(properties, self._fence) > self._fence.token:
            raise lease_lost(self._label)

    def _is_conflict(self, error: Exception) -> bool:
        gateway = self._spark.sparkContext._gateway
        return isinstance(error, Py4JJavaError) and is_instance_of(gateway, error.java_exception, _CONFLICT)

    def _remove_left(self, table: Any) -> None:
        """The branches of processes that were killed, and of earlier holders that stand still."""
        for branch in [str(name) for name in table.refs() if str(name).startswith(_BRANCHES)]:
            lease, token, _ = branch.removeprefix(_BRANCHES).rsplit("_", 2)
            if lease == self._lease and int(token) <= self._mine:
                _remove(table, branch)


def _remove(table: Any, branch: str) -> None:
    if branch not in table.refs():
        return
    try:
        table.manageSnapshots().removeBranch(branch).commit()
    except Py4JJavaError as e:
        # Of two processes at once one comes too late; what stays goes with the next change.
        log.info("%s: the branch %s was not removed: %s", table.name(), branch, e.java_exception.getMessage())


def _token(properties: Any, fence: Fence) -> int:
    """That of the newest holder of the lease; 0: there was none."""
    return int(properties.get(application_of(fence)) or 0)
