"""A saved model with embeddings: one folder with everything that scoring needs.

    model.json          kind, model settings, dataset schema, pipeline, ds, key, metrics, checksums of the dense parts
    dense.safetensors   the state dict of the dense part
    embeddings/         rows (and optimizer states, for a warm start) by table and range (embeddings.checkpoint), or
                        those that changed since another saved model, whose folder model.json names (`base`)
    dynamic/            rows of tables of raw ids, where there are any (embeddings.checkpoint)
    workflow/           the fitted features that it was trained on

Nothing in it is code, and nothing depends on the number of ranks that wrote it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, ValidationError, model_serializer
from torch import Tensor

from headrace import __version__, config
from headrace.comm.base import Collective, LocalCollective
from headrace.config.schema import DatasetSchema
from headrace.embeddings.checkpoint.changes import changes_base, save_changed_rows
from headrace.embeddings.checkpoint.dynamic import load_dynamic, save_dynamic
from headrace.embeddings.checkpoint.files import (
    FileRecord,
    load_tensors,
    read_checked,
    read_index,
    record_of,
    save_tensors,
    shared_directory,
    write_index,
)
from headrace.embeddings.checkpoint.shards import Loaded, load_shards, save_shards
from headrace.embeddings.dynamic.spec import dynamic_features
from headrace.errors import UserError
from headrace.models.sharded_model import ShardedModel
from headrace.storage import Location

META = "model.json"
DENSE = "dense.safetensors"
EMBEDDINGS = "embeddings"
DYNAMIC = "dynamic"
WORKFLOW = "workflow"


class ModelCard(BaseModel):
    """model.json of a model with embeddings."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True, protected_namespaces=())

    #: `model.class` of the spec.
    kind: str = "dlrm"
    pipeline: str
    ds: str
    key: str
    metrics: dict[str, float | None]
    model: config.Model
    dataset_schema: DatasetSchema = Field(alias="schema")
    seed: int
    #: `train.tasks`, the labels of the outputs.
    tasks: Mapping[str, config.Task] = Field(default_factory=dict)
    #: Folder of the model to which the embeddings' rows are changes, relative to this folder; None: all rows are here.
    base: str | None = None
    #: SHA-256 of the record as it was first saved, if `headrace forget` has removed a value and its rows since.
    #: References to the model by that digest stay valid.
    saved_as: str | None = None
    #: The dense part and the workflow's files, relative to the model's folder.
    files: tuple[FileRecord, ...]
    code_version: str = __version__

    @model_serializer(mode="wrap")
    def _without_no_tasks(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out fields without a value: records without them keep the form that they had before these fields
        existed.
        """
        fields: dict[str, Any] = serialize(self)
        if not self.tasks:
            fields.pop("tasks")
        if self.base is None:
            fields.pop("base")
        if self.saved_as is None:
            fields.pop("saved_as")
        return fields


@dataclass(frozen=True)
class Changes:
    """Base of a saved model of changed rows.

    Attributes:
        model: the folder of the model that training started from.
        aged: factor of `age_state` at the start; 1 if it was not called.
    """

    model: Location
    aged: float


def save_model(
    final: Location,
    model: ShardedModel,
    *,
    workflow: Location,
    pipeline: str,
    ds: str,
    key: str,
    metrics: Mapping[str, float | None],
    with_optimizer: bool = True,
    changes: Changes | None = None,
) -> None:
    """Write a saved model. Collective: all ranks call it with the same arguments; they share the file system.

    The folder appears as `final` in one step when all ranks have written; an earlier one is replaced.

    Args:
        final: the model's folder.
        model: the model; each rank has its shards.
        workflow: folder of the dataset's fitted workflow, which is copied.
        pipeline: the pipeline's name.
        ds: the day.
        key: the training run's key.
        metrics: results of the evaluation; None for metrics without a value.
        with_optimizer: whether to save the embeddings' optimizer states too, if there is an optimizer. They are in
            files that scoring does not read, and the next day's training can continue with them.
        changes: the model that training started from, to save only the rows that changed; None: all rows.

    Raises:
        UserError: the workflow's folder is missing.
    """
    embeddings = model.embeddings
    chief = embeddings.collective.world.is_chief
    with shared_directory(final, embeddings.collective) as folder:
        states = with_optimizer and embeddings.optimizer is not None
        if changes is None:
            save_shards(embeddings, folder / EMBEDDINGS, states)
        else:
            base_folder = changes.model / EMBEDDINGS
            base = changes_base(base_folder, final / EMBEDDINGS, changes.aged)
            save_changed_rows(embeddings, folder / EMBEDDINGS, base_folder, base, states)
        if model.dynamic is not None:
            save_dynamic(model.dynamic, folder / DYNAMIC)
        embeddings.collective.barrier()
        if chief:
            if dynamic_features(model.schema):  # the network may look up none of them
                (folder / DYNAMIC).make_dir()
            if not workflow.is_dir():
                raise UserError(f"the dataset has no workflow folder {workflow}: run the features stage again")
            write_index(folder / EMBEDDINGS)
            (folder / WORKFLOW).copy_from(workflow)
            copied = [p.below(folder) for p in (folder / WORKFLOW).files()]
            dense = save_tensors(folder / DENSE, model.dense_state())
            card = ModelCard(
                kind=model.config.kind,
                pipeline=pipeline,
                ds=ds,
                key=key,
                metrics=dict(metrics),
                model=model.config,
                seed=model.seed,
                tasks=model.tasks.specs,
                dataset_schema=model.schema,
                base=None if changes is None else changes.model.seen_from(final),
                files=(dense, *(record_of(folder, name) for name in copied)),
            )
            (folder / META).put_text(card.model_dump_json(by_alias=True, indent=1) + "\n")


def read_card(folder: Location) -> ModelCard:
    """Read model.json of a saved model with embeddings.

    Raises:
        UserError: it is missing, damaged, or another kind of model's.
    """
    path = folder / META
    try:
        return ModelCard.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        raise UserError(f"{folder} is not a saved model: {META} is missing") from None
    except ValidationError as e:
        first = e.errors()[0]
        location = ".".join(str(p) for p in first["loc"])
        raise UserError(
            f"{path} is not the record of a saved model with embeddings: {location}: {first['msg']}"
        ) from None


def load_model(
    folder: Location, collective: Collective | None = None, device: str | torch.device = "cpu"
) -> ShardedModel:
    """Open a saved model with embeddings, in evaluation mode, on any number of ranks; each reads its own rows.

    Args:
        folder: written by `save_model`.
        collective: the ranks to spread the tables over; default this process alone.
        device: of the tables and the dense part.

    Raises:
        UserError: a file is missing or damaged; names it.
    """
    card = read_card(folder)
    ranks = collective or LocalCollective()
    model = ShardedModel(card.dataset_schema, card.model, ranks, card.seed, device=device, tasks=card.tasks)
    check_tables(restore(model, folder, with_optimizer=False), folder)
    check_workflow(folder, card)
    return model.eval()


def check_tables(loaded: Loaded, folder: Location) -> None:
    """Raise UserError where tables of a saved model are missing or superfluous."""
    if loaded.new_rows or loaded.unused:
        raise UserError(f"{folder / EMBEDDINGS} does not hold the tables of {folder / META}: the folder is damaged")


def check_workflow(folder: Location, card: ModelCard, most_bytes: int | None = None) -> None:
    """Compare the workflow's files of at most `most_bytes` (None: all files) with their checksums.

    Raises:
        UserError: a file is missing or damaged.
    """
    for record in card.files:
        if record.name != DENSE and (most_bytes is None or record.bytes <= most_bytes):
            read_checked(folder, record)


def has_state_of(folder: Location, kind: str) -> bool:
    """Return whether a saved model has the embeddings' states of this kind of optimizer.

    Raises:
        UserError: the folder's index is missing or damaged.
    """
    optimizer = read_index(folder / EMBEDDINGS).optimizer
    return optimizer is not None and optimizer.kind == kind


def restore(model: ShardedModel, folder: Location, with_optimizer: bool) -> Loaded:
    """Load a saved model's rows and dense weights into a model of the same shape, whose tables may have grown.

    No communication with other ranks. Buffers that the model computed from its own training rows stay. With
    `with_optimizer` the embeddings' optimizer states are loaded too (call `configure_optimizer` first).

    Raises:
        UserError: a file is missing or damaged, or the shapes differ.
    """
    card = read_card(folder)
    dense = _fitting_dense(model, folder, card)
    loaded = load_shards(model.embeddings, folder / EMBEDDINGS, with_optimizer)
    if model.dynamic is not None:
        load_dynamic(model.dynamic, folder / DYNAMIC, with_optimizer)
    model.load_dense_state(dense)
    return loaded


def restore_dense(model: ShardedModel, folder: Location, card: ModelCard) -> None:
    """Load a saved model except its tables into a model of the same shape, for prediction.

    Raises:
        UserError: a file is missing or damaged, or the shapes differ.
    """
    model.load_dense_state(_fitting_dense(model, folder, card))


def _fitting_dense(model: ShardedModel, folder: Location, card: ModelCard) -> dict[str, Tensor]:
    """Read the dense weights of a saved model, for a model of the same shape."""
    dense = load_tensors(folder, next(r for r in card.files if r.name == DENSE))
    state = model.dense_state()
    if model.has_observed:
        dense |= {name: state[name] for name in model.observed}
    expected = {name: list(t.shape) for name, t in state.items() if name not in model.observed}
    saved = {name: list(t.shape) for name, t in dense.items() if name not in model.observed}
    if expected != saved:
        differ = sorted(n for n in expected.keys() | saved.keys() if expected.get(n) != saved.get(n))
        first = differ[0]
        raise UserError(
            f"{folder / DENSE} does not fit the model: '{first}' is {saved.get(first)} there and {expected.get(first)} "
            f"here ({len(differ)} of {len(expected)} tensors differ): its features or model settings are others"
        )
    return dense
