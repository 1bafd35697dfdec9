"""A smaller dataset for short runs: row groups evenly over a split, and of each the same share of its rows."""

from __future__ import annotations

import math

import numpy as np
import pyarrow.parquet as pq

from headrace.dataset.parquet.layout import SplitLayout, open_split
from headrace.manifest import Manifest, Output
from headrace.schema import DatasetSchema
from headrace.storage import Location, local
from headrace.workspace import Workspace

#: Row groups that a sample is spread over, where the split has them.
_SPREAD = 64


def sample_dataset(
    features: Manifest, ws: Workspace, target: Location, rows: dict[str, int], *, streams: int, seed: int
) -> Manifest:
    """Make `target`, unless it is there, and the manifest of it: that of `features` but for where the dataset is.

    Args:
        features: the manifest of the whole dataset.
        ws: where that is.
        target: a new folder; it appears when it is whole.
        rows: split -> rows at most. A split that has no more, or is not named, is the whole one.
        streams: the sample has at least as many row groups, where the split has them.
        seed: of the rows that are drawn inside a row group.

    Raises:
        UserError: the dataset is gone or damaged.
    """
    dataset, schema = ws.locate(features.output("dataset").name), features.dataset_schema
    assert schema is not None
    if not target.is_dir():
        with target.new_folder() as made:
            for part in [p for p in dataset.entries() if p.is_dir()]:
                layout = open_split(dataset, part.name, schema) if part.name in rows else None
                if layout is None or layout.rows <= rows[part.name]:
                    (made / part.name).copy_from(part, share=True)
                else:
                    _write(layout, made / part.name, rows[part.name], streams, seed)
    output = Output(kind="dataset", name=str(target), version=features.output("dataset").version)
    return features.model_copy(update={"outputs": (output,)})


def sizes(manifest: Manifest, splits: tuple[str, ...] = ("train", "valid")) -> dict[str, int]:
    """Rows of the splits of a sampled dataset."""
    schema: DatasetSchema | None = manifest.dataset_schema
    assert schema is not None
    return {s: open_split(local(manifest.output("dataset").name), s, schema).rows for s in splits}


def _write(layout: SplitLayout, folder: Location, rows: int, streams: int, seed: int) -> None:
    groups = layout.row_groups
    mean = layout.rows / len(groups)
    wanted = min(len(groups), max(streams, _SPREAD, math.ceil(rows / mean)))
    chosen = [groups[i * len(groups) // wanted] for i in range(wanted)]
    share = min(1.0, rows / sum(g.rows for g in chosen))
    for number, group in enumerate(chosen):
        table = pq.ParquetFile(group.path).read_row_group(group.index)
        keep = max(1, math.floor(share * group.rows))
        drawn = np.random.default_rng((seed, number)).choice(group.rows, keep, replace=False)
        table = table.take(np.sort(drawn))
        # As the features stage writes them: a row group a file, plain.
        with (folder / f"part-{number:05d}.parquet").new_file() as path:
            pq.write_table(table, path, row_group_size=keep, compression="none", use_dictionary=False)
