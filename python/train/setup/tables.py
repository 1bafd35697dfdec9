"""The embedding tables of a training run, with what the planner reckons with."""

from __future__ import annotations

from torch import nn

from headrace import config
from headrace.models.tables import ModelTables, model_tables
from headrace.schema import DatasetSchema


def trained_tables(
    schema: DatasetSchema, model: config.Model, network: nn.Module, train: config.Train, ranks: int
) -> ModelTables:
    """The tables of a model, whose lookups say how many ids a row has.

    Args:
        schema: the dataset's.
        model: the model's settings.
        network: made of them.
        train: the run's settings.
        ranks: over which a step's rows are spread.

    Raises:
        UserError: lookups or settings that do not fit the dataset.
    """
    rows = max(1, train.batch_size // (ranks * train.accumulate))
    return model_tables(schema, model, network, train.embeddings, rows=rows)
