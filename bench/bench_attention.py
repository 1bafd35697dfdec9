"""Causal attention over ragged rows on CPUs: which layout is fastest, forward and backward, in CPU milliseconds.

    python -m bench.bench_attention            # lengths like those of Amazon Beauty: most rows short, a few long

Layouts, of which the models have the first: rows in groups of about equal length; all rows padded to the longest of the
batch; all rows behind each other with a block-diagonal mask. Nested tensors are none: in torch 2.13 attention of jagged
ones asks for a CUDA driver, of strided ones it has no causal mask.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from headrace.embeddings.jagged import JaggedTensor
from headrace.models.next_item import LengthGroups

#: packed queries, keys and values [N, 3, heads, d] -> [N, heads, d]
Attention = Callable[[Tensor, Tensor], Tensor]


def by_groups(x: Tensor, offsets: Tensor) -> Tensor:
    groups = LengthGroups.from_offsets(offsets)
    parts = []
    for group in groups.padded(x):
        q, k, v = group.permute(2, 0, 3, 1, 4)
        parts.append(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2))
    return groups.packed(parts)


def to_the_longest(x: Tensor, offsets: Tensor) -> Tensor:
    lengths = offsets.diff()
    is_filled = torch.arange(int(lengths.max())) < lengths.unsqueeze(1)
    padded = x.new_zeros(*is_filled.shape, *x.shape[1:]).index_put((is_filled,), x)
    q, k, v = padded.permute(2, 0, 3, 1, 4)
    return scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)[is_filled]


def block_diagonal(x: Tensor, offsets: Tensor) -> Tensor:
    row = torch.repeat_interleave(torch.arange(len(offsets) - 1), offsets.diff())
    mask = (row.unsqueeze(1) == row).tril()
    q, k, v = x.permute(1, 2, 0, 3)
    return scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(0, 1)


LAYOUTS: dict[str, Attention] = {
    "groups of equal length": by_groups,
    "padded to the longest": to_the_longest,
    "one block-diagonal mask": block_diagonal,
}


def lengths_of(rows: int, longest: int, generator: torch.Generator) -> Tensor:
    """Draw lengths of at least 3, 7 in the mean, from a geometric distribution."""
    drawn = torch.empty(rows).exponential_(1 / 4.5, generator=generator)
    return (3 + drawn).long().clamp(max=longest)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--longest", type=int, default=50)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--steps", type=int, default=30)
    args = parser.parse_args()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(1)
    batches = []
    for _ in range(args.steps):
        lengths = lengths_of(args.rows, args.longest, generator)
        offsets = pad(lengths.cumsum(0), (1, 0))
        batches.append(JaggedTensor(torch.randn(int(offsets[-1]), 3, 1, args.dim, generator=generator), offsets))
    expected = [by_groups(b.values, b.offsets) for b in batches]
    for name, attention in LAYOUTS.items():
        taken = []
        for batch, known in zip(batches, expected, strict=True):
            x = batch.values.clone().requires_grad_()
            begin = time.process_time()
            result = attention(x, batch.offsets)
            result.sum().backward()
            taken.append(time.process_time() - begin)
            torch.testing.assert_close(result, known, rtol=1e-4, atol=1e-5)
        print(f"{name:26} {1e3 * statistics.median(taken):7.2f} ms")


if __name__ == "__main__":
    main()
