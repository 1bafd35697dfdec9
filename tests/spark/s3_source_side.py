"""Source tables in S3 by a session of their own: `python -m tests.spark.s3_source_side CASES`.

CASES is JSON: by the home of a workspace that keeps everything on a disk, what `make_spec` takes. Each home gets a day
of ingest and its dataset. A case without a path is of the table CATALOG.db.events, which is written before.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from headrace.config import Spark
from headrace.config.workspace import Workspace
from headrace.lake.spark.session import session, shared_session
from tests.s3_server import BUCKET
from tests.source_table_support import D3, DDL, dataset, frame, ingest, make_rows, make_spec

#: An Iceberg catalog whose tables are in S3.
CATALOG = "lake"
_CATALOG = {
    f"spark.sql.catalog.{CATALOG}": "org.apache.iceberg.spark.SparkCatalog",
    f"spark.sql.catalog.{CATALOG}.type": "hadoop",
    f"spark.sql.catalog.{CATALOG}.warehouse": f"s3a://{BUCKET}/catalog",
}


def main(cases: dict[str, dict[str, Any]]) -> None:
    specs = {home: make_spec(**case) for home, case in cases.items()}
    home, first = next(iter(specs.items()))
    of_catalog = any(spec.source.title == f"{CATALOG}.db.events" for spec in specs.values())
    conf = Spark(master="local[2]", driver_memory="1g", properties=_CATALOG if of_catalog else {})
    ws = Workspace(Path(home)).of(first)
    with shared_session(conf, ws, "sources in S3", begin=True) as between:
        if of_catalog:
            with session(conf, ws, "an Iceberg table") as spark:
                rows = make_rows().astype({"user": object})
                rows.loc[5, "click"] = 7
                spark.sql(f"CREATE TABLE {CATALOG}.db.events ({DDL}) USING iceberg PARTITIONED BY (dt)")
                frame(spark, rows).writeTo(f"{CATALOG}.db.events").append()
        for home, spec in specs.items():
            ws = Workspace(Path(home)).of(spec)
            ingest(spec, ws, D3)
            dataset(spec, ws, D3)
            between()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
