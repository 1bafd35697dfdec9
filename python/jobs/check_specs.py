"""Checks of pipelines' specs that need no data, made before the first stage begins. Imports neither Spark nor torch.

As a program, `check_specs.py PIPELINE.yaml...` prints JSON lines for the DAG parser: Airflow's own environment has no
headrace. It also describes the stages of pipelines that have stages of other packages: only this environment has their
classes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from headrace.config import Spec, load_spec
from headrace.errors import UserError
from headrace.features.build.plan import checked_workflow
from headrace.logs import redact_sentence
from headrace.score.columns import check_columns, check_rule_columns
from headrace.stage import stage_entries


def check_spec(spec: Spec) -> None:
    """Check all that is known of a pipeline without its data: chains, `prepare`, features, and what a pair has.

    Raises:
        UserError: an unknown operator, parameter or column, two features of one name, a feature made of the label, a
            column of a pair that comes from nowhere or from two places, a stage of a package that is not valid, ...:
            with the key's place in the spec.
    """
    stage_entries(spec)
    checked_workflow(spec)
    if spec.score is not None:
        check_columns(spec, spec.score)
        check_rule_columns(spec)


def answer_of(path: str) -> dict[str, Any]:
    """Return what the DAG parser has to know of a pipeline's file.

    Returns:
        `fault`: why the file is refused before any stage runs, in one line; None where it is not. `stages`: the
        `StageEntry`s of its day as mappings, where some are of other packages; else empty.
    """
    try:
        spec = load_spec(path)
        check_spec(spec)
        stages = stage_entries(spec).values() if spec.stages else ()
    except UserError as e:
        return {"fault": redact_sentence("; ".join(str(e).splitlines())), "stages": []}
    return {"fault": None, "stages": [asdict(entry) for entry in stages]}


def main(argv: Sequence[str] | None = None) -> None:
    """Print a line for each file as soon as it is checked: an object of its path and the answer."""
    for path in sys.argv[1:] if argv is None else argv:
        print(json.dumps({path: answer_of(path)}), flush=True)


if __name__ == "__main__":
    main()
