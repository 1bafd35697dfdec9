"""Rows of ids that the model of the warm start did not know (`retrain.new_rows`)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray

from headrace.comm.base import Collective
from headrace.dataset.parquet.layout import SplitLayout
from headrace.embeddings.checkpoint.new_rows import GrownTable, start_at_means
from headrace.embeddings.checkpoint.shards import Loaded
from headrace.errors import UserError, nearest
from headrace.models.sharded_model import ShardedModel
from headrace.schema import NULL_CODE, DatasetSchema, Feature, Kind

#: In the metadata of a categorical feature: another one, which says of what segment its id is.
SEGMENT = "segment"


def start_new_rows(model: ShardedModel, loaded: Loaded, train: SplitLayout, *, by_segment: bool) -> None:
    """Set rows that were not loaded to means over those that were. Collective.

    Args:
        model: after `models.saved.restore`.
        loaded: what that found. Tables that are new as a whole keep their start, as do tables of raw ids.
        train: the rows that say of what segment an id is.
        by_segment: whether features name segments.

    Raises:
        UserError: a feature names a segment that is none.
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
        found = _reaching(segments[named[0]], plan.by_name[name].rows) if named else None
        grown[name] = GrownTable(range(first, loaded.tables[name]), found)
    start_at_means(model.embeddings, grown)


def segments_of(
    feature: Feature, schema: DatasetSchema, train: SplitLayout, collective: Collective
) -> NDArray[np.int32]:
    """The segment of each code of a feature: int32 [cardinality], -1 where no row tells. Collective.

    An id's segment is the code that most of its rows have, of equals the lowest; a null tells nothing. Each rank reads
    its share of the row groups, two columns of them.

    Raises:
        UserError: the feature's metadata names no single-valued categorical feature.
    """
    segment = _segment_feature(feature, schema)
    world = collective.world
    pairs: dict[tuple[int, int], int] = {}
    for group in train.row_groups[world.rank :: world.size]:
        with pq.ParquetFile(group.path.local_path()) as file:
            read = file.read_row_group(group.index, columns=[feature.name, segment.name])
        codes, of = (read.column(c.name).to_numpy().astype(np.int64) for c in (feature, segment))
        found, counts = np.unique(np.stack([codes, of])[:, of != NULL_CODE], axis=1, return_counts=True)
        for code, s, n in zip(*found.tolist(), counts.tolist(), strict=True):
            pairs[code, s] = pairs.get((code, s), 0) + n
    mine = torch.tensor([(*pair, n) for pair, n in sorted(pairs.items())], dtype=torch.int64).reshape(-1, 3)
    counted, total = collective.all_gather(mine).numpy(), dict[tuple[int, int], int]()
    for code, s, n in counted.tolist():
        total[code, s] = total.get((code, s), 0) + n
    best: Mapping[int, int] = {
        code: s for (code, s), _ in sorted(total.items(), key=lambda given: (given[1], -given[0][1]))
    }
    segments = np.full(feature.cardinality or 0, -1, np.int32)
    segments[np.fromiter(best, np.int64, len(best))] = np.fromiter(best.values(), np.int32, len(best))
    return segments


def _segment_feature(feature: Feature, schema: DatasetSchema) -> Feature:
    features = {f.name: f for f in schema.of(Kind.CATEGORICAL) if not (f.is_list or f.dynamic)}
    name = feature.metadata[SEGMENT]
    if name not in features or feature.is_list:
        known = ", ".join(f for f in features if f != feature.name) or "none"
        of = f"'{feature.name}' is a list" if feature.is_list else f"there are: {known}"
        raise UserError(
            f"the metadata of feature '{feature.name}' names the segment '{name}': it is a categorical feature of one "
            f"value a row, of a feature of one value{nearest(str(name), list(features))}; {of}"
        )
    return features[name]


def _reaching(segments: NDArray[np.int32], rows: int) -> NDArray[np.int32]:
    """For all rows of a table that several features share."""
    found: NDArray[np.int32] = np.concatenate([segments, np.full(max(0, rows - len(segments)), -1, np.int32)])
    return found[:rows]
