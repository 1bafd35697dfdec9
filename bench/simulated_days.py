"""Days of a pipeline without its stages, and their disk use with `headrace gc --delete` after each and without.

    python -m bench.simulated_days --days 60 --plot docs/disk_use.png

Delta tables, manifests and the registry are real, datasets and models are files of sizes in proportion. After each day
all files, and what tables' logs say of removals, are made a day older: a day passes by the clock, too.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import tempfile
import time
import uuid
from collections import Counter
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from statistics import linear_regression
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake import DeltaTable

from headrace.config import Spec, load_spec
from headrace.config.workspace import Workspace
from headrace.jobs.housekeeping.collect import collect
from headrace.lake.delta.log import DeltaLog
from headrace.lake.delta.transaction import Transaction, create_table
from headrace.models import registry
from headrace.stage import identity
from headrace.stage.manifest import Input, Manifest, Output
from headrace.storage import Location

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


#: What a training says of itself in the registry: numbers, and those of its steps.
METRICS = {"auc": 0.7, "logloss": 0.4, "calibration": 1.0, "hr_at_k": 0.2}
HISTORY = [{"step": step, "loss": 1 / (1 + step), "auc": 0.7} for step in range(10)]
#: What is kept: short enough for sixty days to show when it is full, and more days than lie between two checkpoints.
KEEP = {
    "models": 10,
    "logs": 10,
    "reports": 16,
    "manifests": 16,
    "compact_files": None,
    "tables": {"events": 16, "quarantine": 16, "scores": 14},
}
#: No run loads or reads older days than these tables keep.
READS = ("source.catch_up_days=7", "features.window_days=7")
#: The day by which everything is full: the logs of tables as long as the days that are kept have commits of their own,
#: one in which they came and one in which others went, and a week more, for which files stay for readers.
LEVEL = 44


def bytes_by_kind(home: Path) -> dict[str, int]:
    """Return bytes of the workspace's files by its folders; those of the lake by table and log."""
    sizes: Counter[str] = Counter()
    for file in home.rglob("*"):
        if file.is_file():
            parts = file.relative_to(home).parts
            of_table = "logs of tables" if "_delta_log" in parts else f"table {(*parts, '', '')[2]}"
            kind = of_table if parts[0] == "lake" else parts[0]
            sizes["registry" if kind.startswith("mlflow") else kind] += file.stat().st_size
    return dict(sizes)


def simulate(home: Path, spec: Spec, days: int, rows: int, collects: bool) -> list[dict[str, int]]:
    """Run days; return the bytes by kind after each day."""
    ws, history = Workspace(home), []
    for n in range(days):
        ds = day(n)
        run_day(ws, ds, rows)
        model = ws.model("clicks", ds, f"train-{ds}") / "model"
        registry.register(ws, "clicks", model, METRICS, f"train-{ds}", ds=ds, history=HISTORY)
        for _ in collect(spec, ws, datetime.now(UTC), delete=True) if collects else ():
            pass
        history.append(bytes_by_kind(home))
        if collects:  # nobody else asks how old a file is
            let_a_day_pass(home)
    return history


def slope(history: list[dict[str, int]], first: int) -> float:
    """Return bytes a day, by a line of least squares through the sums of the days from the `first` on (from 1)."""
    totals = [float(sum(f.values())) for f in history[first - 1 :]]
    return linear_regression(range(len(totals)), totals).slope


def _table(with_gc: list[dict[str, int]], without_gc: list[dict[str, int]]) -> str:
    kinds = sorted({k for f in with_gc for k in f})
    days_shown = [n for n in range(len(with_gc)) if n % 10 == 9 or n == 0]
    lines = ["| day | " + " | ".join(kinds) + " | all | without gc |", "|---" * (len(kinds) + 3) + "|"]
    for n in days_shown:
        cells = [f"{with_gc[n].get(k, 0) / 1024:,.0f}" for k in kinds]
        total, all_ = (sum(f[n].values()) / 1024 for f in (with_gc, without_gc))
        lines.append(f"| {n + 1} | " + " | ".join(cells) + f" | {total:,.0f} | {all_:,.0f} |")
    return "\n".join(lines)


def _plot(with_gc: list[dict[str, int]], without_gc: list[dict[str, int]], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.2), dpi=130)
    kinds = sorted({k for f in with_gc for k in f}, key=lambda k: -max(f.get(k, 0) for f in with_gc))
    days = range(1, len(with_gc) + 1)
    axes.stackplot(
        days, [[f.get(k, 0) / 2**20 for f in with_gc] for k in kinds], labels=kinds, colors=plt.get_cmap("tab20").colors
    )
    axes.plot(days, [sum(f.values()) / 2**20 for f in without_gc], "k--", label="all, without gc")
    axes.set(xlabel="day", ylabel="MiB", xlim=(1, len(with_gc)), ylim=(0, None))
    axes.legend(loc="upper left", fontsize=7, ncols=2)
    figure.tight_layout()
    figure.savefig(file)


def main() -> None:
    """Simulate, print the table, draw the plot."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--days", type=int, default=60)
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    spec = load_spec(
        "clicks", ["publish=null", *READS, *(f"housekeeping.{k}={json.dumps(v)}" for k, v in KEEP.items())]
    )
    with tempfile.TemporaryDirectory() as folder:
        with_gc, without_gc = (
            simulate(Path(folder) / name, spec, args.days, args.rows, name == "with") for name in ("with", "without")
        )
    print("KiB after each day\n")
    print(_table(with_gc, without_gc))
    if args.days > LEVEL + 1:
        totals = [sum(f.values()) / 1024 for f in with_gc]
        least, most = min(totals[LEVEL - 1 :]), max(totals[LEVEL - 1 :])
        print(
            f"\nday {LEVEL} to {args.days}: {least:,.0f} to {most:,.0f} KiB, by a straight line "
            f"{slope(with_gc, LEVEL):+,.0f} bytes a day; without gc {slope(without_gc, LEVEL):+,.0f}"
        )
    if args.plot:
        _plot(with_gc, without_gc, args.plot)


if __name__ == "__main__":
    main()
