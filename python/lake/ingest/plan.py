"""What a run has to load: its days whose files are not loaded, and days that an earlier run left to be reloaded."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import date, timedelta

from headrace.config import Spec
from headrace.lake import landing
from headrace.lake.delta.log import DeltaLog
from headrace.lake.ingest import load_history
from headrace.lake.ingest.load_history import LoadRecord
from headrace.lake.landing import LandingDay
from headrace.manifest import fingerprint
from headrace.stage import Context

_LOG = logging.getLogger("headrace.lake")

#: Landing bytes that are read and staged together. More days than that are loaded in several batches.
BATCH_BYTES = 256 << 20


@dataclass(frozen=True)
class LoadPlan:
    """The days to load and what is known of those that are loaded."""

    #: Oldest first.
    days: tuple[LandingDay, ...]
    #: The newest record of each day that is loaded.
    records: Mapping[str, LoadRecord]
    #: Fingerprints of the declaration, see LoadRecord.
    declared: str
    judged: str

    def batches(self) -> Iterator[list[LandingDay]]:
        """The days in groups of at most BATCH_BYTES, or of one day."""
        batch: list[LandingDay] = []
        for day in self.days:
            if batch and sum(d.size for d in batch) + day.size > BATCH_BYTES:
                yield batch
                batch = []
            batch.append(day)
        if batch:
            yield batch


def plan_load(ctx: Context, version: int) -> LoadPlan:
    """Compare the landing files with the load history.

    Args:
        ctx: of the run.
        version: of the stage ingest.
    """
    spec = ctx.spec
    log = DeltaLog(ctx.ws.table(spec.pipeline, "events"))
    records = load_history.read(log)
    covered = landing.days(spec.source, ctx.ws, ctx.ds)
    declared, judged = _declared(spec, version), fingerprint(spec.table.model_dump(mode="json"))
    pending, reloads = load_history.pending(covered, records, declared, judged, log)
    names = {d.ds for d in pending}
    if spec.source.daily and spec.table.keys:
        reloads |= {x for d in names if d in records for x in loaded_after(d, records, spec.table.late_days)} - names
    for ds in sorted(reloads):
        day = landing.find(spec.source, ctx.ws, ds)
        if day.files:
            pending.append(day)
        else:
            _LOG.warning("%s should be loaded again after an earlier day changed, but its landing files are gone", ds)
    return LoadPlan(tuple(sorted(pending, key=lambda d: d.ds)), records, declared, judged)


def loaded_after(ds: str, records: Mapping[str, LoadRecord], late_days: int) -> list[str]:
    """Loaded days within `late_days` after `ds`."""
    first = date.fromisoformat(ds)
    near = ((first + timedelta(days=k)).isoformat() for k in range(1, late_days + 1))
    return [d for d in near if d in records]


def _declared(spec: Spec, version: int) -> str:
    """All that decides what becomes of a row; not what only stops a day."""
    table = spec.table.model_dump(mode="json")
    table["expectations"] = {"ranges": table["expectations"]["ranges"]}
    source = spec.source.model_dump(mode="json", exclude={"path", "catch_up_days"})
    return fingerprint({"version": version, "table": table, "source": source})
