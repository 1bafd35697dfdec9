"""What a model says of whole rows: pairs of a user and an item with all columns of the features beside them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headrace.errors import UserError
from headrace.features.workflow.fitted import FittedWorkflow
from headrace.models.predictor import Predictor
from headrace.score.rank.pair_features import BLOCK_PAIRS, Columns, PairFeatures


def features_of_rows(
    fitted: FittedWorkflow, batch: pa.RecordBatch, context: Mapping[str, pa.Scalar]
) -> Iterator[Columns]:
    """The features of rows, in blocks of bounded size, in their order.

    Args:
        fitted: the workflow that the model was trained on.
        batch: the columns that the features read, and perhaps others.
        context: constants for columns that `batch` lacks.

    Raises:
        UserError: a column is missing or of another type.
    """
    missing = [c for c in fitted.input_columns if c not in batch.schema.names and c not in context]
    if missing:
        raise UserError(
            f"the features of the model read {', '.join(repr(c) for c in missing)}, which the rows lack "
            f"(they have: {', '.join(batch.schema.names)})"
        )
    features = PairFeatures(tuple(batch.schema.names), (), context, fitted)
    for start in range(0, batch.num_rows, BLOCK_PAIRS):
        yield features.row_columns(batch.slice(start, BLOCK_PAIRS))


def predict_rows(
    predictor: Predictor, fitted: FittedWorkflow, batch: pa.RecordBatch, context: Mapping[str, pa.Scalar]
) -> NDArray[np.float32]:
    """What the model says of each row, in blocks of bounded size: float32 [rows].

    Args:
        predictor: the model.
        fitted, batch, context: see `features_of_rows`.

    Raises:
        UserError: a column is missing or of another type, or the model gives what is no number.
    """
    parts = [predictor.predict(columns) for columns in features_of_rows(fitted, batch, context)]
    out = np.concatenate(parts) if parts else np.empty(0, np.float32)
    if not np.isfinite(out).all():
        raise UserError("the model gives scores that are no numbers; train it again (a lower rate?)")
    return out
