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
import random
import re
import time
import uuid
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from py4j.java_gateway import is_instance_of
from py4j.protocol import Py4JJavaError

from headrace.config.schema import quoted
from headrace.errors import IncompleteError
from headrace.lake.delta.fence import application_of
from headrace.publish.target import lease_lost
from headrace.storage import Fence

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


log = logging.getLogger("headrace.publish")

_MAIN = "main"
#: What the names of the branches begin with; behind it lease and token of who writes there, and a number of its own.
_BRANCHES = "headrace_write_"
_BRANCH = re.compile(_BRANCHES + "(?P<lease>.*)_(?P<token>[0-9]+)_[0-9a-f]{32}")
#: How often a change is written, and each time committed, at most. Behind each time a wait, twice as long as the one
#: before: all together half a minute.
_TRIES, _WAIT_SECONDS = 8, 0.25
_CONFLICT = "org.apache.iceberg.exceptions.CommitFailedException"


def change(
    spark: SparkSession,
    name: str,
    label: str,
    fence: Fence | None,
    write: Callable[[str], None],
    check_lease: Callable[[], None] = lambda: None,
) -> None:
    """Change a table, in one step.

    Args:
        spark: a session with the table's catalog.
        name: the table's, quoted.
        label: the same for people.
        fence: of the holder of the lease under which the table is written; None: there is no lease.
        write: makes the change to a branch, whose quoted name it is given; also several times, each to a new branch:
            where somebody else has changed the table meanwhile.
        check_lease: raises LeaseLost where another process is at work; asked before whatever is tried again.

    Raises:
        LeaseLost: a later holder has changed the table, or claimed it; nothing of this change is in it.
        IncompleteError: the catalog has refused the change again and again; nothing of it is in the table.
    """
    changing = _Change(spark, name, label, fence, check_lease)
    for _ in changing.tries():
        if changing.attempt(write):
            return


def claim(
    spark: SparkSession, name: str, label: str, fence: Fence | None, check_lease: Callable[[], None] = lambda: None
) -> None:
    """Have changes of earlier holders of a lease refused from now on, also where this one changes nothing else.

    Args and Raises: see `change`.
    """
    if fence is not None and _token(load_table(spark, name).properties(), fence) != fence.token:
        change(spark, name, label, fence, lambda branch: None, check_lease)


def load_table(spark: SparkSession, name: str) -> Any:
    """Iceberg's `Table` as its catalog has it now, by its quoted name."""
    jvm: Any = spark._jvm
    table = jvm.org.apache.iceberg.spark.Spark3Util.loadIcebergTable(spark._jsparkSession, name)
    table.refresh()
    return table


class _Change:
    def __init__(
        self, spark: SparkSession, name: str, label: str, fence: Fence | None, check_lease: Callable[[], None]
    ) -> None:
        self._spark, self._name, self._label, self._fence = spark, name, label, fence
        self._check_lease = check_lease
        self._lease, self._token_number = ("", 0) if fence is None else (fence.lease, fence.token)
        #: Why the last try was none.
        self._refusal = ""

    def tries(self) -> Iterator[int]:
        """Yield the numbers of tries, with a wait after each. Raises IncompleteError after the last one."""
        for n in range(_TRIES):
            yield n
            if n + 1 < _TRIES:
                # Not all of those that are in each other's way at the same time again.
                time.sleep(_WAIT_SECONDS * 2**n * random.uniform(0.5, 1))
                self._check_lease()
        raise IncompleteError(
            f"{self._label}: a change of the Iceberg table {self._name} was tried {_TRIES} times and not taken; the "
            f"last time: {self._refusal}. Nothing of it is in the table. See who else writes the table, and whether "
            f"its catalog gives and frees its locks; then run the same command again"
        )

    def attempt(self, write: Callable[[str], None]) -> bool:
        """Return whether the change is the table's now; otherwise it must be written again."""
        table = load_table(self._spark, self._name)
        self._check(table.properties())
        self._remove_left(table)
        head = table.currentSnapshot()
        start = None if head is None else int(head.snapshotId())
        branch = f"{_BRANCHES}{self._lease}_{self._token_number}_{uuid.uuid4().hex}"
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
            self._remove_own(branch)

    def _commit(self, ops: Any, branch: str, start: int | None) -> bool:
        """Make the branch's snapshot the table's; False where the table has another one than when it was begun."""
        jvm: Any = self._spark._jvm
        for _ in self.tries():
            base = ops.refresh()
            self._check(base.properties())
            head, ref = base.currentSnapshot(), base.ref(branch)
            if ref is None or (None if head is None else int(head.snapshotId())) != start:
                self._refusal = "another writer has changed the table meanwhile"
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
        raise AssertionError("the last try is followed by an error")

    def _check(self, properties: Any) -> None:
        if self._fence is not None and _token(properties, self._fence) > self._fence.token:
            raise lease_lost(self._label)

    def _is_conflict(self, error: Exception) -> bool:
        """Return whether the error is a conflict with another writer, and keep its message for this try."""
        gateway = self._spark.sparkContext._gateway
        if not isinstance(error, Py4JJavaError) or not is_instance_of(gateway, error.java_exception, _CONFLICT):
            return False
        self._refusal = str(error.java_exception.getMessage())
        return True

    def _remove_own(self, branch: str) -> None:
        """Remove the branch. A failure does not affect the change itself: the next holder removes the branch."""
        try:
            _remove(load_table(self._spark, self._name), branch)
        except Exception as e:  # Spark's own errors are of several kinds
            reason = (str(e).splitlines() or [type(e).__name__])[0]
            log.warning("%s: the branch %s was not removed, the next run will: %s", self._label, branch, reason)

    def _remove_left(self, table: Any) -> None:
        """Remove the branches of processes that were killed, and of earlier holders that are suspended."""
        for branch in [str(name) for name in table.refs()]:
            match = _BRANCH.fullmatch(branch)  # None: of people
            if match is not None and match["lease"] == self._lease and int(match["token"]) <= self._token_number:
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
    """Return the token of the newest holder of the lease; 0 without any."""
    return int(properties.get(application_of(fence)) or 0)
