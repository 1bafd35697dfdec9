"""Run whole days, ingest to published scores, from tables of other writers.

    python -m scripts.table_day                        # all kinds
    python -m scripts.table_day delta-rs parquet --rows-per-day 20000
    python -m scripts.table_day delta-rs delta-spark parquet init --store s3://bucket/tables    # read from there

A generated click log is loaded once; each writer then makes a table of its rows, and `headrace run` makes a day of that
table in a pipeline of its own: a copy of the shipped one with another section `source`, or as `headrace init` writes it
for the table (kind init). Prints a line for each: rows
that ingest kept, rows of the dataset, the AUC, scores that were published, seconds of `headrace run`.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.parquet as pq
import yaml
from deltalake import DeltaTable, write_deltalake

from headrace.config import load_spec
from headrace.config.operations import ICEBERG_BY_PATH
from headrace.config.workspace import Workspace
from headrace.lake.delta.log import DeltaLog
from headrace.lake.spark.session import session
from headrace.stage.manifest import Manifest
from headrace.storage import local, location_of
from scripts.published_scores import headrace

DS = "2026-01-04"


@dataclass(frozen=True)
class Written:
    """A table as a pipeline names it."""

    #: The section `source`.
    source: dict[str, Any]
    #: By declared column: where the table has it.
    paths: dict[str, str] = field(default_factory=dict)
    #: Rows that the writer has deleted.
    deleted: int = 0
    #: Whether the pipeline is the one that `headrace init` writes.
    init: bool = False


def parquet(rows: pa.Table, folder: Path) -> Written:
    """Write a folder of Parquet, a folder a day, with Arrow."""
    parts = pads.partitioning(pa.schema([("ds", pa.string())]), flavor="hive")
    pads.write_dataset(rows, folder, format="parquet", partitioning=parts)
    return Written({"format": "parquet", "path": str(folder), "day": {"partition": "ds"}})


def delta_rs(rows: pa.Table, folder: Path) -> Written:
    """Write a Delta table with delta-rs: partitioned, a delete, a checkpoint."""
    write_deltalake(folder, rows, partition_by=["ds"])
    table = DeltaTable(folder)
    deleted = table.delete("hour = 5")["num_deleted_rows"]
    table.create_checkpoint()
    return Written({"format": "delta", "path": str(folder), "day": {"partition": "ds"}}, deleted=deleted)


def delta_init(rows: pa.Table, folder: Path) -> Written:
    """Write a Delta table with delta-rs, of which `headrace init` is told nothing but the folder."""
    write_deltalake(folder, rows.drop_columns(["ds"]))
    return Written({"path": str(folder)}, init=True)


def delta_spark(rows: pa.Table, folder: Path) -> Written:
    """Write a Delta table with plain Spark: a renamed column, deletion vectors, days by a column of times."""
    staged = folder.with_suffix(".staged")
    pq.write_table(rows.drop_columns(["ds"]), staged)
    properties = (
        "'delta.columnMapping.mode' = 'name', 'delta.enableDeletionVectors' = 'true', "
        "'delta.enableChangeDataFeed' = 'false'"
    )
    with session(load_spec("clicks").spark, Workspace(folder.parent), "write a table") as spark:
        table = f"delta.`{folder}`"
        spark.read.parquet(str(staged)).createOrReplaceTempView("rows")
        spark.sql(f"CREATE TABLE {table} USING delta TBLPROPERTIES ({properties}) AS SELECT * FROM rows")
        spark.sql(f"ALTER TABLE {table} RENAME COLUMN item_price TO price_eur")
        deleted = spark.sql(f"DELETE FROM {table} WHERE hour = 5").collect()[0]["num_affected_rows"]
    source = {"format": "delta", "path": str(folder), "day": {"time": "ts"}}
    return Written(source, {"item_price": "price_eur"}, deleted)


def iceberg(rows: pa.Table, folder: Path) -> Written:
    """Write an Iceberg table: hidden partitions by day, a renamed column, rows deleted by merge-on-read."""
    staged = folder.with_suffix(".staged")
    pq.write_table(rows.drop_columns(["ds"]), staged)
    catalog = {
        "spark.sql.catalog.lake": ICEBERG_BY_PATH["spark.sql.catalog.default_iceberg"],
        "spark.sql.catalog.lake.type": "hadoop",
        "spark.sql.catalog.lake.warehouse": str(folder.parent.parent),
    }
    conf = load_spec("clicks").spark.model_copy(update={"properties": catalog})
    with session(conf, Workspace(folder.parent), "write a table") as spark:
        table = f"lake.`{folder.parent.name}`.`{folder.name}`"
        spark.read.parquet(str(staged)).createOrReplaceTempView("rows")
        properties = "'write.delete.mode' = 'merge-on-read'"
        partitions = "PARTITIONED BY (days(ts))"
        spark.sql(f"CREATE TABLE {table} USING iceberg {partitions} TBLPROPERTIES ({properties}) AS SELECT * FROM rows")
        spark.sql(f"ALTER TABLE {table} RENAME COLUMN item_price TO price_eur")
        spark.sql(f"DELETE FROM {table} WHERE hour = 5")
        deleted = spark.sql(f"SELECT sum(record_count) FROM {table}.delete_files").collect()[0][0]
    source = {"format": "iceberg", "path": str(folder), "day": {"time": "ts"}}
    return Written(source, {"item_price": "price_eur"}, deleted)


def orc(rows: pa.Table, folder: Path) -> Written:
    """Write a folder of ORC with Spark, a folder a day."""
    return by_spark(rows, folder, "orc")


def avro(rows: pa.Table, folder: Path) -> Written:
    """Write a folder of Avro with Spark, a folder a day."""
    return by_spark(rows, folder, "avro")


def by_spark(rows: pa.Table, folder: Path, form: str) -> Written:
    """Write a folder of files in a format of Spark's."""
    staged = folder.with_suffix(".staged")
    pq.write_table(rows, staged)
    with session(load_spec("clicks").spark, Workspace(folder.parent), "write files") as spark:
        spark.read.parquet(str(staged)).write.format(form).partitionBy("ds").save(str(folder))
    return Written({"format": form, "path": str(folder), "day": {"partition": "ds"}})


WRITERS: dict[str, Callable[[pa.Table, Path], Written]] = {
    "parquet": parquet,
    "orc": orc,
    "avro": avro,
    "delta-rs": delta_rs,
    "delta-spark": delta_spark,
    "iceberg": iceberg,
    "init": delta_init,
}


def main() -> None:
    """Run the days that the command line names."""
    title = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(description=title, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"of {', '.join(WRITERS)}; all of them where none is")
    parser.add_argument("--rows-per-day", type=int, default=20_000, metavar="N", help="rows of the log a day, 4 days")
    parser.add_argument("--home", type=Path, metavar="FOLDER", help="kept at the end; else a folder that is removed")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a key of the pipelines")
    parser.add_argument("--store", metavar="URI", help="a folder of a store: tables are copied to it, and read there")
    words = parser.parse_args()
    kinds = words.kinds or list(WRITERS)
    if unknown := set(kinds) - WRITERS.keys():
        parser.error(f"no such kind: {', '.join(sorted(unknown))}; there are {', '.join(WRITERS)}")
    if words.store and "iceberg" in kinds:
        parser.error("--store: an Iceberg table names its files by their paths, and cannot be copied")
    home = words.home or Path(tempfile.mkdtemp(prefix="headrace-tables-"))
    settings = [part for setting in words.set for part in ("--set", setting)]
    try:
        rows = load(home, words.rows_per_day)
        print(
            f"{'table':<12} {'rows':>9} {'deleted':>8} {'dataset':>9} {'AUC':>7} {'published':>9} {'seconds':>8}",
            flush=True,
        )
        for kind in kinds:
            shutil.rmtree(home / "tables" / kind, ignore_errors=True)
            # In a process of its own: the jars of a session are those of a process's first one.
            with ProcessPoolExecutor(1, get_context("spawn")) as alone:
                written = alone.submit(WRITERS[kind], rows, home / "tables" / kind).result()
            if words.store:
                place = location_of(words.store, "--store") / kind
                place.remove()
                place.copy_from(local(home / "tables" / kind))
                written = replace(written, source=written.source | {"path": str(place)})
            print(run(home, kind, written, settings), flush=True)
    finally:
        headrace("warehouse", "stop", "--home", str(home), check=False)
        if words.home is None:
            shutil.rmtree(home, ignore_errors=True)


def load(home: Path, rows_per_day: int) -> pa.Table:
    """Return a generated log as a typed table, with a column `ds`."""
    size = ["--set", f"generate.rows_per_day={rows_per_day}"]
    headrace("generate", "clicks", "--home", str(home), "--until", DS, *size)
    headrace("run", "clicks", "--home", str(home), "--ds", DS, "--to", "ingest", *size)
    log = DeltaLog(Workspace(home).events("clicks"))
    files = log.plain_files(log.version or 0)
    assert files is not None
    days = [pa.array([f.partition["ds"]] * (f.rows or 0)) for f in files]
    parts = [pq.ParquetFile(f.path).read().append_column("ds", ds) for f, ds in zip(files, days, strict=True)]
    (home / "tables").mkdir(exist_ok=True)
    return pa.concat_tables(parts).drop_columns(["_source_file", "_source_line"])


def run(home: Path, kind: str, written: Written, settings: list[str]) -> str:
    """Run a day of a table; return a line that says what came of it."""
    name = f"clicks_{kind.replace('-', '_')}"
    spec = home / "tables" / f"{name}.yaml"
    if written.init:
        headrace("init", written.source["path"], "--out", str(spec), "--name", name, "--force")
    else:
        shipped(spec, name, written)
    tick = time.perf_counter()
    headrace("run", str(spec), "--home", str(home), "--ds", DS, *settings)
    seconds = time.perf_counter() - tick
    ws = Workspace(home)
    manifests = {
        stage: Manifest.load(ws.manifest(name, DS, stage)) for stage in ("ingest", "features", "train", "publish")
    }
    ingested, dataset, auc, published = (
        manifests["ingest"].rows["kept"],
        sum(manifests["features"].rows.values()),
        manifests["train"].facts["metrics"]["auc"],
        manifests["publish"].rows["published"],
    )
    return f"{kind:<12} {ingested:>9,} {written.deleted:>8,} {dataset:>9,} {auc:>7.4f} {published:>9,} {seconds:>8.1f}"


def shipped(spec: Path, name: str, written: Written) -> None:
    """Write the shipped pipeline with a table as its source."""
    pipeline = yaml.safe_load(Path(__file__).parents[1].joinpath("conf/pipelines/clicks.yaml").read_text())
    pipeline |= {"pipeline": name, "source": written.source}
    del pipeline["generate"]
    for column in pipeline["table"]["columns"]:
        if column["name"] in written.paths:
            column["path"] = written.paths[column["name"]]
    spec.write_text(yaml.safe_dump(pipeline, sort_keys=False))


if __name__ == "__main__":
    main()
