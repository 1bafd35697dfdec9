"""Which device a rank computes on."""

from __future__ import annotations

import torch

from headrace.errors import UserError
from headrace.world import World


def place(kind: str, world: World) -> torch.device:
    """The device of this rank, made the thread's current one: `cpu`, or a GPU.

    The one GPU that this process sees: the one that Spark assigned to its task (headrace.train.launch.worker), or that
    the cluster's CUDA_VISIBLE_DEVICES names. Where it sees several, that of its number on its machine.

    Raises:
        UserError: there is no GPU, or fewer than there are ranks on this machine.
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
