"""Days of a pipeline without its stages: real Delta tables and manifests, files in proportion for the rest."""

from __future__ import annotations

import json
import os
import re
import time
import uuid
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake import DeltaTable

from headrace.lake.delta.log import DeltaLog
from headrace.lake.delta.transaction import Transaction, create_table
from headrace.manifest import Input, Manifest, Output
from headrace.stage import identity
from headrace.storage import Location
from headrace.workspace import Workspace

FIRST = "2026-01-01"
_FIELDS = [{"name": n, "type": t, "nullable": True, "metadata": {}} for n, t in (("user_id", "long"), ("ds", "string"))]


def day(n: int) -> str:
    """Return the n-th day, from 0."""
    return (date.fromisoformat(FIRST) + timedelta(days=n)).isoformat()


def write_rows(table: Location, ds: str, users: list[int], metadata: str = "{}") -> int:
    """Replace a day of a table partitioned by `ds`, by one commit; its version."""
    if DeltaLog(table).version is None:
        create_table(table, _FIELDS, ["ds"])
    path = f"ds={ds}/part-{uuid.uuid4()}.parquet"
    with (table / path).new_file() as file:
        pq.write_table(pa.table({"user_id": pa.array(users, pa.int64())}), file)
    add = {
        "path": path,
        "partitionValues": {"ds": ds},
        "size": (table / path).size(),
        "modificationTime": time.time_ns() // 1_000_000,
        "dataChange": True,
        "stats": json.dumps({"numRecords": len(users)}),
    }
    transaction = Transaction(table)
    version = transaction.replace("ds", [ds], [add], metadata)
    if transaction.wants_checkpoint(version):  # in a stage it is Spark's
        DeltaTable(str(table)).create_checkpoint()
    return version


def users_at(table: Location, version: int, ds: str) -> list[int]:
    """Return the rows of a day at a version, read from the data files."""
    files = DeltaLog(table).files(version) or []
    rows = [pq.read_table(f.path.local_path(), partitioning=None) for f in files if f.partition["ds"] == ds]
    return sorted(u for t in rows for u in t["user_id"].to_pylist())


def save(ws: Workspace, ds: str, stage: str, upstream: dict[str, Manifest], *outputs: Output, **more: Any) -> Manifest:
    """Write a manifest of a stage that read others."""
    inputs = tuple(Input(kind="stage", name=n, version=identity(m)) for n, m in upstream.items())
    manifest = Manifest(
        stage=stage,
        pipeline="clicks",
        ds=ds,
        key=f"{stage}-{ds}",
        spec_hash="s",
        inputs=(*inputs, *more.pop("inputs", ())),
        outputs=outputs,
        **more,
    )
    manifest.save(ws.manifest("clicks", ds, stage))
    return manifest


def run_day(ws: Workspace, ds: str, size: int = 200, base: str | None = None) -> None:
    """Write what a day's stages leave, of sizes in proportion to those of real ones; `base`: the day of the model's
    base.
    """
    table = {name: ws.table("clicks", name) for name in ("events", "quarantine", "scores", "score_inputs")}
    users = list(range(size))
    name = ws.name_of
    events = write_rows(table["events"], ds, users)
    bad = write_rows(table["quarantine"], ds, users[:3])
    ingest = save(
        ws,
        ds,
        "ingest",
        {},
        Output(kind="delta", name=name(table["events"]), version=str(events), rows=size),
        Output(kind="quarantine", name=name(table["quarantine"]), version=str(bad), rows=3),
        facts={"days": [ds]},
    )
    dataset = ws.dataset("clicks", ds, f"features-{ds}")
    with dataset.new_folder() as folder:
        (folder / "train" / "part-0.parquet").put_bytes(b"x" * size * 50)
        (folder / "_files.json").put_text("[]")
    dataset_output = Output(kind="dataset", name=name(dataset), version=f"features-{ds}", rows=size)
    read = Input(kind="delta", name=name(table["events"]), version=str(events))
    features = save(ws, ds, "features", {"ingest": ingest}, dataset_output, inputs=(read,))
    run = ws.model("clicks", ds, f"train-{ds}")
    with (run / "model").new_folder() as folder:
        (folder / "embeddings" / "rows.safetensors").put_bytes(b"x" * size * 20)
        upon = {} if base is None else {"base": {"sha256": f"rows-{base}"}}
        (folder / "embeddings" / "index.json").put_text(json.dumps({"sha256": f"rows-{ds}"} | upon))
        (folder / "dense.safetensors").put_bytes(b"x" * size)
        (folder / "workflow" / "workflow.json").put_text("{}")
        below = {} if base is None else {"base": f"../../../{base}/train-{base}/model"}
        (folder / "model.json").put_text(json.dumps({"kind": "dlrm", "model": {}, "ds": ds} | below))
    (run / "checkpoints" / "step-00000001" / "rows").put_bytes(b"x" * size * 40)
    model = Output(kind="model", name=name(run / "model"), version=f"train-{ds}", rows=size)
    train = save(ws, ds, "train", {"features": features}, model)
    scores = write_rows(table["scores"], ds, users)
    output = Output(kind="delta", name=name(table["scores"]), version=str(scores), rows=size)
    hashes = write_rows(table["score_inputs"], ds, users)
    inputs = Output(kind="score_inputs", name=name(table["score_inputs"]), version=str(hashes), rows=size)
    score = save(ws, ds, "score", {"train": train}, output, inputs)
    ws.report("clicks", ds).put_bytes(b"x" * size)
    save(ws, ds, "report", {"score": score}, Output(kind="file", name=name(ws.report("clicks", ds)), version="r"))
    ws.log("clicks", ds, "train").put_bytes(b"x" * size)
    (ws.spark_local / "score" / "clicks").remove()  # the stage begins by that
    (ws.spark_local / "score" / "clicks" / f"{ds}" / "items").put_bytes(b"x" * size)
    (ws.mapped("clicks") / f"of-{ds}" / "tables").put_bytes(b"x" * size)


_DAY_MS = 24 * 3600 * 1000
_REMOVED_AT = re.compile(r'"deletionTimestamp":(\d+)')


def let_a_day_pass(home: Path) -> None:
    """Make all that is there a day older, by the clock: files, and the removals that logs of tables tell of."""
    for file in home.rglob("*"):
        if not file.is_file():
            continue
        status = file.stat()
        if file.parent.name == "_delta_log" and file.suffix == ".json":
            text = file.read_text()
            older = _REMOVED_AT.sub(lambda m: f'"deletionTimestamp":{int(m.group(1)) - _DAY_MS}', text)
            if older != text:
                file.write_text(older)
        elif file.name.endswith(".checkpoint.parquet"):
            pq.write_table(_older_removals(pq.read_table(file)), file)
        os.utime(file, ns=(status.st_atime_ns - _DAY_MS * 10**6, status.st_mtime_ns - _DAY_MS * 10**6))


def _older_removals(checkpoint: pa.Table) -> pa.Table:
    """Return a checkpoint's actions with removals of a day earlier."""
    if "remove" not in checkpoint.schema.names:
        return checkpoint
    removals = checkpoint["remove"].combine_chunks()
    fields = {f.name: removals.field(i) for i, f in enumerate(removals.type)}
    fields["deletionTimestamp"] = pc.subtract(fields["deletionTimestamp"], pa.scalar(_DAY_MS, pa.int64()))
    older = pa.StructArray.from_arrays(list(fields.values()), fields=list(removals.type), mask=removals.is_null())
    return checkpoint.set_column(checkpoint.schema.get_field_index("remove"), checkpoint.schema.field("remove"), older)
