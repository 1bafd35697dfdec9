"""How much of a GPU the tables may take: what is free, without what the rest of a step will need."""

from __future__ import annotations

import torch
from torch import nn

from headrace import config
from headrace.comm.base import Collective
from headrace.errors import UserError
from headrace.models.classes import make_network
from headrace.models.inputs import InputFeatures
from headrace.models.lookups import lookups_of
from headrace.schema import DatasetSchema
from headrace.train.setup.tables import trained_tables
from headrace.world import World

#: GiB: cuBLAS's workspaces, kernels that are loaded at their first launch.
_LIBRARIES_GIB = 0.5
#: Share of what is left that may be in pieces.
_FRAGMENTED = 0.1


def tables_gib(device: torch.device, collective: Collective, reserved_gib: float) -> float:
    """GiB that tables may take on the GPU of every rank: where there is least. Collective.

    What communication takes is measured: a message of each kind is sent before, so that NCCL's buffers exist. What the
    dense part, its activations and CUDA graphs will take is reserved.

    Args:
        device: this rank's GPU.
        collective: the ranks.
        reserved_gib: see `reserved_gib`.

    Raises:
        UserError: nothing is left.
    """
    torch.cuda.empty_cache()  # of a model that was here before
    size = collective.world.size
    collective.all_to_all(torch.zeros(size, 1, device=device), [1] * size)
    collective.all_reduce_sum([torch.zeros(1, device=device)])
    free = torch.tensor([torch.cuda.mem_get_info(device)[0] / 2**30], device=device)
    least = float(collective.all_gather(free).min())
    found = (1 - _FRAGMENTED) * (least - reserved_gib)
    if found <= 0:
        raise UserError(
            f"of {least:.1f} GiB that are free on a GPU, {reserved_gib:.1f} are reserved for the dense part and its "
            f"activations (train.sharding.reserve_gib), so there is no room for tables: lower train.batch_size, take "
            f"its rows in parts (train.accumulate), or set train.sharding.reserve_gib"
        )
    return found


def reserved_gib(schema: DatasetSchema, model: config.Model, train: config.Train, world: World) -> float:
    """GiB of a rank's GPU for the dense part: `train.sharding.reserve_gib`, else an estimate from its linear layers.

    Of a micro-batch the values and gradients of all layers and of the vectors, twice with CUDA graphs, whose memory is
    their own; of the parameters the weights, gradients, two states and the message that sums gradients.
    """
    if train.sharding.reserve_gib is not None:
        return train.sharding.reserve_gib
    features = InputFeatures.from_schema(schema, model.embedding_dim, train.tasks)
    network = make_network(model, features, seed=0)
    layers = [m for m in network.modules() if isinstance(m, nn.Linear)]
    # What a layer of a stack takes is what the one before gave.
    stacks = [[m for m in s if isinstance(m, nn.Linear)] for s in network.modules() if isinstance(s, nn.Sequential)]
    given = {id(m) for stack in stacks for m in stack[1:]}
    widths = sum(m.out_features for m in layers) + sum(m.in_features for m in layers if id(m) not in given)
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
