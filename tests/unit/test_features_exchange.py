"""Messages between tasks on hosts that share no folder: the dataset is the same, however they are cut and mixed."""

from __future__ import annotations

import json
import random
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from headrace.config.workspace import Workspace
from headrace.dataset import native
from headrace.features import transport as module
from headrace.features.arrow import kernels, transform
from headrace.features.arrow.collect import MergeStatistics, Name, SendStatistics, StatisticNumbers, by_key
from headrace.features.arrow.decode import HostFolder, LakeFile
from headrace.features.arrow.fit import LakeFit
from headrace.features.arrow.kernels import DictionaryColumn
from headrace.features.arrow.scan import FileTasks, ScanTask, Splitter, lake_rows
from headrace.features.arrow.write import PartWriter
from headrace.features.arrow.write_lake import SendRows, TransformFiles, WriteReceived
from headrace.features.layout.files import TimeRule, plan_files
from headrace.features.learn.statistics import canonical, merge
from headrace.features.transport import Sender, cut, packed, unpacked
from headrace.features.types import ValueType
from headrace.features.vocabulary.codes import VocabularyRule
from headrace.lake.spark.exchange import ExchangedBlock
from headrace.storage import local
from headrace.storage.host_scratch import HostScratch
from tests.unit.test_features_encoded import FIRST, WORKFLOW, digests, land, make, run

SPLITS = ("train", "valid")


def mixed(
    tasks: int,
    send: Callable[[int], Iterable[ExchangedBlock]],
    receive: Callable[[Sequence[ExchangedBlock]], Iterable[pa.RecordBatch]],
    chance: random.Random,
) -> Iterator[pa.RecordBatch]:
    """Yield the batches of `headrace.lake.spark.exchange.exchange`.

    Tasks run in any order, one of them twice; partitions come in any order.
    """
    received: dict[int, list[ExchangedBlock]] = {}
    for task in chance.sample(range(tasks), tasks):
        sent = list(send(task))
        if chance.random() < 0.3:
            again = list(send(task))
            # All but that its files were decoded then.
            assert [b for b in sent if b"kept" not in b.payload] == [b for b in again if b"kept" not in b.payload]
            sent = again
        for block in sent:
            received.setdefault(block.partition, []).append(block)
    for blocks in chance.sample(list(received.values()), len(received)):
        chance.shuffle(blocks)
        yield from receive(sorted(blocks, key=lambda b: (b.source, b.number)))


texts = st.text("abü0", max_size=3)
counted = st.lists(st.tuples(texts, st.integers(1, 9), st.integers(0, 5)), max_size=30, unique_by=lambda r: r[0])


@given(
    pieces=st.lists(counted, min_size=1, max_size=6),
    partitions=st.integers(1, 5),
    least=st.integers(1, 12),
    block=st.integers(1, 4_000),
    built=st.booleans(),
    chance=st.randoms(use_true_random=False),
)
@settings(max_examples=60)
def test_counts_merge_by_key(
    pieces: list[list[tuple[str, int, int]]],
    partitions: int,
    least: int,
    block: int,
    built: bool,
    chance: random.Random,
) -> None:
    def send(task: int) -> Iterator[ExchangedBlock]:
        sender = Sender(task, most=2 * block)
        keys, rows, days = zip(*pieces[task], strict=True) if pieces[task] else ((), (), ())
        columns = {
            "key": pa.array(keys, pa.string()),
            "rows": pa.array(rows, pa.int64()),
            "day": pa.array(days, pa.int64()),
        }
        for partition, rows_of_partition in by_key(pa.table(columns), partitions, 0):
            yield from sender.add(partition, 0, rows_of_partition)
        yield from sender.rest()

    expected: dict[str, tuple[int, int]] = {}
    for key, rows, day in (row for piece in pieces for row in piece):
        previous = expected.get(key, (0, day))
        expected[key] = previous[0] + rows, min(previous[1], day)
    receive = MergeStatistics(StatisticNumbers((), ("v",)), {"v": VocabularyRule(min_count=least)})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BLOCK_BYTES", block)
        if not built:
            patch.setattr(native, "library", lambda: None)
        merged = [row for batch in mixed(len(pieces), send, receive, chance) for row in batch.to_pylist()]
    assert len(merged) == len({r["value"] for r in merged})
    assert {r["value"]: (r["count"], r["day"]) for r in merged} == {k: v for k, v in expected.items() if v[0] >= least}


@given(rows=st.integers(0, 50), most=st.integers(1, 300), name=st.integers(0, 99))
def test_tables_in_blocks_come_back(rows: int, most: int, name: int) -> None:
    table = pa.table(
        {"x": pa.array(range(rows), pa.int64()), "t": pa.array([str(i) for i in range(rows)], pa.string())}
    )
    pieces = list(cut(table, most))
    assert all(p.num_rows == 1 or p.nbytes <= most + 16 for p in pieces if p.num_rows)
    restored = list(unpacked(b"".join(packed(p, name) for p in pieces)))
    assert {n for n, _ in restored} == {name}
    assert pa.concat_tables([t.replace_schema_metadata(None) for _, t in restored]).equals(table)


@given(
    rows=st.integers(1, 300),
    files=st.integers(1, 4),
    group=st.integers(7, 90),
    seed=st.integers(0, 99),
    block=st.integers(200, 20_000),
    chance=st.randoms(use_true_random=False),
)
@settings(max_examples=6, phases=[Phase.explicit, Phase.reuse, Phase.generate])  # an example takes half a second
def test_statistics_and_rows_are_those_of_a_common_folder(
    rows: int, files: int, group: int, seed: int, block: int, chance: random.Random
) -> None:
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BLOCK_BYTES", block)
        same_dataset(Path(name), rows, files, group, seed, chance)


def same_dataset(folder: Path, rows: int, files: int, group: int, seed: int, chance: random.Random) -> None:
    events = make(rows, seed)
    rule = TimeRule("t", FIRST, FIRST + 2, FIRST + 4)
    landed = [LakeFile(f.path, f.size) for f in land(events, folder / "lake", files, group)]
    splitter, extra = Splitter(rule, SPLITS, "y"), {"t": ValueType("timestamp")}
    with lake_rows(WORKFLOW, landed, splitter, local(folder / "home"), extra) as shared:
        fit = LakeFit(WORKFLOW, shared)
        task = fit.next_task()
        assert task is not None
        expected: dict[Name, list[pa.Table]] = {}
        for scan in ScanTask((tuple(enumerate(shared.files)),), shared.folder, shared.layout, splitter, None).files(0):
            for statistic, partial in task.partials(scan.rows()):
                expected.setdefault(statistic, []).append(partial)
        run(shared, folder / "out")
        plans = plan_files(shared.counts.rows, 50, 3)
        counts = shared.counts

    # The same by tasks that see folders of their own: each of another host.
    scratch = HostScratch("encoded", local(folder / "host"))
    with lake_rows(WORKFLOW, landed, splitter, local(folder / "none"), extra, host_scratch=scratch) as hosted:
        assert isinstance(hosted.folder, HostFolder)
        tasks = in_tasks(hosted.files, chance)
        tables = StatisticNumbers.from_task(task)
        least = {n: WORKFLOW.rules[n] for n in tables.vocabularies}
        send = SendStatistics(ScanTask(tasks, hosted.folder, hosted.layout, splitter, None), task, tables, 3)
        statistics, values, facts = dict[Name, list[pa.Table]](), dict[str, int](), list[dict[str, Any]]()
        for batch in mixed(len(tasks), send, MergeStatistics(tables, least), chance):
            for row in batch.to_pylist():
                if row["name"] < 0:
                    facts.append(json.loads(row["statistic"]))
                elif row["statistic"] is not None:
                    for number, table in unpacked(row["statistic"]):
                        statistics.setdefault(tables.statistics[number], []).append(table.replace_schema_metadata(None))
                else:
                    values[f"{row['name']} {row['value']}"] = row["count"]
        hosted.noted(facts)
        assert hosted.counts == counts
        assert {statistic for statistic in expected if not task.counts_values(statistic)} == statistics.keys()
        for statistic, partials in statistics.items():
            assert canonical(merge(partials)).equals(canonical(merge(expected[statistic])))
        expected_values = {
            f"{tables.number(task, statistic)} {r['key']}": r["rows"]
            for statistic, partials in expected.items()
            if task.counts_values(statistic)
            for r in merge(partials).to_pylist()
            if r["rows"] >= least[statistic[2]].min_count
        }
        assert values == expected_values
        out = local(folder / "mixed")
        shutil.copytree(folder / "out" / "workflow", folder / "mixed" / "workflow")
        for split in SPLITS:
            if (folder / "out" / split).is_dir():
                (out / split).make_dir()
        transform = TransformFiles(
            tasks, hosted.folder, hosted.layout, splitter, out / "workflow", hosted.folder, tuple(plans)
        )
        receive = WriteReceived(PartWriter(tuple(plans), out, out / "workflow"))
        list(mixed(len(tasks), SendRows(transform), receive, chance))
        assert digests(folder / "mixed") == digests(folder / "out")
        assert not (folder / "none").exists()


def in_tasks(files: Sequence[LakeFile], chance: random.Random) -> FileTasks:
    """Return files in tasks of uneven sizes."""
    tasks: list[list[tuple[int, LakeFile]]] = [[]]
    for pair in chance.sample(list(enumerate(files)), len(files)):
        if tasks[-1] and chance.random() < 0.5:
            tasks.append([])
        tasks[-1].append(pair)
    return tuple(map(tuple, tasks))


def test_a_host_keeps_what_the_next_run_reads_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_SCRATCH", str(tmp_path / "mine"))
    monkeypatch.setenv("SPARK_LOCAL_DIRS", f"{tmp_path / 'spark'},/other")
    scratch = HostScratch("encoded/shop")
    home = tmp_path / "mine" / "encoded" / "shop"
    first = HostFolder(scratch, "layout", "1", ("a", "b"))
    assert first.on_this_host() == local(home / "layout")
    for name in ("layout/a", "layout/b", "layout/.c.1234.partial", "older/a"):
        (home / name).mkdir(parents=True)
    maps = first.of_run() / "maps"
    maps.make_dir()
    assert first.on_this_host() == local(home / "layout")  # a second task tidies nothing up
    assert (home / "older").exists()
    second = HostFolder(scratch, "layout", "2", ("b", "c"))
    assert second.on_this_host() == local(home / "layout")
    assert sorted(str(p.relative_to(home)) for p in home.rglob("*") if p.is_dir()) == [
        "layout",
        "layout/b",
        "scratch.2",
    ]
    # The pipeline's own folder comes first; where nothing is named, Spark's for this executor.
    assert HostScratch("x", local(tmp_path / "named")).resolve() == local(tmp_path / "named" / "x")
    monkeypatch.delenv("HEADRACE_SCRATCH")
    assert HostScratch("x").resolve() == local(tmp_path / "spark" / "x")


def test_workspaces_with_one_scratch_folder_keep_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One pipeline in two homes: what a run of the one removes is none of the other's."""
    monkeypatch.setenv("HEADRACE_SCRATCH", str(tmp_path / "host"))
    for named in (None, str(tmp_path / "named")):
        homes = [Workspace(tmp_path / name, scratch_folder=named) for name in ("a", "b")]
        first, second = (HostFolder(ws.on_hosts(ws.encoded("shop")), "layout", "1", ("x",)) for ws in homes)
        for folder in (first, second):
            (folder.on_this_host() / "x").make_dir()
        again = HostFolder(homes[1].on_hosts(homes[1].encoded("shop")), "layout", "2", ())
        assert again.on_this_host().entries() == []
        assert [e.name for e in first.on_this_host().entries()] == ["x"]
        assert first.on_this_host().is_below(local(tmp_path / ("named" if named else "host")) / "encoded" / "shop")


@given(
    sources=st.lists(st.lists(st.none() | st.text("aü", max_size=9), max_size=8), min_size=1, max_size=4),
    most=st.integers(0, 40),
    seed=st.integers(0, 9),
)
def test_texts_beyond_one_array(sources: list[list[str | None]], most: int, seed: int) -> None:
    arrays = [pa.array(["-", *texts_of_source], pa.string()).slice(1) for texts_of_source in sources]
    rows = [text for texts_of_source in sources for text in texts_of_source]
    order = random.Random(seed).sample(range(len(rows)), len(rows))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "DECODED_TEXT", most)
        columns = [DictionaryColumn(a) for a in arrays]
        gathered = transform.gathered(columns, np.array(order, np.int32), pa.string())
    assert gathered.type == pa.string()
    assert gathered.to_pylist() == [rows[i] for i in order]
    if isinstance(gathered, pa.ChunkedArray):
        sizes = [[len((text or "").encode()) for text in chunk.to_pylist()] for chunk in gathered.chunks]
        assert all(len(chunk) == 1 or sum(chunk) <= most for chunk in sizes)
        assert len(gathered.chunks) > 1 or sum(map(sum, sizes)) <= most or len(rows) <= 1
