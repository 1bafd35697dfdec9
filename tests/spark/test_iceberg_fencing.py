"""Changes of Iceberg tables under a lease: a later holder's refuse those of an earlier one, wherever it stands."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from headrace.config import load_spec
from headrace.config.workspace import Workspace
from headrace.errors import IncompleteError, UserError
from headrace.lake.spark.session import spark_settings
from headrace.publish.opening import open_target
from headrace.publish.tables import iceberg_fencing
from headrace.publish.tables.iceberg import IcebergTarget
from headrace.publish.tables.iceberg_fencing import change, claim, load_table
from headrace.stage import RunLock
from headrace.storage import Fence, LeaseLost
from tests.publish_support import holding
from tests.storage_support import Killed
from tests.warehouses import Warehouses

DS, NEXT, LAST = "2026-01-10", "2026-01-11", "2026-01-12"
OLD, NEW = Fence("l", 1), Fence("l", 2)
SCHEMA = "ds string, user_id bigint, item_id bigint, rank int, score float, model_version string"


@pytest.fixture
def places(spark: SparkSession, tmp_path: Path) -> Iterator[Warehouses]:
    """A catalog that keeps no table in memory: whoever loads one is as another process to the catalog."""
    warehouses = Warehouses(tmp_path)
    if "iceberg" not in warehouses.settings:
        pytest.skip("Iceberg's jar is not here: make iceberg")
    (catalog,) = (key for key in warehouses.properties if key.count(".") == 3)
    with spark_settings(spark, warehouses.properties | {f"{catalog}.cache-enabled": "false"}):
        yield warehouses


class Table:
    """A table of one column."""

    def __init__(self, spark: SparkSession, places: Warehouses) -> None:
        self.spark, self.name = spark, f"{places.settings['iceberg'][0].removeprefix('catalog=')}.served.seen"
        spark.sql(f"CREATE TABLE {self.name} (n int) USING iceberg")

    def add(self, n: int, fence: Fence | None, after_write: Callable[[], object] = lambda: None) -> None:
        """Add a row; `after_write` is called after it is written, and before it is the table's."""

        def write(branch: str) -> None:
            self.spark.sql(f"INSERT INTO {branch} SELECT int({n})")
            after_write()

        change(self.spark, self.name, "the table", fence, write)

    def rows(self) -> list[int]:
        return sorted(row[0] for row in self.spark.sql(f"SELECT n FROM {self.name}").collect())

    def refs(self) -> list[str]:
        return sorted(str(name) for name in load_table(self.spark, self.name).refs())


@pytest.fixture
def table(spark: SparkSession, places: Warehouses) -> Table:
    return Table(spark, places)


def once(action: Callable[[], object]) -> Callable[[], None]:
    """The same, at the first call alone."""
    calls = [action]

    def act() -> None:
        if calls:
            calls.pop()()

    return act


class Operations:
    """Iceberg's operations of a table, with an action before a commit, by others and to other objects."""

    def __init__(self, real: Any, before_commit: Callable[[], object]) -> None:
        self.real, self.before_commit = real, before_commit

    def refresh(self) -> Any:
        return self.real.refresh()

    def commit(self, base: Any, changed: Any) -> None:
        self.before_commit()
        self.real.commit(base, changed)


def before_the_commit(monkeypatch: pytest.MonkeyPatch, action: Callable[[], object]) -> None:
    """Have something done after a change has looked at the table for the last time, once."""
    real, action_once = iceberg_fencing._Change._commit, once(action)

    def commit(self: Any, ops: Any, *arguments: Any) -> bool:
        return real(self, Operations(ops, action_once), *arguments)

    monkeypatch.setattr(iceberg_fencing._Change, "_commit", commit)


@pytest.mark.parametrize("later", ["adds", "claims"])
@pytest.mark.parametrize("paused", ["after its write", "before its commit"])
def test_of_two_holders_the_later_one_commits(
    table: Table, monkeypatch: pytest.MonkeyPatch, paused: str, later: str
) -> None:
    table.add(1, OLD)
    table.add(2, Fence("other", 9))
    table.add(3, None)

    def other_writer() -> None:
        if later == "adds":
            table.add(7, NEW)
        else:
            claim(table.spark, table.name, "the table", NEW)

    after_write = once(other_writer if paused == "after its write" else lambda: None)
    if paused == "before its commit":
        before_the_commit(monkeypatch, other_writer)
    with pytest.raises(LeaseLost, match="the table: a later run of the pipeline has been at work"):
        table.add(4, OLD, after_write)
    expected_rows = [1, 2, 3, 7] if later == "adds" else [1, 2, 3]
    assert table.rows() == expected_rows
    for late in (lambda: table.add(5, OLD), lambda: claim(table.spark, table.name, "the table", OLD)):
        with pytest.raises(LeaseLost):
            late()
    assert table.refs() == ["main"]
    table.add(6, NEW)
    assert table.rows() == sorted([*expected_rows, 6])


@pytest.mark.parametrize("paused", ["after its write", "before its commit"])
def test_who_is_no_holder_of_the_lease_refuses_nobody(
    table: Table, monkeypatch: pytest.MonkeyPatch, paused: str
) -> None:
    """Rows of both are there, and the change is written once more upon theirs."""
    written = list[int]()

    def other_writer() -> None:
        table.add(7, Fence("other", 9))

    def after_write() -> None:
        written.append(1)
        if paused == "after its write" and len(written) == 1:
            other_writer()

    if paused == "before its commit":
        before_the_commit(monkeypatch, other_writer)
    table.add(4, OLD, after_write)
    assert (table.rows(), written) == ([4, 7], [1, 1])
    # What changes the table's properties alone is in nobody's way.
    before_the_commit(monkeypatch, lambda: table.spark.sql(f"ALTER TABLE {table.name} SET TBLPROPERTIES ('a' = '1')"))
    table.add(5, OLD, after_write)
    assert (table.rows(), written) == ([4, 5, 7], [1, 1, 1])


def test_an_answer_that_is_lost(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    real = iceberg_fencing._Change._commit

    class Lost(Operations):
        def commit(self, base: Any, changed: Any) -> None:
            self.real.commit(base, changed)
            self.real.commit(base, changed)  # raises: the first one is there

    monkeypatch.setattr(
        iceberg_fencing._Change, "_commit", lambda self, ops, *arguments: real(self, Lost(ops, list), *arguments)
    )
    table.add(1, OLD)
    assert (table.rows(), table.refs()) == ([1], ["main"])


@pytest.mark.parametrize("conflict", ["at its commit", "with rows of others", "before its commit"])
def test_conflicts_that_last(table: Table, monkeypatch: pytest.MonkeyPatch, conflict: str) -> None:
    """They come to an end: after a few tries, with longer and longer waits, and where the lease is lost."""
    waits, lease_checks, other_commits = list[float](), list[int](), list[int]()
    monkeypatch.setattr(iceberg_fencing, "time", SimpleNamespace(sleep=waits.append))
    monkeypatch.setattr(iceberg_fencing, "random", SimpleNamespace(uniform=lambda least, most: most))

    def other_writer(statement: str) -> None:
        other_commits.append(len(other_commits))
        assert len(other_commits) < 20, "it has no end"
        table.spark.sql(statement.format(table=table.name, n=len(other_commits)))

    alter = "ALTER TABLE {table} SET TBLPROPERTIES ('a' = '{n}')"
    if conflict == "at its commit":
        real = iceberg_fencing._Change._commit
        monkeypatch.setattr(
            iceberg_fencing._Change,
            "_commit",
            lambda self, ops, *arguments: real(self, Operations(ops, lambda: other_writer(alter)), *arguments),
        )

    def write(branch: str) -> None:
        table.spark.sql(f"INSERT INTO {branch} SELECT 0")
        if conflict == "with rows of others":
            other_writer("INSERT INTO {table} SELECT {n}")
        elif conflict == "before its commit":
            ops = load_table(table.spark, table.name).operations()
            base = ops.current()
            other_writer(alter)
            jvm: Any = table.spark._jvm
            changed = jvm.org.apache.iceberg.TableMetadata.buildFrom(base).setProperties({"b": "1"}).build()
            ops.commit(base, changed)

    def lost() -> None:
        raise LeaseLost("taken")

    reason = {"with rows of others": "another writer has changed the table meanwhile"}.get(conflict, "changed|exists")
    with pytest.raises(
        IncompleteError, match=rf"the table: .* was tried 8 times .* the last time: .*({reason})"
    ) as raised:
        change(table.spark, table.name, "the table", OLD, write, lambda: lease_checks.append(1))
    assert raised.value.exit_code == 75
    assert (len(other_commits), len(lease_checks), len(waits)) == (8, 7, 7)
    assert all(later == 2 * earlier for earlier, later in pairwise(waits))
    assert (0 in table.rows(), [ref for ref in table.refs() if ref != "main"]) == (False, [])
    with pytest.raises(LeaseLost, match="taken"):
        change(table.spark, table.name, "the table", OLD, write, lost)
    assert len(other_commits) == 9


def test_branches_of_people_stay(table: Table) -> None:
    table.add(1, OLD)
    branches = ["headrace_write_x", "headrace_write_a_b_c", f"headrace_write_l_one_{'0' * 32}"]
    for branch in branches:
        load_table(table.spark, table.name).manageSnapshots().createBranch(branch).commit()
    table.add(2, OLD)
    assert (table.rows(), table.refs()) == ([1, 2], sorted([*branches, "main"]))


def test_a_branch_that_cannot_be_removed(
    table: Table, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The outcome of the change is told all the same."""

    def away(table: Any, branch: str) -> None:
        raise ConnectionError("the catalog is away")

    def overtaken() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(iceberg_fencing, "_remove", lambda table, branch: None)
            claim(table.spark, table.name, "the table", NEW)

    monkeypatch.setattr(iceberg_fencing, "_remove", away)
    table.add(1, OLD)
    assert "was not removed, the next run will: the catalog is away" in caplog.text
    with pytest.raises(LeaseLost):
        table.add(2, OLD, overtaken)
    assert table.rows() == [1]


def test_what_a_writer_leaves_that_is_killed(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that readers see; its branch goes with the next change of the same lease."""

    def killed() -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(iceberg_fencing, "_remove", lambda table, branch: None)
        for fence in (OLD, NEW, Fence("other", 9)):
            with pytest.raises(Killed):
                table.add(1, fence, killed)
    assert (table.rows(), len(table.refs())) == ([], 3)
    table.add(2, OLD)
    assert table.rows() == [2]
    assert [ref.rsplit("_", 1)[0] for ref in table.refs()] == ["headrace_write_l_2", "headrace_write_other_9", "main"]
    table.add(3, NEW)
    assert [ref.rsplit("_", 1)[0] for ref in table.refs()] == ["headrace_write_other_9", "main"]


def test_what_a_later_run_has_published_stays(spark: SparkSession, places: Warehouses, tmp_path: Path) -> None:
    """A run that has no token yet, one that is paused, and the one after it publish."""
    spec = load_spec("clicks", ["score.top_k=4", *places.overrides("iceberg")])
    ws = Workspace(tmp_path / "home")

    def opened(lock: RunLock | None) -> Any:
        return open_target(spec, ws, lock)

    def publish(
        key: str, users: int, lock: RunLock, ds: str = DS, after_staging: Callable[[], object] = lambda: None
    ) -> None:
        df = spark.createDataFrame([(ds, u, 7, 1, 0.5, key) for u in range(users)], SCHEMA).coalesce(1)
        with opened(lock) as target:
            target.create(df.dtypes)
            with target.stage(df, ds, key) as staged:
                after_staging()
                target.swap(staged, "s", [])

    def published_versions() -> list[list[tuple[str, str]]]:
        frames = [places.read("iceberg", ws, DS, current=current) for current in (False, True)]
        return [sorted({*zip(f["ds"], f["model_version"], strict=True)}) for f in frames]

    def claimed() -> None:
        with opened(holding(2)) as target:
            target.claim()
            assert (target.rows_with("user_id", [0]), target.leftovers("user_id", [0]), target.days()) == ({}, 0, [])
            assert target.erase("user_id", [0]) == ""
            with pytest.raises(UserError, match="there is no table"):
                target.sample(DS, 1)

    # Before there is a table: who claims it makes one without rows.
    claimed()
    with pytest.raises(LeaseLost):
        publish("old", 3, holding(1))
    publish("new", 3, holding(2))
    assert published_versions() == [[(DS, "new")]] * 2
    with opened(holding(3)) as later:
        with pytest.raises(LeaseLost):
            publish("paused", 4, holding(2), after_staging=later.claim)
        assert published_versions() == [[(DS, "new")]] * 2
    publish("newest", 5, holding(3))
    assert published_versions() == [[(DS, "newest")]] * 2
    with opened(holding(2)) as late:
        assert isinstance(late, IcebergTarget)
        rows = spark.table(late.table).where("user_id < 2")
        for act in (
            lambda: late.write_day(rows, DS, "old"),
            lambda: late.write_current(rows, "old"),
            lambda: late.drop_days([DS]),
            lambda: late.erase("user_id", [0]),
            lambda: next(late._erasures(spark, "user_id", [0])).run(),
            late.claim,
        ):
            with pytest.raises(LeaseLost):
                act()
        assert late.published(DS).key == "newest"  # type: ignore[union-attr]
        assert late.rows_by_day() == {DS: 5}
    assert len(places.read("iceberg", ws, DS)) == 5
    assert published_versions() == [[(DS, "newest")]] * 2
    publish("next", 2, holding(3), NEXT)
    assert published_versions() == [[(DS, "newest")], []]
    with opened(holding(3)) as target:
        # A day whose run was killed before its record.
        target.write_day(
            spark.table(target.table).where("user_id = 0").withColumn("ds", F.to_date(F.lit(LAST))), LAST, "k"
        )
        assert target.rows_with("user_id", [0]).keys() == {DS, NEXT, LAST}
        assert target.erase("user_id", [0]) == ""
        assert target.rows_with("user_id", [0]) == {}
        assert (target.rows_by_day(), target.leftovers("user_id", [0])) == ({DS: 4, NEXT: 1}, 0)
        target.drop_days([DS])
        assert (target.days(), target.rows_by_day()) == ([NEXT], {NEXT: 1})
