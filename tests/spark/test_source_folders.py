"""Folders of ORC and Avro files as sources: rows of every type against pandas and Spark's own reading."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from pyspark.sql import SparkSession

from headrace.config.workspace import Workspace
from headrace.errors import UserError
from tests.source_table_support import (
    COLUMNS,
    D1,
    D2,
    D3,
    dataset,
    expected,
    frame,
    ids,
    ingest,
    make_rows,
    make_spec,
    quarantined,
)

#: Types and places that the main test's columns have not.
TYPED = [
    *COLUMNS[:2],
    {"name": "user", "path": "of.who.name"},
    {"name": "item", "type": "bigint", "path": "attributes['item']"},
    {"name": "price", "type": "decimal(12,3)"},
    COLUMNS[5],
    {"name": "born", "type": "date"},
    {"name": "local", "type": "timestamp_ntz"},
    {"name": "small", "type": "smallint"},
    {"name": "hash", "type": "binary", "path": "bytes"},
]


@pytest.mark.parametrize("form", ["orc", "avro"])
def test_a_folder_of_files_without_positions(spark: SparkSession, ws: Workspace, tmp_path: Path, form: str) -> None:
    path = tmp_path / "events"
    rows = make_rows()
    written = frame(spark, rows).selectExpr(
        "id",
        "ts",
        "struct(struct(user AS name) AS who) AS of",
        "map('item', item, 'other', 0L) AS attributes",
        "CAST(price AS decimal(12,3)) AS price",
        "click",
        "date_add(dt, -9000) AS born",
        "CAST(date_format(ts - INTERVAL 6 HOURS, 'yyyy-MM-dd HH:mm:ss') AS timestamp_ntz) AS local",
        "IF(id = 30, 100000, CAST(id AS int)) AS small",
        "to_binary(hex(user), 'hex') AS bytes",
        "dt",
    )
    written.repartition(3).write.format(form).partitionBy("dt").save(str(path))
    (path / "_SUCCESS").unlink()
    workflow = [
        {"columns": ["price"], "ops": [{"fill_missing": {"value": -1}}]},
        {"columns": ["user", "item", "hash"], "ops": ["categorify"]},
        {"columns": ["ts", "born", "local"], "ops": [{"age": {"event": "ts"}}, {"fill_missing": {"value": -1}}]},
        {"columns": ["small"], "ops": []},
    ]
    source = {"format": form, "path": str(path), "day": {"partition": "dt"}}
    spec = make_spec(source, {"columns": TYPED}, {"workflow": workflow})
    manifest = ingest(spec, ws, D3)
    assert manifest.rows == {"read": 300, "kept": 299, "quarantined": 1, "duplicates": 0}
    assert quarantined(spark, ws) == {30: "small: '100000' is not a smallint"}
    frames = dataset(spec, ws, D3)
    assert ids(frames) == expected(rows.drop([30]))
    ages = "(unix_micros(ts) - unix_micros(CAST(born AS timestamp))) / 86400e6 AS age"
    seen = spark.read.format(form).load(str(path)).selectExpr("id", "price", "of.who.name", ages).toPandas()
    seen = seen.set_index("id")
    for split in frames.values():
        source_rows = seen.loc[split["id"]]
        assert (split["price"].to_numpy() == source_rows["price"].astype(float).to_numpy()).all()
        assert (split["small"] == split["id"]).all()
        # One code for each value.
        for name in ("user", "hash"):
            pairs = pd.DataFrame({"code": split[name].to_numpy(), "value": source_rows["name"].fillna("").to_numpy()})
            assert len(pairs.drop_duplicates()) == pairs["value"].nunique() == pairs["code"].nunique()
        np.testing.assert_allclose(split["born_age"], source_rows["age"], rtol=1e-6)
        np.testing.assert_allclose(split["local_age"], 0.25)
    # A day that comes later changes nothing for this one.
    later = written.where("id < 9").selectExpr("* EXCEPT (dt, id)", "id + 5000 AS id").coalesce(1)
    later.write.format(form).save(str(path / "dt=2026-03-04"))
    assert ingest(spec, ws, D3).started == manifest.started

    # The keys are what tells rows apart.
    later.selectExpr("* EXCEPT (id)", "0L AS id").write.format(form).mode("append").save(str(path / "dt=2026-03-03"))
    with pytest.raises(UserError, match=r"do not tell the rows of .* apart"):
        ingest(spec, ws, D3)
    with pytest.raises(UserError, match=r"declare table\.keys"):
        ingest(
            spec.model_copy(update={"table": spec.table.model_copy(update={"keys": ()})}), Workspace(ws.home / "x"), D3
        )


@pytest.mark.parametrize("form", ["orc", "avro", "parquet"])
def test_a_whole_folder_is_one_snapshot(spark: SparkSession, ws: Workspace, tmp_path: Path, form: str) -> None:
    """Files in folders below it as well; one that changes is noticed."""
    path = tmp_path / "events"
    rows = make_rows()
    frame(spark, rows).where("id % 2 = 0").write.format(form).save(str(path / "even"))
    frame(spark, rows).where("id % 2 = 1").coalesce(1).write.format(form).save(str(path / "odd"))
    source = {"format": form, "path": str(path)}
    spec = make_spec(source, {"event_time": None}, {"split": {"by": "position"}})
    assert ingest(spec, ws, D3).rows["kept"] == 300
    event_ids = ids(dataset(spec, ws, D3))
    assert sorted(event_ids["train"] + event_ids["valid"]) == list(range(300))
    # Days by a time: no partition says which file has them.
    by_time, time_ws = make_spec(source | {"day": {"time": "ts"}}), Workspace(ws.home / "time")
    assert ingest(by_time, time_ws, D3).facts["days"] == ["2026-02-28", D1, D2, D3]
    assert ids(dataset(by_time, time_ws, D3)) == expected(rows)
    (file, *_) = (path / "odd").glob(f"*.{form}")
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(UserError, match="others than when ingest ran"):
        dataset(spec.model_copy(update={"features": spec.features.model_copy(update={"carried": ()})}), ws, D3)
