"""Two stages in one request: a user's vector, the items nearest to it, a filter, and a ranking model's order of them.

RETRIEVAL.query.features, RETRIEVAL.query     raw columns of users to vectors
NAME.index                                    the nearest items of a catalogue
NAME.candidates                               without those to be left out; a row for each user and item
NAME.features, NAME.model                     predictions of these rows
NAME.order                                    each user's items, the best first
NAME.two_stage                                the ensemble; a request's first dimension are users
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from headrace.errors import UserError
from headrace.export.features.columns import FEATURE, RawColumn, to_tensors
from headrace.export.features.python_step import FeaturesStep
from headrace.export.record import ITEM, MODEL, Record, read_record
from headrace.export.triton.config import ANY, ModelConfig, Step, Tensor
from headrace.export.triton.index import index_model, save_array
from headrace.export.triton.options import DEFAULTS, Options
from headrace.export.triton.parts import loaded, put_backend
from headrace.export.triton.publish import Model, publish
from headrace.export.triton.repository import index_step, query_models, ranking
from headrace.export.triton.tensors import of_columns, plain, with_rows
from headrace.features.workflow.fitted import FittedWorkflow
from headrace.storage import Location, StoreAway

EXCLUDE = Tensor("exclude", "object", (ANY,))
PAIRS = (Tensor("pair_user", "int64", (1,)), Tensor("pair_item", "int64", (1,)))


@dataclass(frozen=True)
class Exported:
    """An export of format ONNX, the saved model that it is of, and the pipeline's name."""

    folder: Location
    saved: Location
    name: str


@dataclass(frozen=True)
class Catalogue:
    """Items that may be recommended.

    Attributes:
        table: one row for each, columns as the lake has them.
        key: the column that says which item it is.
    """

    table: pa.Table
    key: str

    @staticmethod
    def read(file: Location, key: str) -> Catalogue:
        """Read a Parquet file. Raises UserError: it is none, has no such column, or a key is null or there twice."""
        try:
            table = pq.read_table(file.local_path())
        except StoreAway:  # nothing is known of the file
            raise
        except (OSError, pa.ArrowException) as e:
            raise UserError(f"{file} cannot be read as Parquet: {' '.join(str(e).split())[:200]}") from None
        if key not in table.column_names:
            raise UserError(f"{file} has no column '{key}' (there are: {', '.join(table.column_names)})")
        keys = table.column(key)
        if not table.num_rows or keys.null_count or len(keys.unique()) < len(keys):
            raise UserError(f"{file}: column '{key}' must name each item once: it is empty, or has nulls or repeats")
        return Catalogue(table, key)

    @property
    def keys(self) -> list[str]:
        """Return the keys as texts."""
        return [str(key) for key in self.table.column(self.key).to_pylist()]

    def batch(self, columns: Sequence[RawColumn], of: str) -> pa.RecordBatch:
        """Return some columns as a batch. Raises UserError where one is missing or has another type."""
        arrays = []
        for column in columns:
            if column.name not in self.table.column_names:
                raise UserError(f"the catalogue has no column '{column.name}', of which {of} makes features of items")
            try:
                arrays.append(_one(self.table.column(column.name).cast(column.type.arrow)))
            except pa.ArrowException as e:
                raise UserError(f"the catalogue's column '{column.name}' is no {column.type}: {e}") from None
        return pa.RecordBatch.from_arrays(arrays, [column.name for column in columns])


def _one(column: pa.ChunkedArray) -> pa.Array:
    return pa.concat_arrays(column.chunks) if column.num_chunks != 1 else column.chunk(0)


def write_two_stage(
    retrieval: Exported,
    ranker: Exported,
    catalogue: Catalogue,
    repository: Location,
    *,
    version: int,
    listed: int,
    options: Options = DEFAULTS,
) -> None:
    """Add a version of both stages to a model repository; see headrace.export.triton.publish.

    Args:
        retrieval: a model in retrieval form.
        ranker: a model whose first output orders a user's items.
        catalogue: the items. Columns that it has are the items', the ranking model's others come with the request.
        repository: the folder that Triton is given.
        version: of all models.
        listed: items of a user's list; `options.found` are ranked for it.
        options: see Options.

    Raises:
        UserError: the first is in no retrieval form; the catalogue lacks a column, or no item of it has a vector.
    """
    first, second = read_record(retrieval.folder), read_record(ranker.folder)
    if ITEM not in first.graphs:
        raise UserError(f"the model of '{retrieval.name}' ({first.kind}) is in no retrieval form: it has no vectors")
    models, user_columns, steps = query_models(retrieval.folder, first, retrieval.saved, ranker.name, version, options)
    known, vectors = item_vectors(retrieval, first, catalogue)
    chosen = Catalogue(catalogue.table.take(pa.array(known)), catalogue.key)
    index = index_model(f"{ranker.name}.index", chosen.keys, vectors, options)
    ranking_models, (ensemble,) = ranking(ranker.folder, second, ranker.saved, ranker.name, version, options)
    columns = _ranking_columns(loaded(ranker.saved)[0], second)
    of_items = tuple(c for c in columns if c.name in catalogue.table.column_names)
    of_users = tuple(c for c in columns if c.name not in catalogue.table.column_names)
    candidates = _candidates_model(f"{ranker.name}.candidates", chosen, of_users, of_items, ranker.name, options)
    order = _order_model(f"{ranker.name}.order", chosen.keys, listed, options)
    score = ensemble.outputs[0].name
    inputs = {t.name: t for t in (*of_columns(user_columns), *of_columns(of_users))}
    # A column of both stages is one tensor; the pairs' columns have names of their own.
    pairs = {t.name: f"pair.{t.name}" for t in candidates.config.outputs}
    steps = (
        *steps,
        index_step(index, version),
        Step(candidates.config.name, version, {t.name: t.name for t in candidates.config.inputs}, pairs),
        *(_renamed(step, pairs, score) for step in ensemble.steps),
        Step(
            order.config.name,
            version,
            {
                "pair_user": pairs["pair_user"],
                "pair_item": pairs["pair_item"],
                "score": "pair.score",
                "item_row": "item_row",
            },
            {"item": "listed_item", "item_score": "listed_score"},
        ),
    )
    k = (ANY, listed)
    both = ModelConfig(
        f"{ranker.name}.two_stage",
        with_rows(plain((*inputs.values(), EXCLUDE))),
        (Tensor("listed_item", "object", k), Tensor("listed_score", "float32", k)),
        options.batching,
        batched=False,
        steps=_without_unused(steps),
        parameters={"version": str(version), "retrieval": first.key, "ranking": second.key},
    )
    publish(repository, [*models, index, candidates, *ranking_models, order], [ensemble, both], version, options.keep)


def item_vectors(
    retrieval: Exported, record: Record, catalogue: Catalogue
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Rows of the catalogue that the model knows, and their vectors [rows, D].

    Raises:
        UserError: it lacks a column, or the model knows none of its items.
    """
    workflow, _ = loaded(retrieval.saved)
    step = FeaturesStep.from_workflow(workflow, [t.name for t in record.graphs[ITEM].inputs])
    tensors = step(to_tensors(step.columns, catalogue.batch(step.columns, f"'{retrieval.name}'")))
    made = {name.removesuffix(FEATURE): x for name, x in tensors.items()}
    known = np.arange(catalogue.table.num_rows)
    if record.items is not None:
        codes = made[record.items.feature]
        known = np.flatnonzero(codes >= record.items.first_code)
        file = retrieval.folder / record.items.file
        vectors = np.load(file.local_path(), mmap_mode="r")[codes[known]]
    else:
        vectors = _asked(retrieval.folder, record, made)
    if not len(known):
        raise UserError(f"the model of '{retrieval.name}' knows no item of the catalogue")
    return known, np.ascontiguousarray(vectors, np.float32)


def _asked(folder: Location, record: Record, made: Mapping[str, NDArray[Any]]) -> NDArray[np.float32]:
    import onnxruntime

    graph = record.graphs[ITEM]
    session = onnxruntime.InferenceSession((folder / graph.file).local_path(), providers=["CPUExecutionProvider"])
    (vectors,) = session.run([graph.outputs[0].name], {t.name: made[t.name] for t in graph.inputs})
    return np.asarray(vectors, np.float32)


def _ranking_columns(workflow: FittedWorkflow, record: Record) -> tuple[RawColumn, ...]:
    return FeaturesStep.from_workflow(workflow, [t.name for t in record.graphs[MODEL].inputs]).columns


def _candidates_model(
    name: str,
    catalogue: Catalogue,
    of_users: Sequence[RawColumn],
    of_items: Sequence[RawColumn],
    ranker: str,
    options: Options,
) -> Model:
    """Return a model without batches: its output has other rows than its input."""
    users, items = plain(of_columns(of_users)), plain(of_columns(of_items))
    row = Tensor("item_row", "int64", (options.found,))
    config = ModelConfig(
        name,
        with_rows((*users, row, EXCLUDE)),
        with_rows((*users, *items, *PAIRS)),
        options.batching,
        "python",
        batched=False,
        kind="KIND_CPU",
    )
    tensors = to_tensors(of_items, catalogue.batch(of_items, f"'{ranker}'"))

    def fill(to: Location) -> None:
        put_backend(to, "candidates")
        save_array(to / "keys.npy", np.array(catalogue.keys, np.str_))
        names = {tensor: f"column-{i}.npy" for i, tensor in enumerate(tensors)}
        for tensor, x in tensors.items():
            wide = x[:, None] if x.ndim == 1 else x
            save_array(to / names[tensor], wide.astype(np.str_) if wide.dtype == object else wide)
        (to / "columns.json").put_text(json.dumps(names, ensure_ascii=False) + "\n")

    return Model(config, fill)


def _order_model(name: str, keys: list[str], listed: int, options: Options) -> Model:
    inputs = with_rows((*PAIRS, Tensor("score", "float32", (1,)), Tensor("item_row", "int64", (options.found,))))
    outputs = with_rows((Tensor("item", "object", (listed,)), Tensor("item_score", "float32", (listed,))))
    said = {"k": str(listed)}
    config = ModelConfig(
        name, inputs, outputs, options.batching, "python", batched=False, parameters=said, kind="KIND_CPU"
    )

    def fill(to: Location) -> None:
        put_backend(to, "order")
        save_array(to / "keys.npy", np.array(keys, np.str_))

    return Model(config, fill)


def _renamed(step: Step, pairs: Mapping[str, str], score: str) -> Step:
    """Return a step of the ranking ensemble over the pairs' columns, with tensors of its own names."""

    def named(tensor: str) -> str:
        return "pair.score" if tensor == score else pairs.get(tensor, f"pair.{tensor}")

    inputs = {inner: named(outer) for inner, outer in step.inputs.items()}
    return Step(step.model, step.version, inputs, {inner: named(outer) for inner, outer in step.outputs.items()})


def _without_unused(steps: Sequence[Step]) -> tuple[Step, ...]:
    """Drop outputs that no step and no answer takes: Triton warns of them."""
    used = {outer for step in steps for outer in step.inputs.values()} | {"listed_item", "listed_score"}
    return tuple(
        Step(s.model, s.version, s.inputs, {inner: outer for inner, outer in s.outputs.items() if outer in used})
        for s in steps
    )
