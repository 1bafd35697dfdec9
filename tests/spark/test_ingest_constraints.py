"""Constraints that a person has given the table of events: ingest checks them where it writes, as Delta does."""

from __future__ import annotations

import pytest
from pyspark.sql import SparkSession

from headrace.errors import UserError
from headrace.lake.delta.log import DeltaLog
from headrace.workspace import Workspace
from tests.ingest_support import D1, D2, D3, event, ids, jsonl, make_spec, put, run, table, version


def test_rows_that_break_a_constraint_stop_their_day(spark: SparkSession, ws: Workspace) -> None:
    spec = make_spec()
    events = ws.table("shop", "events")
    columns = spec.table.spark_schema.replace("`note` string", "`note` string NOT NULL")
    assert "NOT NULL" in columns
    place = "_source_file string, _source_line bigint, ds string"
    spark.sql(f"CREATE TABLE delta.`{events}` ({columns}, {place}) USING delta PARTITIONED BY (ds)")
    put(ws, f"in/{D1}/a.jsonl", jsonl([event(i, D1) for i in range(4)]))
    run(spec, ws, D1)
    spark.sql(f"ALTER TABLE delta.`{events}` ADD CONSTRAINT cheap CHECK (price < 100 AND ds > '2026')")
    version_before = version(ws)
    good = [event(i, D2) for i in range(10, 14)]
    for bad, message in (
        (event(20, D2, price=100), "2 rows of 2026-03-02 break the constraint 'cheap'"),
        # As in Delta a comparison that is null is not true.
        (event(20, D2, price=None), "2 rows of 2026-03-02 break the constraint 'cheap'"),
        (event(20, D2, note=None), "2 rows of 2026-03-02 break the constraint 'note is not null'"),
    ):
        put(ws, f"in/{D2}/a.jsonl", jsonl([*good, bad, bad | {"id": "e21"}]))
        with pytest.raises(UserError, match=message):
            run(spec, ws, D2)
        assert version(ws) == version_before
        assert list(ids(ws)) == [D1]
    put(ws, f"in/{D2}/a.jsonl", jsonl(good))
    run(spec, ws, D2)
    assert ids(ws)[D2] == [f"e{i}" for i in range(10, 14)]
    # Delta itself has refused what ingest did, of the same table.
    schema = spark.read.format("delta").load(str(events)).schema
    broken = spark.createDataFrame(table(spark, ws, "events"), schema).selectExpr("* EXCEPT (price)", "200D AS price")
    with pytest.raises(Exception, match="CHECK constraint cheap"):
        broken.write.format("delta").mode("append").save(str(events))
    # A table to which rows may only be added takes new days, and none again.
    spark.sql(f"ALTER TABLE delta.`{events}` SET TBLPROPERTIES ('delta.appendOnly' = 'true')")
    put(ws, f"in/{D3}/a.jsonl", jsonl([event(30, D3)]))
    run(spec, ws, D3)
    put(ws, f"in/{D3}/b.jsonl", jsonl([event(31, D3)]))
    with pytest.raises(UserError, match=r"delta\.appendOnly"):
        run(spec, ws, D3)
    assert ids(ws)[D3] == ["e30"]
    assert DeltaLog(events).files(version(ws) or 0)
