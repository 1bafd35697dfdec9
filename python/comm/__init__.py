"""Messages between ranks: `base` is the interface, the other modules carry the bytes.

`World` is the topology of the processes: passed in as a value, never global.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.comm.base import Collective


@dataclass(frozen=True)
class World:
    """Rank and size of the job, and of this host. `World()` is a single process: the general case with one rank."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank {self.rank} is not in [0, {self.size})")

    @property
    def is_chief(self) -> bool:
        """True on rank 0, which prints and writes what is written once."""
        return self.rank == 0


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
