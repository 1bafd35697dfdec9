"""Initial weights of a run: pretrained models, rows of new ids, and the saved model of which only changes are saved."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.comm.base import Collective
from headrace.config.schema import NULL_CODE, DatasetSchema, Feature, Kind
from headrace.dataset.layout import SplitLayout
from headrace.embeddings.checkpoint.files import load_tensors, read_chain, record_of
from headrace.embeddings.checkpoint.saved_rows import GrownTable, start_at_means
from headrace.embeddings.checkpoint.shards import Loaded, load_shards
from headrace.errors import UserError
from headrace.features.workflow.fitted import vocabulary_file
from headrace.models.mapped import storages
from headrace.models.predictor import read_meta
from headrace.models.saved import DENSE, EMBEDDINGS, Changes, has_state_of, read_card
from headrace.models.sharded_model import ShardedModel
from headrace.storage import Location
from headrace.train.job import Job
from headrace.train.requirements import SEGMENT, segment_feature

log = logging.getLogger("headrace.train")


def check_pretrained(models: Mapping[str, Location], dataset: Location, schema: DatasetSchema) -> None:
    """Raise UserError if a model's vocabularies differ from the dataset's, so that codes have other meanings."""
    for part, folder in models.items():
        read_meta(folder)
        saved = {r.name: r.sha256 for r in read_card(folder).files}
        for name in sorted({f.vocabulary or f.name for f in schema.of(Kind.CATEGORICAL) if not f.dynamic}):
            path = vocabulary_file(dataset / "workflow", name)
            if not path.is_file():
                continue
            file = path.below(dataset)
            if saved.get(file) != record_of(dataset, file).sha256:
                raise UserError(
                    f"train.pretrained.{part}: {folder} has another vocabulary of '{name}' than the dataset, so its "
                    f"rows are of other values: train it on the same source and days"
                )


def start_from_pretrained(model: ShardedModel, models: Mapping[str, Location]) -> None:
    """Load the models' tables and dense parts, without communication.

    Raises:
        UserError: the network does not start from models or from these, or their shapes differ.
    """
    take = getattr(model.network, "start_from", None)
    if take is None:
        raise UserError(f"train.pretrained: {type(model.network).__name__} does not start from other models")
    states: dict[str, Mapping[str, Tensor]] = {}
    missing = {t.name for t in model.embeddings.plan.tables}
    for part, folder in sorted(models.items()):
        card = read_card(folder)
        states[part] = load_tensors(folder, next(r for r in card.files if r.name == DENSE))
        missing -= load_shards(model.embeddings, folder / EMBEDDINGS, with_optimizer=False).tables.keys()
    if missing:
        raise UserError(f"train.pretrained: none of the models has table {', '.join(sorted(missing))}")
    try:
        take(states)
    except (KeyError, RuntimeError, AttributeError) as e:
        raise UserError(f"train.pretrained: the models do not fit the network: {e}") from None
    log.info("starting from %s", ", ".join(f"{part} {folder}" for part, folder in sorted(models.items())))


#: Number of codes whose pairs the ranks exchange at a time.
_CODES = 1 << 20


def start_new_rows(model: ShardedModel, loaded: Loaded, train: SplitLayout, *, by_segment: bool) -> None:
    """Set rows that were not loaded to means over those that were. Collective.

    Args:
        model: model after `models.saved.restore`.
        loaded: result of `restore`. New tables keep their initial rows, and so do tables of raw ids.
        train: layout of the training rows, which tell the segment of an id.
        by_segment: whether to use the means of segments.

    Raises:
        UserError: a feature's segment is not valid.
    """
    plan, features = model.embeddings.plan, {f.name: f for f in model.schema.of(Kind.CATEGORICAL)}
    grown: dict[str, GrownTable] = {}
    segments: dict[str, NDArray[np.int32]] = {}
    for name in sorted(loaded.tables.keys() & loaded.new_rows.keys()):
        looking = list(dict.fromkeys(x.feature for x in plan.lookups if x.table == name))
        named = [f for f in looking if SEGMENT in features[f].metadata] if by_segment else []
        if named and named[0] not in segments:
            segments[named[0]] = segments_of(features[named[0]], model.schema, train, model.embeddings.collective)
        first = max(features[f].first_code for f in looking)
        segments_of_rows = _reaching(segments[named[0]], plan.by_name[name].rows) if named else None
        grown[name] = GrownTable(range(first, loaded.tables[name]), segments_of_rows)
    start_at_means(model.embeddings, grown)


def segments_of(
    feature: Feature, schema: DatasetSchema, train: SplitLayout, collective: Collective
) -> NDArray[np.int32]:
    """Return the segment of each code of a feature: int32 [cardinality], -1 where it is unknown. Collective.

    An id's segment is the most frequent one in its rows, of equals the lowest; nulls do not count. Each rank reads two
    columns of its share of the row groups, and holds 16 bytes for each distinct pair.

    Raises:
        UserError: the feature's metadata names no single-valued categorical feature.
    """
    segment = segment_feature(feature, schema)
    cardinality, width = feature.cardinality or 0, max(1, segment.cardinality or 0)
    pairs, counts = _count_pairs(_read_pairs(feature, segment, width, train, collective))
    segments = np.full(cardinality, -1, np.int32)
    for first in range(0, cardinality, _CODES):
        block = slice(*np.searchsorted(pairs, [first * width, (first + _CODES) * width]).tolist())
        local_pairs = torch.from_numpy(np.stack([pairs[block], counts[block]], axis=1))
        merged, n = _summed(*collective.all_gather(local_pairs).numpy().T)
        codes, segment_of = merged // width, merged % width
        # The last entry of each code has the most rows and, of equals, the lowest segment.
        order = np.lexsort((-segment_of, n, codes))
        codes, segment_of = codes[order], segment_of[order]
        last = np.append(codes[1:] != codes[:-1], True)[: len(codes)]
        segments[codes[last]] = segment_of[last]
    return segments


def _read_pairs(
    feature: Feature, segment: Feature, width: int, train: SplitLayout, collective: Collective
) -> Iterator[NDArray[np.int64]]:
    """Yield, for each row group of this rank's share, the pairs code * width + segment of rows that have one: int64
    [rows].
    """
    world = collective.world
    for group in train.row_groups[world.rank :: world.size]:
        with pq.ParquetFile(group.path.local_path()) as file:
            read = file.read_row_group(group.index, columns=[feature.name, segment.name])
        codes, segment_of = (read.column(c.name).to_numpy().astype(np.int64) for c in (feature, segment))
        is_known = segment_of != NULL_CODE
        yield codes[is_known] * width + segment_of[is_known]


def _count_pairs(groups: Iterator[NDArray[np.int64]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Count each value in all arrays together: the values in order, and their counts, int64 each."""
    total = np.empty(0, np.int64), np.empty(0, np.int64)
    waiting: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
    for values in groups:
        waiting.append(np.unique(values, return_counts=True))
        # Merge when there are as many new values as merged ones, so that a value is merged only a few times.
        if sum(len(w[0]) for w in waiting) >= len(total[0]):
            total, waiting = _merged([total, *waiting]), []
    return _merged([total, *waiting])


def _merged(parts: list[tuple[NDArray[np.int64], NDArray[np.int64]]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    values, counts = (np.concatenate([p[i] for p in parts]) for i in (0, 1))
    return _summed(values, counts)


def _summed(values: NDArray[np.int64], counts: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the distinct values in order, and the sums of their counts."""
    if not len(values):
        return values, counts
    order = np.argsort(values, kind="stable")
    values, counts = values[order], counts[order]
    starts = np.flatnonzero(np.append(True, values[1:] != values[:-1]))
    return values[starts], np.add.reduceat(counts, starts)


def _reaching(segments: NDArray[np.int32], rows: int) -> NDArray[np.int32]:
    """Extend segments to all rows of a table that several features share, with -1."""
    extended: NDArray[np.int32] = np.concatenate([segments, np.full(max(0, rows - len(segments)), -1, np.int32)])
    return extended[:rows]


def changes_of(job: Job, model: ShardedModel) -> Changes | None:
    """Return the saved model of which only the changes are saved, or None to save all rows.

    All rows are saved on one of `full_copy_days` days, without a warm start, after a warm start without the optimizer's
    states, and if the stored type of rows differs.

    Raises:
        UserError: the model of the warm start is damaged.
    """
    if job.full_copy_days is None or job.warm_start is None:
        return None
    start = job.ws.locate(job.warm_start)
    previous = start / EMBEDDINGS
    if len(read_chain(previous)) >= job.full_copy_days or not has_state_of(start, job.train.embeddings.kind):
        return None
    stored = storages(previous)
    if any(stored.get(t.name, t.storage) != t.storage for t in model.embeddings.plan.tables):
        return None
    return Changes(start, job.train.warm_decay)


def saved_bytes(job: Job) -> dict[str, Any]:
    """Return the bytes of the saved embeddings and of the full copy below them; empty if every model has all rows."""
    if job.full_copy_days is None:
        return {}
    chain = read_chain(job.saved_model / EMBEDDINGS)
    own_bytes, base_bytes = (sum(f.bytes for f in index.files) for _, index in (chain[-1], chain[0]))
    base = None if len(chain) == 1 else job.ws.name_of(chain[-2][0].parent)
    return {"embeddings_bytes": own_bytes, "whole_copy_bytes": base_bytes, "base": base, "saves": len(chain)}
