"""A click model with headrace.embeddings in a Horovod loop of one's own: tables are spread over the ranks.

    horovodrun -np 2 python examples/own_loop.py

examples/plain_loop.py is the same with torch.nn.EmbeddingBag: diff examples/plain_loop.py examples/own_loop.py
"""

import horovod.torch as hvd
import torch
from torch import nn

from headrace import comm
from headrace.embeddings import EmbeddingCollection, EmbeddingFeature, EmbeddingOptimizer, JaggedTensor

DIM, BATCH, STEPS = 16, 256, 60
TABLES = {"user": 1_000, "item": 400, "tags": 50}


class Model(nn.Module):
    """A click's logit, from one user, one item and any number of tags."""

    def __init__(self):
        super().__init__()
        features = [EmbeddingFeature(name, DIM, rows) for name, rows in TABLES.items()]
        optimizer = EmbeddingOptimizer(kind="adagrad", learning_rate=0.1)
        self.tables = EmbeddingCollection(features, optimizer=optimizer, comm=comm.horovod())
        self.top = nn.Sequential(nn.Linear(len(TABLES) * DIM, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, features):
        vectors = self.tables(
            {name: JaggedTensor.of_starts(*ids_and_starts) for name, ids_and_starts in features.items()}
        )
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
        model.tables.step()
        losses.append(float(hvd.allreduce(loss.detach(), name="loss")))
    return losses


if __name__ == "__main__":
    hvd.init()
    torch.manual_seed(1)
    losses = train(Model())
    if hvd.rank() == 0:
        print(f"log loss {losses[0]:.4f} in the first step, {losses[-1]:.4f} in the last")
