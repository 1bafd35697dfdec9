"""A host that is gone without a word ends no connection: who waits there for an answer waits for ever.

Horovod 0.28 waits in the driver for the exit code of each rank, and for what it prints, on sockets without any limit.
Where a rank's host loses its network, `horovod.spark.run` never returns then, not even on SIGTERM. Within
`notice_lost_hosts` its sockets have the kernel ask the other end for a sign of life: an answer comes from the kernel
there, however busy the rank is, so that a few seconds are no risk for one that is only slow.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import horovod.runner.common.util.network

#: Most seconds without an answer, however long ranks may wait for each other.
_SECONDS = 60.0
#: Questions without an answer, after half of the time, until a host is taken as gone.
_QUESTIONS = 5
#: Attempts to connect, each after twice the time of the one before, from 1 s: 15 s in all. (The kernel's own: 127 s.)
_CONNECTS = 3


def silence(deadline: float) -> float:
    """Seconds without an answer after which a host is taken as gone.

    Args:
        deadline: seconds that ranks may wait for each other.
    """
    return max(2.0, min(deadline, _SECONDS))


@contextmanager
def notice_lost_hosts(seconds: float) -> Iterator[None]:
    """Within, a connection that Horovod makes from this process fails when the other end's host is gone.

    Args:
        seconds: without an answer.
    """
    network = horovod.runner.common.util.network
    before = network.socket

    class Socket(socket.socket):
        def __init__(self, *args: object, **more: object) -> None:
            super().__init__(*args, **more)  # type: ignore[arg-type]
            keep_asking(self, seconds)

    shown = ModuleType("socket", socket.__doc__)
    shown.__dict__.update(socket.__dict__)
    shown.__dict__["socket"] = Socket
    network.socket = shown
    try:
        yield
    finally:
        network.socket = before


def keep_asking(connection: socket.socket, seconds: float) -> None:
    """Let the kernel end a connection, or an attempt at one, whose other end has not answered for so long."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    wanted = {
        "TCP_KEEPIDLE": round(seconds / 2),
        "TCP_KEEPINTVL": round(seconds / 2 / _QUESTIONS),
        "TCP_KEEPCNT": _QUESTIONS,
        # Of what was sent and is not acknowledged: then nothing is asked. In milliseconds.
        "TCP_USER_TIMEOUT": round(1000 * seconds),
        "TCP_SYNCNT": _CONNECTS,
    }
    for name, value in wanted.items():
        option = getattr(socket, name, None)  # not every system has them all
        if option is not None:
            connection.setsockopt(socket.IPPROTO_TCP, option, max(1, value))
