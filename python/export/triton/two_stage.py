"""Two stages in one request: a user's vector, the items nearest to it, a filter, and their order by a ranking model.

RETRIEVAL.query.features, RETRIEVAL.query     from raw columns of users to vectors
NAME.index                                    the nearest items of a catalogue
NAME.candidates                               a row for each user and item, without excluded items
NAME.features, NAME.model                     predictions of these rows
NAME.order                                    each user's items, best first
NAME.two_stage                                the ensemble; the first dimension of a request is users
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
from headrace.export.features.columns import FEATURE, FeaturesStep, RawColumn, to_tensors
from headrace.export.record import ITEM, MODEL, ExportRecord, read_record
from headrace.export.triton.config import (
    ANY,
    DEFAULTS,
    EnsembleStep,
    ModelConfig,
    Options,
    TritonTensor,
    column_tensors,
    with_rows,
    without_reshape,
)
from headrace.export.triton.parts import index_model, load_workflow, put_backend, save_array
from headrace.export.triton.publish import RepositoryModel, publish
from headrace.export.triton.repository import index_step, query_models, ranking_models
from headrace.features.functions.arrays import one_chunk
from headrace.features.workflow.fitted import FittedWorkflow
from headrace.storage import Location, StoreAway

EXCLUDE = TritonTensor("exclude", "object", (ANY,))
PAIRS = (TritonTensor("pair_user", "int64", (1,)), TritonTensor("pair_item", "int64", (1,)))


@dataclass(frozen=True)
class ExportedModel:
    """An export of format ONNX, its saved model, and the pipeline's name."""

    folder: Location
    saved: Location
    name: str


@dataclass(frozen=True)
class Catalogue:
    """Items that may be recommended.

    Attributes:
        table: a row for each item, with the columns of the lake.
        key: column of the items' keys.
    """

    table: pa.Table
    key: str

    @staticmethod
    def read(file: Location, key: str) -> Catalogue:
        """Read a Parquet file.

        Raises:
            UserError: the file is not Parquet or lacks the column, or a key is null or occurs twice.
        """
        try:
            table = pq.read_table(file.local_path())
        except StoreAway:  # the store is away, so the file may be fine
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

    def batch(self, columns: Sequence[RawColumn], model: str) -> pa.RecordBatch:
        """Return some columns as a batch. Raises UserError if one is missing or has another type."""
        arrays = []
        for column in columns:
            if column.name not in self.table.column_names:
                raise UserError(
                    f"the catalogue has no column '{column.name}', of which {model} makes features of items"
                )
            try:
                arrays.append(one_chunk(self.table.column(column.name).cast(column.type.arrow)))
            except pa.ArrowException as e:
                raise UserError(f"the catalogue's column '{column.name}' is no {column.type}: {e}") from None
        return pa.RecordBatch.from_arrays(arrays, [column.name for column in columns])


def write_two_stage(
    retrieval: ExportedModel,
    ranker: ExportedModel,
    catalogue: Catalogue,
    repository: Location,
    *,
    version: int,
    list_length: int,
    options: Options = DEFAULTS,
) -> None:
    """Add a version of both stages to a model repository; see headrace.export.triton.publish.

    Args:
        retrieval: a model in retrieval form.
        ranker: a model whose first output orders a user's items.
        catalogue: the items. The ranking model's columns come from it if it has them, else with the request.
        repository: the folder that Triton serves.
        version: version of all models.
        list_length: number of items of a user's list; `options.candidates` items are ranked for it.
        options: see Options.

    Raises:
        UserError: `retrieval` has no retrieval form, the catalogue lacks a column, or none of its items has a vector.
    """
    retrieval_record, ranker_record = read_record(retrieval.folder), read_record(ranker.folder)
    if ITEM not in retrieval_record.graphs:
        raise UserError(
            f"the model of '{retrieval.name}' ({retrieval_record.kind}) is in no retrieval form: it has no vectors"
        )
    models, user_columns, steps = query_models(
        retrieval.folder, retrieval_record, retrieval.saved, ranker.name, version, options
    )
    known, vectors = item_vectors(retrieval, retrieval_record, catalogue)
    known_items = Catalogue(catalogue.table.take(pa.array(known)), catalogue.key)
    index = index_model(f"{ranker.name}.index", known_items.keys, vectors, options)
    ranking, (ensemble,) = ranking_models(ranker.folder, ranker_record, ranker.saved, ranker.name, version, options)
    columns = _ranking_columns(load_workflow(ranker.saved)[0], ranker_record)
    item_columns = tuple(c for c in columns if c.name in catalogue.table.column_names)
    rank_user_columns = tuple(c for c in columns if c.name not in catalogue.table.column_names)
    candidates = _candidates_model(
        f"{ranker.name}.candidates", known_items, rank_user_columns, item_columns, ranker.name, options
    )
    order = _order_model(f"{ranker.name}.order", known_items.keys, list_length, options)
    score = ensemble.outputs[0].name
    inputs = {t.name: t for t in (*column_tensors(user_columns), *column_tensors(rank_user_columns))}
    # A column that both stages read is one tensor; columns of pairs get names of their own.
    pairs = {t.name: f"pair.{t.name}" for t in candidates.config.outputs}
    steps = (
        *steps,
        index_step(index, version),
        EnsembleStep(candidates.config.name, version, {t.name: t.name for t in candidates.config.inputs}, pairs),
        *(_renamed(step, pairs, score) for step in ensemble.steps),
        EnsembleStep(
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
    k = (ANY, list_length)
    two_stage = ModelConfig(
        f"{ranker.name}.two_stage",
        with_rows(without_reshape((*inputs.values(), EXCLUDE))),
        (TritonTensor("listed_item", "object", k), TritonTensor("listed_score", "float32", k)),
        options.batching,
        batched=False,
        steps=_without_unused(steps),
        parameters={"version": str(version), "retrieval": retrieval_record.key, "ranking": ranker_record.key},
    )
    publish(repository, [*models, index, candidates, *ranking, order], [ensemble, two_stage], version, options.keep)


def item_vectors(
    retrieval: ExportedModel, record: ExportRecord, catalogue: Catalogue
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return the catalogue's rows that the model knows, and their vectors [rows, D].

    Raises:
        UserError: the catalogue lacks a column, or the model knows none of its items.
    """
    workflow, _ = load_workflow(retrieval.saved)
    step = FeaturesStep.from_workflow(workflow, [t.name for t in record.graphs[ITEM].inputs])
    tensors = step(to_tensors(step.columns, catalogue.batch(step.columns, f"'{retrieval.name}'")))
    features = {name.removesuffix(FEATURE): x for name, x in tensors.items()}
    known = np.arange(catalogue.table.num_rows)
    if record.items is not None:
        codes = features[record.items.feature]
        known = np.flatnonzero(codes >= record.items.first_code)
        file = retrieval.folder / record.items.file
        vectors = np.load(file.local_path(), mmap_mode="r")[codes[known]]
    else:
        vectors = _run_item_graph(retrieval.folder, record, features)
    if not len(known):
        raise UserError(f"the model of '{retrieval.name}' knows no item of the catalogue")
    return known, np.ascontiguousarray(vectors, np.float32)


def _run_item_graph(
    folder: Location, record: ExportRecord, features: Mapping[str, NDArray[Any]]
) -> NDArray[np.float32]:
    import onnxruntime

    graph = record.graphs[ITEM]
    session = onnxruntime.InferenceSession((folder / graph.file).local_path(), providers=["CPUExecutionProvider"])
    (vectors,) = session.run([graph.outputs[0].name], {t.name: features[t.name] for t in graph.inputs})
    return np.asarray(vectors, np.float32)


def _ranking_columns(workflow: FittedWorkflow, record: ExportRecord) -> tuple[RawColumn, ...]:
    return FeaturesStep.from_workflow(workflow, [t.name for t in record.graphs[MODEL].inputs]).columns


def _candidates_model(
    name: str,
    catalogue: Catalogue,
    user_columns: Sequence[RawColumn],
    item_columns: Sequence[RawColumn],
    ranker: str,
    options: Options,
) -> RepositoryModel:
    """Return the model of candidates; it does not batch, since its output has other rows than its input."""
    users, items = without_reshape(column_tensors(user_columns)), without_reshape(column_tensors(item_columns))
    row = TritonTensor("item_row", "int64", (options.candidates,))
    config = ModelConfig(
        name,
        with_rows((*users, row, EXCLUDE)),
        with_rows((*users, *items, *PAIRS)),
        options.batching,
        "python",
        batched=False,
        kind="KIND_CPU",
    )
    tensors = to_tensors(item_columns, catalogue.batch(item_columns, f"'{ranker}'"))

    def fill(to: Location) -> None:
        put_backend(to, "candidates")
        save_array(to / "keys.npy", np.array(catalogue.keys, np.str_))
        names = {tensor: f"column-{i}.npy" for i, tensor in enumerate(tensors)}
        for tensor, x in tensors.items():
            wide = x[:, None] if x.ndim == 1 else x
            save_array(to / names[tensor], wide.astype(np.str_) if wide.dtype == object else wide)
        (to / "columns.json").put_text(json.dumps(names, ensure_ascii=False) + "\n")

    return RepositoryModel(config, fill)


def _order_model(name: str, keys: list[str], list_length: int, options: Options) -> RepositoryModel:
    inputs = with_rows(
        (*PAIRS, TritonTensor("score", "float32", (1,)), TritonTensor("item_row", "int64", (options.candidates,)))
    )
    outputs = with_rows(
        (TritonTensor("item", "object", (list_length,)), TritonTensor("item_score", "float32", (list_length,)))
    )
    parameters = {"k": str(list_length)}
    config = ModelConfig(
        name, inputs, outputs, options.batching, "python", batched=False, parameters=parameters, kind="KIND_CPU"
    )

    def fill(to: Location) -> None:
        put_backend(to, "order")
        save_array(to / "keys.npy", np.array(keys, np.str_))

    return RepositoryModel(config, fill)


def _renamed(step: EnsembleStep, pairs: Mapping[str, str], score: str) -> EnsembleStep:
    """Return a step of the ranking ensemble over the pairs' columns, with tensors of its own names."""

    def named(tensor: str) -> str:
        return "pair.score" if tensor == score else pairs.get(tensor, f"pair.{tensor}")

    inputs = {inner: named(outer) for inner, outer in step.inputs.items()}
    return EnsembleStep(
        step.model, step.version, inputs, {inner: named(outer) for inner, outer in step.outputs.items()}
    )


def _without_unused(steps: Sequence[EnsembleStep]) -> tuple[EnsembleStep, ...]:
    """Remove outputs that no step reads and that are not in the answer; Triton warns about them."""
    used = {outer for step in steps for outer in step.inputs.values()} | {"listed_item", "listed_score"}
    return tuple(
        EnsembleStep(
            s.model, s.version, s.inputs, {inner: outer for inner, outer in s.outputs.items() if outer in used}
        )
        for s in steps
    )
