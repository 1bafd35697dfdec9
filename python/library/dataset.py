"""Batches of a dataset for torch, in the order in which headrace's training reads them."""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch
from pydantic import ValidationError
from torch.utils.data import IterableDataset, get_worker_info

from headrace.comm import World
from headrace.compute.jagged import JaggedArray
from headrace.config import Train
from headrace.config.schema import DatasetSchema, Kind
from headrace.dataset.batches import Batch
from headrace.dataset.layout import SplitLayout, open_split
from headrace.dataset.loaders import EvalLoader, TrainLoader
from headrace.embeddings.jagged import JaggedTensor
from headrace.errors import UserError
from headrace.features.workflow.fitted import SavedWorkflow, workflow_file
from headrace.storage import local

_MOST_STREAMS = 8

#: Of each feature by name: float32 [B] (a number), int64 [B] (codes or raw ids), int64 [B, length] (of a list, padded
#: with 0; or a JaggedTensor of codes int32 or raw ids int64), or float32 [B, length]; the labels, float32 [B].
Sample = tuple[dict[str, torch.Tensor | JaggedTensor], torch.Tensor]


def load_dataset(
    path: str | os.PathLike[str],
    split: str = "train",
    *,
    batch_size: int = 8_192,
    shuffle: bool | None = None,
    seed: int = 1,
    rank: int = 0,
    world_size: int = 1,
    streams: int | None = None,
    jagged: bool = False,
) -> Dataset:
    """Open a split of a dataset (of `FittedWorkflow.write_dataset`, or of the stage features) as a torch
    IterableDataset.

        for features, labels in hr.load_dataset("dataset", batch_size=1024): ...

    Batches are made by threads of the loader, so give it to a DataLoader with `batch_size=None, num_workers=0`, or go
    over it directly.

    Args:
        path: the dataset's folder.
        split: train, valid, test or rank.
        batch_size: rows of a step over all ranks.
        shuffle: rows in an order that is a function of seed and epoch, in whole batches; False: each row once, in
            stored order. None: shuffle `train`.
        seed: of the order.
        rank: this process' number among `world_size`.
        world_size: how many processes share the steps.
        jagged: lists of codes and raw ids as they are, any number of each row's, for an EmbeddingCollection; False:
            padded with 0.
        streams: how many independent streams the split is read as; with the same number the same batches come whatever
            `world_size`. None: as many as fit, at most 8.

    Raises:
        UserError: no dataset or split there, a damaged file, sizes that do not divide.
    """
    folder = local(path)
    try:
        schema = SavedWorkflow.model_validate_json(workflow_file(folder / "workflow").read_text()).dataset_schema
    except FileNotFoundError:
        raise UserError(f"{folder} is no dataset: it has no workflow/workflow.json") from None
    except (ValidationError, UnicodeDecodeError) as e:
        raise UserError(f"{folder}/workflow/workflow.json is damaged: {' '.join(str(e).split())[:200]}") from None
    layout = open_split(folder, split, schema)
    shuffle = split == "train" if shuffle is None else shuffle
    if streams is None:
        fits = (n for n in range(min(_MOST_STREAMS, len(layout.row_groups)), 0, -1) if not batch_size % n)
        streams = next((n for n in fits if not n % world_size), world_size)
    for size, argument in ((batch_size, "batch_size"), (world_size, "world_size")):
        if size < 1:
            raise UserError(f"{argument}={size}: it is at least 1")
    if batch_size % streams or streams % world_size:
        raise UserError(
            f"batch_size={batch_size} must be a multiple of streams={streams}, and that of world_size={world_size}"
        )
    return Dataset(layout, schema, batch_size, shuffle, seed, World(rank=rank, size=world_size), streams, jagged)


class Dataset(IterableDataset[Sample]):
    """See `load_dataset`. Each pass over it is an epoch; `set_epoch` says which."""

    def __init__(
        self,
        layout: SplitLayout,
        schema: DatasetSchema,
        batch_size: int,
        shuffle: bool,
        seed: int,
        world: World,
        streams: int,
        jagged: bool = False,
    ) -> None:
        self.layout, self.schema, self.batch_size, self.shuffle = layout, schema, batch_size, shuffle
        self.seed, self.world, self.streams, self.jagged = seed, world, streams, jagged
        self._epoch = 0

    @property
    def rows(self) -> int:
        """Rows of the split, over all ranks."""
        return self.layout.rows

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass, which decides its order, as torch's DistributedSampler does."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[Sample]:
        if get_worker_info() is not None:
            raise UserError(
                "the loader has threads of its own: use DataLoader(dataset, batch_size=None, num_workers=0)"
            )
        epoch, self._epoch = self._epoch, self._epoch + 1
        if not self.shuffle:
            with EvalLoader(
                self.layout, self.schema, self.world, batch_size=self.batch_size, streams=self.streams
            ) as loader:
                yield from (self._sample(batch) for batch in loader)
            return
        train = Train(ranks=1, batch_size=self.batch_size, streams=self.streams, seed=self.seed)
        first = TrainLoader(self.layout, self.schema, train, self.world)
        steps = first.steps_per_epoch
        if epoch:
            first.close()
            first = TrainLoader(self.layout, self.schema, train, self.world, start_step=epoch * steps)
        with first as source:
            for _ in range(steps):
                yield self._sample(next(source))

    def _sample(self, batch: Batch) -> Sample:
        features: dict[str, torch.Tensor | JaggedTensor] = {}
        numbers, column = torch.from_numpy(batch.continuous), 0
        for feature in self.schema.of(Kind.CONTINUOUS):
            part = numbers[:, column : column + feature.length]
            features[feature.name] = part if feature.is_list else part[:, 0]
            column += feature.length
        codes = iter(torch.from_numpy(batch.codes).unbind(1))
        for feature in self.schema.of(Kind.CATEGORICAL):
            if feature.is_list:
                features[feature.name] = self._list(batch.lists[feature.name], feature.length)
            else:
                features[feature.name] = next(codes)
        return features, torch.from_numpy(batch.labels)

    def _list(self, lists: JaggedArray, length: int) -> torch.Tensor | JaggedTensor:
        if self.jagged:
            return JaggedTensor(torch.from_numpy(lists.values), torch.from_numpy(lists.offsets))
        return torch.from_numpy(lists.to_padded(length)).long()
