"""How rows of a table may be stored, and what that takes; plain values, so that a plan needs no torch."""

from __future__ import annotations

from typing import Literal

#: How rows are stored. Arithmetic is float32 with all of them.
Storage = Literal["fp32", "fp16", "bf16", "int8"]

#: Bytes of a number, where a row is nothing but numbers.
BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}


def row_bytes(storage: Storage, columns: int) -> int:
    """Bytes of a row as stored: see headrace.embeddings.storage.dtypes."""
    return columns + 8 if storage == "int8" else columns * BYTES[storage]
