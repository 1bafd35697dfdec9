"""A click model with torch.nn.EmbeddingBag in a Horovod loop of one's own: every rank holds all tables.

    horovodrun -np 2 python examples/plain_loop.py

examples/own_loop.py is the same with its tables spread over the ranks: diff examples/plain_loop.py examples/own_loop.py
"""

import horovod.torch as hvd
import torch
from torch import nn

DIM, BATCH, STEPS = 16, 256, 60
TABLES = {"user": 1_000, "item": 400, "tags": 50}


class Model(nn.Module):
    """A click's logit, from one user, one item and any number of tags."""

    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleDict({name: nn.EmbeddingBag(rows, DIM, mode="sum") for name, rows in TABLES.items()})
        self.top = nn.Sequential(nn.Linear(len(TABLES) * DIM, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, features):
        vectors = {name: table(*features[name]) for name, table in self.tables.items()}
        return self.top(torch.cat([vectors[name] for name in TABLES], dim=1)).squeeze(1)


def batches(rank, size):
    """Yield this rank's rows of each step: ids and offsets by feature, and who clicked."""
    known = torch.Generator().manual_seed(0)
    taste = torch.randn(TABLES["user"], 1, generator=known) + torch.randn(TABLES["item"], generator=known)
    for step in range(STEPS):
        drawn = torch.Generator().manual_seed(step + 1)
        rows = slice(rank * BATCH // size, (rank + 1) * BATCH // size)
        user, item = (torch.randint(TABLES[n], (BATCH,), generator=drawn)[rows] for n in ("user", "item"))
        tags = torch.randint(TABLES["tags"], (BATCH, 4), generator=drawn)[rows]
        is_filled = torch.arange(4) < torch.randint(5, (BATCH, 1), generator=drawn)[rows]
        starts = torch.arange(len(user))
        features = {
            "user": (user, starts),
            "item": (item, starts),
            "tags": (tags[is_filled], torch.cumsum(is_filled.sum(1), 0) - is_filled.sum(1)),
        }
        yield features, (taste[user, item] > 0).float()


def train(model):
    """Return the loss of each step: the mean over the rows of all ranks."""
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    losses = []
    for features, labels in batches(hvd.rank(), hvd.size()):
        optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(model(features), labels)
        loss.backward()
        optimizer.step()
        losses.append(float(hvd.allreduce(loss.detach(), name="loss")))
    return losses


if __name__ == "__main__":
    hvd.init()
    torch.manual_seed(1)
    losses = train(Model())
    if hvd.rank() == 0:
        print(f"log loss {losses[0]:.4f} in the first step, {losses[-1]:.4f} in the last")
