"""A workspace in which persons are everywhere: tables with a past, saved models, datasets, caches, a list of each."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from bench.simulated_days import day, save
from headrace.comm.base import LocalCollective
from headrace.config import EmbeddingOptimizer, Model, Spec, build_spec
from headrace.config.workspace import Workspace
from headrace.features.vocabulary.lookup import Lookup
from headrace.features.workflow.fitted import FittedWorkflow
from headrace.features.workflow.workflow import Workflow
from headrace.lake.delta.data_files import statistics
from headrace.lake.delta.log import DeltaLog
from headrace.lake.delta.transaction import Transaction, create_table
from headrace.models.saved import Changes, save_model
from headrace.models.sharded_model import ShardedModel
from headrace.stage.manifest import Output
from headrace.storage import Location

#: Everybody, and those who are forgotten: one at each end of the range, so that statistics have them.
USERS = [f"user-{n:04d}" for n in range(20)]
FORGOTTEN = [USERS[0], USERS[7], USERS[19]]
DAYS = 3
ROWS = 40

_DELTA = {pa.string(): "string", pa.int64(): "long", pa.int32(): "integer", pa.float32(): "float"}


def shop() -> Spec:
    """A pipeline without a warehouse."""
    return build_spec(
        {
            "pipeline": "clicks",
            "source": {"format": "jsonl", "path": "landing/clicks/{ds}/*"},
            "table": {
                "columns": [
                    {"name": "user_id", "type": "string", "required": True},
                    {"name": "item_id", "type": "bigint"},
                    {"name": "click", "type": "int"},
                ]
            },
            "sources": {
                "visits": {
                    "source": {"format": "jsonl", "path": "landing/visits/{ds}/*"},
                    "table": {"columns": [{"name": "user_id"}, {"name": "page"}]},
                }
            },
            "features": {
                "label": "click",
                "split": {"by": "position"},
                "workflow": [
                    {"columns": ["user_id", "item_id"], "ops": ["categorify"]},
                    {"columns": ["user_id"], "ops": ["value_count", {"rename": {"suffix": "_n"}}]},
                ],
            },
        }
    )


def put_rows(table: Location, ds: str | None, rows: pa.Table, metadata: str = "{}") -> int:
    """Replace a day of a table (None: add to one without days), by one commit with statistics; its version."""
    fields = [{"name": f.name, "type": _DELTA[f.type], "nullable": True, "metadata": {}} for f in rows.schema]
    if DeltaLog(table).version is None:
        day_field = {"name": "ds", "type": "string", "nullable": True, "metadata": {}}
        create_table(table, [*fields, *([day_field] if ds else [])], ["ds"] if ds else [])
    path = f"{f'ds={ds}/' if ds else ''}part-{uuid.uuid4()}.parquet"
    footers: list[Any] = []
    with (table / path).new_file() as file:
        pq.write_table(rows, file, metadata_collector=footers, row_group_size=16)
    add = {
        "path": path,
        "partitionValues": {"ds": ds} if ds else {},
        "size": (table / path).size(),
        "modificationTime": time.time_ns() // 1_000_000,
        "dataChange": True,
        "stats": statistics(footers[0], rows.schema, dict.fromkeys(rows.schema.names, 0)),
    }
    if ds is None:
        return Transaction(table).append([add], metadata, ("test", -1))
    return Transaction(table).replace("ds", [ds], [add], metadata)


def events(seed: int, rows: int = ROWS) -> pa.Table:
    rng = np.random.default_rng(seed)
    return pa.table(
        {
            "user_id": pa.array([USERS[i] for i in rng.permutation(rows) % len(USERS)]),
            "item_id": pa.array(rng.integers(0, 9, rows), pa.int64()),
            "click": pa.array(rng.integers(0, 2, rows), pa.int32()),
            "_source_file": pa.array(["f"] * rows),
            "_source_line": pa.array(range(rows), pa.int64()),
        }
    )


def record(ds: str, count: int) -> str:
    """Return the record that ingest puts into its commit of a day."""
    rows = {"read": count, "kept": count, "quarantined": 0, "duplicates": 0}
    facts = {"ds": ds, "key": f"ingest-{ds}", "declared": "d", "judged": "j", "files": [], "rows": rows}
    return json.dumps({"headrace.ingest": facts})


def make_home(ws: Workspace, spec: Spec) -> None:
    """All that stages leave."""
    name = ws.name_of
    for n in range(DAYS):
        ds = day(n)
        table = ws.table("clicks", "events")
        put_rows(table, ds, events(50 + n), record(ds, ROWS))  # loaded twice: the first files are history
        version = put_rows(table, ds, events(n), record(ds, ROWS))
        visits = pa.table({"user_id": USERS, "page": [f"/{n}"] * len(USERS)})
        put_rows(ws.table("clicks", "visits"), ds, visits, record(ds, len(USERS)))
        bad = pa.table(
            {
                "_source_file": ["f"] * 3,
                "_source_line": pa.array(range(3), pa.int64()),
                "_raw": [
                    f'{{"user_id": "{FORGOTTEN[1]}", "click": "x"}}',
                    f"{FORGOTTEN[0]};;",
                    f'{{"user_id": "{USERS[3]}"}}',
                ],
                "_reason": ["click: 'x'", "no JSON", f"{USERS[3]} has no click"],
            }
        )
        quarantine = put_rows(ws.table("clicks", "quarantine"), ds, bad)
        lake_output = Output(kind="delta", name=name(table), version=str(version), rows=ROWS)
        ingest = save(
            ws,
            ds,
            "ingest",
            {},
            lake_output,
            Output(kind="quarantine", name=name(ws.table("clicks", "quarantine")), version=str(quarantine), rows=3),
            facts={"days": [ds], "reasons": {}, "example": f"such as {FORGOTTEN[0]}"},
        )
        codes = pa.table(
            {
                "name": ["user_id"] * 5 if n else ["user_id"] * 10,
                "value": USERS[10 + 5 * (n - 1) : 10 + 5 * n] if n else USERS[:10],
                "code": pa.array(range(2 + (5 + 5 * n if n else 0), 12 + 5 * n), pa.int64()),
                "count": pa.array([2] * (5 if n else 10), pa.int64()),
                "added_ds": [ds] * (5 if n else 10),
            }
        )
        put_rows(ws.table("clicks", "vocabulary"), None, codes)
        dataset = ws.dataset("clicks", ds, f"features-{ds}")
        with dataset.new_folder() as folder:
            (folder / "train" / "part-0.parquet").put_bytes(b"x")
        dataset_output = Output(kind="dataset", name=name(dataset), version=f"features-{ds}", rows=ROWS)
        features = save(ws, ds, "features", {"ingest": ingest}, dataset_output)
        scores = pa.table(
            {
                "user_id": [u for u in USERS for _ in range(2)],
                "item_id": pa.array([1, 2] * len(USERS), pa.int64()),
                "rank": pa.array([1, 2] * len(USERS), pa.int32()),
                "score": pa.array(np.linspace(0, 1, 2 * len(USERS)), pa.float32()),
            }
        )
        version = put_rows(ws.table("clicks", "scores"), ds, scores)
        hashes = pa.table({"user_id": USERS, "inputs_0": pa.array(range(len(USERS)), pa.int64())})
        put_rows(ws.table("clicks", "score_inputs"), ds, hashes)
        scores_output = Output(
            kind="delta", name=name(ws.table("clicks", "scores")), version=str(version), rows=2 * len(USERS)
        )
        save(ws, ds, "score", {"features": features}, scores_output)
        ws.log("clicks", ds, "ingest").put_text(f"{FORGOTTEN[2]} was here\n" if n else "nobody was here\n")
    # What a reader of changes, a killed run and a killed erasure leave.
    with (ws.table("clicks", "events") / "_change_data" / "cdc-1.parquet").new_file() as path:
        pq.write_table(events(9), path)
    of_stages = [ws.spark_local / kind / "clicks" for kind in ("ingest", "score", "vocabulary", "tables")]
    for place in (ws.encoded("clicks"), ws.mapped("clicks"), *of_stages):
        (place / "piece").put_text(FORGOTTEN[0])
    save_models(ws, spec)


def save_models(ws: Workspace, spec: Spec) -> None:
    """A model of the first day, and one of the second whose rows lie upon it; both with states, the first with
    checkpoints beside it.
    """
    workflow = Workflow.from_spec(spec)
    keys = pa.table({"key": sorted(USERS), "count": pa.array(range(1, 21), pa.int64())})
    values = pa.table({"value": USERS, "code": pa.array(range(2, 22), pa.int64())})
    items = pa.table({"value": [str(i) for i in range(9)], "code": pa.array(range(2, 11), pa.int64())})
    from headrace.features.vocabulary.keyed_tables import KeyedTable

    fitted = FittedWorkflow(
        workflow,
        [[{} for _ in chain.steps] for chain in workflow.chains],
        {"user_id": Lookup(values), "item_id": Lookup(items)},
        {"1.0.user_id": KeyedTable(keys)},
    )
    fitted.save(ws.spark_local / "workflow")
    model = ShardedModel(fitted.schema, Model(embedding_dim=4, bottom_mlp=(4,), top_mlp=(4,)), LocalCollective(), 3)
    model.embeddings.configure_optimizer(EmbeddingOptimizer(kind="rowwise_adagrad", learning_rate=0.1))
    folders = [ws.model("clicks", day(n), f"train-{day(n)}") / "model" for n in range(2)]
    for n, folder in enumerate(folders):
        if n:
            with torch.no_grad():  # some rows change: of those who go, and of others
                model.embeddings.weights[0][2 + 7] += 1
                model.embeddings.weights[0][2 + 8] += 1
        save_model(
            folder,
            model,
            workflow=ws.spark_local / "workflow",
            pipeline="clicks",
            ds=day(n),
            key=f"train-{day(n)}",
            metrics={"auc": 0.6},
            changes=Changes(folders[0], 1.0) if n else None,
        )
        (folder.parent / "checkpoints" / "step-1" / "rows").put_text(FORGOTTEN[0])
        output = Output(kind="model", name=ws.name_of(folder), version=f"train-{day(n)}")
        save(ws, day(n), "train", {}, output)
    (ws.spark_local / "workflow").remove()


def tables(home: Path) -> Mapping[str, pa.Table]:
    """Return the rows of each table and version by the log, read without headrace; files that are gone have none."""
    contents = {}
    for log in sorted(home.glob("lake/clicks/*/_delta_log")):
        live: dict[str, dict[str, Any]] = {}
        for commit in sorted(log.glob("*.json")):
            for line in commit.read_text().splitlines():
                action = json.loads(line)
                if "add" in action:
                    live[action["add"]["path"]] = action["add"]
                if "remove" in action:
                    live.pop(action["remove"]["path"], None)
        parts = []
        for path, add in sorted(live.items(), key=lambda x: str(x[1]["partitionValues"])):
            rows = pq.ParquetFile(log.parent / path).read()
            stats = json.loads(add["stats"])
            assert stats["numRecords"] == rows.num_rows
            parts.append(rows.append_column("ds", pa.array([add["partitionValues"].get("ds", "")] * rows.num_rows)))
        contents[log.parent.name] = pa.concat_tables(parts)
    return contents
