"""Times as exports of other systems spell them: `2019-10-01 00:00:00 UTC`, and those that need a format."""

from __future__ import annotations

from datetime import datetime, timedelta
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from headrace.config.workspace import Workspace
from tests.reported.support import ingest, pipeline, read_table, write

DS = "2026-01-08"
START = datetime.fromisoformat(DS)
MOMENTS = [START + timedelta(seconds=577 * n, microseconds=123456) for n in range(140)]
#: column: how Python writes it, the source's format, and what of a second the text has.
SPELLED = {
    "event_time": ("%Y-%m-%d %H:%M:%S UTC", None, "s"),
    "t_pg": ("%Y-%m-%d %H:%M:%S.%f+00", None, "us"),
    "t_dotnet": ("%Y-%m-%dT%H:%M:%S.%f7Z", None, "us"),
    "t_comma": ("%Y-%m-%d %H:%M:%S,%f", None, "us"),
    "t_basic": ("%Y%m%dT%H%M%SZ", "%Y%m%dT%H%M%SZ", "s"),
    "t_us": ("%m/%d/%Y %I:%M:%S %p", "%m/%d/%Y %I:%M:%S %p", "s"),
    "t_eu": ("%d.%m.%Y %H:%M", "%d.%m.%Y %H:%M", "min"),
    "t_rfc": ("%a, %d %b %Y %H:%M:%S GMT", "%a, %d %b %Y %H:%M:%S GMT", "s"),
    "t_apache": ("%d/%b/%Y:%H:%M:%S +0100", "%d/%b/%Y:%H:%M:%S %z", "s"),
}


@pytest.mark.parametrize("ending", [".csv", ".csv.zst", ".jsonl", ".jsonl.zst"])
def test_times_of_other_systems(spark: SparkSession, tmp_path: Path, ending: str) -> None:
    frame = pd.DataFrame({name: [f"{t:{form}}" for t in MOMENTS] for name, (form, _, _) in SPELLED.items()})
    frame["clicked"] = [n % 2 for n in range(len(frame))]
    # One time is none, in each column in turn.
    wrong = {name: k for k, name in enumerate(SPELLED)}
    for name, k in wrong.items():
        frame.loc[k, name] = "31.02.2026 25:61"
    is_csv = ending.startswith(".csv")
    text = frame.to_csv(index=False) if is_csv else frame.to_json(orient="records", lines=True)
    assert text is not None
    body = text.encode()
    write(tmp_path, {f"in/{DS}{ending}": pa.compress(body, "zstd", asbytes=True) if "zst" in ending else body})
    columns = [{"name": name, "type": "timestamp"} for name in SPELLED] + [{"name": "clicked", "type": "int"}]
    formats = {name: form for name, (_, form, _) in SPELLED.items() if form is not None}
    source = {"format": "csv" if is_csv else "jsonl", "path": f"in/{{ds}}{ending}", "timestamps": formats}
    ws = Workspace(tmp_path)
    manifest = ingest(pipeline(source, columns, table={"event_time": "event_time"}), ws, DS).manifest
    assert manifest.rows["kept"] == len(MOMENTS) - len(SPELLED)
    assert manifest.rows["quarantined"] == len(SPELLED)
    bad = read_table(spark, ws, "quarantine")
    assert bad._reason.tolist() == [f"{name}: '31.02.2026 25:61' is not a timestamp" for name in SPELLED]
    actual = read_table(spark, ws)
    for name, (_, _, digits) in SPELLED.items():
        expected = pd.Series(MOMENTS[len(SPELLED) :]).dt.floor(digits)
        expected -= pd.Timedelta(hours=1 if name == "t_apache" else 0)
        assert actual[name].tolist() == expected.tolist(), name
