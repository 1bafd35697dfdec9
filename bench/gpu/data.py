"""Tables of the size of MLPerf's DLRM, and batches of ids for them, made on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

DIM, DENSE = 128, 13
#: Rows of the 26 tables of MLPerf's DLRM-DCNv2, 204 million (Criteo's click logs of 24 days, 40 million rows a table at
#: most). Source: MLCommons, github.com/mlcommons/training, recommendation_v2/torchrec_dlrm.
CARDINALITIES = (
    40_000_000,
    39_060,
    17_295,
    7_424,
    20_265,
    3,
    7_122,
    1_543,
    63,
    40_000_000,
    3_067_956,
    405_282,
    10,
    2_209,
    11_938,
    155,
    4,
    976,
    14,
    40_000_000,
    40_000_000,
    40_000_000,
    590_152,
    12_973,
    108,
    36,
)
#: Zipf's exponent.
EXPONENT = 1.05


def cardinalities(rows: int) -> list[int]:
    """Return the tables' rows, the large ones made smaller so that there are about `rows` in all."""
    share = min(1.0, rows / sum(CARDINALITIES))
    return [max(4, int(c * share)) if c > 100_000 or share < 1e-2 else c for c in CARDINALITIES]


@dataclass(frozen=True)
class IdBatch:
    """Addresses int64 [B * 26] in the matrix of all tables, sample by sample; dense float32 [B, 13]; label [B, 1]."""

    addresses: Tensor
    dense: Tensor
    label: Tensor


def batches(kind: str, sizes: list[int], batch: int, count: int, device: str) -> list[IdBatch]:
    """Draw several batches, so that no run finds the last one's rows in a cache."""
    torch.manual_seed(0)
    rows = torch.tensor(sizes, dtype=torch.float64, device=device)
    first = (rows.cumsum(0) - rows).long()
    drawn = []
    for _ in range(count):
        u = torch.rand(batch, len(sizes), dtype=torch.float64, device=device)
        if kind == "uniform":
            ids = u * rows
        else:
            # The inverse of the continuous distribution's function; popular ids first, as a vocabulary has them.
            power = 1 - EXPONENT
            ids = ((((rows + 1) ** power - 1) * u) + 1) ** (1 / power) - 1
        ids = torch.minimum(ids.long(), (rows - 1).long())
        drawn.append(
            IdBatch(
                (ids + first).flatten(),
                torch.randn(batch, DENSE, device=device),
                (torch.rand(batch, 1, device=device) < 0.03).float(),
            )
        )
    return drawn
