"""Text above 2 GiB in one column: a day's dataset by each way of the stage `features`, compared and recomputed.

    PYTHONPATH=. python scripts/large_text.py                        # both tables, all ways
    PYTHONPATH=. python scripts/large_text.py long --ways shared     # one table, one way

Arrow's texts have offsets of 32 bits, so no array of them holds more than 2 GiB. Each table is a folder of Parquet
files, read where it is, whose file of the training day is one row group with more text than that in the column `body`:

- `long`: 2,400 different texts of 1 MiB, one behind the other among 27,600 short ones, stored as large_string;
- `repeated`: 38,000 rows with 14 texts of 68 KiB, which the file has once each, and the rows 38,000 times.

The ways: `shared` and `own` (the Arrow engine, by `spark.scratch`), `spark` (the Spark engine). Each is `headrace run
--to features` in a workspace of its own. All rows of each dataset are compared with those of the first way, file by
file, to the bit, and with what is computed here of the source files a few rows at a time: SHA-256 of the carried text,
codes, counts and means by digests with pandas, hashes of some texts by a plain XXH64. 20 GiB of disk below TMPDIR.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from bench.usage import peak_of_tree
from headrace.config.workspace import Workspace
from headrace.stage.manifest import Manifest
from tests.unit.test_features_kernels import xxh64

DAYS = ("2026-01-01", "2026-01-02")
WAYS = {
    "shared": ["spark.scratch=shared", "features.engine=arrow"],
    "own": ["spark.scratch=own", "features.engine=arrow"],
    "spark": ["spark.scratch=own", "features.engine=spark"],
}
KINDS = ("long", "repeated")
#: Spark's reader holds a column of a row group, and while it decompresses a page of 1 MiB texts what it made so far.
HEAP = {"repeated": "4g", "long": "10g"}
#: Rows that are in memory here at once.
ROWS_AT_ONCE = 256
#: Of the texts, so many are hashed here: a tenth of a second a MiB.
HASHED = 40
BUCKETS = 100_003
LONG_ROWS, LONG, SHORT_ROWS = 2_400, 1 << 20, 27_600
REPEATED_ROWS, REPEATED, TEXTS = 38_000, 68 << 10, 14


def letters(size: int) -> str:
    """Return letters and digits that hardly compress."""
    alphabet = np.frombuffer(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_", np.uint8)
    return alphabet[np.random.default_rng(7).integers(0, len(alphabet), size)].tobytes().decode()


def texts_of(kind: str, day: int) -> Iterator[str | None]:
    """Return the texts of a day's rows, in order; different ones differ in their first 16 characters."""
    block = letters(2 * LONG)
    if kind == "repeated":
        texts = [f"text {i:011d}" + block[i : i + REPEATED - 16 - i] for i in range(TEXTS + 1)]
        for i in range(500 if day else REPEATED_ROWS):
            # The valid day has one that the training day lacks.
            yield None if i % 97 == 5 else texts[(i * i + i // 7) % (TEXTS + day)]
        return

    def long(i: int) -> str:
        start = i * 409 % LONG
        return f"long {i * 7_919 % 100_003:011d}" + block[start : start + LONG - 16 - i % 50]

    if day == 1:
        for i in range(400):
            yield f"unknown {i:08d}" if i % 3 == 2 else long(i) if i < 40 else f"short {i:010d}"
        return
    for i in range(SHORT_ROWS // 2):
        yield None if i % 101 == 3 else f"short {i % 9_000:010d}"
    for i in range(LONG_ROWS):
        yield long(i)
    for i in range(SHORT_ROWS // 2, SHORT_ROWS):
        yield f"short {i:010d}"


def file_of(table: Path, day: int) -> Path:
    """Return the file of a day."""
    return table / f"ds={DAYS[day]}" / "part-0.parquet"


def write_table(kind: str, table: Path) -> int:
    """Write a file of one row group for each day; return the bytes of text of the training day."""
    type_ = pa.large_string() if kind == "long" else pa.string()
    first, size = 0, []
    for day, ds in enumerate(DAYS):
        chunks, waiting = list[pa.Array](), list[str | None]()
        for text in texts_of(kind, day):
            waiting.append(text)
            if len(waiting) == ROWS_AT_ONCE:
                chunks.append(pa.array(waiting, type_))
                waiting = []
        body = pa.chunked_array([*chunks, pa.array(waiting, type_)])
        rows, rng = len(body), np.random.default_rng(day)
        columns = {
            "id": np.arange(first, first + rows),
            "label": rng.integers(0, 2, rows).astype(np.int32),
            "ts": pa.array(pd.Timestamp(ds, tz="UTC").value // 1000 + np.arange(rows), pa.timestamp("us", "UTC")),
            "body": body,
            "k": rng.integers(0, 50, rows).astype(np.int32),
            "x": pa.array(rng.random(rows), mask=rng.random(rows) < 0.1),
        }
        first += rows
        file_of(table, day).parent.mkdir(parents=True)
        pq.write_table(pa.table(columns), file_of(table, day), row_group_size=rows)
        assert pq.read_metadata(file_of(table, day)).num_row_groups == 1
        size.append(sum(chunk.nbytes for chunk in body.chunks))
    return size[0]


def pipeline(kind: str, table: Path) -> dict[str, Any]:
    """Return the pipeline as its YAML says it."""

    def named(name: str, *ops: Any) -> dict[str, Any]:
        return {"columns": ["body"], "ops": [{"rename": {"to": {"body": name}}}, *ops]}

    chains = [
        {"columns": ["body"], "ops": ["categorify"]},
        {"columns": ["body"], "ops": ["value_count"]},
        named("hashed", {"hash_bucket": {"buckets": BUCKETS}}),
        {"columns": ["body", "k"], "ops": [{"hashed_cross": {"buckets": BUCKETS, "to": "crossed"}}]},
        named("grams", {"text_ngrams": {"n": 3, "buckets": BUCKETS, "most": 4}}, {"pad": {"length": 4}}),
    ]
    if kind == "repeated":
        groups = {"by": ["body", "k"], "stats": ["count", "mean"]}
        chains += [
            {"columns": ["body", "k", "x"], "ops": [{"join_groupby": groups}]},
            {"columns": ["body"], "ops": ["target_encoding"]},
            named("often", "value_count", "normalize"),
        ]
    types = {"id": "bigint", "label": "int", "ts": "timestamp", "body": "string", "k": "int", "x": "double"}
    return {
        "pipeline": "texts",
        "source": {"format": "parquet", "path": str(table), "day": {"partition": "ds"}, "catch_up_days": 1},
        "table": {"columns": [{"name": n, "type": t} for n, t in types.items()], "event_time": "ts"},
        "spark": {"driver_memory": HEAP[kind]},
        "features": {
            "label": "label",
            "split": {"by": "time", "valid_days": 1},
            "window_days": 1,
            "workflow": chains,
            "carried": ["id", "body"],
        },
    }


def expected(kind: str, table: Path) -> pd.DataFrame:
    """Compute with pandas, from the source's files, the rows that the dataset must have, by id."""
    parts, hashes = [], dict[str, int]()
    for day in range(len(DAYS)):
        for batch in pq.ParquetFile(file_of(table, day)).iter_batches(ROWS_AT_ONCE):
            part = batch.select(["id", "label", "k", "x"]).to_pandas()
            texts = [None if t is None else t.encode() for t in batch.column("body").to_pylist()]
            part["digest"] = [None if t is None else hashlib.sha256(t).hexdigest() for t in texts]
            part["begin"] = [None if t is None else t[:16] for t in texts]
            part["split"] = ("train", "valid")[day]
            parts.append(part)
            for text, digest in list(zip(texts, part["digest"], strict=True))[:: ROWS_AT_ONCE // 2]:
                if text is not None and digest not in hashes and sum(h > 0 for h in hashes.values()) < HASHED:
                    hashes[digest] = xxh64(text) % BUCKETS + 1
    rows = pd.concat(parts, ignore_index=True)
    train = rows[(rows["split"] == "train") & rows["digest"].notna()]
    counted = train.groupby("digest").agg(n=("id", "size"), begin=("begin", "first"))
    assert counted["begin"].is_unique, "the order of texts is that of their beginnings"
    counted = counted.sort_values(["n", "begin"], ascending=[False, True])
    codes = dict(zip(counted.index, range(2, len(counted) + 2), strict=True))
    is_present = rows["digest"].notna()
    rows["body"] = [0 if d is None else codes.get(d, 1) for d in rows["digest"]]
    rows["body_count"] = rows["digest"].map(counted["n"]).fillna(0).astype(np.float32)
    #: -1: not known here.
    rows["hashed"] = np.where(is_present, rows["digest"].map(hashes).fillna(-1), 0).astype(np.int64)
    if kind == "repeated":
        by = train.groupby(["digest", "k"]).agg(n=("id", "size"), mean=("x", "mean")).reset_index()
        joined = rows[["digest", "k"]].merge(by, "left", ["digest", "k"])
        rows["body_k_count"] = joined["n"].where(is_present, 0).fillna(0).astype(np.float32)
        rows["body_k_x_mean"] = joined["mean"].where(is_present).fillna(0).astype(np.float32)
        n = rows["body_count"].astype(float)
        of_train = n[(rows["split"] == "train") & is_present]
        rows["often_count"] = ((n - of_train.mean()) / of_train.std()).where(is_present, 0.0)
    return rows.set_index("id")


def read(file: Path) -> pd.DataFrame:
    """Read a file of the dataset, with digests in place of carried texts."""
    parts = []
    for batch in pq.ParquetFile(file).iter_batches(ROWS_AT_ONCE):
        index = batch.schema.get_field_index("body__carried")
        texts = batch.column(index).to_pylist()
        rest = batch.select([n for n in batch.schema.names if n != "body__carried"]).to_pandas()
        rest["body__carried"] = [None if t is None else hashlib.sha256(t.encode()).hexdigest() for t in texts]
        parts.append(rest)
    return pd.concat(parts, ignore_index=True)


def check(kind: str, dataset: dict[str, pd.DataFrame], reference: pd.DataFrame) -> None:
    """Compare a dataset's rows with those that are wanted."""
    for split in ("train", "valid"):
        rows = pd.concat([frame for name, frame in dataset.items() if name.startswith(split)]).set_index("id")
        expected_rows = reference[reference["split"] == split].loc[rows.index]
        assert len(rows) == (reference["split"] == split).sum() == rows.index.nunique(), split
        assert (rows["body__carried"].fillna("-") == expected_rows["digest"].fillna("-")).all(), split
        for name in ("label", "body", "body_count"):
            assert (rows[name].to_numpy() == expected_rows[name].to_numpy()).all(), (split, name)
        known = expected_rows["hashed"] >= 0
        assert (rows["hashed"][known] == expected_rows["hashed"][known]).all(), (split, "hashed")
        if kind == "repeated":
            assert known.sum() > len(rows) // 2
            assert (rows["body_k_count"] == expected_rows["body_k_count"]).all(), split
            for name in ("body_k_x_mean", "often_count"):
                np.testing.assert_allclose(
                    rows[name], expected_rows[name], rtol=2e-6, atol=2e-6, err_msg=f"{split} {name}"
                )


def same(dataset: dict[str, pd.DataFrame], reference: dict[str, pd.DataFrame]) -> None:
    """Compare datasets: the same files, rows in the same order, the bits of every value."""
    assert dataset.keys() == reference.keys()
    for name, frame in dataset.items():
        pd.testing.assert_frame_equal(frame, reference[name], check_exact=True, obj=name)


def built(way: str, kind: str, folder: Path) -> tuple[dict[str, pd.DataFrame], str]:
    """Build a day's dataset; return it, and what it took."""
    home, spec = folder / "home", folder / "texts.yaml"
    command = [sys.executable, "-m", "headrace.cli", "run", str(spec), "--home", str(home), "--ds", DAYS[-1]]
    options = [part for setting in WAYS[way] for part in ("--set", setting)]
    with subprocess.Popen([*command, "--to", "features", *options]) as process, peak_of_tree(process.pid) as peak:
        if code := process.wait():
            raise RuntimeError(f"{kind} by {way}: exit code {code}")
    manifest = Manifest.load(Workspace(home).manifest("texts", DAYS[-1], "features"))
    assert manifest is not None
    dataset = home / manifest.output("dataset").name
    frames = {str(p.relative_to(dataset)): read(p) for s in ("train", "valid") for p in sorted((dataset / s).iterdir())}
    groups = max(pq.read_metadata(dataset / name).num_row_groups for name in frames)
    assert groups == 1, f"{groups} row groups in a file"
    held = f"{peak.mib:,.0f} MiB held by all processes, {peak.python_mib:,.0f} of them no JVM"
    return frames, f"{way}: features {manifest.seconds:.1f} s; {held}"


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", choices=[*KINDS, []])
    parser.add_argument("--ways", default=",".join(WAYS), help="the first is what the others are compared with")
    args = parser.parse_args()
    for kind in args.kinds or KINDS:
        with tempfile.TemporaryDirectory(prefix="headrace-text-") as name:
            folder, table = Path(name), Path(name) / "table"
            size = write_table(kind, table)
            assert size > 1 << 31
            (folder / "texts.yaml").write_text(yaml.safe_dump(pipeline(kind, table)), encoding="utf-8")
            tick = time.perf_counter()
            reference = expected(kind, table)
            print(
                f"{kind}: {size / 2**30:.2f} GiB of text in a row group; {time.perf_counter() - tick:.0f} s", flush=True
            )
            first: dict[str, pd.DataFrame] = {}
            for way in args.ways.split(","):
                dataset, took = built(way, kind, folder)
                check(kind, dataset, reference)
                if first:
                    same(dataset, first)
                first = first or dataset
                rows = sum(map(len, dataset.values()))
                print(f"{kind}, {took}; {rows:,} rows in {len(dataset)} files as computed here and alike", flush=True)
                shutil.rmtree(folder / "home")


if __name__ == "__main__":
    main()
