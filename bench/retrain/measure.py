"""Measurements of each day's model by its manifest, and of the first day's model by each day's rows of the lake."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

import headrace as hr
from bench.retrain.knowable import knowable_auc
from bench.retrain.run import PIPELINE, RetrainRun
from headrace.errors import UserError
from headrace.lake.delta.log import DeltaLog
from headrace.lake.generate.click_model import ClickModel
from headrace.lake.generate.truth import auc
from headrace.manifest import Manifest
from headrace.quality.report import facts
from headrace.quality.report.stage import read_truth
from headrace.storage import local


@dataclass(frozen=True)
class DayResult:
    """Result of a day. AUCs of the rows that happened and landed on it."""

    ds: str
    rows: int
    #: Of the probabilities that the clicks were drawn from.
    ceiling: float
    #: Of what a model can know of them: bench.retrain.knowable.
    knowable: float
    #: Of the day's own model, of that of the first day, and of the day's model over the first day's rows (None where
    #: retrain.forgetting_day is not that day).
    retrained: float
    frozen: float
    first_day: float | None
    #: Seconds of features and training.
    seconds: float
    #: Bytes of the saved embeddings, the rows that changed alone where retrain.full_copy_days says so, and of a copy of
    #: all rows (None: all are saved).
    saved_bytes: int | None = None
    whole_bytes: int | None = None

    def share(self, value: float) -> float:
        """Return how far an AUC comes from 0.5 to the ceiling."""
        share = facts.ceiling_share(value, self.ceiling)
        assert share is not None
        return share

    @property
    def share_of_knowable(self) -> float:
        """Return how far the day's model comes from 0.5 to what it can come to."""
        share = facts.ceiling_share(self.retrained, self.knowable)
        assert share is not None
        return share


def measure(run: RetrainRun, file: Path) -> list[DayResult]:
    """Measure the days that are trained and not in `file` yet; return them and those that are. Written day by day.

    Raises:
        UserError: a model or the lake is damaged, or a model is better than the truth, which it must have seen then.
    """
    known: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
    dates = [d for d in run.dates() if manifest_of(run, d) is not None]
    if not dates:
        return []
    frozen = hr.Predictor(_model(run, dates[0]))
    for ds in dates:
        manifest = manifest_of(run, ds)
        assert manifest is not None
        if known.get(ds, {}).get("key") == manifest.key:
            continue
        rows, metrics = rows_of(run, ds), manifest.facts["metrics"]
        saved = manifest.facts.get("saved") or {}
        result = DayResult(
            ds=ds,
            rows=rows.num_rows,
            ceiling=ceiling_of(run, ds),
            knowable=_knowable(run, ds),
            retrained=metrics["auc"],
            frozen=_auc(frozen, rows),
            first_day=first_day_auc(manifest, dates[0]),
            saved_bytes=saved.get("embeddings_bytes"),
            whole_bytes=saved.get("whole_copy_bytes"),
            seconds=round(sum(m.seconds for m in (manifest, manifest_of(run, ds, "features")) if m is not None), 1),
        )
        if max(result.share(result.retrained), result.share(result.frozen)) > 1:
            raise UserError(f"{ds}: an AUC above the ceiling, {result}: a model has seen what it should not")
        known[ds] = {"key": manifest.key, **asdict(result)}
        local(file).put_text(json.dumps(known, indent=1) + "\n")
        print(f"{ds}: {result.share(result.retrained):.4f}, trained once {result.share(result.frozen):.4f}", flush=True)
    return results_of(known, dates)


def results_of(known: Mapping[str, Any], dates: Sequence[str]) -> list[DayResult]:
    """Return the results of these days in a file of `measure`."""
    return [DayResult(**{k: v for k, v in known[ds].items() if k != "key"}) for ds in dates if ds in known]


def first_day_auc(manifest: Manifest, first_day: str) -> float | None:
    """Return the AUC of a day's model over the rows of the first day, by its manifest."""
    if manifest.ds == first_day:
        auc_of_day: float = manifest.facts["metrics"]["auc"]
        return auc_of_day
    forgetting: Mapping[str, Any] = manifest.facts.get("forgetting") or {}
    return forgetting.get("metrics", {}).get("auc")


def rows_of(run: RetrainRun, ds: str) -> pa.Table:
    """Return the rows of a day that happened on it, as ingest kept them."""
    log = DeltaLog(run.ws.events(PIPELINE))
    version = log.version
    files = None if version is None else log.plain_files(version)
    if files is None:
        raise UserError(f"the events table {log.folder} is missing, or has rows that only Spark can leave out")
    paths = [f.path.local_path() for f in files if ds in f.partition.values()]
    table = pa.concat_tables([pq.ParquetFile(p).read() for p in sorted(paths)])
    of_day = pc.equal(pc.strftime(table.column("ts"), format="%Y-%m-%d"), ds)
    return table.filter(of_day)


def _auc(predictor: hr.Predictor, rows: pa.Table) -> float:
    clicked = rows.column("clicked").to_numpy().astype(np.float64)
    value = auc(np.asarray(predictor.predict(rows), dtype=np.float64), clicked)
    if value is None:
        raise UserError("rows of one class alone have no AUC")
    return round(value, 6)


def _knowable(run: RetrainRun, ds: str) -> float:
    spec = run.spec()
    assert spec.generate is not None
    day = (date.fromisoformat(ds) - date.fromisoformat(spec.generate.start)).days
    value = knowable_auc(ClickModel(spec.generate, spec.table.late_days), day)
    if value is None:
        raise UserError("rows of one class alone have no AUC")
    return round(value, 6)


def ceiling_of(run: RetrainRun, ds: str) -> float:
    """Return the AUC of the true probabilities over the rows of a day."""
    ceiling = facts.number(read_truth(run.ws, PIPELINE, ds).get("auc_ceiling"))
    if ceiling is None:
        raise UserError(f"the truth of {ds} is missing: run headrace generate again")
    return ceiling


def manifest_of(run: RetrainRun, ds: str, stage: str = "train") -> Manifest | None:
    """Return the manifest of a day's stage; None: it has not run."""
    return Manifest.load(run.ws.manifest(PIPELINE, ds, stage))


def _model(run: RetrainRun, ds: str) -> Path:
    manifest = manifest_of(run, ds)
    assert manifest is not None
    return run.ws.locate(manifest.output("model").name).local_path()
