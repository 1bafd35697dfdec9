"""Checks that every collective must pass, on ranks of any kind."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headrace.comm.base import MOST_IN_FLIGHT, Collective, TooManyInFlight


def most_in_flight(c: Collective) -> list[Any]:
    """Run as many all-to-alls in flight as there may be, a sum among them, one too many, and as many once more.

    Those that nobody waits for any more are none of them.
    """
    me, size = c.world.rank, c.world.size
    results: list[Any] = []
    for round_number in range(3):
        waits = [
            c.start_all_to_all(torch.full((2 * size, 3), 1000 * round_number + 100 * me + n), [2] * size)
            for n in range(MOST_IN_FLIGHT)
        ]
        with pytest.raises(TooManyInFlight, match=f"{MOST_IN_FLIGHT} all-to-alls of this rank are in flight"):
            c.start_all_to_all(torch.zeros(size, 1), [1] * size)
        total = torch.tensor([1.0 + me])
        c.all_reduce_sum([total])
        results.append(total.item())
        order = range(MOST_IN_FLIGHT) if round_number % 2 else reversed(range(MOST_IN_FLIGHT))
        results.append([waits[n]()[0][:, 0].tolist() for n in order])
    return results


def most_expected(rank: int, size: int) -> list[Any]:
    """The same by definition."""
    results: list[Any] = []
    for round_number in range(3):
        results.append(float(sum(range(1, size + 1))))
        order = range(MOST_IN_FLIGHT) if round_number % 2 else reversed(range(MOST_IN_FLIGHT))
        results.append(
            [[1000 * round_number + 100 * sender + n for sender in range(size) for _ in range(2)] for n in order]
        )
    return results


def many_abandoned(c: Collective) -> None:
    """Twice as many as may be in flight are begun, none is waited for, and the ranks go on."""
    size = c.world.size
    for _ in range(2 * MOST_IN_FLIGHT):
        c.start_all_to_all(torch.zeros(size, 1), [1] * size)
        c.barrier()
    assert c.all_to_all(torch.full((size, 1), c.world.rank), [1] * size)[0].tolist() == [[r] for r in range(size)]
