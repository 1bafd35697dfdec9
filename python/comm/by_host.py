"""Ranks on several hosts: through shared memory within a host, through the collective that is wrapped between hosts.

Of an all-to-all, which is what sharded embeddings wait for, the rows for ranks of the same host never reach the network
or the kernel. All-reduces stay with the wrapped collective: a sum by hosts first has other bits than one in the order
of the ranks, and a model would depend on where its ranks ran. (Two levels of an all-to-all: `train.sharding.exchange`.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from headrace.comm.base import AllToAll, Collective, check_send_rows
from headrace.comm.shared_messages import SharedMessages
from headrace.world import World


class ByHostCollective:
    """See the module; made by headrace.comm.shared_memory.shared."""

    def __init__(self, inner: Collective, hosts: Sequence[Sequence[int]], messages: SharedMessages | None) -> None:
        """`hosts`: all ranks, those that share memory together; `messages`: of this rank's; None where it is alone."""
        self._inner, self._hosts, self._messages = inner, [list(h) for h in hosts], messages
        self._members = next(h for h in self._hosts if inner.world.rank in h)
        self._others = [r for r in range(inner.world.size) if r not in self._members]

    @property
    def world(self) -> World:
        return self._inner.world

    def all_to_all(self, x: Tensor, send_rows: Sequence[int]) -> tuple[Tensor, list[int]]:
        return self.start_all_to_all(x, send_rows)()

    def start_all_to_all(self, x: Tensor, send_rows: Sequence[int]) -> Callable[[], tuple[Tensor, list[int]]]:
        # On all hosts alike: where one has its tables on GPUs, all have.
        if x.device.type != "cpu" or self._messages is None:
            return self._inner.start_all_to_all(x, send_rows)
        check_send_rows(x, send_rows, self.world.size)
        rows = torch.split(x.detach(), list(send_rows))
        far = [0 if r in self._members else n for r, n in enumerate(send_rows)]
        # What takes longer goes first.
        fetch = self._inner.start_all_to_all(torch.cat([rows[r] for r in self._others]), far)
        arrive = self._messages.start([rows[r] for r in self._members])

        def wait() -> tuple[Tensor, list[int]]:
            near = arrive()
            received, counts = fetch()
            parts = list(torch.split(received, counts))
            for r, part in zip(self._members, near.parts, strict=True):
                # What a rank sends to itself stays where it is.
                parts[r] = rows[r] if part is None else part
            out = torch.cat(parts)
            near.release()
            return out, [p.shape[0] for p in parts]

        return wait

    def within(self, ranks: Sequence[int]) -> AllToAll | None:
        """See headrace.comm.base.within: of the ranks of a host, where all hosts have as many."""
        alike = list(ranks) == self._members and len({len(h) for h in self._hosts}) == 1
        return self._messages if alike else None

    def all_reduce_sum(self, tensors: Sequence[Tensor]) -> None:
        self._inner.all_reduce_sum(tensors)

    def all_gather(self, x: Tensor) -> Tensor:
        return self._inner.all_gather(x)

    def broadcast(self, tensors: Sequence[Tensor], root: int = 0) -> None:
        self._inner.broadcast(tensors, root)

    def barrier(self) -> None:
        self._inner.barrier()

    def close(self) -> None:
        """Tell the others of the host that this rank leaves: who waits for it raises PeerLost."""
        if self._messages is not None:
            self._messages.close()
