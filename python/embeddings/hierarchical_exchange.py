"""Exchange in two hops where machines have several ranks: inside the machine, then between machines.

Rank r has local rank r % L on machine r // L. What a rank needs of the owners with local rank p on any machine it asks
of its own machine's local rank p; that one asks the owners, once for each distinct row that its machine needs. So a row
that several ranks of a machine need crosses the network once, and so does its gradient, already summed. Each rank talks
to L + W / L others in place of W.

Lookups are those of the direct exchange, bit for bit. Gradients are summed machine by machine, so weights differ by the
rounding of sums in another order. Inside a machine they go through memory where its ranks share it; else sub-groups
are all-to-alls with nothing for those outside: no more is asked of a collective than headrace.comm.base has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headrace.comm import World
from headrace.comm.base import Collective, subgroup_all_to_all
from headrace.embeddings.addressing import RawIdRequest, UniqueRawIds
from headrace.embeddings.exchange import BagRequest, RowExchange, RowRequest
from headrace.embeddings.kernels.dispatch import Duplicates, find_duplicates
from headrace.embeddings.layout import FusedTable
from headrace.embeddings.sharding_plan import CommDtype


class SubgroupCollective:
    """Subgroup of a collective, as far as `RowExchange` needs one: all groups communicate at the same time."""

    def __init__(self, collective: Collective, ranks: Sequence[int]) -> None:
        self._collective = collective
        self._ranks = list(ranks)
        self.world = World(rank=self._ranks.index(collective.world.rank), size=len(self._ranks))
        #: All-to-all of the subgroup alone, in memory that the ranks of a machine share; None: there is none.
        self._alone = subgroup_all_to_all(collective, self._ranks)

    def start_all_to_all(self, x: Tensor, send_rows: Sequence[int]) -> Callable[[], tuple[Tensor, list[int]]]:
        """See `Collective.start_all_to_all`. Members are in ascending order, so what comes is in their order too."""
        if self._alone is not None and x.device.type == "cpu":
            return self._alone.start_all_to_all(x, send_rows)
        every = [0] * self._collective.world.size
        for rank, rows in zip(self._ranks, send_rows, strict=True):
            every[rank] = rows
        wait = self._collective.start_all_to_all(x, every)

        def answer() -> tuple[Tensor, list[int]]:
            received, counts = wait()
            return received, [counts[r] for r in self._ranks]

        return answer


@dataclass(frozen=True)
class _IndexRanges:
    """Indices of a fused table, divided among the members of a group."""

    #: First index of each member, and the end: int64 [members + 1].
    rank_offsets: Tensor
    pooled: bool = False


@dataclass(frozen=True)
class HierarchicalRequest(RowRequest):
    """Request of both hops: rows of the owners, and the request inside the machine.

    Its machine's rank of the owner's local rank, which asked on.
    """

    #: Request inside the machine; its rows are positions in the rows that this rank fetches for its machine.
    inside: RowRequest = field(kw_only=True)
    #: By fused table, then table of raw ids: rows that the ranks of the machine requested from this one, sorted.
    node_duplicates: list[Duplicates] = field(kw_only=True)
    #: Number of requested vectors by fused table and owner, [W].
    requests: list[list[int]] = field(kw_only=True)


class HierarchicalRowExchange:
    """`RowExchange` in two hops. Fused tables whose bags are summed by their owners cannot use it."""

    def __init__(
        self,
        fused_tables: Sequence[FusedTable],
        collective: Collective,
        ranks_per_node: int,
        comm_dtype: CommDtype = "fp32",
    ) -> None:
        """See the class.

        Args:
            fused_tables: none of them `pooled`.
            collective: of W ranks.
            ranks_per_node: ranks of a machine, L; a divisor of W.
            comm_dtype: as `RowExchange`.
        """
        if any(a.pooled for a in fused_tables):
            raise ValueError("bags that owners sum do not travel by nodes")
        world = collective.world
        self._fused_tables, self._ranks_per_node, nodes = (
            list(fused_tables),
            ranks_per_node,
            world.size // ranks_per_node,
        )
        node, local_rank = divmod(world.rank, ranks_per_node)
        # Owners in order of indices here: by local rank, then machine.
        self._owners = [n * ranks_per_node + p for p in range(ranks_per_node) for n in range(nodes)]
        #: The ranks of this one's local rank, by machine.
        self._peers = range(local_rank, world.size, ranks_per_node)
        sizes = [a.rank_offsets.diff()[self._owners].view(ranks_per_node, nodes) for a in fused_tables]
        inside = [_IndexRanges(_starts(s.sum(1))) for s in sizes]
        across = [_IndexRanges(_starts(s[local_rank])) for s in sizes]
        self._inside = RowExchange(
            inside,
            SubgroupCollective(collective, range(node * ranks_per_node, (node + 1) * ranks_per_node)),
            comm_dtype,
        )
        self._across = RowExchange(across, SubgroupCollective(collective, self._peers), comm_dtype)
        #: By fused table: shift from the owner's indices to those of this order: [W].
        self._shift = [
            _starts(s.flatten())[:-1] - a.rank_offsets[:-1][self._owners]
            for s, a in zip(sizes, fused_tables, strict=True)
        ]

    def send_ids(
        self, requests: Sequence[Tensor | BagRequest], raw: Sequence[RawIdRequest] = ()
    ) -> Callable[[], HierarchicalRequest]:
        """See `RowExchange.send_ids`. The second hop begins when the first is waited for."""
        counts, local = [], []
        for fused, shift, unique in zip(self._fused_tables, self._shift, requests, strict=True):
            assert isinstance(unique, Tensor)
            of_owner = torch.searchsorted(unique, fused.rank_offsets.to(unique.dtype)).diff().tolist()
            parts = torch.split(unique, of_owner)
            local.append(torch.cat([parts[o] + int(s) for o, s in zip(self._owners, shift, strict=True)]))
            counts.append(of_owner)
        counts += [r.ids_per_rank for r in raw]
        wait = self._inside.send_ids(local, [r.bucketized(self._owners, self._ranks_per_node) for r in raw])

        def answer() -> HierarchicalRequest:
            requested = wait()
            duplicates = [find_duplicates(rows) for rows in requested.rows]
            machine_requests = [UniqueRawIds.from_ids(r.ids, len(self._owners), r.counts) for r in requested.raw]
            request = self._across.send_ids(
                [f.unique for f in duplicates], [r.bucketized(self._peers, len(self._peers)) for r in machine_requests]
            )()
            duplicates += [r.duplicates for r in machine_requests]
            inside = RowRequest(
                requested.sent, [f.inverse() for f in duplicates], requested.received, [None] * len(duplicates)
            )
            return HierarchicalRequest(
                request.sent,
                request.rows,
                request.received,
                request.requested,
                request.raw,
                inside=inside,
                node_duplicates=duplicates,
                requests=counts,
            )

        return answer

    def start_rows(
        self, request: RowRequest, weights: Sequence[Tensor], answers: Sequence[Tensor] = ()
    ) -> Callable[[], list[Tensor]]:
        """See `RowExchange.start_rows`. The second hop, inside the machine, begins when the first is waited for."""
        assert isinstance(request, HierarchicalRequest)
        wait = self._across.start_rows(request, weights, answers)

        def answer() -> list[Tensor]:
            rows = self._inside.start_rows(request.inside, wait())()
            return [self._from_local_rank_order(r, n) for r, n in zip(rows, request.requests, strict=True)]

        return answer

    def return_gradients(self, request: RowRequest, gradients: Sequence[Tensor]) -> list[Tensor]:
        """See `RowExchange.return_gradients`. Those of one row are summed in its machine before they go on."""
        assert isinstance(request, HierarchicalRequest)
        sent = [self._to_local_rank_order(g, n) for g, n in zip(gradients, request.requests, strict=True)]
        arrived = self._inside.return_gradients(request.inside, sent)
        sums = [f.sum_rows(g) for f, g in zip(request.node_duplicates, arrived, strict=True)]
        return self._across.return_gradients(request, sums)

    def _to_local_rank_order(self, vectors: Tensor, counts: list[int]) -> Tensor:
        """Reorder vectors from order of owners to order of local ranks."""
        parts = torch.split(vectors, counts)
        return torch.cat([parts[o] for o in self._owners])

    def _from_local_rank_order(self, vectors: Tensor, counts: list[int]) -> Tensor:
        parts = torch.split(vectors, [counts[o] for o in self._owners])
        back = sorted(range(len(self._owners)), key=self._owners.__getitem__)
        return torch.cat([parts[i] for i in back])


def _starts(sizes: Tensor) -> Tensor:
    return torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
