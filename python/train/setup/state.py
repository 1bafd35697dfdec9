"""The model of a training run, its sharded tables and its optimizers, on the device of a rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from torch import nn

from headrace import config
from headrace.comm import World
from headrace.comm.base import Collective
from headrace.comm.shared_memory import may_share_memory
from headrace.config.schema import DatasetSchema, Kind
from headrace.dataset.layout import open_split
from headrace.embeddings.dynamic.rows import dynamic_table_bytes
from headrace.embeddings.planner.cost import OtherMemory
from headrace.embeddings.planner.search import plan_tables
from headrace.embeddings.planner.tables import Popularity
from headrace.embeddings.sharding_plan import Lookup, Plan, Table
from headrace.errors import UserError
from headrace.models.classes import make_network
from headrace.models.inputs import InputFeatures
from headrace.models.lookups import ModelTables, lookups_of, model_tables, table_name
from headrace.models.sharded_model import ShardedModel
from headrace.storage import Location
from headrace.train.job import Job
from headrace.train.optim import DenseOptimizer


def place(kind: str, world: World) -> torch.device:
    """Return the device of this rank, `cpu` or a GPU, and make it the thread's current one.

    If the process sees one GPU, it is that one: Spark has assigned it to the task (headrace.train.launch.worker), or
    the cluster by CUDA_VISIBLE_DEVICES. Of several it is the one with the rank's number on its machine.

    Raises:
        UserError: there is no GPU, or there are fewer than ranks on this machine.
    """
    if kind == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if not count:
        raise UserError(
            "train.device is cuda and torch sees no GPU on this machine: see `nvidia-smi`, or set it to cpu"
        )
    if 1 < count < world.local_size:
        raise UserError(
            f"train.device is cuda: {world.local_size} ranks on a machine with {count} GPUs. Set train.ranks so that "
            f"each has one"
        )
    device = torch.device("cuda", world.local_rank if count > 1 else 0)
    torch.cuda.set_device(device)
    return device


def trained_tables(
    schema: DatasetSchema, model: config.Model, network: nn.Module, train: config.Train, ranks: int
) -> ModelTables:
    """Return the tables of a model, with the number of ids that a row looks up in them.

    Args:
        schema: schema of the dataset.
        model: settings of the model.
        network: network of these settings.
        train: settings of the run.
        ranks: number of ranks over which a step's rows are spread.

    Raises:
        UserError: lookups or settings do not fit the dataset, or a lookup needs drawn items and none are drawn.
    """
    rows = max(1, train.batch_size // (ranks * train.accumulate))
    negatives = train.negatives
    of_row = 1
    if negatives is not None:
        of_row = -(-negatives.per_positive // rows) if negatives.shared else negatives.per_positive
    tables = model_tables(schema, model, network, train.embeddings, negatives=of_row, rows=rows)
    features = {f.name: f for f in schema.of(Kind.CATEGORICAL)}
    for w in lookups_of(network) or ():
        if w.ids != "negatives":
            continue
        if negatives is None or negatives.form != "candidates":
            raise UserError(
                f"the model compares '{w.feature}' with items that are drawn for each row: set train.negatives, such "
                f"as {{column: {w.feature}, as: candidates, per_positive: 4}}"
            )
        looked_up, column = features[w.feature], features.get(negatives.column)
        if column is not None and table_name(w, looked_up) != table_name(w, column):
            raise UserError(
                f"the model compares '{w.feature}' with items that are drawn, but train.negatives.column is "
                f"'{negatives.column}', whose codes are others'"
            )
    return tables


#: GiB for cuBLAS's workspaces and for kernels that are loaded at their first launch.
_LIBRARIES_GIB = 0.5
#: Share of the remaining memory that may be fragmented.
_FRAGMENTED = 0.1


def tables_gib(device: torch.device, collective: Collective, reserved_gib: float) -> float:
    """Return the GiB that tables may take on the GPU of every rank, the least of all ranks. Collective.

    The memory of communication is measured: a message of each kind is sent first, so that NCCL's buffers exist. Memory
    for the dense part, its activations and CUDA graphs is reserved.

    Args:
        device: this rank's GPU.
        collective: the ranks.
        reserved_gib: see `reserved_gib`.

    Raises:
        UserError: no memory remains.
    """
    torch.cuda.empty_cache()  # free the memory of a previous model
    size = collective.world.size
    collective.all_to_all(torch.zeros(size, 1, device=device), [1] * size)
    collective.all_reduce_sum([torch.zeros(1, device=device)])
    free = torch.tensor([torch.cuda.mem_get_info(device)[0] / 2**30], device=device)
    least = float(collective.all_gather(free).min())
    usable = (1 - _FRAGMENTED) * (least - reserved_gib)
    if usable <= 0:
        raise UserError(
            f"of {least:.1f} GiB that are free on a GPU, {reserved_gib:.1f} are reserved for the dense part and its "
            f"activations (train.sharding.reserve_gib), so there is no room for tables: lower train.batch_size, take "
            f"its rows in parts (train.accumulate), or set train.sharding.reserve_gib"
        )
    return usable


def reserved_gib(schema: DatasetSchema, model: config.Model, train: config.Train, world: World) -> float:
    """Return the GiB of a rank's GPU for the dense part: `train.sharding.reserve_gib`, or an estimate.

    The estimate counts values and gradients of all linear layers and of the vectors for a micro-batch, twice with CUDA
    graphs, which have their own memory. For parameters it counts weights, gradients, two states and the message that
    sums gradients.
    """
    if train.sharding.reserve_gib is not None:
        return train.sharding.reserve_gib
    features = InputFeatures.from_schema(schema, model.embedding_dim, train.tasks)
    network = make_network(model, features, seed=0)
    layers = [m for m in network.modules() if isinstance(m, nn.Linear)]
    # The input of a layer in a stack is the output of the layer before.
    stacks = [[m for m in s if isinstance(m, nn.Linear)] for s in network.modules() if isinstance(s, nn.Sequential)]
    chained = {id(m) for stack in stacks for m in stack[1:]}
    widths = sum(m.out_features for m in layers) + sum(m.in_features for m in layers if id(m) not in chained)
    rows = -(-train.batch_size // (world.size * train.accumulate))
    vectors = len(features.categorical) * model.embedding_dim
    if lookups_of(network) is not None:
        tables = trained_tables(schema, model, network, train, world.size)
        dims = {t.name: t.dim for t in tables.tables}
        vectors = sum(x.length * dims[x.table] for x in tables.lookups)
        vectors += sum(n * t.dim for t, n in zip(tables.dynamic, tables.raw_ids, strict=True))
    of_row = widths + vectors + model.embedding_dim
    parameters = sum(p.numel() for p in network.parameters())
    floats = rows * of_row * 2 * (1 + train.cuda_graphs) + 5 * parameters
    return _LIBRARIES_GIB + 4 * floats / 2**30


#: Most rows of the sample, and most row groups that they are from.
_ROWS, _ROW_GROUPS = 200_000, 8


def sampled_popularity(
    dataset: Location, schema: DatasetSchema, tables: Sequence[Table], lookups: Sequence[Lookup]
) -> dict[str, Popularity]:
    """Return the popularity of codes by table, from row groups spread over the split `train`. It is deterministic.

    Args:
        dataset: folder of the dataset.
        schema: schema of the dataset.
        tables: tables of the model.
        lookups: lookups of codes of the rows in these tables.

    Raises:
        UserError: the split is missing, or a file is damaged.
    """
    groups = open_split(dataset, "train", schema).row_groups
    chosen = groups[:: max(1, -(-len(groups) // _ROW_GROUPS))]
    each = max(1, _ROWS // max(1, len(chosen)))
    counts = {t.name: np.zeros(0, dtype=np.int64) for t in tables}
    for group in chosen:
        with pq.ParquetFile(group.path) as file:
            read = file.read_row_group(group.index, sorted({x.feature for x in lookups})).slice(0, each)
        for x in lookups:
            column = read.column(x.feature)
            code_counts = np.bincount((pc.list_flatten(column) if x.is_list else column).to_numpy())
            if x.is_list and len(code_counts):
                code_counts[0] = 0  # a null's code is not looked up
            counts[x.table] = _add(counts[x.table], code_counts)
    return {t.name: Popularity.sampled(counts[t.name], t.rows) for t in tables if counts[t.name].any()}


def _add(first: NDArray[np.int64], second: NDArray[np.int64]) -> NDArray[np.int64]:
    longer, shorter = (first, second) if len(first) > len(second) else (second, first)
    total = longer.astype(np.int64)
    total[: len(shorter)] += shorter
    return total


@dataclass
class TrainState:
    """The model with its embedding optimizer, and the dense part's optimizer."""

    model: ShardedModel
    dense: DenseOptimizer


def build_state(job: Job, schema: DatasetSchema, collective: Collective) -> TrainState:
    """Build a new model with its tables placed by the sharding plan, and its optimizers. Collective.

    Raises:
        UserError: the device does not exist, no plan fits, or settings do not fit the dataset.
    """
    dataset, plans = job.ws.locate(job.features.output("dataset").name), job.train.sharding.kind == "auto"
    features = InputFeatures.from_schema(schema, job.model.embedding_dim, job.train.tasks)
    network = make_network(job.model, features, job.train.seed)
    tables_of_model = trained_tables(schema, job.model, network, job.train, collective.world.size)
    popularity = None
    if plans and collective.world.size > 1:
        popularity = sampled_popularity(dataset, schema, tables_of_model.tables, tables_of_model.counted)
    dynamic_bytes = dynamic_table_bytes(
        tables_of_model.dynamic,
        tables_of_model.raw_ids,
        job.train.batch_size,
        collective.world.size,
        job.train.embeddings.kind,
        1 + job.train.background_checkpoints,
    )
    shares_memory = job.train.device == "cpu" and may_share_memory(collective)
    device, settings = place(job.train.device, collective.world), job.train.sharding
    if device.type == "cuda" and settings.memory_gib is None:
        reserved = reserved_gib(schema, job.model, job.train, collective.world)
        settings = settings.model_copy(update={"memory_gib": tables_gib(device, collective, reserved)})

    def make_plan(tables: Sequence[Table], lookups: Sequence[Lookup], world_size: int) -> Plan:
        return plan_tables(
            tables,
            tables_of_model.lookups,  # the same lookups, with the number of ids of a row
            world_size,
            batch_size=job.train.batch_size,
            optimizer=job.train.embeddings.kind,
            settings=settings,
            popularity=popularity,
            card=device.type == "cuda",
            other_memory=OtherMemory(dynamic_bytes, shares_memory, job.train.background_checkpoints),
        ).plan

    seed, optimizer = job.train.seed, job.train.embeddings
    model = ShardedModel(schema, job.model, collective, seed, make_plan, optimizer, device, network, job.train.tasks)
    model.precision = job.train.precision
    model.configure_optimizer(optimizer)
    return TrainState(model, DenseOptimizer(model.dense_parameters(), job.train.dense, collective))
