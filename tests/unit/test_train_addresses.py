"""Addresses of Horovod's services: what other hosts reach."""

from __future__ import annotations

import socket
from collections import namedtuple

import pytest
from horovod.runner.common.util import network

from headrace.train.launch.hosts import beyond_loopback, reached_by_others, without_loopback

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
