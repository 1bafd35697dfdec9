"""Fenced changes of an Iceberg table: each carries a fencing token, and those with an earlier token are refused.

Iceberg repeats a commit on top of the newest metadata, so it cannot check a token. Here a change is written to a branch
of its own, which no reader sees. One commit of metadata then makes it the table's: it sets `main` to the branch's
snapshot and a property to the token. A catalog accepts that commit only if nobody has committed since its base was read
(a REST catalog: only if `main` is still the same snapshot). So a later token is noticed, however long a process was
paused.
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
from headrace.lake.delta.transaction import lease_application
from headrace.publish.target import lease_lost
from headrace.storage import Fence

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


log = logging.getLogger("headrace.publish")

_MAIN = "main"
#: Prefix of the branches' names; it is followed by lease and token of the writer and a random number.
_BRANCH_PREFIX = "headrace_write_"
_BRANCH = re.compile(_BRANCH_PREFIX + "(?P<lease>.*)_(?P<token>[0-9]+)_[0-9a-f]{32}")
#: Most attempts to write a change, and to commit each written one. The wait after an attempt doubles each time: half a
#: minute in total.
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
        name: quoted name of the table.
        label: name of the table for messages.
        fence: fencing token of the lease under which the table is written; None: there is no lease.
        write: writes the change to the branch of the given quoted name. It is called again, with a new branch, if
            another writer has changed the table meanwhile.
        check_lease: raises LeaseLost if another process holds the lease; called before each new attempt.

    Raises:
        LeaseLost: a later holder has changed or claimed the table; this change is not in it.
        IncompleteError: the catalog has refused every attempt; this change is not in the table.
    """
    attempts = _Change(spark, name, label, fence, check_lease)
    for _ in attempts.tries():
        if attempts.attempt(write):
            return


def claim(
    spark: SparkSession, name: str, label: str, fence: Fence | None, check_lease: Callable[[], None] = lambda: None
) -> None:
    """Write the token of a lease's holder to a table, so that changes of earlier holders are refused from now on.

    Args and Raises: see `change`.
    """
    if fence is not None and _token(load_table(spark, name).properties(), fence) != fence.token:
        change(spark, name, label, fence, lambda branch: None, check_lease)


def load_table(spark: SparkSession, name: str) -> Any:
    """Return Iceberg's `Table` by its quoted name, with the catalog's newest metadata."""
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
        #: Reason why the last attempt failed.
        self._refusal = ""

    def tries(self) -> Iterator[int]:
        """Yield the numbers of attempts, with a wait between them. Raises IncompleteError after the last one."""
        for n in range(_TRIES):
            yield n
            if n + 1 < _TRIES:
                # A random wait, so that conflicting writers do not all try again at the same time.
                time.sleep(_WAIT_SECONDS * 2**n * random.uniform(0.5, 1))
                self._check_lease()
        raise IncompleteError(
            f"{self._label}: a change of the Iceberg table {self._name} was tried {_TRIES} times and not taken; the "
            f"last time: {self._refusal}. Nothing of it is in the table. See who else writes the table, and whether "
            f"its catalog gives and frees its locks; then run the same command again"
        )

    def attempt(self, write: Callable[[str], None]) -> bool:
        """Write and commit the change; return False if it must be written again."""
        table = load_table(self._spark, self._name)
        self._check(table.properties())
        self._remove_stale_branches(table)
        current = table.currentSnapshot()
        start = None if current is None else int(current.snapshotId())
        branch = f"{_BRANCH_PREFIX}{self._lease}_{self._token_number}_{uuid.uuid4().hex}"
        manage = table.manageSnapshots()
        try:
            # A branch of a table without snapshots begins empty.
            (manage.createBranch(branch) if start is None else manage.createBranch(branch, start)).commit()
            write(f"{self._name}.{quoted(f'branch_{branch}')}")
            table.refresh()
            ref = table.refs().get(branch)
            if ref is not None and ref.snapshotId() == start:
                # `write` changed nothing, and a REST catalog compares snapshots: add an empty one.
                table.newAppend().toBranch(branch).commit()
            return self._commit(table.operations(), branch, start)
        except Exception as e:  # Spark's own errors are of several kinds
            # Most likely a later holder has removed the branch; then this raises LeaseLost.
            self._check(load_table(self._spark, self._name).properties())
            if self._is_conflict(e):
                return False
            raise
        finally:
            self._remove_branch_quietly(branch)

    def _commit(self, ops: Any, branch: str, start: int | None) -> bool:
        """Make the branch's snapshot the table's; return False if the table's snapshot is no longer `start`."""
        jvm: Any = self._spark._jvm
        for _ in self.tries():
            base = ops.refresh()
            self._check(base.properties())
            current, ref = base.currentSnapshot(), base.ref(branch)
            if ref is None or (None if current is None else int(current.snapshotId())) != start:
                self._refusal = "another writer has changed the table meanwhile"
                return False
            new = int(ref.snapshotId())
            new_metadata = jvm.org.apache.iceberg.TableMetadata.buildFrom(base)
            if self._fence is not None:
                new_metadata = new_metadata.setProperties({lease_application(self._fence): str(self._fence.token)})
            new_metadata = new_metadata.setBranchSnapshot(new, _MAIN).removeRef(branch).build()
            try:
                ops.commit(base, new_metadata)
            except Py4JJavaError as e:
                # The commit may have succeeded, with its answer lost.
                current = ops.refresh().currentSnapshot()
                if current is not None and int(current.snapshotId()) == new:
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
        """Return whether the error is a conflict with another writer; if so, note its message as the refusal."""
        gateway = self._spark.sparkContext._gateway
        if not isinstance(error, Py4JJavaError) or not is_instance_of(gateway, error.java_exception, _CONFLICT):
            return False
        self._refusal = str(error.java_exception.getMessage())
        return True

    def _remove_branch_quietly(self, branch: str) -> None:
        """Remove the branch. A failure does not affect the change itself: the next holder removes the branch."""
        try:
            _remove(load_table(self._spark, self._name), branch)
        except Exception as e:  # Spark's own errors are of several kinds
            reason = (str(e).splitlines() or [type(e).__name__])[0]
            log.warning("%s: the branch %s was not removed, the next run will: %s", self._label, branch, reason)

    def _remove_stale_branches(self, table: Any) -> None:
        """Remove branches of killed processes and of earlier holders of the lease."""
        for branch in [str(name) for name in table.refs()]:
            match = _BRANCH.fullmatch(branch)  # None: a user's branch
            if match is not None and match["lease"] == self._lease and int(match["token"]) <= self._token_number:
                _remove(table, branch)


def _remove(table: Any, branch: str) -> None:
    if branch not in table.refs():
        return
    try:
        table.manageSnapshots().removeBranch(branch).commit()
    except Py4JJavaError as e:
        # Another process may have removed it first. A branch that stays is removed with the next change.
        log.info("%s: the branch %s was not removed: %s", table.name(), branch, e.java_exception.getMessage())


def _token(properties: Any, fence: Fence) -> int:
    """Return the token of the newest holder of the lease; 0 without any."""
    return int(properties.get(lease_application(fence)) or 0)
