"""Addresses of rows: from a batch of codes to the indices that each output piece is pooled from; owners of raw ids.

Each rank owns one range of the hashes of raw ids, and all ranges are of equal size. So sorting a batch's hashes both
removes duplicates and groups the ids by owner, as sorting indices does for planned tables (headrace.embeddings.layout).
Requests for raw ids travel between ranks in the encoding of `pack`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from headrace.compute import native
from headrace.embeddings.jagged import JaggedTensor
from headrace.embeddings.kernels import cpu, hashing
from headrace.embeddings.kernels.cpu import data_pointer
from headrace.embeddings.kernels.dispatch import Duplicates, find_duplicates
from headrace.embeddings.kernels.id_map import Ids, mix
from headrace.embeddings.layout import Layout, TableGroup
from headrace.errors import UserError

#: A batch: codes of all lookups side by side, int64 [B, S]; or for each lookup a tensor [B], [B, L] or a JaggedTensor.
CodeBatch = Tensor | Sequence[Tensor | JaggedTensor]


@dataclass(frozen=True)
class JaggedIndices:
    """Indices that a group of output pieces is pooled from, in the form of torch's embedding_bag.

    Bag i is row i of the output [B * pieces, width], in order of the samples. In a sequence each code is a sample.
    """

    #: Indices into the fused table, bag by bag: [N].
    indices: Tensor
    #: Number of bags.
    num_bags: int
    #: Bag of each index, ascending: int64 [N]; None: index i is bag i.
    bag_ids: Tensor | None = None
    #: First index of each bag: int64 [bags].
    offsets: Tensor | None = None
    #: Weight of each index in the sum: float32 [N]; None: 1.
    weights: Tensor | None = None
    #: Divisor of each bag's sum: float32 [bags, 1]; None: no division.
    divisor: Tensor | None = None


def batch_to_device(batch: CodeBatch, weights: Tensor | None, device: torch.device) -> tuple[CodeBatch, Tensor | None]:
    """Copy a batch to a device; from pinned memory without waiting."""
    moved: CodeBatch
    if isinstance(batch, Tensor):
        moved = batch.to(device, non_blocking=True)
    else:
        moved = [x.to(device, non_blocking=True) for x in batch]
    return moved, None if weights is None else weights.to(device, non_blocking=True)


class BatchIndexer:
    """Conversion of batches to `JaggedIndices`, one for each group of the layout."""

    def __init__(self, layout: Layout) -> None:
        plan = layout.plan
        self._plan = plan
        self._weighted = any(x.weighted for x in plan.lookups)
        self._has_lists = any(x.length > 1 for x in plan.lookups)
        self._groups = [_GroupIndexer(layout, g) for g in layout.groups]
        #: First column of each lookup in padded codes.
        self._slots = [0, *accumulate(x.length for x in plan.lookups)]

    def padded(self, codes: Tensor, weights: Tensor | None) -> list[JaggedIndices]:
        """Return the indices of padded codes int64 [B, S], by group: code 0 of a list is padding.

        Raises:
            UserError: a code is outside its table.
        """
        if codes.ndim != 2 or codes.shape[1] != self._plan.slots or codes.dtype != torch.int64:
            raise ValueError(f"codes must be int64 [B, {self._plan.slots}], not {codes.dtype} {list(codes.shape)}")
        if self._weighted != (weights is not None):
            raise ValueError("weights are given exactly where a lookup is weighted")
        if weights is not None and (weights.shape != codes.shape or weights.dtype != torch.float32):
            raise ValueError(f"weights must be float32 {list(codes.shape)}, not {weights.dtype} {list(weights.shape)}")
        if self._has_lists or weights is not None:  # C++ reads a sample's codes side by side
            codes, weights = codes.contiguous(), None if weights is None else weights.contiguous()
        features = []
        for x, slot in zip(self._plan.lookups, self._slots, strict=False):
            columns = slice(slot, slot + x.length)
            feature_weights = weights[:, columns] if weights is not None and x.weighted else None
            features.append(FeatureCodes(codes[:, columns], None, feature_weights, 0 if x.is_list else NO_PADDING))
        return self._indices(features)

    def jagged(self, batch: Sequence[Tensor | JaggedTensor]) -> list[JaggedIndices]:
        """Return the indices, by group, of codes by lookup, int32 or int64: one a sample [B], L a sample [B, L], or
        jagged.

        A sequence may have another number of samples than the pooled lookups: each of its codes has its own vector.

        Raises:
            UserError: a code is outside its table.
        """
        if len(batch) != len(self._plan.lookups):
            raise ValueError(f"codes of {len(batch)} lookups, not of {len(self._plan.lookups)}")
        features = [
            feature_codes(x.feature, codes, weighted=x.weighted, padding_idx=x.padding_idx)
            for x, codes in zip(self._plan.lookups, batch, strict=True)
        ]
        sizes = {f.samples for x, f in zip(self._plan.lookups, features, strict=True) if x.pooling != "none"}
        if len(sizes) > 1:
            raise ValueError(f"features of {sorted(sizes)} samples in one batch")
        return self._indices(features)

    def _indices(self, features: Sequence[FeatureCodes]) -> list[JaggedIndices]:
        by_loop = native.library() is not None and all(f.values.device.type == "cpu" for f in features)
        indices = []
        for g in self._groups:
            jagged = g.by_loop(features) if by_loop else g.by_torch(features)
            if jagged is None:
                self._check(features)
                raise AssertionError("codes were refused that are inside their tables")
            indices.append(jagged)
        return indices

    def _check(self, features: Sequence[FeatureCodes]) -> None:
        """Raise UserError where a code is outside its table, ValueError where offsets do not fit."""
        wrong: tuple[str, int, int] | None = None
        count = 0
        for x, f in zip(self._plan.lookups, features, strict=True):
            if f.offsets is not None:
                ends = f.offsets
                if bool((ends.diff() < 0).any()) or int(ends[0]) < 0 or int(ends[-1]) > f.values.numel():
                    raise ValueError(f"feature '{x.feature}': offsets must ascend, and end within the values")
            values, rows = f.flat().values, self._plan.by_name[x.table].rows
            outside = values[(values < 0) | (values >= rows)]
            if outside.numel():
                wrong = wrong or (x.feature, int(outside[0]), rows)
                count += outside.numel()
        if wrong is not None:
            feature, code, rows = wrong
            raise UserError(
                f"feature '{feature}': code {code} is outside its embedding table of {rows} rows ({count} such codes "
                f"in the batch): the data were coded with a newer vocabulary than the model's; use the workflow that "
                f"is saved with the model"
            )


class _GroupIndexer:
    """Conversion for one group: the lookup and the rows of each of its pieces, computed once."""

    def __init__(self, layout: Layout, group: TableGroup) -> None:
        self._fused = layout.fused_tables[group.fused]
        self._entries = sorted(group.entries, key=lambda e: e.piece)
        assert [e.piece for e in self._entries] == list(range(group.pieces))
        lookups = [layout.plan.lookups[e.lookup] for e in self._entries]
        self._sequence = group.sequence
        #: Rows, first shard and number of shards of the block of each piece, int64 [P, 3].
        self._blocks = torch.tensor(
            [
                (layout.plan.by_name[x.table].rows, *self._fused.shards_of(e.block))
                for e, x in zip(self._entries, lookups, strict=True)
            ],
            dtype=torch.int64,
        )
        self._block_numbers = torch.tensor([e.block for e in self._entries], dtype=torch.int64)
        self._has_lists = group.sequence is None and any(x.is_list for x in lookups)
        self._weighted = any(x.weighted for x in lookups)
        self._mean = torch.tensor([x.pooling == "mean" for x in lookups])
        self._has_mean = any(x.pooling == "mean" for x in lookups)

    def by_loop(self, features: Sequence[FeatureCodes]) -> JaggedIndices | None:
        """Compute the indices in one pass of C++; None where a code is outside its table, or offsets do not fit."""
        features = self._features(features)
        arrays = cpu.jagged_indices(
            features[0].samples,
            torch.tensor([f.native_piece() for f in features]),
            self._blocks,
            self._fused.shard_offsets,
            self._fused.index_dtype,
            most=sum(f.values.numel() for f in features),
            bags=self._has_bags(features),
            weighted=self._weighted,
        )
        return None if arrays is None else self._jagged(*arrays, features[0].samples)

    def by_torch(self, features: Sequence[FeatureCodes]) -> JaggedIndices | None:
        """Compute the indices by torch, on any device, in a few passes over all pieces; None as for `by_loop`."""
        features = self._features(features)
        samples, pieces = features[0].samples, len(features)
        if not self._has_bags(features):
            codes = torch.cat([f.values for f in features], dim=1).long()
            if bool(((codes < 0) | (codes >= self._blocks[:, 0])).any()):
                return None
            return JaggedIndices(self._fused.indices(codes, self._block_numbers).reshape(-1), codes.numel())
        # Compute the indices piece by piece, then move them to the order by sample and piece.
        jagged = [f.without_padding() for f in features]
        lengths = torch.stack([x.lengths for x in jagged])
        sizes = [x.values.numel() for x in jagged]
        codes = torch.cat([x.values.long() for x in jagged])
        total = codes.numel()
        piece = torch.repeat_interleave(torch.arange(pieces), torch.tensor(sizes), output_size=total)
        outside = ((codes < 0) | (codes >= self._blocks[:, 0][piece])).any()
        if bool(outside | (lengths < 0).any() | (lengths.sum(1) != torch.tensor(sizes)).any()):
            return None
        flat_lengths, counts = lengths.reshape(-1), lengths.T.reshape(-1)
        starts = counts.cumsum(0) - counts
        shift = starts.view(samples, pieces).T.reshape(-1) - (flat_lengths.cumsum(0) - flat_lengths)
        position = torch.repeat_interleave(shift, flat_lengths, output_size=total) + torch.arange(total)
        indices = torch.empty(total, dtype=self._fused.index_dtype)
        indices[position] = self._fused.indices(codes, self._block_numbers[piece])
        weights = torch.ones(total) if self._weighted else None
        if weights is not None:
            ones = (torch.ones(n) if x.weights is None else x.weights for x, n in zip(jagged, sizes, strict=True))
            weights[position] = torch.cat(list(ones))
        bag = torch.repeat_interleave(torch.arange(counts.numel()), counts, output_size=total)
        return self._jagged(indices, bag, starts, weights, samples)

    def _features(self, features: Sequence[FeatureCodes]) -> list[FeatureCodes]:
        """Return the codes that are pooled for each piece; in a sequence each code is a sample."""
        if self._sequence is None:
            return [features[e.lookup] for e in self._entries]
        return [features[self._sequence].one_each()] * len(self._entries)

    def _has_bags(self, features: Sequence[FeatureCodes]) -> bool:
        return self._has_lists or self._weighted or any(not f.is_one_each for f in features)

    def _jagged(
        self, indices: Tensor, bag: Tensor | None, starts: Tensor | None, weights: Tensor | None, samples: int
    ) -> JaggedIndices:
        divisor = None
        if starts is not None and self._has_mean:
            counts = torch.diff(starts, append=torch.tensor([indices.numel()])).view(-1, len(self._entries))
            divisor = torch.where(self._mean, counts.clamp(min=1), 1).float().view(-1, 1)
        return JaggedIndices(indices, samples * len(self._entries), bag, starts, weights, divisor)


#: Padding value that no code of a planned table has.
NO_PADDING = -1


@dataclass(frozen=True, eq=False)
class FeatureCodes:
    """Codes of one feature for B samples, int32 or int64: padded [B, L], contiguous for each sample, or jagged [N]."""

    values: Tensor
    #: int64 [B + 1]: sample i has values[offsets[i]:offsets[i + 1]]; None: values is [B, L].
    offsets: Tensor | None
    #: float32, with the values' shape and strides; None: not weighted.
    weights: Tensor | None
    #: The code that is ignored.
    padding: int

    @property
    def samples(self) -> int:
        """Number of samples, B."""
        return len(self.values) if self.offsets is None else self.offsets.numel() - 1

    @property
    def is_one_each(self) -> bool:
        """True if code i is looked up for sample i."""
        return self.offsets is None and self.values.shape[1] == 1 and self.padding == NO_PADDING

    def flat(self) -> JaggedTensor:
        """Return the codes as a jagged tensor whose offsets begin at 0."""
        if self.offsets is not None:
            return JaggedTensor(self.values, self.offsets, self.weights).flat()
        samples, width = self.values.shape
        offsets = torch.arange(samples + 1, device=self.values.device) * width
        weights = None if self.weights is None else self.weights.reshape(-1)
        return JaggedTensor(self.values.reshape(-1), offsets, weights)

    def without_padding(self) -> JaggedTensor:
        """Return `flat` without padding."""
        return self.flat() if self.padding == NO_PADDING else self.flat().without(self.padding)

    def one_each(self) -> FeatureCodes:
        """Return each code as a sample of its own."""
        flat = self.flat()
        weights = None if flat.weights is None else flat.weights.unsqueeze(1)
        return FeatureCodes(flat.values.unsqueeze(1), None, weights, self.padding)

    def native_piece(self) -> tuple[int | None, ...]:
        """Return the fields of `Piece` of native/cpp/embeddings.cpp. The tensors must outlive its use."""
        values = self.values
        length, stride = (0, 0) if self.offsets is not None else (values.shape[1], values.stride(0))
        places = (data_pointer(x) or 0 for x in (self.offsets, self.weights))
        wide = values.dtype is torch.int64
        return (values.data_ptr(), int(wide), *places, length, stride, values.numel(), self.padding)


def feature_codes(name: str, ids: Tensor | JaggedTensor, *, weighted: bool, padding_idx: int | None) -> FeatureCodes:
    """Check and wrap the codes of a feature: int32 or int64 [B], [B, L] or a JaggedTensor.

    Raises:
        ValueError: another shape or type; weights for a lookup without weights, or no weights for one with them.
    """
    prefix, jagged = f"feature '{name}': ", ids if isinstance(ids, JaggedTensor) else None
    values = ids.values if isinstance(ids, JaggedTensor) else ids
    if values.dtype not in (torch.int32, torch.int64) or not 1 <= values.ndim <= (2 if jagged is None else 1):
        shape = f"{values.dtype} {list(values.shape)}"
        raise ValueError(f"{prefix}ids must be int32 or int64, [B], [B, L] or a JaggedTensor of [N], not {shape}")
    weights = None if jagged is None else jagged.weights
    if weighted != (weights is not None):
        raise ValueError(f"{prefix}weights are given exactly where a lookup is weighted")
    if weights is not None and (weights.shape != values.shape or weights.dtype != torch.float32):
        raise ValueError(f"{prefix}weights must be float32 {list(values.shape)}")
    padding = NO_PADDING if padding_idx is None else padding_idx
    if jagged is None:
        return FeatureCodes(values.unsqueeze(1) if values.ndim == 1 else values.contiguous(), None, None, padding)
    offsets = jagged.offsets
    if offsets.dtype != torch.int64 or offsets.ndim != 1 or not offsets.numel():
        raise ValueError(f"{prefix}offsets must be int64 [B + 1], not {offsets.dtype} {list(offsets.shape)}")
    return FeatureCodes(
        values.contiguous(), offsets.contiguous(), None if weights is None else weights.contiguous(), padding
    )


#: Salt of the hash that decides the owner of an id.
_OWNER = 1


def owners(ids: Ids, ranks: int) -> Ids:
    """Return the owner of each id [N]: by its hash, so that any number of ranks is balanced."""
    return np.searchsorted(_range_starts(ranks), _hashes(ids), side="right") - 1


def _hashes(ids: Ids) -> Ids:
    """Hash ids: distinct ids have distinct hashes."""
    return mix(ids, _OWNER).view(np.int64)


def _hashes_of(ids: Tensor) -> Tensor:
    """Hash a tensor of ids on its device."""
    return torch.from_numpy(_hashes(ids.numpy())) if ids.device.type == "cpu" else hashing.mix(ids, _OWNER)


def _range_starts(ranks: int) -> Ids:
    """Return the smallest hash of each rank: int64 [W], ascending."""
    return np.array([2**64 * rank // ranks - 2**63 for rank in range(ranks)], dtype=np.int64)


@dataclass(frozen=True)
class RawIdRequest:
    """Ids of one table that a rank requests from others, or that others request from it, in order of their ranks."""

    #: int64 [N].
    ids: Tensor
    #: Number of lookups of each: int64 [N].
    counts: Tensor
    #: Number of ids of each rank, [W].
    ids_per_rank: list[int]

    def bucketized(self, ranks: Sequence[int], groups: int) -> RawIdRequest:
        """Return the ids of `ranks`, in that order, as a request of `groups` groups of consecutive ranks."""
        ids, counts = torch.split(self.ids, self.ids_per_rank), torch.split(self.counts, self.ids_per_rank)
        each = len(ranks) // groups
        sizes = [sum(self.ids_per_rank[r] for r in ranks[i * each : (i + 1) * each]) for i in range(groups)]
        return RawIdRequest(torch.cat([ids[r] for r in ranks]), torch.cat([counts[r] for r in ranks]), sizes)


@dataclass(frozen=True)
class UniqueRawIds(RawIdRequest):
    """Distinct ids that a rank requests from their owners."""

    #: Position of each among the original ids.
    duplicates: Duplicates

    @staticmethod
    def from_ids(ids: Tensor, ranks: int, counts: Tensor | None = None) -> UniqueRawIds:
        """Create a request from ids int64 [N] that may repeat.

        Args:
            ids: any 64-bit numbers.
            ranks: owners.
            counts: number of lookups of each id, int64 [N]; None: one each.
        """
        duplicates = find_duplicates(ids if ranks == 1 else _hashes_of(ids))
        times = torch.diff(duplicates.starts, append=torch.tensor([ids.numel()], device=ids.device))
        if counts is not None:
            times = torch.zeros_like(times).index_add_(0, duplicates.group, counts.index_select(0, duplicates.order))
        cuts = torch.searchsorted(duplicates.unique, torch.from_numpy(_range_starts(ranks)[1:]).to(ids.device)).tolist()
        ids_per_rank = [end - start for start, end in pairwise([0, *cuts, duplicates.unique.numel()])]
        return UniqueRawIds(
            ids.index_select(0, duplicates.order.index_select(0, duplicates.starts)), times, ids_per_rank, duplicates
        )


def pack(tables: Sequence[RawIdRequest], dtype: torch.dtype) -> tuple[Tensor, list[int]]:
    """Encode requests as one vector of `dtype` (int32 or int64); return it and its length for each rank.

    The part of each rank has the number of ids of each table, then for each table the ids (64 bits each) and counts.
    """
    split = [(torch.split(t.ids, t.ids_per_rank), torch.split(t.counts, t.ids_per_rank)) for t in tables]
    pieces: list[Tensor] = []
    lengths = []
    for rank in range(len(tables[0].ids_per_rank)):
        message = [torch.tensor([t.ids_per_rank[rank] for t in tables], dtype=dtype)]
        for ids, counts in split:
            message += [ids[rank].view(dtype), counts[rank].to(dtype)]
        pieces += message
        lengths.append(sum(p.numel() for p in message))
    return torch.cat(pieces), lengths


def unpack(message: Tensor, lengths: Sequence[int], tables: int) -> tuple[list[RawIdRequest], Tensor, list[int]]:
    """Decode requests of `pack` from each sender's part of a message.

    Args:
        message: int32 or int64 [M], the senders' parts in order; each part begins with an encoding of `pack`.
        lengths: lengths of the parts.
        tables: number of tables.

    Returns:
        (requests by table, in order of the senders; the rest of all parts; the lengths of these rests).
    """
    words = 8 // message.element_size()
    by_table: list[tuple[list[Tensor], list[Tensor], list[int]]] = [([], [], []) for _ in range(tables)]
    further_parts = []
    for part in torch.split(message, list(lengths)):
        offset = tables
        for (ids, counts, sizes), n in zip(by_table, part[:tables].tolist(), strict=True):
            # A copy, since eight bytes that are read as one number must begin at a multiple of eight.
            ids.append(part[offset : offset + n * words].clone().view(torch.int64))
            counts.append(part[offset + n * words : offset + n * (words + 1)].long())
            sizes.append(n)
            offset += n * (words + 1)
        further_parts.append(part[offset:])
    requests = [RawIdRequest(torch.cat(ids), torch.cat(counts), sizes) for ids, counts, sizes in by_table]
    return requests, torch.cat(further_parts), [p.numel() for p in further_parts]


def split_found_flags(answered: Tensor) -> tuple[Tensor, Tensor]:
    """Split a message of `DynamicLookup.with_found_flags` of any float type: float32 [M, D], bool [M]."""
    return answered[:, :-1].float().contiguous(), answered[:, -1] > 0
