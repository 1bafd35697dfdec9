"""What the ranks of an evaluation tell each other: small tables, sums, and rows on their way to another rank."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from headrace.world import World

if TYPE_CHECKING:  # imports torch, which one process alone needs not
    from headrace.comm.base import Collective

Array = npt.NDArray[Any]
I64 = npt.NDArray[np.int64]


class Ranks:
    """The ranks of an evaluation. Every method is collective.

    Args:
        collective: carries the messages; None: this process alone, for which there are none.
    """

    def __init__(self, collective: Collective | None = None) -> None:
        self._collective = collective
        self.world = World() if collective is None else collective.world

    def gather(self, x: I64) -> I64:
        """The ranks' tables of one shape: int64 [...] -> int64 [ranks, ...]."""
        return self.gather_rows(np.ascontiguousarray(x, np.int64)[None])

    def add_up(self, x: I64) -> I64:
        """The sum over the ranks of tables of one shape: int64 [...] -> int64 [...], without a float on the way."""
        total = np.array(x, np.int64)
        if self._collective is not None and total.size:
            import torch

            self._collective.all_reduce_sum([torch.from_numpy(total)])
        return total

    def gather_json(self, value: Any) -> list[Any]:
        """What each rank says, in rank order: small JSON values."""
        text = np.frombuffer(json.dumps(value).encode(), np.uint8)
        lengths = self.gather(np.array([len(text)]))[:, 0]
        whole = self.gather_rows(text).tobytes()
        ends = np.cumsum(lengths).tolist()
        return [json.loads(whole[end - n : end]) for n, end in zip(lengths.tolist(), ends, strict=True)]

    def send_rows(self, columns: Sequence[Array], rows: Sequence[int]) -> list[Array]:
        """Columns of rows to the ranks: the first `rows[0]` to rank 0, and so on. What came here, to be read only."""
        if self._collective is None:
            return list(columns)
        import torch

        return [self._collective.all_to_all(torch.from_numpy(c), rows)[0].numpy() for c in columns]

    def gather_rows(self, x: Array) -> Array:
        """The ranks' rows in rank order: [N_r, ...] of any type -> [sum of N_r, ...]."""
        if self._collective is None:
            return x
        import torch

        return self._collective.all_gather(torch.from_numpy(x.copy())).numpy()
