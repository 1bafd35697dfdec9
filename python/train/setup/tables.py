"""The embedding tables of a training run, with what the planner reckons with."""

from __future__ import annotations

from torch import nn

from headrace import config
from headrace.errors import UserError
from headrace.models.lookups import ModelTables, lookups_of, model_tables, table_name
from headrace.schema import DatasetSchema, Kind


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
        UserError: lookups or settings that do not fit the dataset, or drawn items that nobody draws.
    """
    rows = max(1, train.batch_size // (ranks * train.accumulate))
    drawn = train.negatives
    of_row = 1
    if drawn is not None:
        of_row = -(-drawn.per_positive // rows) if drawn.shared else drawn.per_positive
    tables = model_tables(schema, model, network, train.embeddings, negatives=of_row, rows=rows)
    features = {f.name: f for f in schema.of(Kind.CATEGORICAL)}
    for w in lookups_of(network) or ():
        if w.ids != "negatives":
            continue
        if drawn is None or drawn.form != "candidates":
            raise UserError(
                f"the model compares '{w.feature}' with items that are drawn for each row: set train.negatives, such "
                f"as {{column: {w.feature}, as: candidates, per_positive: 4}}"
            )
        of, column = features[w.feature], features.get(drawn.column)
        if column is not None and table_name(w, of) != table_name(w, column):
            raise UserError(
                f"the model compares '{w.feature}' with items that are drawn, but train.negatives.column is "
                f"'{drawn.column}', whose codes are others'"
            )
    return tables
