"""Saved models: a person's row of an embedding becomes zero, the value leaves the vocabulary, the code stays given.

A model is written again beside the old one, files that stay as they are shared, and takes its place in one step.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import ValidationError

from headrace.config import Spec
from headrace.errors import UserError
from headrace.features.functions.ids import arrow_hashes, arrow_ids
from headrace.features.ops.raw_id import RawId
from headrace.features.workflow.saved import SavedWorkflow, file_of, table_file, vocabulary_file
from headrace.features.workflow.workflow import Workflow
from headrace.housekeeping.forget.persons import Persons
from headrace.housekeeping.forget.place import Place
from headrace.housekeeping.forget.values import blanked, is_blanked, parts_of, vocabularies_of
from headrace.housekeeping.workspace_state import WorkspaceState
from headrace.storage import Location

#: A folder with this file is a saved model.
META = "model.json"
_WORKFLOW, _EMBEDDINGS, _DYNAMIC, _DENSE = "workflow", "embeddings", "dynamic", "dense.safetensors"
#: Buffers of models that keep the edges of a graph of their training rows.
_USERS, _ITEMS = "graph_users", "graph_items"


def model_places(state: WorkspaceState, persons: Persons) -> Iterator[Place]:
    """Models that know a value, or have learned a row of it.

    Raises:
        UserError: a model's file is missing or damaged.
    """
    ws = state.ws
    for file in ws.model(state.pipeline, "x", "x").parent.parent.files():
        if file.name != META:
            continue
        folder = file.parent
        found, in_graph = look_into(state.spec, folder, persons)
        if found.rows or found.files or in_graph:
            left = "it keeps the graph of its training rows: train its day again, and remove this one"
            left = left if in_graph else ""
            act = partial(_rewrite, folder, found) if found.rows or found.files else None
            rewritten = len(found.files) + bool(found.rows)
            yield Place("model", ws.name_of(folder), found.rows, rewritten, left=left, act=act)


def look_into(spec: Spec, folder: Location, persons: Persons) -> tuple[Found, bool]:
    """What a saved model has of persons, and whether it keeps a graph with edges of theirs.

    Raises:
        UserError: a file of it is missing or damaged.
    """
    found = Found.of(folder, persons)
    graph = _ITEMS if spec.score and persons.column == spec.score.item.key else _USERS
    return found, bool(found.forgotten) and _has_edges(folder / _DENSE, graph, found.forgotten)


@dataclass
class Found:
    """What a saved model has of persons."""

    #: Rows of embeddings that are not zero.
    rows: int = 0
    #: By table: codes; by table of raw ids: ids.
    codes: dict[str, set[int]] = field(default_factory=dict)
    #: Codes of their values, and of those that went before: a graph keeps these.
    forgotten: set[int] = field(default_factory=set)
    ids: dict[str, set[int]] = field(default_factory=dict)
    #: Files of the workflow, by path in the model's folder, as they are to be.
    files: dict[str, pa.Table] = field(default_factory=dict)

    @staticmethod
    def of(folder: Location, persons: Persons) -> Found:
        found, workflow = Found(), folder / _WORKFLOW
        try:
            saved = SavedWorkflow.model_validate_json(file_of(workflow).read_text())
            bound = Workflow(saved.chains, saved.columns, saved.label, saved.carried)
        except (FileNotFoundError, ValidationError) as e:
            raise UserError(
                f"{workflow} cannot be read ({type(e).__name__}): remove the model, or restore it"
            ) from None
        codes = found._of_vocabularies(workflow, saved, bound, persons)
        found._of_tables(workflow, saved, bound, persons)
        found._of_raw_ids(bound, persons)
        # Late: they import torch.
        if (folder / _EMBEDDINGS).is_dir() and codes:
            from headrace.embeddings.checkpoint.index import read_index
            from headrace.embeddings.checkpoint.zero_rows import count_rows

            tables = [t.name for t in read_index(folder / _EMBEDDINGS).tables]
            found.codes = {t: c for t in tables for name, c in codes.items() if t == name or t.startswith(f"{name}.")}
            found.rows += count_rows(folder / _EMBEDDINGS, found.codes)
        if (folder / _DYNAMIC).is_dir() and found.ids:
            from headrace.embeddings.checkpoint.dynamic import count_ids, saved_tables

            there = saved_tables(folder / _DYNAMIC)
            found.ids = {t: i for t in there for name, i in found.ids.items() if t == name or t.startswith(f"{name}.")}
            found.rows += count_ids(folder / _DYNAMIC, found.ids)
        return found

    def _of_vocabularies(
        self, workflow: Location, saved: SavedWorkflow, bound: Workflow, persons: Persons
    ) -> dict[str, set[int]]:
        codes: dict[str, set[int]] = {}
        for name in vocabularies_of(bound, persons.column) & saved.vocabularies.keys():
            table = pq.read_table(vocabulary_file(workflow, name))
            gone = persons.mask(table.column("value"))
            numbers = table.column("code").to_numpy()
            before = np.array([is_blanked(v) for v in table.column("value").to_pylist()], np.bool_)
            self.forgotten |= set(numbers[gone | before].tolist())
            if gone.any():
                codes[name] = set(numbers[gone].tolist())
                values = blanked(table.column("value").to_pylist(), gone, numbers.tolist())
                new = table.set_column(0, table.schema.field(0), pa.array(values, pa.string()))
                self.files[vocabulary_file(workflow, name).below(workflow.parent)] = new
        return codes

    def _of_tables(self, workflow: Location, saved: SavedWorkflow, bound: Workflow, persons: Persons) -> None:
        """Keyed tables: what was learned of a key becomes zero."""
        for name in saved.tables:
            chain = bound.chains[int(name.split(".", 1)[0])]
            if persons.column not in chain.columns:
                continue
            table = pq.read_table(table_file(workflow, name))
            keys = table.column("key").to_pylist()
            gone = np.array([not persons.texts.isdisjoint(parts_of(key)) for key in keys], np.bool_)
            if not gone.any():
                continue
            columns: list[Any] = []
            for f, column in zip(table.schema, table.columns, strict=True):
                if f.name == "key":
                    columns.append(pa.array(blanked(keys, gone, range(len(keys))), f.type))
                else:
                    numbers = column.to_pylist()
                    columns.append(pa.array([0 if g else x for g, x in zip(gone, numbers, strict=True)], f.type))
            path = table_file(workflow, name).below(workflow.parent)
            self.files[path] = pa.Table.from_arrays(columns, schema=table.schema)

    def _of_raw_ids(self, bound: Workflow, persons: Persons) -> None:
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
    """Whether a graph that a model keeps has an edge of one of these codes."""
    if not dense.is_file() or name.encode() not in dense.read_bytes():
        return False
    from safetensors.numpy import load

    graphs = (v for k, v in load(dense.read_bytes()).items() if k.rpartition(".")[2] == name)
    return any(bool(np.isin(graph, sorted(codes)).any()) for graph in graphs)


def _rewrite(folder: Location, found: Found) -> None:
    from headrace.embeddings.checkpoint.dynamic import remove_ids
    from headrace.embeddings.checkpoint.zero_rows import zero_rows

    said = (folder / META).read_bytes()
    meta = json.loads(said)
    with folder.new_folder() as new:
        done = {META, *found.files}
        for path, table in found.files.items():
            with (new / path).new_file() as written:
                pq.write_table(table, written, compression="zstd")
        for part, wanted, write in ((_EMBEDDINGS, found.codes, zero_rows), (_DYNAMIC, found.ids, remove_ids)):
            if wanted and (folder / part).is_dir():
                write(folder / part, new / part, wanted)
                done |= {file.below(folder) for file in (folder / part).files()}
        for file in folder.files():
            if file.below(folder) not in done:
                (new / file.below(folder)).copy_from(file, share=True)
        meta["files"] = [_record(new, r) for r in meta["files"]]
        meta["saved_as"] = meta.get("saved_as") or hashlib.sha256(said).hexdigest()
        (new / META).put_text(json.dumps(meta, indent=1) + "\n")


def _record(folder: Location, record: Mapping[str, Any]) -> dict[str, Any]:
    content = (folder / record["name"]).read_bytes()
    return {**record, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
