"""Sockets that notice a host that is gone (what that means between hosts: tests/rack/test_lost_hosts.py)."""

from __future__ import annotations

import socket

import pytest
from horovod.runner.common.util import network

from headrace.train.launch.hosts import notice_lost_hosts, silence


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
