"""What a finished run reports of its tables and its memory."""

from __future__ import annotations

import logging
import resource

from headrace.comm.base import Collective
from headrace.embeddings.lookup.local_tables import cache_use
from headrace.models.sharded_model import ShardedModel

log = logging.getLogger("headrace.train")


def dynamic_report(model: ShardedModel, collective: Collective) -> dict[str, dict[str, float | None]]:
    """The report on tables of raw ids; `oov_share` is of the split `valid`. Collective."""
    if model.dynamic is None:
        return {}
    found = model.dynamic.report()
    if collective.world.is_chief:
        for name, table in found.items():
            log.info(
                "raw ids of %s: %s rows, %s admitted and %s evicted so far, %s wait; %s of the lookups of valid "
                "found no row",
                name,
                f"{table.rows:,}",
                f"{table.admitted:,}",
                f"{table.evicted:,}",
                f"{table.waiting:,}",
                f"{table.oov_share or 0:.1%}",
            )
    return {
        name: {
            "rows": t.rows,
            "waiting": t.waiting,
            "load": round(t.load, 4),
            "admitted": t.admitted,
            "evicted": t.evicted,
            "hit_share": round(t.hits / t.lookups, 6) if t.lookups else None,
            "oov_share": None if t.oov_share is None else round(t.oov_share, 6),
            "mib": round(t.nbytes / 2**20, 3),
        }
        for name, t in found.items()
    }


def cache_report(model: ShardedModel, collective: Collective) -> dict[str, dict[str, float | None]]:
    """The report on tables in host memory with hot rows on GPUs. Collective."""
    found = cache_use(model.embeddings)
    if collective.world.is_chief:
        for name, use in found.items():
            log.info(
                "table %s: %s rows in host memory, %.1f%% of them on the GPU too, where %.1f%% of the lookups "
                "found theirs",
                name,
                f"{use.rows:,}",
                100 * use.share,
                100 * (use.hit_rate or 0),
            )
    return {
        name: {
            "rows": u.rows,
            "share": u.share,
            "lookups": u.lookups,
            "hit_share": None if u.hit_rate is None else round(u.hit_rate, 6),
        }
        for name, u in found.items()
    }


def peak_mib() -> float:
    """Peak resident size of this process, MiB."""
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1)


def core_seconds() -> float:
    """Processor time of this process and of its children that have ended."""
    both = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return round(sum(r.ru_utime + r.ru_stime for r in both), 3)
