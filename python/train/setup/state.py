"""What is trained: the model, its sharded tables and its optimizers, as the run's settings ask for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.comm.base import Collective
from headrace.comm.shared_memory import some_may_share
from headrace.embeddings.dynamic.rows import dynamic_table_bytes
from headrace.embeddings.planner.cost import OtherMemory
from headrace.embeddings.planner.search import plan_tables
from headrace.embeddings.sharding_plan import Lookup, Plan, Table
from headrace.models.classes import make_network
from headrace.models.inputs import InputFeatures
from headrace.models.sharded_model import ShardedModel
from headrace.schema import DatasetSchema
from headrace.train.job import Job
from headrace.train.optim.dense import DenseOptimizer
from headrace.train.setup.device import place
from headrace.train.setup.memory import reserved_gib, tables_gib
from headrace.train.setup.popularity import sampled_popularity
from headrace.train.setup.tables import trained_tables


@dataclass
class TrainState:
    """The model with its embedding optimizer, and the dense part's optimizer."""

    model: ShardedModel
    dense: DenseOptimizer


def build_state(job: Job, schema: DatasetSchema, collective: Collective) -> TrainState:
    """A new model with its tables placed by the sharding plan, and its optimizers. Collective.

    Raises:
        UserError: no such device, no plan that fits, or settings that do not fit the dataset.
    """
    dataset, plans = job.ws.locate(job.features.output("dataset").name), job.train.sharding.kind == "auto"
    features = InputFeatures.from_schema(schema, job.model.embedding_dim, job.train.tasks)
    network = make_network(job.model, features, job.train.seed)
    wanted = trained_tables(schema, job.model, network, job.train, collective.world.size)
    popularity = None
    if plans and collective.world.size > 1:
        popularity = sampled_popularity(dataset, schema, wanted.tables, wanted.counted)
    beside = dynamic_table_bytes(
        wanted.dynamic,
        wanted.raw_ids,
        job.train.batch_size,
        collective.world.size,
        job.train.embeddings.kind,
        1 + job.train.background_checkpoints,
    )
    shares_memory = job.train.device == "cpu" and some_may_share(collective)
    device, settings = place(job.train.device, collective.world), job.train.sharding
    if device.type == "cuda" and settings.memory_gib is None:
        reserved = reserved_gib(schema, job.model, job.train, collective.world)
        settings = settings.model_copy(update={"memory_gib": tables_gib(device, collective, reserved)})

    def make_plan(tables: Sequence[Table], lookups: Sequence[Lookup], world_size: int) -> Plan:
        return plan_tables(
            tables,
            wanted.lookups,  # the same, and how many ids a row has
            world_size,
            batch_size=job.train.batch_size,
            optimizer=job.train.embeddings.kind,
            settings=settings,
            popularity=popularity,
            card=device.type == "cuda",
            other_memory=OtherMemory(beside, shares_memory, job.train.background_checkpoints),
        ).plan

    seed, optimizer = job.train.seed, job.train.embeddings
    model = ShardedModel(schema, job.model, collective, seed, make_plan, optimizer, device, network, job.train.tasks)
    model.precision = job.train.precision
    model.configure_optimizer(optimizer)
    return TrainState(model, DenseOptimizer(model.dense_parameters(), job.train.dense, collective))
