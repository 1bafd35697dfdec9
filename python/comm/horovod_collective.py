"""Collective of Horovod processes. The only module that sends by horovod.torch.

Horovod 0.28 needs contiguous inputs; `splits` as an int32 tensor on the CPU; the same name for the same operation on
every rank and in every step, so that negotiated responses are reused; no name in flight twice. A name is the
operation, dtype and trailing shape, and a number where an all-to-all of that kind has not been waited for yet.

Tensors on a GPU travel by NCCL where Horovod was built with it (`make env` does); else by way of the host. In an
all-to-all over NCCL Horovod counts elements and their displacements in int32, on both sides; over gloo, rows alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import count

import horovod.torch as hvd
import torch
from torch import Tensor

from headrace.comm import World
from headrace.comm.base import InFlight, check_send_rows, flatten_by_dtype, unflatten

_MAX_INT32 = 2**31 - 1


class HorovodCollective:
    """The ranks of a Horovod job, or some of them. `hvd.init()` must have been called (the launcher's business)."""

    def __init__(self, group: hvd.ProcessSet = hvd.global_process_set) -> None:
        self._group = group
        self._world = World(
            rank=group.rank(), size=group.size(), local_rank=hvd.local_rank(), local_size=hvd.local_size()
        )
        self._in_flight = InFlight()
        #: Names of messages in flight.
        self._names: set[str] = set()

    @property
    def world(self) -> World:
        return self._world

    def all_to_all(self, x: Tensor, send_rows: Sequence[int]) -> tuple[Tensor, list[int]]:
        return self.start_all_to_all(x, send_rows)()

    def start_all_to_all(self, x: Tensor, send_rows: Sequence[int]) -> Callable[[], tuple[Tensor, list[int]]]:
        check_send_rows(x, send_rows, self.world.size)
        sent = _sendable(x)
        _check_int32(sent, send_rows)
        splits = torch.tensor(send_rows, dtype=torch.int32, device="cpu")
        # Horovod knows no bfloat16; nothing is computed on the way, so any type of two bytes carries the bits.
        sent = sent.view(torch.int16) if x.dtype is torch.bfloat16 else sent
        # Ranks start and wait in one order, so they agree on the number.
        kind = _name("all_to_all", x)
        ticket = self._in_flight.begin()
        name = next(n for n in (f"{kind}.{i}" for i in count()) if n not in self._names)
        self._names.add(name)
        handle = hvd.alltoall_async(sent, splits=splits, name=name, process_set=self._group)

        def wait() -> tuple[Tensor, list[int]]:
            received, counts = hvd.synchronize(handle)
            self._names.discard(name)
            ticket.end()
            return received.view(x.dtype).to(x.device), counts.tolist()

        return wait

    def all_reduce_sum(self, tensors: Sequence[Tensor]) -> None:
        for members, flat in flatten_by_dtype(tensors):
            name, sent = f"headrace.all_reduce.{flat.dtype}.{flat.numel()}", _sendable(flat)
            hvd.allreduce_(sent, op=hvd.Sum, name=name, process_set=self._group)
            unflatten(members, sent.to(flat.device))

    def all_gather(self, x: Tensor) -> Tensor:
        handle = hvd.allgather_async(_sendable(x), name=_name("all_gather", x), process_set=self._group)
        gathered: Tensor = hvd.synchronize(handle)
        return gathered.to(x.device)

    def broadcast(self, tensors: Sequence[Tensor], root: int = 0) -> None:
        for members, flat in flatten_by_dtype(tensors):
            name, sent = f"headrace.broadcast.{root}.{flat.dtype}.{flat.numel()}", _sendable(flat)
            hvd.broadcast_(sent, root, name=name, process_set=self._group)
            unflatten(members, sent.to(flat.device))

    def barrier(self) -> None:
        hvd.barrier(process_set=self._group)


def _check_int32(sent: Tensor, send_rows: Sequence[int]) -> None:
    """Raise ValueError where Horovod's int32 numbers would overflow, here or where the rows arrive.

    A receiver learns its counts too late to refuse them, so each sender keeps within its share of what may arrive.
    """
    most = max(send_rows)
    if most > _MAX_INT32:
        raise ValueError(f"Horovod sends at most {_MAX_INT32} rows to a rank at once, not {most}")
    elements = most * math.prod(sent.shape[1:])
    if sent.device.type != "cpu" and elements * len(send_rows) > _MAX_INT32:
        ranks = len(send_rows)
        raise ValueError(
            f"Horovod over NCCL sends at most {_MAX_INT32 // ranks} elements to each of {ranks} ranks at once, "
            f"not {elements} ({most} rows of {list(sent.shape[1:])})"
        )


def _sendable(x: Tensor) -> Tensor:
    """Return a contiguous tensor on a device that this build of Horovod can send from."""
    x = x.detach().contiguous()
    return x.cpu() if x.is_cuda and not hvd.nccl_built() else x


def _name(operation: str, x: Tensor) -> str:
    shape = "x".join(str(n) for n in x.shape[1:])
    return f"headrace.{operation}.{x.dtype}.{shape}"
