"""Ranking of lists of candidates, beside the bare torch model on tensors that lie ready.

100,000 users and as many items of 8 features, a DLRM of 64 columns, 500 candidates a user, the best 10 kept. Rates are
of one core by its processor time. The floor is the network on the same rows, in blocks of the same size, without
gathering of features, top-k or Arrow.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

import headrace as hr
from bench.report import Figure
from headrace import config
from headrace.comm.base import LocalCollective
from headrace.features.workflow.fitted import FittedWorkflow
from headrace.models.predictor import NetworkPredictor
from headrace.models.saved import save_model
from headrace.models.sharded_model import ShardedModel
from headrace.score import ranking
from headrace.score.item_features import ItemFeatures
from headrace.score.items import ItemTable
from headrace.score.loaded_model import BLOCK_PAIRS, PairFeatures, loaded_model
from headrace.score.ranking import ITEMS, TaskInputs, score_batches
from headrace.storage import local

USERS, N_ITEMS, LIST, RANKED_ITEMS = 100_000, 100_000, 500, 10
#: Users of a measurement, and times as many: memory must not grow.
MEASURED, TIMES = 500, (1, 2, 4)
ROUNDS = 3
MODEL = config.Model(embedding_dim=64, bottom_mlp=(128, 64), top_mlp=(256, 128))
USER = ("user", "country", "age", "spent")
ITEM = ("item", "category", "price", "sold")


def figures() -> list[Figure]:
    """Measure the floor, our ranking, what a core does in which part, memory by rows."""
    with tempfile.TemporaryDirectory() as folder:
        in_a_process(prepare, Path(folder))
        measured = in_a_process(rates, Path(folder))
        named = f"ranking: {LIST} candidates a user, best {RANKED_ITEMS}, a core; floor: the bare torch model"
        out = [Figure(named, measured["ours"], "rows/s", floor=measured["floor"])]
        for part in ("features of users", "gather", "predict", "best of lists", "rows"):
            named = f"ranking: of a row's time, {part}"
            out.append(Figure(named, measured[part] * 1e6, "us a row", floor=1e6 / measured["ours"]))
        for times in TIMES:
            rate, mib = in_a_process(memory, Path(folder), times)
            rows = times * MEASURED * LIST
            out.append(Figure(f"ranking: {rows:,} rows, a core", rate, "rows/s"))
            out.append(Figure(f"ranking: {rows:,} rows, memory above the start", mib, "MiB"))
    return out


def prepare(folder: Path) -> None:
    """Write a model and its workflow of 200,000 pairs."""
    rng = np.random.default_rng(0)
    users, items = users_of(USERS), items_of(N_ITEMS)
    drawn = [c.take(pa.array(rng.integers(0, USERS, 200_000))) for c in users.columns]
    drawn += [c.take(pa.array(rng.integers(0, N_ITEMS, 200_000))) for c in items.columns]
    write_model(folder, dict(zip((*USER, *ITEM), drawn, strict=True)))


def write_model(folder: Path, frame: dict[str, pa.Array]) -> None:
    """Write a workflow that knows the values of these columns, and a network of first values."""
    torch.set_num_threads(1)
    rng = np.random.default_rng(3)
    rows = len(frame[USER[0]])
    codes = ["user", "item", "country", "category"] >> hr.Categorify(min_count=1)
    numbers = ["age", "spent", "price", "sold"] >> hr.FillMissing() >> hr.Log() >> hr.Normalize()
    table = pa.table({**frame, "click": pa.array(rng.integers(0, 2, rows), pa.int32())})
    hr.Workflow(codes + numbers, label="click").fit(table).save(folder / "workflow")
    fitted = FittedWorkflow.load(local(folder / "workflow"))
    model = ShardedModel(fitted.schema, MODEL, LocalCollective(), 1)
    fields = {"workflow": local(folder / "workflow"), "pipeline": "bench", "ds": "2026-01-01", "key": "k"}
    save_model(local(folder / "model"), model, metrics={}, **fields)


def rates(folder: Path) -> dict[str, float]:
    """Measure rows a processor second of our ranking and of the floor, the best of rounds that take turns; seconds a
    row by part.
    """
    task, batch = task_of(folder, folder), _batch(1)
    predictor, _ = loaded_model(task.model, 1, None, task.maps)
    assert isinstance(predictor, NetworkPredictor)
    rows = MEASURED * LIST
    list(score_batches(task, iter([batch.slice(0, 100)]), lambda n: None))
    tensors = list(_tensors(task, predictor, batch))
    best = {"ours": 0.0, "floor": 0.0}
    for _ in range(ROUNDS):
        best["ours"] = max(best["ours"], rows / _cpu(lambda: list(score_batches(task, iter([batch]), lambda n: None))))
        best["floor"] = max(best["floor"], rows / _cpu(lambda: _bare(predictor, tensors)))
    return best | {name: s / rows for name, s in _parts(task, predictor, batch).items()}


def memory(folder: Path, times: int) -> tuple[float, float]:
    """Measure rows a processor second, and MiB of this process's own pages above the start, at most, of so many times
    the users.
    """
    task = task_of(folder, folder)
    list(score_batches(task, iter([_batch(1).slice(0, 100)]), lambda n: None))
    start_mib, most = _resident_mib(), [0.0]

    def score() -> None:
        for _ in score_batches(task, _batches(times), lambda n: None):
            most[0] = max(most[0], _resident_mib())

    seconds = _cpu(score)
    return times * MEASURED * LIST / seconds, most[0] - start_mib


def _parts(task: TaskInputs, predictor: NetworkPredictor, batch: pa.RecordBatch) -> dict[str, float]:
    """Measure processor seconds of each part, by clocks around its function."""
    spent: dict[str, float] = {}

    def clocked(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **named: Any) -> Any:
            tick = time.process_time()
            result = function(*args, **named)
            spent[name] = spent.get(name, 0.0) + time.process_time() - tick
            return result

        return run

    originals = (
        ranking.gather,
        ranking.best_of_lists,
        ranking._rows,
        PairFeatures.user_columns,
        NetworkPredictor.predict,
    )
    names = "gather", "best of lists", "rows", "features of users", "predict"
    wrapped = [clocked(name, function) for name, function in zip(names, originals, strict=True)]
    _patch(wrapped)
    try:
        list(score_batches(task, iter([batch]), lambda n: None))
    finally:
        _patch(list(originals))
    return spent


def _patch(functions: list[Callable[..., Any]]) -> None:
    ranking.gather, ranking.best_of_lists, ranking._rows = functions[:3]
    PairFeatures.user_columns, NetworkPredictor.predict = functions[3:]  # type: ignore[method-assign]


def _tensors(task: TaskInputs, predictor: NetworkPredictor, batch: pa.RecordBatch) -> Iterator[Any]:
    """Yield the network's inputs for the rows, block by block."""
    _, fitted = loaded_model(task.model, 1, None, task.maps)
    columns = _features(fitted).user_columns(batch)
    items = batch.column(ITEMS).flatten().to_numpy()
    users = np.repeat(np.arange(batch.num_rows, dtype=np.int32), LIST)
    for start in range(0, len(items), BLOCK_PAIRS):
        u, i = users[start : start + BLOCK_PAIRS], items[start : start + BLOCK_PAIRS]
        yield predictor._tensors(ranking.gather(columns, task.item_features.open(), u, i))


def _bare(predictor: NetworkPredictor, tensors: list[Any]) -> None:
    with torch.inference_mode():
        for continuous, codes in tensors:
            predictor._model.outputs_of(continuous, codes)["logits"].sigmoid()


def task_of(folder: Path, scratch: Path, n_items: int = N_ITEMS) -> TaskInputs:
    """Return the inputs of a Spark task: the model of `write_model` in a folder; items and their features, written
    anew.
    """
    torch.set_num_threads(1)
    pa.set_cpu_count(1)
    fitted = FittedWorkflow.load(local(folder / "workflow"))
    items = ItemTable.of_arrow(pa.Table.from_batches([items_of(n_items)]), "item", local(scratch / "items"))
    features = _features(fitted)
    item_features = ItemFeatures.write(items, local(folder), features, local(scratch / "features"), None)
    return TaskInputs(
        model=local(folder / "model"),
        threads=1,
        top_k=RANKED_ITEMS,
        user_key="user",
        items=items,
        item_features=item_features,
        user_columns=USER,
        item_names=ITEM,
        context={},
        maps=local(folder / "maps"),
    )


def _features(fitted: FittedWorkflow) -> PairFeatures:
    return PairFeatures(USER, ITEM, {}, fitted)


def users_of(n: int) -> pa.RecordBatch:
    """Return users: keys in ascending order, and the other columns."""
    rng = np.random.default_rng(1)
    columns = [
        pa.array([f"u{i:06d}" for i in range(n)]),
        pa.array([f"c{i}" for i in rng.integers(0, 50, n)]),
        pa.array(rng.integers(18, 80, n), pa.int32()),
        pa.array(rng.gamma(2, 9, n)),
    ]
    return pa.record_batch(columns, names=list(USER))


def items_of(n: int) -> pa.RecordBatch:
    """Return items: keys in ascending order, and the other columns."""
    rng = np.random.default_rng(2)
    columns = [
        pa.array([f"i{i:06d}" for i in range(n)]),
        pa.array([f"k{i}" for i in rng.integers(0, 500, n)]),
        pa.array(rng.gamma(2, 9, n)),
        pa.array(rng.integers(0, 1000, n), pa.int64()),
    ]
    return pa.record_batch(columns, names=list(ITEM))


def _batch(seed: int) -> pa.RecordBatch:
    """Return users with their candidates."""
    rng = np.random.default_rng(seed)
    people = users_of(USERS).slice(int(rng.integers(0, USERS - MEASURED)), MEASURED)
    lists = rng.integers(0, N_ITEMS // LIST, (MEASURED, LIST)) + np.arange(LIST) * (N_ITEMS // LIST)
    candidates = pa.FixedSizeListArray.from_arrays(pa.array(lists.reshape(-1).astype(np.int32)), LIST)
    return pa.RecordBatch.from_arrays([*people.columns, candidates.cast(pa.list_(pa.int32()))], [*USER, ITEMS])


def _batches(times: int) -> Iterator[pa.RecordBatch]:
    yield from (_batch(seed) for seed in range(times))


def _cpu(work: Callable[[], Any]) -> float:
    tick = time.process_time()
    work()
    return time.process_time() - tick


def _resident_mib() -> float:
    """Return the MiB of this process's own resident pages: mapped files are not counted."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(x.split()[1]) for x in lines if x.startswith("RssAnon:")) / 1024


def in_a_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in a process of its own and return its result."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()
