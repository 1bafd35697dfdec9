"""Where Horovod's services say that they are reached: never at loopback, where they have another address.

Horovod 0.28 lets a service name the addresses of all its host's interfaces, and who calls it tries each, its own
loopback among them. There something else may listen at that port, and whoever does not answer costs three attempts of
20 s, behind which a rank starts a minute after the others. And where all ranks are on one host and the driver on
another, loopback is an interface that "all tasks have in common", on which Horovod then offers its rendezvous.

With interfaces that were given (`nics`, of which loopback may be one) Horovod's choice stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import ip_address
from typing import Any

from headrace.train.launch.task_lifetime import Mapper

#: By interface, its addresses: each with the service's port.
Addresses = dict[str, list[tuple[str, int]]]


@contextmanager
def without_loopback() -> Iterator[None]:
    """Within, services that this process makes name no address of loopback."""
    from horovod.runner.common.util.network import BasicService

    before = BasicService._get_local_addresses
    BasicService._get_local_addresses = lambda service: beyond_loopback(before(service))
    try:
        yield
    finally:
        BasicService._get_local_addresses = before


def reached_by_others(mapper: Mapper) -> Mapper:
    """A mapper of Horovod's, in a task whose service names no address of loopback."""

    def mapped(index: int, rows: Any) -> Iterator[Any]:
        with without_loopback():
            yield from mapper(index, rows)

    return mapped


def beyond_loopback(addresses: Addresses) -> Addresses:
    """Addresses that other hosts reach; all of them where there are none."""
    found = {
        interface: [a for a in those if not ip_address(a[0]).is_loopback] for interface, those in addresses.items()
    }
    return {interface: those for interface, those in found.items() if those} or addresses
