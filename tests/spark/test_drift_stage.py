"""SplitStatistics of real days against pandas over the same events, and a day that has moved."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from pyspark.sql import SparkSession

from headrace.config import Spec
from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.features.build.stage import BuildFeatures
from headrace.features.workflow.fitted import FittedWorkflow
from headrace.quality.drift import columns as statistics
from headrace.quality.drift.count_day import count_day
from headrace.quality.drift.stage import JudgeDrift
from headrace.stage import run_stage
from headrace.stage.manifest import Manifest
from headrace.storage import local
from tests.spark.test_features_stage import clicks, land, make_clicks
from tests.train_support import read_padded

DS, NEXT = "2026-01-05", "2026-01-06"
NUMBERS = {"user_age", "user_activity", "item_age_days", "item_price"}


def with_drift(spec: Spec, **section: Any) -> Spec:
    drift = {"min_values": 100, "columns": {c: {"action": "ignore"} for c in ("user_id", "item_age_days")}} | section
    return Spec.model_validate(spec.model_dump(mode="json", by_alias=True) | {"drift": drift})


def with_raw_ids(spec: Spec) -> Spec:
    """With a feature of raw ids, of which some are negative."""
    fields = spec.model_dump(mode="json", by_alias=True)
    ops = ["raw_id", {"rename": {"to": "country_raw"}}]
    fields["features"]["workflow"].append({"columns": ["user_country"], "ops": ops})
    return Spec.model_validate(fields)


def table(spark: SparkSession, ws: Workspace, manifest: Manifest | None = None) -> pd.DataFrame:
    reader = spark.read.format("delta")
    if manifest is not None:
        (output,) = [o for o in manifest.outputs if o.kind == "delta"]
        assert output.name == "lake/clicks/statistics"
        reader = reader.option("versionAsOf", output.version)
    frame = reader.load(str(ws.table("clicks", "statistics"))).toPandas()
    return frame.set_index(["ds", "split", "side", "column"]).sort_index()


def values_of(column: pd.Series) -> list[Any]:
    """Return the values of scalars and lists, without missing ones."""
    flat = [v for cell in column for v in (cell if isinstance(cell, list) else [cell])]
    return [v for v in flat if v is not None and not (isinstance(v, float) and math.isnan(v))]


def inside(r: Any, x: float) -> bool:
    low, high = (default if pd.isna(v) else v for v, default in ((r["low"], -math.inf), (r["high"], math.inf)))
    return bool(low <= x < high)


def check(stats: pd.Series, values: list[Any], number: bool, estimated: bool = False) -> None:
    """One row of the table against the values themselves."""
    assert stats["values"] == len(values)
    # Spark's own estimate where Spark counts, exact where NumPy does.
    close = pytest.approx(len(set(values)), rel=0.06, abs=1)
    assert stats["distinct"] == (close if estimated else len(set(values)))
    bins = list(stats["histogram"])
    if number:
        x = np.array(values, float)
        assert (stats["min"], stats["max"]) == (x.min(), x.max())
        assert stats["mean"] == pytest.approx(math.fsum(x) / len(x), rel=1e-12)
        assert stats["std"] == pytest.approx(np.std(x, ddof=1), rel=1e-9)
        assert [r["count"] for r in bins] == [sum(inside(r, v) for v in x) for r in bins]
    else:
        named = [r["value"] for r in bins[:-1]]
        assert bins[-1]["value"] is None
        counts = pd.Series([str(v) for v in values]).value_counts()
        assert [r["count"] for r in bins[:-1]] == [counts.get(v, 0) for v in named]
        assert bins[-1]["count"] == sum(n for v, n in counts.items() if v not in named)
    assert sum(r["share"] for r in bins) == pytest.approx(1)


def compare(
    stats: pd.DataFrame, ws: Workspace, spec: Spec, manifest: Manifest, events: pd.DataFrame, estimated: bool = False
) -> None:
    """All of the table against pandas: columns over the events, features over the dataset."""
    day = np.array([t.day for t in events["ts"]])
    parts = {"train": events[(day >= 2) & (day <= 4)], "valid": events[day == 5]}
    raw = {c for chain in spec.features.workflow for c in chain.columns}
    schema = manifest.dataset_schema
    assert schema is not None
    folder = ws.home / manifest.output("dataset").name
    words = {
        n: {c: w for w, c in zip(*v.table.to_pydict().values(), strict=True)}
        for n, v in FittedWorkflow.load(local(folder / "workflow")).vocabularies.items()
    }
    features = [f for f in schema.features if f.kind in ("continuous", "categorical")]
    assert len(stats) == 2 * (len(raw) + len(features))
    for split, rows in parts.items():
        of_split = stats.loc[(DS, split)]
        assert set(of_split["rows"]) == {len(rows)}
        days = ("2026-01-02", "2026-01-04") if split == "train" else (DS, DS)
        assert set(zip(of_split["from_day"], of_split["to_day"], strict=True)) == {days}
        for column in raw:
            r = of_split.loc[("input", column)]
            empty = [c is None or c == [] or (isinstance(c, float) and math.isnan(c)) for c in rows[column]]
            assert r["missing"] == sum(empty), column
            assert r["kind"] == ("number" if column in NUMBERS else "category")
            check(r, values_of(rows[column]), column in NUMBERS, estimated)
        padded = read_padded(
            sorted((folder / split).glob("*.parquet")), FittedWorkflow.load(local(folder / "workflow")).schema
        )
        for f in features:
            r, cells = of_split.loc[("feature", f.name)], padded[list(f.physical)].to_numpy()
            if f.kind == "continuous":
                check(r, cells.ravel().tolist(), True, estimated)
                assert (r["missing"], pd.isna(r["oov"])) == (0, True)
                continue
            assert r["missing"] == (cells == 0).all(axis=1).sum()
            codes = [c for c in cells.ravel().tolist() if c]
            if f.vocabulary is None:
                assert pd.isna(r["oov"])
                check(r, codes, False, estimated)
                continue
            assert r["oov"] == codes.count(1)
            check(r, [words[f.vocabulary].get(c, statistics.UNKNOWN) for c in codes], False, estimated)


def test_the_table_is_what_pandas_counts_and_a_rerun_replaces(
    spark: SparkSession, ws: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Fewer than the training rows: the bins come from a sample, the counts from all rows.
    monkeypatch.setattr(statistics, "SAMPLE_ROWS", 400)
    spec, events = with_drift(with_raw_ids(clicks()), top_values=3), make_clicks()
    land(spark, ws, spec, events)
    manifest = run_stage(BuildFeatures(count_day), spec, ws, DS).manifest
    stats = table(spark, ws, manifest)
    compare(stats, ws, spec, manifest, events)
    (raw,) = [f for f in manifest.dataset_schema.features if f.dynamic] if manifest.dataset_schema else []
    assert (raw.name, raw.dtype, raw.cardinality) == ("country_raw", "int64", None)
    # Deciles of a sample of 400 are about deciles.
    shares = [r["share"] for r in stats.loc[(DS, "train", "input", "user_activity"), "histogram"]]
    assert len(shares) == 12
    assert shares[0] + shares[-1] < 0.02
    assert all(0.05 < s < 0.16 for s in shares[1:-1])

    # Killed before its manifest: the same rows in the same version. Other bins: the day's rows are replaced.
    ws.manifest("clicks", DS, "features").remove()
    rerun = run_stage(BuildFeatures(count_day), spec, ws, DS).manifest
    assert rerun.outputs == manifest.outputs
    other_spec = with_drift(with_raw_ids(clicks(engine="spark")), quantiles=4, top_values=3)
    recounted = run_stage(BuildFeatures(count_day), other_spec, ws, DS).manifest
    replaced = table(spark, ws)
    compare(replaced, ws, other_spec, recounted, events, estimated=True)
    assert len(replaced) == len(stats)
    assert len(replaced.loc[(DS, "train", "input", "user_activity"), "histogram"]) == 6
    assert recounted.key != manifest.key
    assert len(table(spark, ws, manifest)) == len(stats)
    # Limits are not the features' business.
    limits = with_drift(with_raw_ids(clicks(engine="spark")), quantiles=4, top_values=3, max_psi=9.0)
    assert run_stage(BuildFeatures(count_day), limits, ws, DS).skipped


def test_a_day_that_moved_stops_by_name_and_heals(spark: SparkSession, ws: Workspace) -> None:
    events = make_clicks(days=6)
    moved = np.array([t.day == 6 for t in events["ts"]])
    events.loc[moved, "user_activity"] = events.loc[moved, "user_activity"] * 3 + 1
    events.loc[moved & (np.arange(len(events)) % 2 == 0), "device"] = "fridge"
    events.loc[moved & (np.arange(len(events)) % 3 > 0), "item_category"] = None
    spec = with_drift(clicks(), action="stop")
    for ds in (DS, NEXT):
        land(spark, ws, spec, events, ds=ds)
        run_stage(BuildFeatures(count_day), spec, ws, ds)
    quiet = run_stage(JudgeDrift(), spec, ws, DS).manifest
    assert quiet.rows["over_limit"] == 0, quiet.facts
    with pytest.raises(UserError, match=f"drift of 'clicks' stops {NEXT}") as stopped:
        run_stage(JudgeDrift(), spec, ws, NEXT)
    moved_columns = {line.split(":")[0].strip() for line in str(stopped.value).splitlines()[1:-1]}
    names = {"user_activity", "device", "item_category"}
    assert moved_columns == {f"{side} {name}" for side in ("input", "feature") for name in names}
    assert re.search(r"feature device: (4|5)\d\.\d % of the values are not in the vocabulary", str(stopped.value))
    assert not Path(ws.manifest("clicks", NEXT, "drift")).exists()
    healed = run_stage(JudgeDrift(), with_drift(clicks(), action="warn"), ws, NEXT).manifest
    assert healed.rows["over_limit"] == len(moved_columns)
    # Both days are kept, each once.
    stats = table(spark, ws)
    assert stats.index.is_unique
    assert {ds for ds, *_ in stats.index} == {DS, NEXT}
