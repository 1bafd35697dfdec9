"""Whether messages go directly or by machines (headrace.embeddings.exchange.hierarchical): what each puts on the wires.

Means over the ranks: which rank is slowest hardly depends on the way. Between machines a row goes once for each machine
that wants it, not once for each rank; in exchange everything goes twice, inside and across.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.config import Sharding
from headrace.embeddings.planner.cost import Workload
from headrace.embeddings.sharding.plan import Block
from headrace.errors import UserError


@dataclass(frozen=True)
class RouteTraffic:
    """Bytes that a rank sends in a step, to ranks of its machine and to others, and the time of the wires."""

    inside: float
    across: float
    seconds: float


@dataclass(frozen=True)
class ExchangeTraffic:
    """Both ways, with machines of `ranks_per_node` ranks."""

    ranks_per_node: int
    direct: RouteTraffic
    by_machine: RouteTraffic


def compare_exchanges(work: Workload, blocks: Sequence[Block]) -> ExchangeTraffic | None:
    """Both ways of a plan; None where only one is possible: no machines of several ranks, or owners sum bags."""
    world, settings = work.world_size, work.settings
    ranks_per_node = settings.ranks_per_node
    remote = [b for b in blocks if not b.replicated]
    if not (1 < ranks_per_node < world) or world % ranks_per_node or not remote or any(b.pooled for b in remote):
        return None
    machines = world // ranks_per_node
    direct_inside = direct_across = inside = across = 0.0
    for block in remote:
        table, width = work.by_name[block.table], len(block.columns)
        # An id and a gradient one way, a row the other: means of what is sent.
        each = work.id_bytes + width * work.number_bytes + work.comm_bytes(table, width)
        popularity, ids = work.popularity_of(block.table), work.local_batch * work.slots[block.table]
        alone, together = popularity.distinct(ids), popularity.distinct(ids * ranks_per_node)
        direct_inside += each * alone * (ranks_per_node - 1) / world
        direct_across += each * alone * (world - ranks_per_node) / world
        inside += each * alone * (1 - 1 / ranks_per_node)
        across += each * together / ranks_per_node * (1 - 1 / machines)
    return ExchangeTraffic(
        ranks_per_node,
        RouteTraffic(direct_inside, direct_across, _seconds(settings, direct_inside, direct_across, together=True)),
        RouteTraffic(inside, across, _seconds(settings, inside, across, together=False)),
    )


def choose_exchange(work: Workload, blocks: Sequence[Block]) -> tuple[int, ExchangeTraffic | None]:
    """`Plan.ranks_per_node`, and what it was chosen by.

    Raises:
        UserError: machines are asked for and not possible.
    """
    wanted = work.settings.exchange
    traffic = compare_exchanges(work, blocks)
    if wanted == "by_machine" and traffic is None and work.world_size > 1:
        raise UserError(
            f"train.sharding.exchange=by_machine needs machines of several ranks that make up the world "
            f"(train.sharding.ranks_per_node={work.settings.ranks_per_node}, {work.world_size} ranks) and tables whose "
            f"bags are not summed by their owners (pooled)"
        )
    if traffic is None or wanted == "direct" or (wanted == "auto" and work.settings.kind != "auto"):
        return 1, traffic
    faster = traffic.by_machine.seconds < traffic.direct.seconds
    return (traffic.ranks_per_node if wanted == "by_machine" or faster else 1), traffic


def _seconds(settings: Sharding, inside: float, across: float, *, together: bool) -> float:
    """Three messages whose two wires work at the same time; or six, one wire after the other."""
    near, far = inside / settings.node_gbps / 1e9, across / settings.network_gbps / 1e9
    messages = (3 if together else 6) * settings.latency_us * 1e-6
    return (max(near, far) if together else near + far) + messages
