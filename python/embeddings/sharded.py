"""Embedding tables spread over the ranks by a plan."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headrace.config import Optimizer
from headrace.embeddings import storage
from headrace.embeddings.collective import Collective
from headrace.embeddings.exchange import (
    Duplicates,
    Request,
    fetch_rows,
    find_duplicates,
    merge,
    return_gradients,
    send_ids,
    sum_bags,
)
from headrace.embeddings.optimizers import RULES
from headrace.embeddings.plan import Plan, Shard

#: Rows drawn by one generator: a row's start depends on its block, never on the table's size or on the world.
INIT_BLOCK = 1_024
#: Rows start uniform in +- this. Independent of the table's size, so that a table that grows starts its new rows alike.
INIT_BOUND = 0.05


class ShardedEmbeddings(nn.Module):
    """The tables of a plan, this rank's shards of them, looked up and trained together.

    Forward: codes int64 [B, S] -> float32 [B, F, D], S columns for F features (a list's columns summed, code 0 of a
    list adding nothing). B may differ between ranks and be 0, but all ranks call forward, and backward, the same
    number of times: both exchange rows. The weights are no torch parameters: backward leaves the gradients of touched
    rows with their owners, summed over the ranks, and `step` applies them.

        embeddings = ShardedEmbeddings(plan, LocalCollective(), seed=1)
        embeddings.configure_optimizer(Optimizer(kind="adagrad", learning_rate=0.05))
        loss_of(embeddings(codes)).backward()   # local loss: sum over the rank's rows / rows of the global batch
        embeddings.step()
    """

    #: This rank's rows, shards in plan order: float32 [local rows, D]. Not in `state_dict`: storage knows ranges.
    weight: Tensor

    def __init__(self, plan: Plan, collective: Collective, seed: int, *, init_bound: float = INIT_BOUND) -> None:
        super().__init__()
        if plan.world_size != collective.world.size:
            raise ValueError(f"a plan for {plan.world_size} ranks in a world of {collective.world.size}")
        self.plan = plan
        self.collective = collective
        rank = collective.world.rank
        shards = [_initial_rows(s, plan.dim, seed, init_bound) for s in plan.shards_on(rank)]
        self.register_buffer("weight", torch.cat([*shards, torch.empty(0, plan.dim)]), persistent=False)
        #: Optimizer states by name, each float32 [local rows, D].
        self.state: dict[str, Tensor] = {}
        self.optimizer: Optimizer | None = None
        #: Steps taken.
        self.steps = 0
        self._pending: list[tuple[Tensor, Tensor]] = []
        # Autograd follows a function only where some input asks for a gradient.
        self._anchor = torch.zeros((), requires_grad=True)
        lists = [x.is_list for x in plan.lookups for _ in range(x.length)]
        self._is_list = torch.tensor(lists, dtype=torch.bool) if any(lists) else None
        #: Feature of each slot: int64 [S].
        self._feature = torch.tensor([i for i, x in enumerate(plan.lookups) for _ in range(x.length)])

    def forward(self, codes: Tensor) -> Tensor:
        if codes.ndim != 2 or codes.shape[1] != self.plan.slots or codes.dtype != torch.int64:
            raise ValueError(f"codes must be int64 [B, {self.plan.slots}], not {codes.dtype} {list(codes.shape)}")
        if not self.plan.tables:
            return self.weight.new_zeros(codes.shape[0], 0, 0)
        out: Tensor = _Lookup.apply(self._anchor, self, codes)  # type: ignore[no-untyped-call]
        return out

    def configure_optimizer(self, optimizer: Optimizer) -> None:
        """Choose the optimizer and make its states, at zero. Without one (scoring) no memory is spent on states."""
        self.optimizer = optimizer
        self.state = {name: torch.zeros_like(self.weight) for name in RULES[optimizer.kind].state}
        self.steps = 0
        self._pending.clear()

    @torch.no_grad()
    def step(self, lr: float | None = None) -> None:
        """Apply the gradients of all backward passes since the last step to the rows they touch. No exchange.

        Args:
            lr: the learning rate of this step; default the configured one.
        """
        if self.optimizer is None:
            raise RuntimeError("configure_optimizer comes before step")
        self.steps += 1
        pending, self._pending = self._pending, []
        if not pending:
            return
        rows, grad = merge(pending)
        weight = self.weight.index_select(0, rows)
        if self.optimizer.weight_decay:
            grad.add_(weight, alpha=self.optimizer.weight_decay)
        state = {name: full.index_select(0, rows) for name, full in self.state.items()}
        lr = self.optimizer.learning_rate if lr is None else lr
        RULES[self.optimizer.kind].update(weight, grad, state, lr, self.steps)
        self.weight.index_copy_(0, rows, weight)
        for name, full in self.state.items():
            full.index_copy_(0, rows, state[name])

    @torch.no_grad()
    def age_state(self, kept: float) -> None:
        """Multiply the states that never shrink (adagrad's sums) by `kept`, so that rows stay able to move."""
        if self.optimizer is not None:
            for name in RULES[self.optimizer.kind].growing:
                self.state[name].mul_(kept)

    def drop_gradients(self) -> None:
        """Forget the gradients since the last step."""
        self._pending.clear()

    def save_shards(self, directory: Path, with_optimizer: bool) -> None:
        """Write this rank's rows (and optimizer states) below `directory`; see storage.save_shards."""
        storage.save_shards(self, directory, with_optimizer)

    def load_shards(self, directory: Path, with_optimizer: bool) -> storage.Loaded:
        """Read this rank's rows (and optimizer states), saved by any number of ranks; see storage.load_shards."""
        return storage.load_shards(self, directory, with_optimizer)

    def _bags(self, codes: Tensor) -> tuple[Tensor, Tensor | None]:
        """The slots that are looked up, and the bag (row of [B * F, D]) of each; None: slot i is bag i."""
        address = self.plan.addresses.of_codes(codes)
        if self._is_list is None:
            return address.view(-1), None
        bag = self._feature + torch.arange(codes.shape[0]).unsqueeze(1) * len(self.plan.lookups)
        kept = ~(self._is_list & (codes == 0))
        return address[kept], bag[kept]


class _Lookup(torch.autograd.Function):
    """(anchor, embeddings, codes [B, S]) -> [B, F, D]; two all-to-alls forward, one backward."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, embeddings: ShardedEmbeddings, codes: Tensor) -> Tensor:
        plan, collective = embeddings.plan, embeddings.collective
        address, bag = embeddings._bags(codes)
        found = find_duplicates(address)
        request = send_ids(found.unique, plan.addresses.rank_starts, collective)
        rows = fetch_rows(request, embeddings.weight, collective)
        bags = codes.shape[0] * len(plan.lookups)
        if bag is None:
            pooled = rows.index_select(0, found.inverse())
        else:
            counts = torch.bincount(bag, minlength=bags)
            pooled = sum_bags(rows, found.inverse(), counts.cumsum(0) - counts)
        ctx.embeddings, ctx.found, ctx.request, ctx.bag = embeddings, found, request, bag
        return pooled.view(codes.shape[0], len(plan.lookups), plan.dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        embeddings: ShardedEmbeddings = ctx.embeddings
        found: Duplicates = ctx.found
        request: Request = ctx.request
        grad = grads[0].reshape(-1, embeddings.plan.dim).contiguous()
        summed = found.sum_rows(grad, ctx.bag)
        embeddings._pending.append((request.rows, return_gradients(request, summed, embeddings.collective)))
        return None, None, None


def _initial_rows(shard: Shard, dim: int, seed: int, bound: float) -> Tensor:
    """The starting rows of a shard, float32 [len(shard.rows), D]: a function of (seed, table, row) alone."""
    rows = torch.empty(len(shard.rows), dim)
    filled = 0
    for first in range(0, shard.rows.stop, INIT_BLOCK):
        text = f"{seed}/{shard.table}/{first // INIT_BLOCK}"
        block_seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big", signed=True)
        # Always the whole block: a shorter draw would give other values.
        block = torch.empty(INIT_BLOCK, dim).uniform_(
            -bound, bound, generator=torch.Generator().manual_seed(block_seed)
        )
        inside = range((shard.rows.start - first) % shard.rows.step, INIT_BLOCK, shard.rows.step)
        part = block[inside.start :: inside.step][: len(rows) - filled]
        rows[filled : filled + len(part)] = part
        filled += len(part)
    return rows
