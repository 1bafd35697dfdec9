"""A network that starts from trained models of other pipelines, one for each of its parts: `train.pretrained`.

The network has `start_from(states)`: the dense parts of these models, state dicts by part. Embedding tables are taken
over by name.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from torch import Tensor

from headrace.embeddings.checkpoint.shards import load_shards
from headrace.embeddings.checkpoint.tensors import load_tensors, record_of
from headrace.errors import UserError
from headrace.features.workflow.saved import vocabulary_file
from headrace.models.predictor import read_meta
from headrace.models.saved import DENSE, EMBEDDINGS, read_card
from headrace.models.sharded_model import ShardedModel
from headrace.schema import DatasetSchema, Kind
from headrace.storage import Location

log = logging.getLogger("headrace.train")


def check_pretrained(models: Mapping[str, Location], dataset: Location, schema: DatasetSchema) -> None:
    """Raise UserError where a model's codes do not mean what the dataset's mean: they are of other vocabularies."""
    for part, folder in models.items():
        read_meta(folder)
        saved = {r.name: r.sha256 for r in read_card(folder).files}
        for name in sorted({f.vocabulary or f.name for f in schema.of(Kind.CATEGORICAL) if not f.dynamic}):
            path = vocabulary_file(dataset / "workflow", name)
            if not path.is_file():
                continue
            file = path.below(dataset)
            if saved.get(file) != record_of(dataset, file).sha256:
                raise UserError(
                    f"train.pretrained.{part}: {folder} has another vocabulary of '{name}' than the dataset, so its "
                    f"rows are of other values: train it on the same source and days"
                )


def start_from_pretrained(model: ShardedModel, models: Mapping[str, Location]) -> None:
    """Take over the models' tables and dense parts. Speaks to no other rank.

    Raises:
        UserError: the network starts from no models, from others, or they are of other shapes.
    """
    take = getattr(model.network, "start_from", None)
    if take is None:
        raise UserError(f"train.pretrained: {type(model.network).__name__} does not start from other models")
    states: dict[str, Mapping[str, Tensor]] = {}
    missing = {t.name for t in model.embeddings.plan.tables}
    for part, folder in sorted(models.items()):
        card = read_card(folder)
        states[part] = load_tensors(folder, next(r for r in card.files if r.name == DENSE))
        missing -= load_shards(model.embeddings, folder / EMBEDDINGS, with_optimizer=False).tables.keys()
    if missing:
        raise UserError(f"train.pretrained: none of the models has table {', '.join(sorted(missing))}")
    try:
        take(states)
    except (KeyError, RuntimeError, AttributeError) as e:
        raise UserError(f"train.pretrained: the models do not fit the network: {e}") from None
    log.info("starting from %s", ", ".join(f"{part} {folder}" for part, folder in sorted(models.items())))
