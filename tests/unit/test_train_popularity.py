"""Popularity of codes, as the planner reads it from a dataset."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from headrace.embeddings.sharding_plan import tables_of
from headrace.schema import DatasetSchema, Feature, Kind
from headrace.storage import local
from headrace.train.setup.state import sampled_popularity


def test_codes_of_all_features_of_a_table_are_counted_and_padding_is_not(tmp_path: Path) -> None:
    schema = DatasetSchema(
        features=(
            Feature(name="user", kind=Kind.CATEGORICAL, dtype="int32", cardinality=50),
            Feature(
                name="seen",
                kind=Kind.CATEGORICAL,
                dtype="int32",
                cardinality=9,
                vocabulary="item",
                length=2,
                is_list=True,
            ),
            Feature(name="item", kind=Kind.CATEGORICAL, dtype="int32", cardinality=9, vocabulary="item"),
            Feature(name="click", kind=Kind.LABEL, dtype="float32"),
        )
    )
    columns = {
        "user": [0, 1, 1, 1],
        "seen": [[3], [3], [], [4, 3]],
        "item": [3, 5, 5, 0],
        "click": [0.0, 1.0, 0.0, 0.0],
    }
    types = {n: pa.float32() if n == "click" else pa.int32() for n in columns} | {"seen": pa.list_(pa.int32())}
    table = pa.table({n: pa.array(v, types[n]) for n, v in columns.items()})
    (tmp_path / "train").mkdir()
    for part in range(3):
        pq.write_table(table, tmp_path / "train" / f"{part}.parquet")
    popularity = sampled_popularity(local(tmp_path), schema, *tables_of(schema, 4))
    # item: 3 four times a file, 5 twice, 0 (of the scalar) and 4 once; nothing was seen once in three files.
    assert popularity["item"].rows.tolist() == [1, 1, 2, 5]
    np.testing.assert_allclose(popularity["item"].chance, [4 / 8, 2 / 8, 1 / 8, 0])
    assert popularity["user"].rows.tolist() == [1, 1, 48]
    np.testing.assert_allclose(popularity["user"].chance, [3 / 4, 1 / 4, 0])
