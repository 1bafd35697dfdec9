"""A day of the site as landing files, in the place of the random log's."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from datetime import date, timedelta

import numpy as np
import pyarrow as pa
from pydantic import ValidationError

from headrace.config import Spec
from headrace.errors import UserError
from headrace.generate.click_model import ClickModel
from headrace.generate.landing_files import truth_path, write_gzip
from headrace.generate.purchase_model import purchases
from headrace.generate.serialize import lines, values
from headrace.generate.site import Lists, SiteDay, summary, visits_of
from headrace.manifest import fingerprint
from headrace.stage import run_lock
from headrace.storage import Location
from headrace.workspace import Workspace

log = logging.getLogger("headrace.generate")

#: Raise it when the same parameters and lists give other bytes.
_VERSION = 1
_FILE = "site-0000.json.gz"


def site_path(landing: Location, ds: str) -> Location:
    """Where a day of the site is described, below the pipeline's landing folder."""
    return landing / "site" / f"{ds}.json"


def simulate_site(
    spec: Spec, ws: Workspace, ds: str, lists: Lists, lists_ds: str | None, *, force: bool = False
) -> SiteDay:
    """Write a day's landing files: what visitors were shown and clicked, and what landed late of days before.

    The bytes depend on seed, parameters, day and lists alone. What lands later waits in `landing/PIPELINE/late/`.

    Args:
        spec: a pipeline with a `generate` section, and the format `clicks`.
        ws: writes `landing/<pipeline>/<ds>/site-0000.json.gz` and `landing/<pipeline>/site/<ds>.json`.
        ds: the day.
        lists: what the site has for a user.
        lists_ds: the day of these lists.
        force: replace a day that is there.

    Returns:
        what is known of the day.

    Raises:
        UserError: there is no section, the day is before the log's first, or it has landed already otherwise.
    """
    if spec.generate is None:
        raise UserError(f"pipeline '{spec.pipeline}' has no 'generate' section, so there is nobody to visit a site")
    model = ClickModel(spec.generate, spec.table.late_days)
    start = date.fromisoformat(spec.generate.start)
    number = (date.fromisoformat(ds) - start).days
    if number < 0:
        raise UserError(f"{ds} is before the log's first day, {start} (generate.start)")
    landing = ws.landing(spec.pipeline)
    asked: dict[int, Sequence[int]] = {}

    def remembered(users: Sequence[int]) -> Mapping[int, Sequence[int]]:
        asked.update(lists(users))
        return asked

    with run_lock(ws, f"{spec.pipeline}-generate"):
        visits = visits_of(model, number, remembered)
        parts = {"site": _VERSION, "ds": ds, "lists": sorted((u, list(i)) for u, i in asked.items())}
        key = fingerprint({**spec.generate.model_dump(mode="json"), "late_days": model.late_days, **parts})
        there = _load(site_path(landing, ds))
        if (landing / ds).is_dir() and not force:
            if there is not None and there.key == key:
                log.info("%s: the site's day is there already; nothing to do", ds)
                return there
            raise UserError(f"{landing / ds} has landed already: simulate another day, or replace it with --force")
        found = summary(model, ds, number, visits, lists_ds, key)
        # What describes the day is gone while the day is written, so that half a run is never one that is done.
        site_path(landing, ds).remove()
        columns = values(visits.events, start, "jsonl", purchases(model, visits.events))
        all_lines = lines(columns, "jsonl")
        for lag in range(1, model.late_days + 1):
            later = (start + timedelta(days=number + lag)).isoformat()
            path = landing / "late" / later / f"{ds}.json"
            path.put_text("".join(all_lines.filter(pa.array(visits.events.lag == lag)).to_pylist()))
        late = [p for p in (landing / "late" / ds).entries() if p.name.endswith(".json")]
        before = "".join(p.read_text() for p in sorted(late, key=lambda p: p.name))
        now = all_lines.filter(pa.array(visits.events.lag == 0))
        with (landing / ds).new_folder() as folder:
            write_gzip(folder / _FILE, before, pa.concat_arrays([now]).take(pa.array(np.arange(len(now)))))
        truth_path(landing, ds).remove()  # of the random log, which this day no longer is
        site_path(landing, ds).put_text(found.model_dump_json(indent=1) + "\n")
    log.info("%s: %d visits, %d impressions", ds, len(visits.source), len(visits.visit))
    return found


def _load(path: Location) -> SiteDay | None:
    """None where there is none, or one of another version."""
    try:
        return SiteDay.model_validate_json(path.read_text())
    except (FileNotFoundError, ValidationError):
        return None
