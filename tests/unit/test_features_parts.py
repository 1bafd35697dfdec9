"""Parts of a dataset through a common folder and through a shuffle: the same files and counts, whatever the columns."""

from __future__ import annotations

import json
import random
import shutil
import tempfile
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from headrace.config import Chain
from headrace.config.schema import TableColumn
from headrace.features.arrow.decode import FILE, LINE, HostFolder, LakeFile
from headrace.features.arrow.fit import LakeFit
from headrace.features.arrow.scan import Splitter, lake_rows
from headrace.features.arrow.write import PartWriter, written_dataset
from headrace.features.arrow.write_lake import SendRows, TransformFiles, WriteReceived, write_lake_rows
from headrace.features.layout.files import ColumnRule, plan_files
from headrace.features.types import ValueType, declared
from headrace.features.workflow.workflow import Workflow
from headrace.storage import local
from headrace.storage.host_scratch import HostScratch
from tests.unit.test_features_encoded import Codes, digests
from tests.unit.test_features_exchange import in_tasks, mixed

SPLITS = ("train", "valid")
CODES, NUMBERS = [{"categorify": {"min_count": 2}}], ["fill_missing"]
PAIR: dict[str, Any] = {"pad": {"length": 2}}
FIRST = datetime(2026, 1, 1, tzinfo=UTC)
#: By a column's type: a random value, chains that take it.
KINDS: dict[str, tuple[Callable[[random.Random], Any], list[list[Any]]]] = {
    "string": (
        lambda r: r.choice(["", "ü", "a b", "x" * 40, str(r.random())]),
        [CODES, [{"hash_bucket": {"buckets": 9}}]],
    ),
    "int": (lambda r: r.choice([0, -1, 2**31 - 1, r.randrange(9)]), [CODES, NUMBERS, ["raw_id"]]),
    "bigint": (lambda r: r.choice([0, 2**53 + 1, r.randrange(-9, 9)]), [CODES, ["raw_id"]]),
    "float": (lambda r: r.choice([0.0, -0.0, 1.5, float("nan")]), [NUMBERS]),
    "double": (lambda r: r.choice([0.0, -0.0, r.random(), float("nan"), 1e300]), [NUMBERS, [*NUMBERS, "normalize"]]),
    "boolean": (lambda r: r.random() < 0.5, [CODES, NUMBERS]),
    "timestamp": (lambda r: FIRST + timedelta(microseconds=r.randrange(10**12)), [[{"cyclic": {"of": "hour"}}]]),
    "date": (lambda r: date(1969, 12, 1) + timedelta(days=r.randrange(99)), [[{"cyclic": {"of": "weekday"}}]]),
    "array<string>": (lambda r: [r.choice(["a", "ü", None]) for _ in range(r.randrange(4))], [[*CODES, PAIR]]),
    "array<bigint>": (
        lambda r: [r.choice([0, 7, None]) for _ in range(r.randrange(4))],
        [[*CODES, PAIR], ["raw_id", PAIR]],
    ),
}


@given(
    types=st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=6),
    rows=st.integers(1, 300),
    nulls=st.sampled_from([0.0, 0.2, 1.0]),
    files=st.integers(1, 4),
    group=st.integers(7, 300),
    part_rows=st.integers(2, 90),
    chance=st.randoms(use_true_random=False),
)
@settings(max_examples=12, phases=[Phase.explicit, Phase.reuse, Phase.generate])
def test_both_transports_write_the_same_files(
    types: list[str], rows: int, nulls: float, files: int, group: int, part_rows: int, chance: random.Random
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        workflow, table = drawn(types, rows, nulls, chance)
        landed = land(table, folder / "lake", files, group)
        splitter = Splitter(ColumnRule("part"), SPLITS, "y")
        extra = {"part": ValueType("string")}
        with lake_rows(workflow, landed, splitter, local(folder / "home"), extra) as shared:
            fit = LakeFit(workflow, shared)
            while (task := fit.next_task()) is not None:
                fit.merge(shared.scan(None, task))
            if not shared.counts.rows:
                shared.scan(None)
            fitted = fit.finish(Codes())
            fitted.save(local(folder / "out" / "workflow"))
            plans = plan_files({s: n for s, n in shared.counts.rows.items() if n}, part_rows, 2)
            out = local(folder / "out")
            expected = write_lake_rows(fitted, shared, plans, out, out / "workflow", None)
        ids = [pq.read_table(file).column("id").to_pylist() for file in (folder / "out").glob("*/*.parquet")]
        assert sorted(i for file_ids in ids for i in file_ids) == list(range(rows))

        shuffled = local(folder / "shuffled")
        shutil.copytree(folder / "out" / "workflow", folder / "shuffled" / "workflow")
        for plan in plans:
            (shuffled / plan.split).make_dir()
        scratch = HostScratch("encoded", local(folder / "host"))
        with lake_rows(workflow, landed, splitter, local(folder / "none"), extra, host_scratch=scratch) as hosted:
            assert isinstance(hosted.folder, HostFolder)
            tasks = in_tasks(hosted.files, chance)
            transform = TransformFiles(
                tasks, hosted.folder, hosted.layout, splitter, shuffled / "workflow", hosted.folder, tuple(plans)
            )
            receive = WriteReceived(PartWriter(tuple(plans), shuffled, shuffled / "workflow"))
            parts = [
                json.loads(text)
                for batch in mixed(len(tasks), SendRows(transform), receive, chance)
                for text in batch.column(0).to_pylist()
            ]
        assert written_dataset(plans, parts) == expected
        assert digests(folder / "shuffled") == digests(folder / "out")


def drawn(types: list[str], rows: int, nulls: float, chance: random.Random) -> tuple[Workflow, pa.Table]:
    """Return a workflow over columns of these types, some of them carried, and rows for it."""
    columns = [TableColumn(name=f"c.{i}", type=t) for i, t in enumerate(types)]
    chains = [Chain.model_validate({"columns": [c.name], "ops": chance.choice(KINDS[c.type][1])}) for c in columns]
    carried = [c.name for c in columns if c.type != "date" and not c.type.startswith("array") and chance.random() < 0.5]
    fixed = [TableColumn(name=n, type=t) for n, t in {"id": "bigint", "y": "int", "part": "string"}.items()]
    workflow = Workflow(chains, [*columns, *fixed], "y", ("id", *carried))
    values = {
        c.name: pa.array(
            [None if chance.random() < nulls else KINDS[c.type][0](chance) for _ in range(rows)], declared(c).arrow
        )
        for c in columns
    }
    # Some rows share a place, as rows that an operator makes of one.
    return workflow, pa.table(
        {
            **values,
            "id": pa.array(range(rows), pa.int64()),
            "y": pa.array([chance.randrange(2) for _ in range(rows)], pa.int32()),
            "part": [chance.choice(SPLITS) if i else "train" for i in range(rows)],
            FILE: [chance.choice(["a.csv", "ü.csv"]) for _ in range(rows)],
            LINE: pa.array(np.arange(rows) // chance.choice([1, 2]), pa.int64()),
        }
    )


def land(table: pa.Table, folder: Path, files: int, group: int) -> list[LakeFile]:
    """Write the rows as Parquet files."""
    folder.mkdir()
    edges = [table.num_rows * i // files for i in range(files + 1)]
    landed = []
    for i, (start, end) in enumerate(pairwise(edges)):
        path = folder / f"{i}.parquet"
        pq.write_table(table.slice(start, end - start), path, row_group_size=group)
        landed.append(LakeFile(local(path), path.stat().st_size))
    return landed
