"""`headrace gc` of the pipeline clicks, with other keys of its section `housekeeping`."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

from headrace.config import Spec, load_spec
from headrace.jobs.housekeeping.collect import collect
from headrace.jobs.housekeeping.workspace_state import CleanupStep
from headrace.workspace import Workspace


def clicks(**housekeeping: Any) -> Spec:
    """The shipped pipeline without a warehouse; files may go as soon as nothing names them."""
    keep = {"vacuum_hours": 0, "unfinished_days": 0, "compact_files": None} | housekeeping
    sets = [f"housekeeping.{key}={json.dumps(value)}" for key, value in keep.items()]
    return load_spec("clicks", ["publish=null", *sets])


def gc(spec: Spec, ws: Workspace, delete: bool = True) -> list[CleanupStep]:
    """All steps."""
    return list(collect(spec, ws, datetime.now(UTC) + timedelta(hours=1), delete))
