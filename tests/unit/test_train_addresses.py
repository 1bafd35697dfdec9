"""Hosts of ranks: addresses that others reach, and hosts and executors that are lost."""

from __future__ import annotations

import json
import socket
from collections import namedtuple
from pathlib import Path

import pytest
from horovod.runner.common.util import network

from bench.rack.cluster import Losses, losses
from headrace.train.launch.hosts import beyond_loopback, notice_lost_hosts, reached_by_others, silence, without_loopback

_Address = namedtuple("_Address", ("family", "address"))


@pytest.fixture
def two_interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = {name: [_Address(socket.AF_INET, a)] for name, a in (("lo", "127.0.0.1"), ("eth0", "10.77.0.3"))}
    monkeypatch.setattr(network.psutil, "net_if_addrs", lambda: addresses)


def interfaces_of_a_service(nics: set[str] | None = None) -> list[str]:
    service = network.BasicService("service", b"key", nics)
    try:
        return sorted(service.addresses())
    finally:
        service.shutdown()


@pytest.mark.usefixtures("two_interfaces")
def test_a_service_is_not_to_be_reached_at_loopback_within_the_block() -> None:
    with without_loopback():
        assert interfaces_of_a_service() == ["eth0"]
        assert interfaces_of_a_service({"lo"}) == ["lo"]
    assert interfaces_of_a_service() == ["eth0", "lo"]


@pytest.mark.usefixtures("two_interfaces")
def test_nor_is_that_of_a_task() -> None:
    def mapper(index: int, rows: list[int]):  # type: ignore[no-untyped-def]
        yield index, interfaces_of_a_service()

    assert list(reached_by_others(mapper)(7, [])) == [(7, ["eth0"])]
    assert interfaces_of_a_service() == ["eth0", "lo"]


def test_a_host_without_a_network_keeps_loopback() -> None:
    assert beyond_loopback({"lo": [("127.0.0.1", 1)]}) == {"lo": [("127.0.0.1", 1)]}
    assert beyond_loopback({"lo": [("127.0.0.1", 1), ("10.1.1.1", 1)]}) == {"lo": [("10.1.1.1", 1)]}


@pytest.mark.parametrize(("deadline", "seconds"), [(0.5, 2.0), (20.0, 20.0), (600.0, 60.0)])
def test_a_host_may_be_silent_as_long_as_ranks_may_wait_and_a_minute_at_most(deadline: float, seconds: float) -> None:
    assert silence(deadline) == seconds


def test_sockets_of_horovod_ask_within_the_block_alone() -> None:
    with notice_lost_hosts(20):
        with network.socket.socket(network.socket.AF_INET, network.socket.SOCK_STREAM) as asks:
            assert asks.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            idle, interval, count = (
                asks.getsockopt(socket.IPPROTO_TCP, option)
                for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
            )
            assert idle + interval * count == 20
            assert asks.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 20_000
        with socket.socket() as other_socket:
            assert not other_socket.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    assert network.socket is socket


def test_what_was_lost_is_counted_up_to_the_end_of_the_application(tmp_path: Path) -> None:
    events: list[dict[str, object]] = [
        {"Event": "SparkListenerTaskEnd", "Task End Reason": {"Reason": reason}}
        for reason in ("Success", "ExecutorLostFailure", "FetchFailed", "FetchFailed")
    ]
    removed = {"Event": "SparkListenerExecutorRemoved"}
    failed = {"Event": "SparkListenerStageCompleted", "Stage Info": {"Failure Reason": "FetchFailed"}}
    stage_completed = {"Event": "SparkListenerStageCompleted", "Stage Info": {}}
    events += [removed, failed, stage_completed, {"Event": "SparkListenerApplicationEnd"}, removed]
    complete, killed = tmp_path / "whole", tmp_path / "killed"
    complete.write_text("".join(json.dumps(event) + "\n" for event in events))
    killed.write_text(json.dumps(removed) + "\n" + json.dumps(removed)[:9])
    counted = losses([complete, killed])
    assert counted == Losses(2, {"ExecutorLostFailure": 1, "FetchFailed": 2}, 1)
    assert str(counted) == "2 executors, 3 tasks (1 ExecutorLostFailure, 2 FetchFailed), 1 attempt of a stage"
    assert str(Losses(0, {}, 0)) == "no executors, no tasks, no attempts of a stage"
