"""Whether a saved model holds all rows or those that changed since the one it started from (`full_copy_days`)."""

from __future__ import annotations

import logging
from typing import Any

from headrace.embeddings.checkpoint.index import read_chain
from headrace.models.mapped import storages
from headrace.models.saved import EMBEDDINGS, Changes, has_state_of
from headrace.models.sharded_model import ShardedModel
from headrace.train.job import Job

log = logging.getLogger("headrace.train")


def changes_of(job: Job, model: ShardedModel) -> Changes | None:
    """What the saved model lies upon; None: it holds all rows.

    All rows on one of `full_copy_days` days; without a warm start, or after one that left the optimizer's states
    behind; where rows are stored in another way than there.

    Raises:
        UserError: the model of the warm start is damaged.
    """
    if job.full_copy_days is None or job.warm_start is None:
        return None
    start = job.ws.locate(job.warm_start)
    before = start / EMBEDDINGS
    if len(read_chain(before)) >= job.full_copy_days or not has_state_of(start, job.train.embeddings.kind):
        return None
    stored = storages(before)
    if any(stored.get(t.name, t.storage) != t.storage for t in model.embeddings.plan.tables):
        return None
    return Changes(start, job.train.warm_decay)


def saved_bytes(job: Job) -> dict[str, Any]:
    """Bytes of the saved embeddings and of the whole copy that they lie upon; empty where every model is whole."""
    if job.full_copy_days is None:
        return {}
    chain = read_chain(job.saved_model / EMBEDDINGS)
    mine, whole = (sum(f.bytes for f in index.files) for _, index in (chain[-1], chain[0]))
    base = None if len(chain) == 1 else job.ws.name_of(chain[-2][0].parent)
    return {"embeddings_bytes": mine, "whole_copy_bytes": whole, "base": base, "saves": len(chain)}
