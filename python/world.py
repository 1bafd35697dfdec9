"""Which rank am I, and of how many: a value that is handed in, never looked up deep inside."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class World:
    """The process topology. `World()` is one process: the general case with one rank, not a special one."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank {self.rank} is not in [0, {self.size})")

    @property
    def is_chief(self) -> bool:
        """Rank 0 writes what is written once, and prints."""
        return self.rank == 0
