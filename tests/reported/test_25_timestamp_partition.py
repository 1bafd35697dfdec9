"""Delta tables that are partitioned by a timestamp cut to the day, in both spellings of their logs.

Reported as https://github.com/delta-io/delta/issues/4268 and https://github.com/delta-io/delta-rs/issues/2380.
"""

from __future__ import annotations

import json
from pathlib import Path

import deltalake
import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from headrace.config.workspace import Workspace
from headrace.errors import UserError
from tests.reported.click_log import COLUMNS, DAYS, click_log, kept_rows, utc
from tests.reported.support import ingest, pipeline


def spelled_as_iso(table: Path) -> None:
    """Rewrite the log's partition values as newer writers spell them."""
    log = table / "_delta_log" / f"{0:020d}.json"
    actions = [json.loads(line) for line in log.read_text().splitlines()]
    for action in actions:
        if "add" in action:
            value = action["add"]["partitionValues"]["day"]
            action["add"]["partitionValues"]["day"] = f"{value[:10]}T00:00:00.000000Z"
    log.write_text("".join(json.dumps(action) + "\n" for action in actions))


@pytest.mark.parametrize("iso", [False, True], ids=["delta-rs", "iso"])
def test_days_by_the_time_or_not_at_all(spark: SparkSession, ws: Workspace, tmp_path: Path, iso: bool) -> None:
    rows = click_log()
    day = pa.array(rows.ts.dt.floor("D").to_numpy(), pa.timestamp("us")).cast(pa.timestamp("us", "UTC"))
    deltalake.write_deltalake(str(tmp_path / "t"), utc(rows, day=day), partition_by=["day"])
    if iso:
        spelled_as_iso(tmp_path / "t")
    columns = [*COLUMNS, {"name": "day", "type": "timestamp"}]
    source = {"format": "delta", "path": str(tmp_path / "t")}
    actual = kept_rows(spark, pipeline(source | {"day": {"time": "ts"}}, columns), ws, DAYS[2])
    assert actual.event_id.tolist() == rows.event_id.tolist()
    assert actual["day"].tolist() == rows.ts.dt.floor("D").tolist()
    by_partition = pipeline(source | {"day": {"partition": "day"}}, columns)
    with pytest.raises(UserError, match="which is no day such as 2026-01-31 or 20260131; name a time column instead"):
        ingest(by_partition, Workspace(ws.home / "partition"), DAYS[2])
