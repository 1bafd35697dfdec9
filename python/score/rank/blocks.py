"""What a Spark task does: the cross of its users with all candidate items, a block at a time, and the best of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from headrace.errors import UserError
from headrace.features.workflow.fitted import FittedWorkflow
from headrace.models.predictor import Predictor, load_predictor
from headrace.score.rank.pair_features import Columns, PairFeatures, gather
from headrace.score.rank.top_k import top_k
from headrace.storage import Location

#: Pairs that are in memory at a time, whatever the number of users and items. Small enough for a DLRM's activations to
#: stay near the cache: 1.6 times the speed of 262,144 on one core, and 260 MB less at the peak.
BLOCK_PAIRS = 32_768
#: The column of users that lists the items they must not be shown, where there is one.
SEEN = "__seen"


@dataclass(frozen=True)
class TaskInputs:
    """What all tasks are told; small, but for the items."""

    #: The saved model's folder, visible on every executor.
    model: Location
    threads: int
    top_k: int
    user_key: str
    #: In order of the key: the order in which ties are broken.
    item_keys: pa.Array
    item_columns: Columns
    user_columns: tuple[str, ...]
    #: Everything that `PairFeatures` needs besides the fitted workflow, which each process loads from the model.
    item_names: tuple[str, ...]
    context: dict[str, pa.Scalar]
    #: The items' columns that features of pairs are made of (`PairFeatures.item_parts`), in order of the key, or None.
    item_parts: pa.RecordBatch | None = None
    block_pairs: int = BLOCK_PAIRS
    #: The task whose predictions are the scores; None: the model's first.
    output: str | None = None


def score_batches(
    task: TaskInputs, batches: Iterable[pa.RecordBatch], count: Callable[[int], None]
) -> Iterator[pa.RecordBatch]:
    """Users to their best items.

    Args:
        task: the candidates and the model.
        batches: users: the key, the user's columns and perhaps `__seen`.
        count: is called with the number of pairs of each finished block.

    Yields:
        Batches of (user key, item key, rank int32 from 1, score float32), one for each block of users.

    Raises:
        UserError: the model is damaged, or gives scores that are no numbers.
    """
    predictor, fitted = loaded_model(task.model, task.threads, task.output)
    features = PairFeatures(task.user_columns, task.item_names, task.context, fitted)
    n_items = len(task.item_keys)
    users_a_block = max(1, task.block_pairs // n_items)
    for batch in batches:
        columns = features.user_columns(batch)
        for start in range(0, batch.num_rows, users_a_block):
            users = range(start, min(start + users_a_block, batch.num_rows))
            part = batch.slice(users.start, len(users))
            scores = _score(task, predictor, features, columns, users, part)
            if SEEN in batch.schema.names:
                _leave_out(scores, part.column(SEEN), task.item_keys)
            yield _best(scores, part.column(task.user_key), task)
            count(len(users) * n_items)


def _score(
    task: TaskInputs, predictor: Predictor, features: PairFeatures, columns: Columns, users: range, raw: pa.RecordBatch
) -> NDArray[np.float32]:
    """Probabilities of all items for some users: float32 [users, items], predicted in blocks of bounded size.

    Args:
        columns: features of more users.
        users: the rows of them that are meant.
        raw: those users' own columns.
    """
    n_items = len(task.item_keys)
    scores = np.empty((len(users), n_items), dtype=np.float32)
    width = min(n_items, task.block_pairs)
    for start in range(0, n_items, width):
        items = range(start, min(start + width, n_items))
        pairs = gather(columns, task.item_columns, users, items)
        if task.item_parts is not None:
            pairs |= features.cross_columns(raw, task.item_parts.slice(items.start, len(items)))
        scores[:, items.start : items.stop] = predictor.predict(pairs).reshape(len(users), len(items))
    if not np.isfinite(scores).all():
        raise UserError(f"the model in {task.model} gives scores that are no numbers; train it again (a lower rate?)")
    return scores


def _leave_out(scores: NDArray[np.float32], seen: pa.ListArray, item_keys: pa.Array) -> None:
    """Make the scores of items that a user has seen minus infinity, in place."""
    flat = seen.flatten()
    places = pc.index_in(flat, value_set=item_keys)
    rows = np.repeat(np.arange(len(seen)), pc.fill_null(pc.list_value_length(seen), 0).to_numpy(zero_copy_only=False))
    candidate = places.is_valid().to_numpy(zero_copy_only=False)
    scores[rows[candidate], places.drop_null().to_numpy()] = -np.inf


def _best(scores: NDArray[np.float32], users: pa.Array, task: TaskInputs) -> pa.RecordBatch:
    best = top_k(scores, task.top_k)
    values = np.take_along_axis(scores, best, axis=1)
    row, place = np.nonzero(values > -np.inf)
    return pa.RecordBatch.from_arrays(
        [
            users.take(pa.array(row)),
            task.item_keys.take(pa.array(best[row, place])),
            pa.array((place + 1).astype(np.int32)),
            pa.array(values[row, place]),
        ],
        ["user", "item", "rank", "score"],
    )


@lru_cache(maxsize=1)
def loaded_model(folder: Location, threads: int, output: str | None) -> tuple[Predictor, FittedWorkflow]:
    """Loaded once in each Python worker, which Spark keeps for its next tasks; a model's folder never changes."""
    return load_predictor(folder, threads, output), FittedWorkflow.load(folder / "workflow")
