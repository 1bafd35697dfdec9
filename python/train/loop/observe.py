"""A network that looks at the training rows before the first step, such as for the graph that it works on."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from headrace.dataset.loader.loaders import EvalLoader
from headrace.dataset.parquet.layout import SplitLayout
from headrace.models.categorical import CategoricalBatch
from headrace.models.sharded_model import ShardedModel
from headrace.train.micro_batch import MicroBatch
from headrace.world import World

#: Rows that a network sees at a time.
_ROWS = 65_536


def observe_training_rows(model: ShardedModel, train: SplitLayout) -> None:
    """Show a network that has `observe` all rows of the split, each once, in one order on all ranks.

    Each rank reads the whole split, so that nothing travels.
    """
    if not hasattr(model.network, "observe"):
        return

    def rows() -> Iterator[tuple[Tensor, CategoricalBatch, Tensor]]:
        with EvalLoader(train, model.schema, World(), batch_size=_ROWS, streams=1) as source:
            for batch in source:
                found = MicroBatch.of(batch)
                yield found.continuous, found.categorical, found.labels

    model.observe(rows())
