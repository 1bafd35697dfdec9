"""Options of the models in a repository that do not follow from the models."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from headrace.export.triton.config import Batching

#: How trees are in a repository; how an index searches.
TreesAs = Literal["onnx", "fil"]
IndexAs = Literal["exact", "faiss"]


@dataclass(frozen=True)
class Options:
    """See the module.

    Attributes:
        batching: of each model.
        trees: boosted trees as an ONNX graph, or as XGBoost's own file for the FIL back end.
        found: items of a user that an index gives.
        index: all vectors are compared, or Faiss's inverted lists.
        keep: versions that stay in a repository.
    """

    batching: Batching = field(default_factory=Batching)
    trees: TreesAs = "onnx"
    found: int = 100
    index: IndexAs = "exact"
    keep: int = 2


DEFAULTS = Options()
