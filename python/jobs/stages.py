"""Stages by name. Each is imported when asked for, so that whoever needs one does not pay for all."""

from __future__ import annotations

from importlib import import_module
from typing import cast

from headrace.config import Spec
from headrace.errors import UserError
from headrace.stage import Stage
from headrace.stages import STAGES


def load_stage(name: str) -> Stage:
    """Load the stage of that name (one of `headrace.stages.ORDER`).

    Raises:
        KeyError: there is none.
    """
    module, _, factory = STAGES[name].implementation.partition(":")
    return cast(Stage, getattr(import_module(module), factory)())


def features_stage() -> Stage:
    """Return the stage `features` with the counts of its columns that the stage `drift` judges."""
    from headrace.features.build.stage import BuildFeatures
    from headrace.quality.drift.count_day import count_day

    return BuildFeatures(count_day)


def require_stage(spec: Spec, name: str) -> None:
    """See that a pipeline has a stage.

    Raises:
        UserError: it has not.
    """
    if not STAGES[name].applies(spec):
        raise UserError(f"pipeline '{spec.pipeline}' has no '{STAGES[name].section}' section, so it has no such stage")
