"""Saved models without persons: their rows of embeddings become zero, their values leave the vocabulary.

Codes stay assigned. A model is written again beside the old one, shares its unchanged files, and replaces it in one
step. Models on a tracking server are uploaded again from the store, after those have been rewritten.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import ValidationError

from headrace.config import Spec
from headrace.errors import UserError
from headrace.features.functions.keys import arrow_hashes, arrow_ids
from headrace.features.ops.hashing import RawId
from headrace.features.workflow.fitted import SavedWorkflow, table_file, vocabulary_file, workflow_file
from headrace.features.workflow.workflow import Workflow
from headrace.jobs.housekeeping.folders import REGISTERED_SUFFIXES
from headrace.jobs.housekeeping.forget.persons import (
    Persons,
    Place,
    is_blanked,
    parts_of,
    vocabularies_of,
    with_placeholders,
)
from headrace.jobs.housekeeping.workspace_state import WorkspaceState
from headrace.models.registry.versions import Upload, fetched, upload_again, uploads
from headrace.storage import Location

#: A folder with this file is a saved model.
META = "model.json"
_WORKFLOW, _EMBEDDINGS, _DYNAMIC, _DENSE = "workflow", "embeddings", "dynamic", "dense.safetensors"
#: Buffers of models that keep the edges of a graph of their training rows.
_USERS, _ITEMS = "graph_users", "graph_items"


def model_places(state: WorkspaceState, persons: Persons) -> Iterator[Place]:
    """Yield models whose vocabulary has a value, or that have learned a row of it.

    Raises:
        UserError: a model's file is missing or damaged.
    """
    ws = state.ws
    for file in ws.model(state.pipeline, "x", "x").parent.parent.files():
        if file.name != META:
            continue
        folder = file.parent
        model_values, in_graph = find_in_model(state.spec, folder, persons)
        if model_values.rows or model_values.files or in_graph:
            left = "it keeps the graph of its training rows: train its day again, and remove this one"
            left = left if in_graph else ""
            act = partial(_rewrite, folder, model_values) if model_values.rows or model_values.files else None
            rewritten = len(model_values.files) + bool(model_values.rows)
            yield Place("model", ws.name_of(folder), model_values.rows, rewritten, left=left, act=act)


def find_in_model(spec: Spec, folder: Location, persons: Persons) -> tuple[ModelValues, bool]:
    """Return persons' values in a saved model, and whether it keeps a graph with edges of theirs.

    Raises:
        UserError: a file of it is missing or damaged.
    """
    model_values = ModelValues.read(folder, persons)
    graph = _ITEMS if spec.score and persons.column == spec.score.item.key else _USERS
    return model_values, bool(model_values.forgotten) and _has_edges(folder / _DENSE, graph, model_values.forgotten)


@dataclass
class ModelValues:
    """Persons' values and rows in a saved model."""

    #: Rows of embeddings that are not zero.
    rows: int = 0
    #: By table: codes; by table of raw ids: ids.
    codes: dict[str, set[int]] = field(default_factory=dict)
    #: Codes of their values, and of values that were blanked earlier: a graph keeps these.
    forgotten: set[int] = field(default_factory=set)
    ids: dict[str, set[int]] = field(default_factory=dict)
    #: New content of the workflow's files, by path in the model's folder.
    files: dict[str, pa.Table] = field(default_factory=dict)

    @staticmethod
    def read(folder: Location, persons: Persons) -> ModelValues:
        model_values, workflow = ModelValues(), folder / _WORKFLOW
        try:
            saved = SavedWorkflow.model_validate_json(workflow_file(workflow).read_text())
            bound = Workflow(saved.chains, saved.columns, saved.label, saved.carried)
        except (FileNotFoundError, ValidationError) as e:
            raise UserError(
                f"{workflow} cannot be read ({type(e).__name__}): remove the model, or restore it"
            ) from None
        codes = model_values._add_vocabularies(workflow, saved, bound, persons)
        model_values._add_keyed_tables(workflow, saved, bound, persons)
        model_values._add_raw_ids(bound, persons)
        # Late: they import torch.
        if (folder / _EMBEDDINGS).is_dir() and codes:
            from headrace.embeddings.checkpoint.files import read_index
            from headrace.embeddings.checkpoint.shards import count_rows

            tables = [t.name for t in read_index(folder / _EMBEDDINGS).tables]
            model_values.codes = {
                t: c for t in tables for name, c in codes.items() if t == name or t.startswith(f"{name}.")
            }
            model_values.rows += count_rows(folder / _EMBEDDINGS, model_values.codes)
        if (folder / _DYNAMIC).is_dir() and model_values.ids:
            from headrace.embeddings.checkpoint.dynamic import count_ids, saved_tables

            table_names = saved_tables(folder / _DYNAMIC)
            model_values.ids = {
                t: i
                for t in table_names
                for name, i in model_values.ids.items()
                if t == name or t.startswith(f"{name}.")
            }
            model_values.rows += count_ids(folder / _DYNAMIC, model_values.ids)
        return model_values

    def _add_vocabularies(
        self, workflow: Location, saved: SavedWorkflow, bound: Workflow, persons: Persons
    ) -> dict[str, set[int]]:
        codes: dict[str, set[int]] = {}
        for name in vocabularies_of(bound, persons.column) & saved.vocabularies.keys():
            table = pq.read_table(vocabulary_file(workflow, name))
            is_theirs = persons.mask(table.column("value"))
            numbers = table.column("code").to_numpy()
            was_blanked = np.array([is_blanked(v) for v in table.column("value").to_pylist()], np.bool_)
            self.forgotten |= set(numbers[is_theirs | was_blanked].tolist())
            if is_theirs.any():
                codes[name] = set(numbers[is_theirs].tolist())
                values = with_placeholders(table.column("value").to_pylist(), is_theirs, numbers.tolist())
                new = table.set_column(0, table.schema.field(0), pa.array(values, pa.string()))
                self.files[vocabulary_file(workflow, name).below(workflow.parent)] = new
        return codes

    def _add_keyed_tables(self, workflow: Location, saved: SavedWorkflow, bound: Workflow, persons: Persons) -> None:
        """Add keyed tables: the statistics of a person's key become zero."""
        for name in saved.tables:
            chain = bound.chains[int(name.split(".", 1)[0])]
            if persons.column not in chain.columns:
                continue
            table = pq.read_table(table_file(workflow, name))
            keys = table.column("key").to_pylist()
            is_theirs = np.array([not persons.texts.isdisjoint(parts_of(key)) for key in keys], np.bool_)
            if not is_theirs.any():
                continue
            columns: list[Any] = []
            for f, column in zip(table.schema, table.columns, strict=True):
                if f.name == "key":
                    columns.append(pa.array(with_placeholders(keys, is_theirs, range(len(keys))), f.type))
                else:
                    numbers = column.to_pylist()
                    columns.append(pa.array([0 if g else x for g, x in zip(is_theirs, numbers, strict=True)], f.type))
            path = table_file(workflow, name).below(workflow.parent)
            self.files[path] = pa.Table.from_arrays(columns, schema=table.schema)

    def _add_raw_ids(self, bound: Workflow, persons: Persons) -> None:
        for chain in bound.chains:
            for step in chain.steps:
                if not isinstance(step.op, RawId) or persons.column not in step.inputs:
                    continue
                kind = bound.input_type(persons.column)
                values = pa.array(sorted(persons.texts), pa.string())
                values = values.cast(pa.int64()) if kind.element != "string" else values
                hashed = kind.element == "string" or step.op.hash
                ids = arrow_hashes(values, kind) if hashed else arrow_ids(values, kind).to_numpy()
                for name in chain.outputs:
                    if persons.column in chain.sources[name]:
                        self.ids[name] = set(ids.tolist())


def _has_edges(dense: Location, name: str, codes: set[int]) -> bool:
    """Return whether a graph that a model keeps has an edge of one of these codes."""
    if not dense.is_file() or name.encode() not in dense.read_bytes():
        return False
    from safetensors.numpy import load

    graphs = (v for k, v in load(dense.read_bytes()).items() if k.rpartition(".")[2] == name)
    return any(bool(np.isin(graph, sorted(codes)).any()) for graph in graphs)


def _rewrite(folder: Location, model_values: ModelValues) -> None:
    from headrace.embeddings.checkpoint.dynamic import remove_ids
    from headrace.embeddings.checkpoint.shards import zero_rows

    previous_meta = (folder / META).read_bytes()
    meta = json.loads(previous_meta)
    with folder.new_folder() as new:
        done = {META, *model_values.files}
        for path, table in model_values.files.items():
            with (new / path).new_file() as written:
                pq.write_table(table, written, compression="zstd")
        for part, selected, write in (
            (_EMBEDDINGS, model_values.codes, zero_rows),
            (_DYNAMIC, model_values.ids, remove_ids),
        ):
            if selected and (folder / part).is_dir():
                write(folder / part, new / part, selected)
                done |= {file.below(folder) for file in (folder / part).files()}
        for file in folder.files():
            if file.below(folder) not in done:
                (new / file.below(folder)).copy_from(file, share=True)
        meta["files"] = [_record(new, r) for r in meta["files"]]
        meta["saved_as"] = meta.get("saved_as") or hashlib.sha256(previous_meta).hexdigest()
        (new / META).put_text(json.dumps(meta, indent=1) + "\n")


def _record(folder: Location, record: Mapping[str, Any]) -> dict[str, Any]:
    content = (folder / record["name"]).read_bytes()
    return {**record, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def upload_places(
    state: WorkspaceState, persons: Persons, models: Sequence[Place], looked: set[str]
) -> Iterator[Place]:
    """Yield uploads that have values: judged by the store's model, else by the downloaded artifact.

    Args:
        state: the pipeline.
        persons: the persons.
        models: places of the store's models that have values.
        looked: runs whose artifact has none, from an earlier look under the same lock; more are added.

    Raises:
        UserError: the server cannot be used, or a model is damaged.
    """
    ws = state.ws
    stored = {place.name: place for place in models}
    for suffix in REGISTERED_SUFFIXES:
        for upload in uploads(ws, state.pipeline + suffix):
            if upload.run_id in looked:
                continue
            rows, is_theirs, in_graph = 0, upload.is_begun, False
            if not upload.is_begun:
                if known := [stored[name] for name in _in_store(state, upload) if name in stored]:
                    rows, is_theirs = sum(p.rows for p in known), any(p.rewritten for p in known)
                    in_graph = any(p.left for p in known)
                else:
                    rows, is_theirs, in_graph = _in_artifact(state, upload, persons)
            if not is_theirs and not in_graph:
                looked.add(upload.run_id)
                continue
            name = (
                f"{upload.name} version {upload.version}"
                if upload.version
                else f"a run of {upload.name} without a version"
            )
            can = is_theirs and not upload.is_deleted and upload.source is not None and upload.source.is_dir()
            advice = (
                f"it cannot be written again: delete its run {upload.run_id} with its artifacts (MLflow's delete_run, "
                f"then mlflow gc on the server)"
            )
            left = advice if in_graph or not can else ""
            act = partial(upload_again, ws, upload) if can else None
            yield Place("model", f"{name} on {ws.registry_server}", rows, int(can), left=left, act=act)


def _in_store(state: WorkspaceState, upload: Upload) -> list[str]:
    """Return the names of the saved models that an artifact was made of, as far as they are in the store."""
    # Late: it imports torch.
    from headrace.models.predictor import needed_models

    try:
        return [] if upload.source is None else [state.ws.name_of(folder) for folder in needed_models(upload.source)]
    except UserError:  # an incomplete model: opening the artifact reports it in detail
        return []


def _in_artifact(state: WorkspaceState, upload: Upload, persons: Persons) -> tuple[int, bool, bool]:
    """Return (rows, whether the artifact has values, whether it keeps a graph with edges of theirs)."""
    rows, is_theirs, in_graph = 0, False, False
    with fetched(state.ws, upload) as artifact:
        for file in artifact.files():
            if file.name == META:
                model_values, graph = find_in_model(state.spec, file.parent, persons)
                rows, in_graph = rows + model_values.rows, in_graph or graph
                is_theirs = is_theirs or bool(model_values.rows or model_values.files)
    return rows, is_theirs, in_graph
