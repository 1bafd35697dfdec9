"""Rows of older days in each step: which ones, how many, on any ranks; which datasets a day draws from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.comm import World
from headrace.comm.base import run_ranks
from headrace.compute.jagged import JaggedArray
from headrace.config import Replay, Spec, build_spec
from headrace.config.workspace import Workspace
from headrace.dataset.batches import Batch
from headrace.dataset.layout import RowGroup, SplitLayout, split_of
from headrace.dataset.loaders import ReplayLoader, ReplayRows, TrainLoader, WithReplay, joined
from headrace.errors import UserError
from headrace.stage import plan_run
from headrace.stage.manifest import Manifest
from headrace.storage import local
from headrace.train.carried_columns import DayDecay
from headrace.train.loop.run import train
from headrace.train.setup.earlier_days import dataset_misfit, find_replay, replay_days
from headrace.train.stage import Train as TrainStage
from tests.train_support import TRAIN, Stopped, assert_same_weights, job_of, stop_at, weights

DAYS = ("2026-01-03", "2026-01-04", "2026-01-05")


def layout_of(*sizes: Sequence[int]) -> list[SplitLayout]:
    """A split of each day with row groups of these rows, each in a file of its own."""
    layouts = []
    for day, of_day in enumerate(sizes):
        groups = tuple(RowGroup(i, local(f"/{day}/{i}.parquet"), 0, n) for i, n in enumerate(of_day))
        layouts.append(SplitLayout("valid", tuple(g.path for g in groups), groups))
    return layouts


@given(
    st.lists(st.lists(st.integers(1, 500), min_size=1, max_size=5), min_size=1, max_size=6),
    st.integers(1, 2_000),
    st.sampled_from(["row", "day"]),
    st.integers(1, 3),
)
def test_a_pass_has_as_many_rows_as_are_wanted_evenly(sizes: list[list[int]], rows: int, by: Any, streams: int) -> None:
    plan = ReplayRows.plan(layout_of(*sizes), rows, 8, by, min(streams, sum(map(len, sizes))), 1)
    groups = [(n, sum(of_day)) for of_day in sizes for n in of_day]
    assert [g.rows for g in plan.layout.row_groups] == [n for n, _ in groups]
    assert [g.piece for g in plan.layout.row_groups] == list(range(len(groups)))
    assert all(1 <= taken <= n for taken, (n, _) in zip(plan.taken, groups, strict=True))
    # By plain proportion, stream by stream, to the nearest row.
    streams = min(streams, len(groups))
    for i in range(streams):
        stream_groups = groups[i::streams]
        share = np.array([n / of_day if by == "day" else n for n, of_day in stream_groups])
        exact = share / share.sum() * rows / streams
        for taken, expected, (n, _) in zip(plan.taken[i::streams], exact, stream_groups, strict=True):
            assert abs(taken - min(max(expected, 1), n)) <= 0.5


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    return Workspace(tmp_path_factory.mktemp("replay"))


@pytest.fixture(scope="module")
def older(home: Workspace, make_dataset: Callable[..., Manifest]) -> list[Manifest]:
    sizes = dict(zip(DAYS, (400, 200, 300), strict=True))
    return [make_dataset(home, train=100, valid=n, users=60, ds=ds, seed=n) for ds, n in sizes.items()]


@pytest.fixture(scope="module")
def today(home: Workspace, make_dataset: Callable[..., Manifest]) -> Manifest:
    return make_dataset(home, train=800, valid=200, users=80, ds="2026-01-10", seed=7)


def rows_of(batch: Batch) -> list[tuple[Any, ...]]:
    """Each row as a tuple of all that is read of it."""
    codes, numbers = batch.codes, batch.continuous
    return [(*codes[i].tolist(), *numbers[i].tolist(), float(batch.labels[i])) for i in range(batch.rows)]


def stored(home: Workspace, manifest: Manifest) -> list[list[tuple[Any, ...]]]:
    """The rows of each row group of the split valid, by pandas."""
    assert manifest.dataset_schema is not None
    schema = manifest.dataset_schema
    layout, _ = split_of(manifest, home, "valid")
    stored_rows = []
    with_group = [(g, pd.read_parquet(g.path.local_path())) for g in layout.row_groups]
    scalars = [f.name for f in schema.features if f.kind.value == "categorical" and not f.is_list]
    numbers = [f.name for f in schema.features if f.kind.value == "continuous"]
    for group, frame in with_group:
        offset = sum(g.rows for g, _ in with_group if g.path == group.path and g.index < group.index)
        part = frame.iloc[offset : offset + group.rows]
        columns = [part[c].to_numpy() for c in (*scalars, *numbers, schema.label.name)]
        rows = zip(*columns, strict=True)
        stored_rows.append([(*map(int, row[: len(scalars)]), *map(float, row[len(scalars) :])) for row in rows])
    return stored_rows


def drawn(
    home: Workspace, older: list[Manifest], plan: ReplayRows, steps: int, world: World = World(), start: int = 0
) -> list[list[tuple[Any, ...]]]:
    schema = older[0].dataset_schema
    assert schema is not None
    loader = ReplayLoader(
        plan.layout,
        schema,
        TRAIN,
        world,
        batch_rows=plan.batch_rows,
        taken=plan.taken,
        seed=plan.seed,
        start_step=start,
    )
    try:
        return [rows_of(b) for b in islice(loader, steps)]
    finally:
        loader.close()


@pytest.mark.parametrize("by", ["row", "day"])
def test_what_is_drawn_is_evenly_of_all_days_and_no_row_twice(home: Workspace, older: list[Manifest], by: Any) -> None:
    layouts = [split_of(m, home, "valid")[0] for m in older]
    groups = [rows for m in older for rows in stored(home, m)]
    plan = ReplayRows.plan(layouts, 240, 16, by, TRAIN.streams, seed=5)
    taken = [(n, str(g.path)) for n, g in zip(plan.taken, plan.layout.row_groups, strict=True)]
    of_day = [sum(n for n, path in taken if f"/{ds}/" in path) for ds in DAYS]
    expected = {"row": [240 * n / 900 for n in (400, 200, 300)], "day": [80, 80, 80]}[by]
    assert of_day == pytest.approx(expected, abs=len(groups))
    # Of each stream a pass: of each of its row groups so many rows, each at most once.
    in_pass = [sum(plan.taken[i :: TRAIN.streams]) for i in range(TRAIN.streams)]
    rows_per_stream = plan.batch_rows // TRAIN.streams
    steps = max(in_pass) // rows_per_stream + 1
    batches = drawn(home, older, plan, steps)
    assert all(len(b) == plan.batch_rows for b in batches)
    for i in range(TRAIN.streams):
        stream_rows = [row for b in batches for row in b[i * rows_per_stream : (i + 1) * rows_per_stream]][: in_pass[i]]
        counts = Counter(stream_rows)
        for taken, rows in zip(plan.taken[i :: TRAIN.streams], groups[i :: TRAIN.streams], strict=True):
            group_rows = Counter(rows)
            assert sum((counts & group_rows).values()) >= taken
        everything = Counter(row for rows in groups[i :: TRAIN.streams] for row in rows)
        assert not counts - everything
    # A function of the seed and the step: on any ranks, from any step on.
    assert drawn(home, older, plan, steps) == batches
    halves = [drawn(home, older, plan, steps, World(rank, 2)) for rank in (0, 1)]
    assert [a + b for a, b in zip(*halves, strict=True)] == batches
    assert drawn(home, older, plan, 3, start=4) == batches[4:7]
    reseeded = ReplayRows.plan(layouts, 240, 16, by, TRAIN.streams, seed=6)
    assert drawn(home, older, reseeded, steps) != batches


def test_a_step_has_rows_of_both(home: Workspace, older: list[Manifest], today: Manifest) -> None:
    schema = today.dataset_schema
    assert schema is not None
    layouts = [split_of(m, home, "valid")[0] for m in older]
    plan = ReplayRows.plan(layouts, 120, 40, "row", TRAIN.streams, seed=5)
    settings = TRAIN.model_copy(update={"batch_size": 160})
    layout, _ = split_of(today, home, "train")
    day_loader = TrainLoader(layout, schema, settings)
    with day_loader:
        expected = [rows_of(b) for b in islice(day_loader, 4)]
    replayed = drawn(home, older, plan, 4)
    loader = ReplayLoader(plan.layout, schema, TRAIN, batch_rows=40, taken=plan.taken, seed=plan.seed)
    with WithReplay(TrainLoader(layout, schema, settings), loader) as source:
        assert source.steps_per_epoch == 800 // 160
        actual = [rows_of(b) for b in islice(source, 4)]
    assert actual == [a + b for a, b in zip(expected, replayed, strict=True)]


def test_batches_are_joined_row_by_row() -> None:
    rng = np.random.default_rng(2)

    def batch(rows: int) -> Batch:
        lengths = rng.integers(0, 4, rows)
        offsets = np.append(0, np.cumsum(lengths)).astype(np.int64)
        lists = {"tags": JaggedArray(offsets, rng.integers(0, 9, offsets[-1]).astype(np.int32))}
        numbers = rng.random((3, rows), np.float32).T
        codes = rng.integers(0, 99, (2, rows)).T
        return Batch(numbers, codes, rng.random(rows, np.float32), {"ts": rng.integers(0, 9, rows)}, lists)

    a, b = batch(5), batch(3)
    joined_batch = joined(a, b)
    assert joined_batch.rows == 8
    for name in ("continuous", "codes", "labels"):
        np.testing.assert_array_equal(getattr(joined_batch, name), np.concatenate([getattr(x, name) for x in (a, b)]))
    assert joined_batch.continuous.flags.f_contiguous
    assert joined_batch.codes.flags.f_contiguous
    np.testing.assert_array_equal(joined_batch.carried["ts"], np.append(a.carried["ts"], b.carried["ts"]))
    expected = [x.lists["tags"].rows(i, i + 1).flat().tolist() for x in (a, b) for i in range(x.rows)]
    assert [joined_batch.lists["tags"].rows(i, i + 1).flat().tolist() for i in range(8)] == expected


def test_training_with_replay_goes_on_to_the_bit(home: Workspace, older: list[Manifest], today: Manifest) -> None:
    names = tuple(m.output("dataset").name for m in older)
    settings = TRAIN.model_copy(update={"patience": None, "checkpoint_steps": 3})

    def job(key: str, **more: Any) -> Any:
        return job_of(home, today, key, settings, **more)

    replay = {"replay": Replay(share=0.2), "replayed": names}
    replayed_job, plain_job = job("replayed", **replay), job("plain")
    reports = run_ranks(1, lambda c: train(replayed_job, c))
    run_ranks(1, lambda c: train(plain_job, c))
    assert reports[0].steps == 2 * (800 // 160)
    assert any((weights(replayed_job)[n] != w).any() for n, w in weights(plain_job).items())
    resumed_job = replayed_job.model_copy(update={"ds": "2026-01-11"})
    with pytest.raises(Stopped):
        run_ranks(1, lambda c: train(resumed_job, c, on_progress=stop_at(7)))
    run_ranks(1, lambda c: train(resumed_job, c))
    assert_same_weights(replayed_job, resumed_job)
    # Fewer row groups than streams: none are replayed.
    none = job("none", replay=Replay(share=0.2), replayed=())
    run_ranks(1, lambda c: train(none, c))
    assert_same_weights(none, plain_job)
    assert none.config_fingerprint == plain_job.config_fingerprint != replayed_job.config_fingerprint


def test_replayed_rows_count_as_they_are() -> None:
    """Replayed rows count by their share: the decay of days is for the window's own."""
    spec = spec_of(retrain={"half_life_days": 2, "replay": {"share": 0.1}})
    decay = DayDecay.from_spec(spec, "2026-01-10")
    plain = DayDecay.from_spec(spec_of(retrain={"half_life_days": 2}), "2026-01-10")
    assert decay is not None
    assert plain is not None
    days = np.array(["2026-01-09", "2026-01-06", "2026-01-05", "2025-12-01"], "datetime64[us]").astype(np.int64)
    row_weights = decay.weights(days)
    np.testing.assert_array_equal(row_weights[:2], plain.weights(days)[:2])
    assert row_weights[2:].tolist() == [1.0, 1.0]


_FEATURES = {"label": "click", "workflow": [], "split": {"by": "time"}, "window_days": 4, "carried": ["ts"]}


def spec_of(**sections: Any) -> Spec:
    table = {"columns": [{"name": "click", "type": "int"}, {"name": "ts", "type": "timestamp"}], "event_time": "ts"}
    source = {"format": "clicks", "path": "{ds}"}
    return build_spec({"pipeline": "clicks", "source": source, "table": table, "features": _FEATURES} | sections)


def test_a_day_draws_from_days_before_its_window() -> None:
    spec = spec_of(retrain={"replay": {"share": 0.1, "days": 3}, "forgetting_day": "2026-01-04"})
    # The window of the 10th begins with the 6th.
    assert replay_days(spec, "2026-01-10") == ["2026-01-03", "2026-01-05"]
    split = {"by": "time", "valid_days": 2, "test_days": 1}
    # It trains on the 4th to the 7th: the datasets of the 4th and the 2nd have the 2nd and 3rd, the 31st and 1st.
    wide = spec_of(retrain={"replay": {"share": 0.1, "days": 4}}, features=_FEATURES | {"split": split})
    assert replay_days(wide, "2026-01-10") == ["2026-01-02", "2026-01-04"]
    # Each dataset has the rows of its day and the one before: that of the 4th shares the 3rd with that of the 3rd.
    for measured_on, left in (("03", []), ("04", ["2026-01-02"]), ("05", ["2026-01-02"]), ("01", ["2026-01-04"])):
        retrain = {"replay": {"share": 0.1, "days": 4}, "forgetting_day": f"2026-01-{measured_on}"}
        window_spec = spec_of(retrain=retrain, features=_FEATURES | {"split": {"by": "time", "valid_days": 2}})
        assert replay_days(window_spec, "2026-01-10") == left
    assert replay_days(spec_of(retrain={}), "2026-01-10") == replay_days(spec_of(), "2026-01-10") == []


def test_the_datasets_are_part_of_the_key(
    home: Workspace, older: list[Manifest], today: Manifest, caplog: pytest.LogCaptureFixture
) -> None:
    schema = today.dataset_schema
    assert schema is not None
    spec = spec_of(retrain={"replay": {"share": 0.1}})
    replayed = find_replay(home, spec, "2026-01-10", schema)
    assert [i.name for i in replayed] == [m.output("dataset").name for m in older]
    plan = plan_run(TrainStage(), spec, home, "2026-01-10")
    assert [i for i in plan.inputs if i.kind == "replay"] == list(replayed)
    assert plan.ctx.key != plan_run(TrainStage(), spec_of(retrain={}), home, "2026-01-10").ctx.key
    assert TrainStage().spec_part(spec_of(retrain={}))["train"]["retrain"]["replay"] is None
    # Removed since: no longer drawn from, but by a run that has.
    file = home.manifest("clicks", DAYS[1], "features")
    older[1].with_removed({older[1].output("dataset").name}).save(file)
    with caplog.at_level("INFO", "headrace.train"):
        assert find_replay(home, spec, "2026-01-10", schema) == (replayed[0], replayed[2])
    assert f"no rows of {DAYS[1]} are replayed: " in caplog.text
    assert find_replay(home, spec, "2026-01-10", schema, replayed) == replayed
    older[1].save(file)


def test_a_dataset_without_a_carried_column_of_the_day_is_not_drawn_from(
    home: Workspace, older: list[Manifest], today: Manifest, caplog: pytest.LogCaptureFixture
) -> None:
    schema, old_schema = today.dataset_schema, older[0].dataset_schema
    assert schema is not None
    assert old_schema is not None
    spec = spec_of(retrain={"replay": {"share": 0.1}})
    fewer = old_schema.model_copy(update={"features": tuple(f for f in old_schema.features if f.name != "query")})
    file = home.manifest("clicks", DAYS[0], "features")
    older[0].model_copy(update={"dataset_schema": fewer}).save(file)
    with caplog.at_level("INFO", "headrace.train"):
        replayed = find_replay(home, spec, "2026-01-10", schema)
    older[0].save(file)
    assert [i.name for i in replayed] == [m.output("dataset").name for m in older[1:]]
    assert f"no rows of {DAYS[0]} are replayed: it carries no column 'query'" in caplog.text
    assert dataset_misfit(home, older[0].model_copy(update={"dataset_schema": fewer}), schema) is None


_REPLAY = {"replay": {"share": 0.1}}


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"retrain": {"replay": {"share": 0}}}, "share"),
        ({"retrain": {"replay": {"share": 0.0001}}}, "some must be of either kind"),
        ({"retrain": _REPLAY, "train": {"negatives": {"column": "click"}}}, "not with train.negatives"),
        ({"retrain": _REPLAY, "features": _FEATURES | {"split": {"by": "position"}}}, "split.by to 'time'"),
    ],
)
def test_what_cannot_be_replayed(sections: Mapping[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        spec_of(**sections)
