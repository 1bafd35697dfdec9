"""Checks of pipelines' specs that need no data, made before the first stage begins. Imports neither Spark nor torch.

As a program, `check_specs.py PIPELINE.yaml...` prints JSON lines for the DAG parser: Airflow's own environment has no
headrace.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from headrace.config import Spec, load_spec
from headrace.errors import UserError
from headrace.features.build.plan import checked_workflow
from headrace.logs import redact_sentence
from headrace.score.columns import check_columns, check_rule_columns


def check_spec(spec: Spec) -> None:
    """Check all that is known of a pipeline without its data: chains, `prepare`, features, and what a pair has.

    Raises:
        UserError: an unknown operator, parameter or column, two features of one name, a feature made of the label, a
            column of a pair that comes from nowhere or from two places, ...: with the key's place in the spec.
    """
    checked_workflow(spec)
    if spec.score is not None:
        check_columns(spec, spec.score)
        check_rule_columns(spec)


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
