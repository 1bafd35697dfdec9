"""Input 31: trees that rank, by a column that is null in some rows: refused before Spark starts, by the user's name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
from pyspark.sql import SparkSession

from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.stage import run_stage
from headrace.train.baseline.stage import TrainBaseline
from tests.reported import support

DAYS = ("2026-01-06", "2026-01-07", "2026-01-08")


@pytest.mark.parametrize("type_", ["bigint", "string"])
def test_rows_without_a_list_are_counted_and_named(spark: SparkSession, ws: Workspace, type_: str) -> None:
    rng = np.random.default_rng(4)
    n = 900
    frame = pd.DataFrame({
        "event_id": np.arange(n),
        "ts": [f"{DAYS[i * 3 // n]}T0{i % 9}:00:00Z" for i in range(n)],
        "user_id": pd.array(rng.integers(100, 130, n), "Int64"),
        "item_id": rng.integers(0, 20, n),
        "clicked": rng.integers(0, 2, n),
    })  # fmt: skip
    frame.loc[rng.random(n) < 0.05, "user_id"] = None
    day = frame["ts"].str[:10]
    support.write(ws.home / "in", {f"{d}.csv": frame[day == d].to_csv(index=False).encode() for d in DAYS})
    columns: list[dict[str, Any]] = [
        {"name": "event_id", "type": "bigint"},
        {"name": "ts", "type": "timestamp"},
        {"name": "user_id", "type": type_},
        {"name": "item_id", "type": "bigint"},
        {"name": "clicked", "type": "int"},
    ]
    workflow = [{"columns": ["user_id", "item_id"], "ops": ["categorify"]}]
    spec = support.pipeline(
        {"format": "csv", "path": "in/{ds}.csv"},
        columns,
        table={"event_time": "ts", "keys": ["event_id"]},
        features={
            "carried": ["user_id", "event_id"],
            "workflow": workflow,
            "split": {"by": "time", "valid_days": 1},
            "window_days": 3,
        },
    )
    spec = spec.model_validate(
        spec.model_dump(mode="json", by_alias=True, exclude_unset=True)
        | {"baseline": {"objective": "ranking", "group": "user_id", "rounds": 2, "workers": 1}}
    )
    for ds in DAYS:
        support.ingest(spec, ws, ds)
    support.build_features(spec, ws, DAYS[-1])
    train = frame[day < DAYS[-1]]
    missing = int(train["user_id"].isna().sum())
    assert missing
    expected = rf"^column 'user_id', by which baseline\.group makes lists, is null in {missing} of {len(train)} rows"
    with pytest.raises(UserError, match=expected):
        run_stage(TrainBaseline(), spec, ws, DAYS[-1])
