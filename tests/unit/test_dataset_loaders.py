"""The reader: the order of its rows, for any number of ranks and from any step."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headrace.comm import World
from headrace.compute.jagged import concatenated
from headrace.config import Negatives, Train
from headrace.config.schema import DatasetSchema
from headrace.config.workspace import Workspace
from headrace.dataset.batches import Batch
from headrace.dataset.layout import LISTING, SplitLayout, open_split, split_of
from headrace.dataset.loaders import EvalLoader, TrainLoader
from headrace.dataset.petastorm_compat import LocalFiles, make_batch_reader
from headrace.dataset.petastorm_reader import RowGroupReader
from headrace.dataset.row_groups import ReadAhead, StoredRowGroup
from headrace.errors import UserError
from headrace.stage.manifest import Manifest
from headrace.storage import local
from tests.train_support import padded_codes, read_padded

Split = tuple[SplitLayout, DatasetSchema]
TRAIN = Train(batch_size=64, streams=4, seed=3)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    return Workspace(tmp_path_factory.mktemp("dataset"))


@pytest.fixture(scope="module")
def manifest(home: Workspace, make_dataset: Callable[..., Manifest]) -> Manifest:
    # 1003 rows in 10 row groups: neither divides evenly into 4 streams, nor into batches of 64.
    return make_dataset(home, train=1003, valid=203, groups=10)


@pytest.fixture(scope="module")
def split(manifest: Manifest, home: Workspace) -> Split:
    return split_of(manifest, home, "train", ["row"])


def rows_of(batches: Sequence[Batch]) -> npt.NDArray[np.generic]:
    return np.concatenate([b.carried["row"] for b in batches])


def steps(split: Split, n: int, *, world: int = 1, start: int = 0, train: Train = TRAIN) -> list[list[Batch]]:
    """Return the batches of `n` steps of each rank: [rank][step]."""
    by_rank = []
    for rank in range(world):
        with TrainLoader(*split, train, World(rank, world), start_step=start, carried=["row"]) as source:
            by_rank.append(list(itertools.islice(source, n)))
    return by_rank


def assert_equal(a: Batch, b: Batch) -> None:
    np.testing.assert_array_equal(a.continuous, b.continuous)
    np.testing.assert_array_equal(a.codes, b.codes)
    assert a.lists.keys() == b.lists.keys()
    for name in a.lists:
        np.testing.assert_array_equal(a.lists[name].lengths, b.lists[name].lengths)
        np.testing.assert_array_equal(a.lists[name].flat(), b.lists[name].flat())
    np.testing.assert_array_equal(a.labels, b.labels)
    assert a.carried.keys() == b.carried.keys()
    for name in a.carried:
        np.testing.assert_array_equal(a.carried[name], b.carried[name])


def side_by_side(parts: Sequence[Batch]) -> Batch:
    return Batch(
        np.concatenate([p.continuous for p in parts]),
        np.concatenate([p.codes for p in parts]),
        np.concatenate([p.labels for p in parts]),
        {name: np.concatenate([p.carried[name] for p in parts]) for name in parts[0].carried},
        {name: concatenated([p.lists[name] for p in parts], np.int32) for name in parts[0].lists},
    )


@pytest.mark.parametrize("world", [2, 4])
def test_global_batches_do_not_depend_on_the_number_of_ranks(split: Split, world: int) -> None:
    (alone,) = steps(split, 40)
    together = steps(split, 40, world=world)
    for step, expected in enumerate(alone):
        assert expected.rows == 64
        assert_equal(side_by_side([ranks[step] for ranks in together]), expected)


def test_batches_hold_what_the_files_hold(split: Split) -> None:
    layout, schema = split
    stored = read_padded(layout.files, schema).set_index("row")
    (batches,) = steps(split, 20)
    for b in batches:
        expected = stored.loc[b.carried["row"]]
        np.testing.assert_array_equal(b.continuous, expected[["age", "price"]].to_numpy())
        names = ["user", "item", "tags__0", "tags__1", "tags__2"]
        np.testing.assert_array_equal(padded_codes(b, schema), expected[names].to_numpy())
        assert (b.lists["tags"].values.dtype, b.lists["tags"].offsets.dtype) == (np.int32, np.int64)
        np.testing.assert_array_equal(b.labels, expected["click"].to_numpy())
        assert (b.continuous.dtype, b.codes.dtype, b.labels.dtype) == (np.float32, np.int64, np.float32)


def test_streams_wrap_and_each_epoch_has_its_own_order(split: Split) -> None:
    layout, _ = split
    (batches,) = steps(split, 60)
    for stream in range(4):
        rows = np.concatenate([b.carried["row"][16 * stream : 16 * stream + 16] for b in batches])
        n = sum(g.rows for g in layout.stream(stream, 4))
        first, second, third = rows[:n], rows[n : 2 * n], rows[2 * n : 3 * n]
        assert len(set(first)) == n
        assert set(first) == set(second) == set(third)
        assert not np.array_equal(first, second)
        assert not np.array_equal(second, third)
        assert np.mean(np.diff(first) == 1) < 0.1  # rows inside a row group are in a new order too


def test_streams_are_petastorms_shards(split: Split) -> None:
    layout, _ = split
    (batches,) = steps(split, 20)
    for stream in range(4):
        with make_batch_reader(
            layout.files[0].parent.uri,
            filesystem=LocalFiles(),
            schema_fields=["row"],
            reader_pool_type="dummy",
            shuffle_row_groups=False,
            cur_shard=stream,
            shard_count=4,
            num_epochs=1,
        ) as shard:
            expected = np.concatenate([g.row for g in shard])
        rows = np.concatenate([b.carried["row"][16 * stream : 16 * stream + 16] for b in batches])
        assert set(rows[: len(expected)]) == set(expected)


@pytest.mark.parametrize(
    "negatives",
    [None, Negatives(column="item", per_positive=3), Negatives(column="item", per_positive=2, method="in_batch")],
)
@pytest.mark.parametrize("start", [0, 1, 7, 16, 17, 100])
def test_starting_at_a_step_equals_coming_to_it(split: Split, start: int, negatives: Negatives | None) -> None:
    train = TRAIN.model_copy(update={"negatives": negatives})
    (uninterrupted,) = steps(split, start + 5, train=train)
    for rank, batches in enumerate(steps(split, 5, world=2, start=start, train=train)):
        for expected, b in zip(uninterrupted[start:], batches, strict=True):
            assert_equal(side_by_side([_half(expected, rank)]), b)


def _half(b: Batch, rank: int) -> Batch:
    half = slice(rank * b.rows // 2, (rank + 1) * b.rows // 2)
    lists = {name: x.rows(half.start, half.stop) for name, x in b.lists.items()}
    return Batch(b.continuous[half], b.codes[half], b.labels[half], {k: v[half] for k, v in b.carried.items()}, lists)


def test_skipping_decodes_no_earlier_row_group(split: Split, monkeypatch: pytest.MonkeyPatch) -> None:
    import headrace.dataset.stream as module

    decoded: list[int] = []
    original = module.write_features

    def counted(stored: StoredRowGroup, *args: Any, **more: Any) -> Any:
        decoded.append(stored.num_rows)
        return original(stored, *args, **more)

    monkeypatch.setattr(module, "write_features", counted)
    with TrainLoader(*split, TRAIN, start_step=1000, depth=1) as source:
        next(source)
        source.close()
    assert len(decoded) <= 4 * 3  # of some 640: the one under way, the next, and the one that is being read


def test_seed_changes_the_order_and_nothing_else(split: Split) -> None:
    (a,), (b,), (again,) = (steps(split, 15, train=TRAIN.model_copy(update={"seed": s})) for s in (3, -4, 3))
    assert not np.array_equal(rows_of(a), rows_of(b))
    np.testing.assert_array_equal(rows_of(a), rows_of(again))


def test_steps_per_epoch(manifest: Manifest, home: Workspace, split: Split) -> None:
    with TrainLoader.from_manifest(manifest, home, TRAIN) as source:
        assert (source.rows, source.steps_per_epoch) == (1003, 1003 // 64)
        assert next(source).carried == {}
    with TrainLoader(*split, TRAIN.model_copy(update={"batch_size": 2048})) as source:
        assert source.steps_per_epoch == 1
        assert next(source).rows == 2048  # a batch above an epoch wraps


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("streams", [4, 16])
def test_evaluation_gives_each_row_once_in_equal_steps(
    manifest: Manifest, home: Workspace, world: int, streams: int
) -> None:
    layout, schema = split_of(manifest, home, "valid", ["row"])
    received: list[Batch] = []
    counts = set()
    for rank in range(world):
        with EvalLoader(layout, schema, World(rank, world), batch_size=32, streams=streams, carried=["row"]) as source:
            batches = list(source)
            counts.add(len(batches))
            assert len(batches) == source.steps
            received += [b for b in batches if b.rows]
    assert len(counts) == 1
    expected = pa.concat_tables([pq.read_table(f) for f in layout.files]).column("row").to_numpy()
    assert layout.rows == len(expected) == 203
    np.testing.assert_array_equal(np.sort(rows_of(received)), np.sort(expected))


def test_negatives_are_other_known_values_and_the_same_for_any_world(split: Split) -> None:
    train = TRAIN.model_copy(update={"negatives": Negatives(column="item", per_positive=3)})
    (alone,) = steps(split, 60, train=train)
    pairs = steps(split, 60, train=train, world=2)
    for step, expected in enumerate(alone):
        assert expected.rows == 64
        assert_equal(side_by_side([ranks[step] for ranks in pairs]), expected)
    with TrainLoader(*split, train) as source:
        stored = pa.concat_tables([pq.read_table(f) for f in split[0].files]).to_pandas().set_index("row")
        assert source.rows == len(stored) + 3 * int(stored["click"].sum())
    # Stream 0 of the first epoch, row by row: an original, then its three copies where it is a positive.
    layout = split[0]
    row_ids = np.concatenate([b.carried["row"][:16] for b in alone])
    codes = np.concatenate([padded_codes(b, split[1])[:16] for b in alone])
    labels = np.concatenate([b.labels[:16] for b in alone])
    expected_rows = sum(g.rows for g in layout.stream(0, 4))
    position, originals, drawn = 0, 0, []
    while originals < expected_rows:
        original = stored.loc[row_ids[position]]
        assert labels[position] == original["click"]
        assert codes[position, 1] == original["item"]
        originals += 1
        copies = 3 if labels[position] else 0
        for j in range(position + 1, position + 1 + copies):
            assert row_ids[j] == row_ids[position]
            assert labels[j] == 0
            assert 2 <= codes[j, 1] < 40
            assert codes[j, 1] != original["item"]
            np.testing.assert_array_equal(np.delete(codes[j], 1), np.delete(codes[position], 1))
            drawn.append(codes[j, 1])
        position += 1 + copies
    assert set(drawn) == set(range(2, 40))


def test_too_few_row_groups_names_the_setting(tmp_path: Path, make_dataset: Callable[..., Manifest]) -> None:
    ws = Workspace(tmp_path)
    manifest = make_dataset(ws, train=100, groups=2)
    with pytest.raises(
        UserError, match=r"2 row groups .100 rows., fewer than train.streams .4.: set features.min_row_g"
    ):
        TrainLoader.from_manifest(manifest, ws, TRAIN)


def test_damaged_files_are_named(tmp_path: Path, make_dataset: Callable[..., Manifest]) -> None:
    ws = Workspace(tmp_path)
    manifest = make_dataset(ws, train=100)
    folder = ws.home / manifest.output("dataset").name
    assert manifest.dataset_schema is not None
    with pytest.raises(UserError, match="has no split 'rank'"):
        open_split(local(folder), "rank", manifest.dataset_schema)
    with pytest.raises(UserError, match=r"carries no column 'colour' .it has: row, query."):
        open_split(local(folder), "train", manifest.dataset_schema, ["colour"])
    part = folder / "train" / "part-0001.parquet"
    content = part.read_bytes()
    part.write_bytes(content[: len(content) // 2])
    with pytest.raises(UserError, match=r"part-0001.parquet is not a whole Parquet file"):
        open_split(local(folder), "train", manifest.dataset_schema)
    pq.write_table(pa.table({"age": [1.0]}), part)
    with pytest.raises(UserError, match=r"part-0001.parquet lacks the columns click, item, price"):
        open_split(local(folder), "train", manifest.dataset_schema)


def test_a_folder_named_like_a_pattern(tmp_path: Path, make_dataset: Callable[..., Manifest]) -> None:
    ws = Workspace(tmp_path / "[a-b]*")
    layout, _ = split_of(make_dataset(ws, train=60, groups=2), ws, "train")
    assert layout.rows == 60


def test_shards_are_planned_from_the_listing(
    tmp_path: Path, make_dataset: Callable[..., Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No Parquet file is opened for it."""
    ws = Workspace(tmp_path)
    manifest = make_dataset(ws, train=1003, groups=2)
    folder = ws.home / manifest.output("dataset").name
    by_footers = split_of(manifest, ws, "train", ["row"])
    files = [p for split in ("train", "valid") for p in sorted((folder / split).iterdir())]
    listed = [
        {
            "name": str(p.relative_to(folder)),
            "size": p.stat().st_size,
            "rows": pq.read_metadata(p).num_rows,
            "row_groups": 1,
        }
        for p in files
    ]
    (folder / LISTING).write_text(json.dumps([*listed, {"name": "workflow/workflow.json", "size": 3}]))
    with monkeypatch.context() as patch:
        patch.setattr(pq, "read_metadata", None)
        planned = split_of(manifest, ws, "train", ["row"])
    assert planned == by_footers
    files[0].with_name("rows.parquet").write_bytes(b"")
    with pytest.raises(UserError, match=r"rows.parquet is no file of the dataset"):
        split_of(manifest, ws, "train")
    files[0].with_name("rows.parquet").unlink()
    files[0].write_bytes(files[0].read_bytes()[:-9])
    with pytest.raises(UserError, match=r"part-0000.parquet is not the whole Parquet file"):
        split_of(manifest, ws, "train")
    files[0].unlink()
    with pytest.raises(UserError, match=r"part-0000.parquet is gone"):
        split_of(manifest, ws, "train")


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        ("item", pa.array([5, 99, 3, 4], pa.int32()), r"'item' has codes 3..99, outside its vocabulary .0, 40."),
        ("price", pa.array([1.0, None, 2.0, 3.0], pa.float32()), r"'price' has 1 nulls"),
    ],
)
def test_bad_values_are_named(
    tmp_path: Path, make_dataset: Callable[..., Manifest], column: str, values: pa.Array, message: str
) -> None:
    ws = Workspace(tmp_path)
    manifest = make_dataset(ws, train=8, groups=2)
    part = ws.home / manifest.output("dataset").name / "train" / "part-0000.parquet"
    table = pq.read_table(part)
    pq.write_table(table.set_column(table.schema.get_field_index(column), column, values), part)
    with pytest.raises(UserError, match=message):
        TrainLoader.from_manifest(manifest, ws, Train(batch_size=4, streams=2, ranks=1)).__next__()


def test_row_groups_come_in_the_order_asked_for(split: Split) -> None:
    layout, _ = split
    pieces = [7, 0, 3, 3, 9]
    groups = {g.piece: g for g in layout.row_groups}
    with ReadAhead(1, 1) as ahead:
        reader = RowGroupReader(["row"], (arriving for _, arriving in ahead.follow(iter(pieces), groups.__getitem__)))
        row_groups = [stored.column("row").to_numpy() for stored in reader]
        reader.close()
    for piece, rows in zip(pieces, row_groups, strict=True):
        with pq.ParquetFile(groups[piece].path) as file:
            expected = file.read_row_group(groups[piece].index, ["row"]).column("row").to_numpy()
        np.testing.assert_array_equal(rows, expected)


def test_a_failing_stream_is_heard_where_its_rows_are_missing(split: Split, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches that are whole come before it; then everybody who asks hears of it."""
    import headrace.dataset.stream as module

    original, calls = module.write_features, itertools.count()

    def failing(*args: Any, **more: Any) -> Any:
        if next(calls) == 7:
            raise UserError("no more")
        return original(*args, **more)

    monkeypatch.setattr(module, "write_features", failing)
    with TrainLoader(*split, TRAIN) as source:
        received: list[Batch] = []
        with pytest.raises(UserError, match="no more"):
            received.extend(source)
        with pytest.raises(UserError, match="no more"):
            next(source)


def test_streams_stay_near_what_is_taken(split: Split, monkeypatch: pytest.MonkeyPatch) -> None:
    """No stream runs away: rows in memory are bounded, whatever the consumer's speed."""
    import headrace.dataset.stream as module

    written: list[int] = []
    original = module.Stream._write

    def noted(self: module.Stream, *args: Any) -> None:
        assert self.step < taken + 7  # a row group of 101 rows is 6.3 steps of 16
        original(self, *args)
        written.append(self.step)

    taken = 0
    monkeypatch.setattr(module.Stream, "_write", noted)
    with TrainLoader(*split, TRAIN) as source:
        for _ in range(100):
            taken += 1  # before it is given: streams may be ahead of what was taken, not of what is asked for
            next(source)
    assert written
