"""Collective of torch.distributed processes: gloo on CPUs, NCCL on GPUs. The only import of torch.distributed.

    torch.distributed.init_process_group("gloo", ...)   # done by the launcher; or:
    collective = TorchCollective()                      # with gloo_ranks(...) as collective

The receiver of an all-to-all must know its sizes, so the counts travel first, in a message of their own.
NCCL carries tensors of GPUs alone: in a group that has no backend for the CPU, host tensors travel through the GPU.
(The path of NCCL is the same calls on device tensors; it was not run.)
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from headrace.comm import World
from headrace.comm.base import InFlight, check_send_rows, flatten_by_dtype, unflatten


class TorchCollective:
    """The ranks of a process group; default the whole world's, which must have been initialised."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group, self._in_flight = group, InFlight()
        #: Device from which host tensors are sent; None: the host.
        self._staging = _staging_device(group)
        size = dist.get_world_size(group)
        # torchrun sets these; without them, all ranks are taken to be on one machine.
        local = int(os.environ.get("LOCAL_RANK", dist.get_rank(group)))
        self._world = World(
            rank=dist.get_rank(group),
            size=size,
            local_rank=local,
            local_size=int(os.environ.get("LOCAL_WORLD_SIZE", size)),
        )

    @property
    def world(self) -> World:
        return self._world

    def all_to_all(self, x: Tensor, send_rows: Sequence[int]) -> tuple[Tensor, list[int]]:
        return self.start_all_to_all(x, send_rows)()

    def start_all_to_all(self, x: Tensor, send_rows: Sequence[int]) -> Callable[[], tuple[Tensor, list[int]]]:
        check_send_rows(x, send_rows, self.world.size)
        ticket = self._in_flight.begin()
        home, x = x.device, self._sendable(x)
        counts = torch.empty(self.world.size, dtype=torch.int64, device=x.device)
        sent = torch.tensor(list(send_rows), dtype=torch.int64, device=x.device)
        dist.all_to_all_single(counts, sent, group=self._group)
        received: list[int] = counts.tolist()
        out = x.new_empty(sum(received), *x.shape[1:])
        work = dist.all_to_all_single(out, x, received, list(send_rows), group=self._group, async_op=True)

        def wait() -> tuple[Tensor, list[int]]:
            work.wait()
            ticket.end()
            return out.to(home), received

        return wait

    def all_reduce_sum(self, tensors: Sequence[Tensor]) -> None:
        for members, flat in flatten_by_dtype(tensors):
            sent = self._sendable(flat)
            dist.all_reduce(sent, group=self._group)
            unflatten(members, sent)

    def all_gather(self, x: Tensor) -> Tensor:
        home, x = x.device, self._sendable(x)
        sizes = [torch.empty(1, dtype=torch.int64, device=x.device) for _ in range(self.world.size)]
        dist.all_gather(sizes, torch.tensor([x.shape[0]], device=x.device), group=self._group)
        rows = [int(n) for n in sizes]
        padded = x.new_zeros(max(rows), *x.shape[1:])
        padded[: x.shape[0]] = x
        parts = [torch.empty_like(padded) for _ in rows]
        dist.all_gather(parts, padded, group=self._group)
        return torch.cat([part[:n] for part, n in zip(parts, rows, strict=True)]).to(home)

    def broadcast(self, tensors: Sequence[Tensor], root: int = 0) -> None:
        for members, flat in flatten_by_dtype(tensors):
            sent = self._sendable(flat)
            dist.broadcast(sent, group_src=root, group=self._group)
            unflatten(members, sent)

    def barrier(self) -> None:
        dist.barrier(group=self._group)

    def _sendable(self, x: Tensor) -> Tensor:
        """Return a contiguous tensor on a device that the group can send from."""
        x = x.detach().contiguous()
        return x.to(self._staging) if self._staging is not None and x.device.type == "cpu" else x


@contextmanager
def gloo_ranks(
    rank: int, size: int, host: str, exchange_text: Callable[[str], Sequence[str]]
) -> Iterator[TorchCollective]:
    """Open a process group of gloo for processes that can exchange one text; close it at the end of the context.

    A process that raises keeps its connections until it ends: otherwise the ranks that wait for it would fail at the
    same time, and the caller might see their errors before the cause.

    Args:
        rank: number of this process.
        size: number of processes.
        host: address at which the other processes reach this one.
        exchange_text: called once with this process's text; returns the texts of all, in rank order.
    """
    store = TCPStore(host, 0, size, is_master=True, wait_for_workers=False) if rank == 0 else None
    address = exchange_text("" if store is None else f"{host}:{store.port}")[0]
    if store is None:
        name, port = address.rsplit(":", 1)
        store = TCPStore(name, int(port), size, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    yield TorchCollective()
    dist.barrier()  # the first process has the store: it leaves last
    dist.destroy_process_group()


def _staging_device(group: dist.ProcessGroup | None) -> torch.device | None:
    """Return the device through which host tensors are sent; None if the group has a backend for the CPU."""
    # "cpu:gloo,cuda:nccl", or "cuda:nccl" alone.
    devices = [part.split(":")[0] for part in dist.get_backend_config(group).split(",")]
    return None if "cpu" in devices else torch.device(devices[0], torch.accelerator.current_device_index())
