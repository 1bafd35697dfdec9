"""What the body of a table operator over Arrow tables is given besides the rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pyarrow as pa

from headrace.features.table_ops.base import External, Given, TrainRows


@dataclass(frozen=True)
class Place:
    given: Given
    read: Callable[[External], pa.Table]
    train: TrainRows | None = None
