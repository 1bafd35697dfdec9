"""The day on whose rows each later day's model is measured (`retrain.forgetting_day`): what the models forget.

A measurement beside the training: it is no input of it, and where it cannot be made, training goes on without.
"""

from __future__ import annotations

import logging

from headrace.config import Spec
from headrace.errors import UserError
from headrace.manifest import Manifest
from headrace.schema import DatasetSchema
from headrace.train.setup.older_dataset import misfit
from headrace.workspace import Workspace

log = logging.getLogger("headrace.train")


def forgetting_day(spec: Spec, ds: str) -> str | None:
    """The day on whose rows the model of `ds` is to be measured, too; None: on no other day's."""
    day = None if spec.retrain is None else spec.retrain.forgetting_day
    return None if day is None or day >= ds else day


def find_forgetting_dataset(ws: Workspace, spec: Spec, ds: str, schema: DatasetSchema | None) -> str | None:
    """The name in the workspace of the dataset of that day, where it is there and its codes mean the same.

    A dataset that is asked for and cannot be measured on is named in the log with the reason.
    """
    day = forgetting_day(spec, ds)
    if day is None or schema is None:
        return None
    try:
        manifest = Manifest.load(ws.manifest(spec.pipeline, day, "features"))
        reason = misfit(ws, manifest, schema)
    except UserError as e:
        manifest, reason = None, str(e)
    if reason is not None or manifest is None:
        log.warning("not measured on the rows of %s: %s", day, reason)
        return None
    return manifest.output("dataset").name
