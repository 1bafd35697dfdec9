"""The stage `report`: one self-contained HTML page about a pipeline's day."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from typing import Any

from headrace.config import Spec
from headrace.config.workspace import Workspace
from headrace.stage import Context, Result, Stage
from headrace.stage.manifest import Input, Manifest, Output
from headrace.stage.protocol import PACKAGE_NEEDS
from headrace.storage import Location

log = logging.getLogger("headrace.monitor")


class Report(Stage):
    """One HTML page about the day: what ran, on what, how good it is, where it came from."""

    name = "report"
    #: Raise it when the page changes, so that days reported before get the new one when they are run again.
    version = 5
    needs: tuple[str, ...] = (
        "ingest?",
        "outcomes?",
        "experiments?",
        "features?",
        "drift?",
        "train?",
        "baseline?",
        "second_stage?",
        "challenger?",
        "compare?",
        "evaluate?",
        "gate?",
        "promote?",
        "score?",
        "publish?",
        PACKAGE_NEEDS,
    )

    def spec_part(self, spec: Spec) -> Mapping[str, Any]:
        """Return all of it: the page shows the settings."""
        return spec.model_dump(mode="json")

    def inputs(self, ctx: Context) -> tuple[Input, ...]:
        """Return the truth file of a generated day."""
        path = truth_file(ctx.ws, ctx.spec.pipeline, ctx.ds)
        if not path.is_file():
            return ()
        return (Input(kind="file", name=ctx.ws.name_of(path), version=_digest(path.read_bytes())),)

    def verify(self, ctx: Context, manifest: Manifest) -> str | None:
        path = ctx.ws.report(ctx.spec.pipeline, ctx.ds)
        if not path.is_file():
            return "the page is gone"
        if _digest(path.read_bytes()) != manifest.output("file").version:
            return "the page was changed"
        return None

    def run(self, ctx: Context) -> Result:
        from headrace.quality.report.blocks import Day
        from headrace.quality.report.lineage import load_runs
        from headrace.quality.report.report import page

        runs = load_runs(ctx.ws, ctx.spec.pipeline)
        text = page(
            Day(
                spec=ctx.spec,
                ds=ctx.ds,
                manifests=ctx.upstream,
                truth=read_truth(ctx.ws, ctx.spec.pipeline, ctx.ds),
                runs=runs,
            )
        )
        path = ctx.ws.report(ctx.spec.pipeline, ctx.ds)
        ctx.check_lease()
        path.put_text(text)
        log.info("report: %s (%.0f KiB)", path, len(text.encode()) / 1024)
        return Result(
            outputs=(Output(kind="file", name=ctx.ws.name_of(path), version=_digest(text.encode())),),
            rows={},
            facts={"bytes": len(text.encode()), "stages": list(ctx.upstream)},
        )


def truth_file(ws: Workspace, pipeline: str, ds: str) -> Location:
    """Return the path of a generated day's truth (`auc_ceiling` and more)."""
    return ws.landing(pipeline) / "truth" / f"{ds}.json"


def read_truth(ws: Workspace, pipeline: str, ds: str) -> Mapping[str, Any]:
    """Return the truth of a day; empty where there is none (real data) or it is no JSON object."""
    try:
        truth = json.loads(truth_file(ws, pipeline, ds).read_text())
    except (FileNotFoundError, UnicodeDecodeError, json.JSONDecodeError):
        return {}
    return truth if isinstance(truth, dict) else {}


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
