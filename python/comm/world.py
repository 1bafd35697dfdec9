"""Process topology of training: this process's rank and the number of ranks, passed in as a value and never global."""

from __future__ import annotations

from dataclasses import dataclass


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
