"""Holders of a lease that were paused and wake up: what they commit after a later holder has is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.config import Spec, load_spec
from headrace.config.workspace import Workspace
from headrace.errors import EXIT_BUSY, UserError
from headrace.jobs.housekeeping.collect import collect
from headrace.jobs.housekeeping.workspace_state import remove_all
from headrace.lake.delta import transaction
from headrace.lake.delta.log import DeltaLog
from headrace.lake.delta.log_files import Replacement, replacements, save_replacements
from headrace.lake.delta.transaction import Transaction, TransactionOvertaken, claim, create_table, lease_application
from headrace.lake.forgotten import ForgottenValues, listed_in
from headrace.stage import Context, Result, RunLock, run_lock, run_stage
from headrace.stage.manifest import Input, Manifest, Output
from headrace.storage import Fence, Lease, LeaseLost, Location, local
from headrace.storage.lease import Holder
from headrace.storage.objects import lease as leases
from tests.storage_support import home_of, memory_home

DS = "2026-01-03"
FIELDS = [{"name": n, "type": t, "nullable": True, "metadata": {}} for n, t in (("id", "long"), ("ds", "string"))]


def add(ds: str, name: str) -> dict[str, Any]:
    file = {"path": f"ds={ds}/{name}", "partitionValues": {"ds": ds}, "size": 9, "modificationTime": 1}
    return file | {"dataChange": True, "stats": json.dumps({"numRecords": 1})}


def live(table: Location) -> list[str]:
    log = DeltaLog(table)
    assert log.version is not None
    return sorted(f.path.name for f in log.files(log.version) or ())


# --- tables ----------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 4), st.booleans(), st.sampled_from("abc")), max_size=10))
def test_a_commit_stands_unless_a_later_holder_has_committed(
    tmp_path_factory: pytest.TempPathFactory, commits: list[tuple[int, bool, str]]
) -> None:
    """`early`: the transaction began on the table as it was made. Those of another lease, or of none, mean nothing."""
    table = local(tmp_path_factory.mktemp("table"))
    create_table(table, FIELDS, ["ds"])
    newest, expected = 0, dict[str, str]()
    touched: set[str] = set()
    for n, (token, early, day) in enumerate(commits):
        open_transaction = Transaction(table, 0 if early else None, Fence("mine", token))
        for fence in (Fence("other", n), None):
            Transaction(table, fence=fence).replace("ds", ["z"], [], "")
        try:
            open_transaction.replace("ds", [day], [add(day, str(n))], "")
        except LeaseLost:
            assert token < newest
        except UserError:
            assert early
            assert day in touched
        else:
            assert token >= newest
            newest, expected[day] = token, str(n)
            touched.add(day)
    assert live(table) == sorted(expected.values())


@pytest.mark.parametrize("how", ["replace", "append", "rewrite"])
@pytest.mark.parametrize("kind", ["local", "memory"])
def test_who_is_paused_before_the_put(how: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = home_of(kind, tmp_path, monkeypatch) / "table"
    create_table(table, FIELDS, () if how == "append" else ["ds"], [add("d1", "a")], fence=Fence("l", 1))
    commit: Mapping[str, Callable[[Transaction, str], int]] = {
        "replace": lambda t, name: t.replace("ds", [name], [add(name, name)], ""),
        "append": lambda t, name: t.append([add("d1", name)], "", (name, -1)),
        "rewrite": lambda t, name: t.rewrite({"ds=d1/a": add("d1", name)}, ""),
    }
    paused_transaction, real = Transaction(table, fence=Fence("l", 1)), transaction._put

    def paused(*arguments: Any) -> bool:
        monkeypatch.setattr(transaction, "_put", real)
        commit[how](Transaction(table, fence=Fence("l", 2)), "theirs")
        return real(*arguments)

    monkeypatch.setattr(transaction, "_put", paused)
    with pytest.raises(LeaseLost, match="a later holder of the lease has committed since"):
        commit[how](paused_transaction, "mine")
    assert "mine" not in live(table)
    assert "theirs" in live(table)
    if how == "rewrite":  # the file is no more
        return
    # Also where it begins only now.
    with pytest.raises(LeaseLost):
        commit[how](Transaction(table, fence=Fence("l", 1)), "mine")
    commit[how](Transaction(table, fence=Fence("l", 2)), "again")
    assert "again" in live(table)


def test_of_two_that_make_a_table_the_holder_of_the_older_lease_is_refused_afterwards(tmp_path: Path) -> None:
    table = local(tmp_path / "table")
    assert create_table(table, FIELDS, (), [add("d1", "a")], fence=Fence("l", 2))
    assert not create_table(table, FIELDS, (), [add("d1", "b")], fence=Fence("l", 1))
    with pytest.raises(LeaseLost):
        Transaction(table, fence=Fence("l", 1)).append([add("d1", "b")], "", ("app", -1))
    # What an older one did before stays a conflict of its own.
    open_transaction = Transaction(table, fence=Fence("l", 3))
    Transaction(table, fence=Fence("l", 2)).append([add("d1", "c")], "", ("app", -1))
    with pytest.raises(TransactionOvertaken):
        open_transaction.append([add("d1", "d")], "", ("app", -1))


def test_application_versions_grow_within_what_delta_can_say(tmp_path: Path) -> None:
    """Also with tokens of a lease by flock, which begin at the clock's milliseconds."""
    table = local(tmp_path / "table")
    create_table(table, FIELDS, ["ds"])
    with (local(tmp_path) / "lock").lease() as lease:
        for _ in range(3):
            Transaction(table, fence=lease.fence).replace("ds", ["d1"], [], "")
        log = DeltaLog(table)
        versions = [log.application_version(lease_application(lease.fence), version) for version in (1, 2, 3)]
    assert versions == sorted({v for v in versions if v is not None})
    assert versions[0] == lease.fence.token << 20
    later = replace(lease.fence, token=lease.fence.token + 100 * 365 * 86_400_000)
    Transaction(table, fence=later).replace("ds", ["d1"], [], "")
    newest = log.application_version(lease_application(later), 4)
    assert newest is not None
    assert newest < 2**63


# --- files that go ---------------------------------------------------------------------------------------------------


def test_a_claim_refuses_what_an_earlier_holder_has_begun(tmp_path: Path) -> None:
    table = local(tmp_path / "table")
    claim(table, Fence("l", 1))
    assert DeltaLog(table).version is None
    create_table(table, FIELDS, ["ds"], fence=Fence("l", 1))
    open_transaction = Transaction(table, fence=Fence("l", 1))
    for _ in range(2):  # once: the newest token is its own then
        claim(table, Fence("l", 2))
    claim(table, None)
    assert DeltaLog(table).version == 1
    with pytest.raises(LeaseLost):
        open_transaction.replace("ds", ["d1"], [add("d1", "a")], "")
    with pytest.raises(LeaseLost):
        claim(table, Fence("l", 1))
    Transaction(table, fence=Fence("l", 2)).replace("ds", ["d1"], [add("d1", "b")], "")
    assert live(table) == ["b"]


def test_files_that_vacuum_removes_are_not_named_by_a_run_that_stood_still(tmp_path: Path) -> None:
    """No commit of the run that vacuums says that there is a later holder: a claim does."""
    spec, ws = load_spec("clicks", ["housekeeping.vacuum_hours=0"]), Workspace(tmp_path)
    table = ws.events("clicks")
    open_transaction = None
    with run_lock(ws, "clicks") as paused:
        create_table(table, FIELDS, ["ds"], fence=paused.fence)
        open_transaction = Transaction(table, fence=paused.fence)
        (table / "ds=d1" / "orphan.parquet").put_text("PAR1")
    steps = [s for s in collect(spec, ws, datetime.now(UTC), delete=True) if s.kind == "vacuum"]
    assert len(steps) == 1
    assert not (table / "ds=d1" / "orphan.parquet").is_file()
    with pytest.raises(LeaseLost):
        open_transaction.replace("ds", ["d1"], [add("d1", "orphan.parquet")], "")
    assert live(table) == []
    # Where all that goes was in the log, nobody can name it again: no commit is made.
    version = DeltaLog(table).version
    Transaction(table).replace("ds", ["d1"], [add("d1", "named.parquet")], "")
    (table / "ds=d1" / "named.parquet").put_text("PAR1")
    Transaction(table).replace("ds", ["d1"], [], "")
    list(collect(spec, ws, datetime.now(UTC), delete=True))
    assert not (table / "ds=d1" / "named.parquet").is_file()
    assert version is not None
    assert DeltaLog(table).version == version + 2


def test_a_removal_that_stood_still_leaves_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [local(tmp_path / name) for name in "abc"]
    for file in files:
        file.put_text("x")
    seconds, held = [0.0], [True]
    monkeypatch.setattr("headrace.storage.lease.elapsed_seconds", lambda: seconds[0])
    lock = RunLock((Lease(Holder(token=1, lease="l"), lambda: held[0]),))
    lock.check()
    real = Location.remove

    def pause(self: Location) -> None:
        real(self)
        if self == files[1]:
            seconds[0], held[0] = 60.0, False

    monkeypatch.setattr(Location, "remove", pause)
    with pytest.raises(LeaseLost):
        remove_all(files, lock)
    assert [f.is_file() for f in files] == [False, False, True]


def test_of_two_lists_of_forgotten_values_neither_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, real = local(tmp_path / "values.json"), Location.put_if
    listed_in(file, "user_id", ["0"])

    def put_if(self: Location, data: bytes, tag: str | None) -> bool:
        monkeypatch.setattr(Location, "put_if", real)
        listed_in(file, "user_id", ["2"])
        return real(self, data, tag)

    monkeypatch.setattr(Location, "put_if", put_if)
    forgotten = listed_in(file, "user_id", ["1"])
    assert forgotten == ForgottenValues.load(file)
    assert list(forgotten.mask("user_id", pa.array([0, 1, 2, 3]))) == [True, True, True, False]


def test_the_record_of_rewritten_files_is_not_written_over(tmp_path: Path) -> None:
    table = local(tmp_path / "table")
    first, second = {"a": Replacement({"path": "b"}, 1)}, {"c": Replacement({"path": "d"}, 1)}
    save_replacements(table, first, {})
    with pytest.raises(LeaseLost, match="written by another run"):
        save_replacements(table, second, {})
    save_replacements(table, {**first, **second}, first)
    assert replacements(table) == {**first, **second}


# --- manifests -------------------------------------------------------------------------------------------------------


def manifest(note: str) -> Manifest:
    return Manifest(stage="train", pipeline="clicks", ds=DS, key="k", spec_hash="s", facts={"note": note})


@pytest.mark.parametrize("kind", ["local", "memory"])
@pytest.mark.parametrize("is_present", [True, False], ids=["replaced", "new"])
def test_a_manifest_is_written_on_the_condition_that_nobody_has_since(
    is_present: bool, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = home_of(kind, tmp_path, monkeypatch) / "train.json"
    old, new, another_lease = ((Fence(lease, token), Fence("x", 7)) for lease, token in (("l", 1), ("l", 2), ("m", 1)))
    if is_present:
        manifest("before").save(file, old)
    real = Location.put_if

    def save(note: str, fences: tuple[Fence, ...], rival_fences: tuple[Fence, ...]) -> str:
        """Save while another writer saves between the look and the PUT; return the note that is stored at the end."""

        def paused(self: Location, data: bytes, tag: str | None) -> bool:
            monkeypatch.setattr(Location, "put_if", real)
            manifest("theirs").save(file, rival_fences)
            return real(self, data, tag)

        monkeypatch.setattr(Location, "put_if", paused)
        saved = manifest(note).save(file, fences)
        assert Manifest.load(file) == saved
        return str(saved.facts["note"])

    with pytest.raises(LeaseLost, match="written by a later run"):
        save("mine", old, new)
    stored = Manifest.load(file)
    assert stored is not None
    assert (stored.facts["note"], stored.fences) == ("theirs", {"l": 2, "x": 7})
    # A later one, the same one and one of another lease go on behind it.
    assert save("later", new, new) == "later"
    assert save("of another lease", another_lease, new) == "of another lease"


# --- runs ------------------------------------------------------------------------------------------------------------


@dataclass
class Commits:
    """A stage that replaces a day of a table."""

    word: str
    name: str = "features"
    version: int = 1
    needs: tuple[str, ...] = ()

    def spec_part(self, spec: Spec) -> Mapping[str, Any]:
        return {}

    def inputs(self, ctx: Context) -> tuple[Input, ...]:
        return ()

    def verify(self, ctx: Context, manifest: Manifest) -> str | None:
        return None

    def run(self, ctx: Context) -> Result:
        table = ctx.ws.events("clicks")
        if DeltaLog(table).version is None:
            create_table(table, FIELDS, ["ds"], fence=ctx.fence)
        version = Transaction(table, fence=ctx.fence).replace("ds", [DS], [add(DS, self.word)], "")
        return Result(outputs=(Output(kind="delta", name="events", version=str(version)),))


@pytest.mark.parametrize("moment", ["the table's PUT", "the manifest's PUT"])
@pytest.mark.parametrize("kind", ["objects", "a lock that a network file system has lost"])
def test_a_run_that_is_paused_after_it_asked_for_its_lease(
    kind: str, moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "objects":
        # Two hosts, each with what a process of its own would know of the same objects.
        memory_home(monkeypatch, tmp_path / "cache", readers=("s3", "gs"))
        paused_ws, rival_ws = (Workspace(tmp_path, f"{s}://bucket/lake", f"{s}://bucket/store") for s in ("s3", "gs"))
        # The holder stands still, and its thread with it; the other host's clock has gone on.
        monkeypatch.setattr(leases, "_RENEWED_AFTER", 1000)
        monkeypatch.setattr(leases, "SKEW_SECONDS", -2 * leases.SECONDS)
    else:
        paused_ws = rival_ws = Workspace(tmp_path)
        monkeypatch.setattr("headrace.storage.lease.fcntl.flock", lambda fd, how: None)
    spec = load_spec("clicks")

    def overtake() -> None:
        outcome = run_stage(Commits("theirs"), spec, rival_ws, DS)
        assert not outcome.skipped

    if moment == "the table's PUT":
        real_put = transaction._put

        def put(folder: Location, version: int, actions: Any) -> bool:
            if version:
                monkeypatch.setattr(transaction, "_put", real_put)
                overtake()
            return real_put(folder, version, actions)

        monkeypatch.setattr(transaction, "_put", put)
    else:
        real_check = RunLock.check

        def check(self: RunLock) -> None:
            real_check(self)
            monkeypatch.setattr(RunLock, "check", real_check)
            overtake()

        monkeypatch.setattr(RunLock, "check", check)
    with pytest.raises(LeaseLost) as raised:
        run_stage(Commits("mine"), spec, paused_ws, DS)
    assert raised.value.exit_code == EXIT_BUSY
    assert live(rival_ws.events("clicks")) == ["theirs"]
    stored = Manifest.load(rival_ws.manifest("clicks", DS, "features"))
    assert stored is not None
    assert stored.output("delta").version == str(DeltaLog(rival_ws.events("clicks")).version)
    assert run_stage(Commits("mine"), spec, paused_ws, DS).skipped
