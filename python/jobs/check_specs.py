"""Check of pipelines' specs for the DAG parser: `check_specs.py PIPELINE.yaml...` prints JSON lines.

Imports neither Spark nor torch (spec_check.py). Airflow runs it as a program: its own environment has no headrace.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from headrace.config import load_spec
from headrace.errors import UserError
from headrace.jobs.spec_check import check_spec
from headrace.logs import redact_sentence


def fault_of(path: str) -> str | None:
    """Return why a pipeline's file is refused before any stage runs, in one line; None where it is not."""
    try:
        check_spec(load_spec(path))
    except UserError as e:
        return redact_sentence("; ".join(str(e).splitlines()))
    return None


def main(argv: Sequence[str] | None = None) -> None:
    """Print a line for each file as soon as it is checked: an object of its path and the fault, or null."""
    for path in sys.argv[1:] if argv is None else argv:
        print(json.dumps({path: fault_of(path)}), flush=True)


if __name__ == "__main__":
    main()
