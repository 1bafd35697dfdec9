"""Leases in a store of objects: one holder on any number of hosts, each with a store of its own over the same one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from pathlib import Path
from threading import Event

import pytest

from headrace.storage import LeaseLost, Location
from headrace.storage.lease import Held, Holder
from headrace.storage.objects import calls
from headrace.storage.objects import lease as leases
from tests.storage_support import faulty, memory_home


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Location, Location]:
    host = memory_home(monkeypatch, tmp_path, readers=("other",)) / "locks" / "clicks.lock"
    return host, Location(host.path, "other")


class Clock:
    """Time that a test moves, for the holder's clock and for the other host's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.passed = 0.0
        start = datetime.now(UTC)

        class Moved(datetime):
            @classmethod
            def now(cls, tz: object = None) -> Moved:
                return cls.fromtimestamp((start + timedelta(seconds=self.passed)).timestamp(), UTC)

        monkeypatch.setattr(leases, "elapsed_seconds", lambda: self.passed)
        monkeypatch.setattr(leases, "datetime", Moved)


def until(condition: Callable[[], bool]) -> None:
    for _ in range(2000):
        if condition():
            return
        time.sleep(0.005)
    raise AssertionError("it never was")


def test_one_works_and_the_other_says_who_does_and_since_when(hosts: tuple[Location, Location]) -> None:
    host, other_host = hosts
    assert host.holder() is None
    with host.lease() as lease:
        lease.check()
        assert lease.holder.expires is not None
        assert (lease.holder.process, lease.holder.host) == (os.getpid(), os.uname().nodename)
        since = f"{lease.holder.since:%Y-%m-%d %H:%M:%S}"
        with pytest.raises(Held, match=f"process {os.getpid()} on .* since {since} UTC"), other_host.lease():
            pass
        holder = other_host.holder()
        assert holder is not None
        assert holder.token == lease.holder.token
    assert other_host.holder() is None
    with other_host.lease() as next_one:
        assert next_one.holder.token > lease.holder.token
        with pytest.raises(LeaseLost):
            lease.check()


def test_of_many_that_want_it_at_once_one_gets_it(hosts: tuple[Location, Location]) -> None:
    inside: list[int] = []
    most: list[int] = []

    def work(n: int) -> bool:
        try:
            with hosts[n % 2].lease():
                inside.append(n)
                most.append(len(inside))
                time.sleep(0.02)
                inside.remove(n)
        except Held:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        worked = list(pool.map(work, range(40)))
    assert any(worked)
    assert max(most) == 1


def test_a_paused_holder_that_wakes_up_cannot_commit(
    hosts: tuple[Location, Location], monkeypatch: pytest.MonkeyPatch
) -> None:
    host, other_host = hosts
    clock = Clock(monkeypatch)
    monkeypatch.setattr(leases, "_RENEWED_AFTER", 1000)  # its thread stands still with it
    with host.lease() as lease:
        clock.passed = leases.SECONDS - 1
        lease.check()
        with pytest.raises(Held), other_host.lease():
            pass
        clock.passed = leases.SECONDS
        with pytest.raises(LeaseLost):
            lease.check()
        # The other one's clock may be ahead: it waits longer.
        with pytest.raises(Held), other_host.lease():
            pass
        clock.passed = leases.SECONDS + leases.SKEW_SECONDS + 1
        monkeypatch.setattr(leases, "_is_alive", lambda process: True)
        with other_host.lease() as next_lease:
            assert next_lease.holder.token > lease.holder.token
            next_lease.check()
            with pytest.raises(LeaseLost, match="run it again"):
                lease.check()
            clock.passed = 0  # even where its clock was set back
            with pytest.raises(LeaseLost):
                lease.check()
    # Its end took nothing from anybody.
    with other_host.lease():
        pass


@pytest.mark.parametrize("token", ["shared", None], ids=["one token", "own tokens"])
@pytest.mark.parametrize("published", [True, False], ids=["after", "before"])
@pytest.mark.parametrize("older", [True, False], ids=["older", "new"])
def test_a_paused_writer_that_wakes_up_publishes_no_part_of_a_folder(
    hosts: tuple[Location, Location], token: str | None, published: bool, older: bool
) -> None:
    """`published`: it wakes up after the next holder has published the folder; else while that one fills it."""
    paused_model, other_model = (host.parent / "model" for host in hosts)
    if older:
        with other_model.new_folder() as folder:
            (folder / "f0").put_text("old")
    first = paused_model.begin(token or "a")
    (first / "f1").put_text("mine")
    second = other_model.begin(token or "b")
    (second / "f1").put_text("theirs")
    if published:
        (second / "f2").put_text("theirs")
        other_model.commit(token or "b")
    # Before the next holder publishes, what is put in one place cannot be told from its own.
    with nullcontext() if token and not published else pytest.raises(LeaseLost, match="published, or was begun anew"):
        (first / "f3").put_text("mine")
    with pytest.raises(LeaseLost, match="run it again"):
        paused_model.commit(token or "a")
    if not published:
        assert paused_model.exists() == older
        if token:
            (second / "f3").remove()
        (second / "f2").put_text("theirs")
        other_model.commit(token or "b")
    for host in (paused_model, other_model):
        assert {f.below(host): f.read_text() for f in host.files()} == {"f1": "theirs", "f2": "theirs"}


def test_it_is_renewed_while_its_holder_works(
    hosts: tuple[Location, Location], monkeypatch: pytest.MonkeyPatch
) -> None:
    host, other_host = hosts
    monkeypatch.setattr(leases, "SECONDS", 1.0)
    monkeypatch.setattr(leases, "SKEW_SECONDS", 0.0)
    monkeypatch.setattr(leases, "_RENEWED_AFTER", 0.01)
    with host.lease() as lease:
        (file,) = host.entries()
        first = json.loads(file.read_bytes())
        until(lambda: json.loads(file.read_bytes())["expires"] > first["expires"])
        lease.check()
        with pytest.raises(Held), other_host.lease():
            pass


def test_a_store_that_is_away_for_a_while(hosts: tuple[Location, Location], monkeypatch: pytest.MonkeyPatch) -> None:
    host, _ = hosts
    monkeypatch.setattr(leases, "_RENEWED_AFTER", 0.0005)
    with host.lease() as lease:
        with faulty(1, kills=False, calls=calls) as fault:
            until(lambda: fault.calls_made > 2)
        lease.check()


def test_its_end_does_not_wait_for_a_store_that_is_away(
    hosts: tuple[Location, Location], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    host, other_host = hosts
    monkeypatch.setattr(leases, "END_SECONDS", 0.01)
    real, is_back = calls.put, Event()

    def away(bucket: object, key: str, data: bytes) -> str:
        is_back.wait(30)
        return real(bucket, key, data)

    with host.lease():
        monkeypatch.setattr(calls, "put", away)
    try:
        assert "clicks.lock was not given back (the store does not answer)" in caplog.text
        assert other_host.holder() is not None
        with host.lease() as next_lease:  # the next stage of the process that ended it
            assert next_lease.holder.token == 2
    finally:
        is_back.set()
    until(lambda: other_host.holder() is None)
    caplog.clear()
    monkeypatch.setattr(leases, "END_SECONDS", 60)
    with other_host.lease():
        pass
    assert caplog.text == ""


def test_who_was_slow_to_take_a_number_that_is_free_again(
    hosts: tuple[Location, Location], monkeypatch: pytest.MonkeyPatch
) -> None:
    host, other_host = hosts
    with host.lease():
        pass
    real = calls.put_new

    def slow(bucket: object, key: str, data: bytes) -> str | None:
        monkeypatch.setattr(calls, "put_new", real)
        for _ in range(2):
            with host.lease():
                pass
        return real(bucket, key, data)

    monkeypatch.setattr(calls, "put_new", slow)
    with pytest.raises(Held), other_host.lease():
        pass
    with other_host.lease() as lease:
        assert lease.holder.token == 4


def test_the_answer_to_a_write_is_lost(hosts: tuple[Location, Location], monkeypatch: pytest.MonkeyPatch) -> None:
    """The client tries again and is told that the condition does not hold: by its own first try."""
    real = calls.put_new

    def put_twice(bucket: object, key: str, data: bytes) -> str | None:
        real(bucket, key, data)
        return real(bucket, key, data)

    monkeypatch.setattr(calls, "put_new", put_twice)
    with hosts[0].lease() as lease:
        lease.check()


def test_a_holder_that_died_on_this_machine_is_followed_at_once(hosts: tuple[Location, Location]) -> None:
    host, other_host = hosts
    ended_process = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True
    )
    expires = datetime.now(UTC) + timedelta(hours=1)
    dead = Holder(process=int(ended_process.stdout), expires=expires, token=7, machine=leases._machine())
    (host / "0000000007").put_text(dead.model_dump_json())
    assert other_host.holder() is None
    with other_host.lease() as lease:
        assert lease.holder.token == 8
        assert [e.name for e in host.entries()] == ["0000000008"]
    # Of another machine nobody knows: it has its time.
    (host / "0000000009").put_text(dead.model_copy(update={"machine": "another"}).model_dump_json())
    with pytest.raises(Held), other_host.lease():
        pass


def test_a_lease_that_says_nothing_is_somebodys(hosts: tuple[Location, Location]) -> None:
    host, other_host = hosts
    (host / "0000000001").put_text("?")
    with pytest.raises(Held, match="an unknown process"), other_host.lease():
        pass
