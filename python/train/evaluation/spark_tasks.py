"""The tasks of a barrier stage of Spark as the ranks of an evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pyspark import BarrierTaskContext

from headrace.train.evaluation.ranks import Ranks


@contextmanager
def ranks_of_tasks() -> Iterator[Ranks]:
    """The tasks of a barrier stage as ranks."""
    context = BarrierTaskContext.get()
    addresses = [info.address for info in context.getTaskInfos()]
    if len(addresses) == 1:
        yield Ranks()
        return
    # torch takes seconds to import.
    from headrace.comm.torch_dist import gloo_ranks

    host = addresses[0].rsplit(":", 1)[0]
    with gloo_ranks(context.partitionId(), len(addresses), host, context.allGather) as collective:
        yield Ranks(collective)
