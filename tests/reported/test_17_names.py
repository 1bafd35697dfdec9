"""Input 17: names as people's tables have them go through every stage, keys of users and items among them."""

from __future__ import annotations

import html
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from headrace.config import Spec, build_spec
from headrace.jobs.stages import load_stage
from headrace.publish.postgres.server import connect
from headrace.stage import run_stage
from headrace.workspace import Workspace

STAGES = ("ingest", "features", "drift", "train", "promote", "score", "publish", "report")
DAYS = ["2026-01-06", "2026-01-07", "2026-01-08"]
LONG = "average basket value, " * 9 + "%s"
#: Role -> name: dots, dashes, blanks, quotes of all kinds, `%`, umlauts, reserved words, about 200 characters.
NAMES = {
    "event": "event-id.1",
    "time": "Event Time",
    "user": "Kunden-Nr.",
    "item": 'the "best" `item` 100%',
    "device": "service.name",
    "price": "price [EUR] <net>",
    "size": "größe;cm, it's",
    "kind": "select",
    "member": "Is Member?",
    "long": LONG,
    "clicked": "Order by \\ %s {x} $y",
}


def events(names: dict[str, str]) -> pd.DataFrame:
    """1,500 events of 40 users and 25 items; users like items of their own parity."""
    rng = np.random.default_rng(3)
    n = 1500
    user, item = rng.integers(0, 40, n), rng.integers(0, 25, n)
    frame = pd.DataFrame(
        {
            "event": [f"e{i}" for i in range(n)],
            "time": pd.Timestamp(DAYS[0], tz="UTC") + pd.to_timedelta(rng.integers(0, 3 * 86400, n), unit="s"),
            "user": [f"u{u}" for u in user],
            "item": item,
            "device": rng.choice(["phone", "tv", "it's"], n),
            "price": rng.gamma(2, 5, n),
            "size": rng.gamma(2, 5, n),
            "kind": [f"k{i % 4}" for i in item],
            "member": user % 2 == 0,
            "long": rng.normal(0, 1, n),
            "clicked": (rng.random(n) < np.where(user % 2 == item % 2, 0.6, 0.1)).astype(np.int32),
        }
    )
    return frame.sort_values("time").rename(columns=names)


def pipeline(names: dict[str, str], folder: Path, **more: Any) -> Spec:
    types = {"time": "timestamp", "item": "bigint", "price": "double", "size": "double", "member": "boolean"}
    types |= {"long": "double", "clicked": "int"}
    n = names
    return build_spec(
        {
            "pipeline": "names",
            "source": {"format": "parquet", "path": str(folder), "day": {"time": n["time"]}},
            "table": {
                "keys": [n["event"]],
                "event_time": n["time"],
                "columns": [{"name": name, "type": types.get(role, "string")} for role, name in n.items()],
                "expectations": {"ranges": {n["clicked"]: [0, 1]}, "null_rate": {n["device"]: 0.5}},
            },
            "features": {
                "label": n["clicked"],
                "split": {"by": "time", "valid_days": 1},
                "window_days": 2,
                "carried": [n["user"], n["event"]],
                "workflow": [
                    {"columns": [n["time"]], "ops": [{"cyclic": {"of": ["hour"]}}]},
                    {"columns": [n["user"], n["item"]], "ops": ["categorify"]},
                    {"columns": [n["device"], n["kind"], n["member"]], "ops": ["categorify"]},
                    {"columns": [n["price"], n["size"], n["long"]], "ops": ["fill_missing", "log", "normalize"]},
                ],
            },
            "drift": {},
            "model": {"embedding_dim": 4, "bottom_mlp": [8], "top_mlp": [8]},
            "train": {"ranks": 1, "batch_size": 256, "streams": 2, "epochs": 1, "evaluation": {"user": n["user"]}},
            "score": {
                "user": {"key": n["user"], "columns": [n["member"]]},
                "item": {"key": n["item"], "columns": [n["kind"]]},
                "context": {
                    n["time"]: datetime(2026, 1, 8, 12, tzinfo=UTC),
                    n["device"]: "tv",
                    n["price"]: 5.0,
                    n["size"]: 5.0,
                    n["long"]: 0.5,
                },
                "top_k": 3,
            },
            "publish": {},
            **more,
        }
    )


def write(frame: pd.DataFrame, folder: Path, time: str) -> None:
    folder.mkdir()
    for day, part in frame.groupby(frame[time].dt.date.astype(str)):
        table = pa.Table.from_pandas(
            part.assign(**{time: part[time].astype("datetime64[us, UTC]")}), preserve_index=False
        )
        pq.write_table(table, folder / f"{day}.parquet")


@pytest.mark.slow
def test_a_day_of_hostile_names(spark: SparkSession, tmp_path: Path) -> None:
    frame = events(NAMES)
    write(frame, tmp_path / "in", NAMES["time"])
    online = {"kind": "lmdb", "path": f"{tmp_path}/top.lmdb"}
    spec, ws = pipeline(NAMES, tmp_path / "in", publish={"online": online}), Workspace(tmp_path / "home")
    for ds in DAYS[:-1]:
        run_stage(load_stage("ingest"), spec, ws, ds)
    done = {name: run_stage(load_stage(name), spec, ws, DAYS[-1]).manifest for name in STAGES}
    assert done["features"].rows["train"] + done["features"].rows["valid"] == len(frame)
    users = set(frame[NAMES["user"]])
    assert spec.publish is not None
    with connect(spec.publish.warehouse, ws) as conn:
        cursor = conn.execute("SELECT * FROM names_scores")
        rows = pd.DataFrame(cursor.fetchall(), columns=[c.name for c in cursor.description or ()])
    assert {NAMES["user"], NAMES["item"]} < set(rows.columns)
    assert len(rows) == len(users) * 3
    assert set(rows[NAMES["user"]]) == users
    assert set(rows[NAMES["item"]]) <= set(frame[NAMES["item"]])
    with lmdb.open(f"{tmp_path}/top.lmdb", subdir=False, readonly=True, lock=False) as env, env.begin() as reading:
        for user, of_user in rows.sort_values("rank").groupby(NAMES["user"]):
            assert [r["item"] for r in json.loads(reading.get(user.encode()))] == list(of_user[NAMES["item"]])
    assert html.escape(NAMES["user"]) in ws.report("names", DAYS[-1]).read_text()
