"""What ranks say to each other: `base` is the interface, the other modules carry the bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.comm.base import Collective


def horovod() -> Collective:
    """The ranks of this Horovod job. Collective: every rank calls it, once.

    `hvd.init()` is called where it was not yet. The messages of a step between ranks of one machine go through
    memory that they share (headrace.comm.shared_memory).
    """
    import horovod.torch as hvd

    from headrace.comm.horovod_collective import HorovodCollective
    from headrace.comm.shared_memory import shared

    if not hvd.is_initialized():
        hvd.init()
    return shared(HorovodCollective())
