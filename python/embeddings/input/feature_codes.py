"""Codes of one feature as a batch has them: where they lie in memory, padded or jagged."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.embeddings.input.jagged import JaggedTensor
from headrace.embeddings.kernels.cpu import data_pointer

#: No code of a planned table is this.
NO_PADDING = -1


@dataclass(frozen=True, eq=False)
class FeatureCodes:
    """Codes of B samples, int32 or int64: as many of each, [B, L], each sample's side by side, or any number, [N]."""

    values: Tensor
    #: int64 [B + 1]: sample i has values[offsets[i]:offsets[i + 1]]; None: values is [B, L].
    offsets: Tensor | None
    #: float32, of the values' shape and strides.
    weights: Tensor | None
    #: The code that counts nothing.
    padding: int

    @property
    def samples(self) -> int:
        """B."""
        return len(self.values) if self.offsets is None else self.offsets.numel() - 1

    @property
    def is_one_each(self) -> bool:
        """Whether code i is looked up for sample i."""
        return self.offsets is None and self.values.shape[1] == 1 and self.padding == NO_PADDING

    def flat(self) -> JaggedTensor:
        """As any number of each sample, with offsets from 0."""
        if self.offsets is not None:
            return JaggedTensor(self.values, self.offsets, self.weights).flat()
        samples, width = self.values.shape
        offsets = torch.arange(samples + 1, device=self.values.device) * width
        weights = None if self.weights is None else self.weights.reshape(-1)
        return JaggedTensor(self.values.reshape(-1), offsets, weights)

    def counted(self) -> JaggedTensor:
        """`flat` without padding."""
        return self.flat() if self.padding == NO_PADDING else self.flat().without(self.padding)

    def one_each(self) -> FeatureCodes:
        """Each code as a sample of its own."""
        flat = self.flat()
        weights = None if flat.weights is None else flat.weights.unsqueeze(1)
        return FeatureCodes(flat.values.unsqueeze(1), None, weights, self.padding)

    def described(self) -> tuple[int | None, ...]:
        """As `Piece` of native/cpp/embeddings.cpp. The tensors are to outlive its use."""
        values = self.values
        length, stride = (0, 0) if self.offsets is not None else (values.shape[1], values.stride(0))
        places = (data_pointer(x) or 0 for x in (self.offsets, self.weights))
        wide = values.dtype is torch.int64
        return (values.data_ptr(), int(wide), *places, length, stride, values.numel(), self.padding)


def feature_codes(name: str, given: Tensor | JaggedTensor, *, weighted: bool, padding_idx: int | None) -> FeatureCodes:
    """Of what a caller gives for a feature: int32 or int64 [B], one each, [B, L], L each, or any number.

    Raises:
        ValueError: another shape or type, or weights where there should be none, or none where there should be.
    """
    what, jagged = f"feature '{name}': ", given if isinstance(given, JaggedTensor) else None
    values = given.values if isinstance(given, JaggedTensor) else given
    if values.dtype not in (torch.int32, torch.int64) or not 1 <= values.ndim <= (2 if jagged is None else 1):
        shape = f"{values.dtype} {list(values.shape)}"
        raise ValueError(f"{what}ids must be int32 or int64, [B], [B, L] or a JaggedTensor of [N], not {shape}")
    weights = None if jagged is None else jagged.weights
    if weighted != (weights is not None):
        raise ValueError(f"{what}weights are given exactly where a lookup is weighted")
    if weights is not None and (weights.shape != values.shape or weights.dtype != torch.float32):
        raise ValueError(f"{what}weights must be float32 {list(values.shape)}")
    padding = NO_PADDING if padding_idx is None else padding_idx
    if jagged is None:
        return FeatureCodes(values.unsqueeze(1) if values.ndim == 1 else values.contiguous(), None, None, padding)
    offsets = jagged.offsets
    if offsets.dtype != torch.int64 or offsets.ndim != 1 or not offsets.numel():
        raise ValueError(f"{what}offsets must be int64 [B + 1], not {offsets.dtype} {list(offsets.shape)}")
    return FeatureCodes(
        values.contiguous(), offsets.contiguous(), None if weights is None else weights.contiguous(), padding
    )
