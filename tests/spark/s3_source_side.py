"""Source tables in S3 by a session of their own: `python -m tests.spark.s3_source_side CASES`.

CASES is JSON: by the home of a workspace that keeps everything on a disk, the section `source` and others that
`make_spec` takes. Each home gets a day of ingest and its dataset.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from headrace.config import Spark
from headrace.lake.session import shared_session
from headrace.workspace import Workspace
from tests.source_table_support import D3, dataset, ingest, make_spec


def main(cases: dict[str, dict[str, Any]]) -> None:
    specs = {home: make_spec(**case) for home, case in cases.items()}
    home, first = next(iter(specs.items()))
    conf = Spark(master="local[2]", driver_memory="1g", properties=first.spark.properties)
    with shared_session(conf, Workspace(Path(home)).of(first), "sources in S3", begin=True) as between:
        for home, spec in specs.items():
            ws = Workspace(Path(home)).of(spec)
            ingest(spec, ws, D3)
            dataset(spec, ws, D3)
            between()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
