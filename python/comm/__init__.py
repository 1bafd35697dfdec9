"""Messages between ranks: `base` is the interface, the other modules carry the bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.comm.base import Collective


def horovod() -> Collective:
    """Return the ranks of this Horovod job. Collective: every rank calls it, once.

    Calls `hvd.init()` unless that was done. The messages of a step between ranks of one machine go through memory that
    they share (headrace.comm.shared_memory).
    """
    import horovod.torch as hvd

    from headrace.comm.horovod_collective import HorovodCollective
    from headrace.comm.shared_memory import shared

    if not hvd.is_initialized():
        hvd.init()
    return shared(HorovodCollective())
