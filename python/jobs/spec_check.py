"""Checks of a spec that need no data, made before the first stage begins.

Imports neither Spark nor torch.
"""

from __future__ import annotations

from headrace.config import Spec
from headrace.features.build.plan import checked_workflow
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
