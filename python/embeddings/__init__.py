"""Embedding tables of a model on any number of ranks: see docs/embeddings.md.

The names in `__all__` are public: tables, plans, lookups, training, saves. A name's module, and torch with it, is
imported at first use: `from headrace.embeddings import ShardedEmbeddings`. Modules that need no torch
(embeddings.sharding_plan, embeddings.dynamic.spec) are imported by their own names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace import lazy_names

if TYPE_CHECKING:
    from headrace.config.embeddings import DynamicTable as DynamicTable
    from headrace.config.embeddings import EmbeddingOptimizer as EmbeddingOptimizer
    from headrace.config.embeddings import Sharding as Sharding
    from headrace.config.embeddings import TableSharding as TableSharding
    from headrace.embeddings.checkpoint.changes import apply_changes as apply_changes
    from headrace.embeddings.checkpoint.changes import save_changes as save_changes
    from headrace.embeddings.checkpoint.dynamic import load_dynamic as load_dynamic
    from headrace.embeddings.checkpoint.dynamic import save_dynamic as save_dynamic
    from headrace.embeddings.checkpoint.files import shared_directory as shared_directory
    from headrace.embeddings.checkpoint.files import write_index as write_index
    from headrace.embeddings.checkpoint.shards import load_shards as load_shards
    from headrace.embeddings.checkpoint.shards import save_shards as save_shards
    from headrace.embeddings.collection import EmbeddingCollection as EmbeddingCollection
    from headrace.embeddings.collection import EmbeddingFeature as EmbeddingFeature
    from headrace.embeddings.collection import EmbeddingOutputs as EmbeddingOutputs
    from headrace.embeddings.dynamic.spec import DynamicSpec as DynamicSpec
    from headrace.embeddings.dynamic.tables import DynamicEmbeddings as DynamicEmbeddings
    from headrace.embeddings.jagged import JaggedTensor as JaggedTensor
    from headrace.embeddings.layer import ShardedEmbeddings as ShardedEmbeddings
    from headrace.embeddings.lookup.handle import LookupHandle as LookupHandle
    from headrace.embeddings.lookup.zero_copy import ZeroCopyVectors as ZeroCopyVectors
    from headrace.embeddings.planner.search import plan_tables as plan_tables
    from headrace.embeddings.sharding_plan import Block as Block
    from headrace.embeddings.sharding_plan import Lookup as Lookup
    from headrace.embeddings.sharding_plan import Plan as Plan
    from headrace.embeddings.sharding_plan import Table as Table
    from headrace.embeddings.sharding_plan import row_wise as row_wise

__getattr__ = lazy_names(
    __name__,
    {
        ".checkpoint.changes": ("apply_changes", "save_changes"),
        ".checkpoint.dynamic": ("load_dynamic", "save_dynamic"),
        ".checkpoint.files": ("shared_directory", "write_index"),
        ".checkpoint.shards": ("load_shards", "save_shards"),
        ".collection": ("EmbeddingCollection", "EmbeddingFeature", "EmbeddingOutputs"),
        ".dynamic.spec": ("DynamicSpec",),
        ".dynamic.tables": ("DynamicEmbeddings",),
        ".jagged": ("JaggedTensor",),
        ".layer": ("ShardedEmbeddings",),
        ".lookup.handle": ("LookupHandle",),
        ".lookup.zero_copy": ("ZeroCopyVectors",),
        ".planner.search": ("plan_tables",),
        ".sharding_plan": ("Block", "Lookup", "Plan", "Table", "row_wise"),
        "headrace.config.embeddings": ("DynamicTable", "EmbeddingOptimizer", "Sharding", "TableSharding"),
    },
)
__all__ = [
    "Block",
    "DynamicEmbeddings",
    "DynamicSpec",
    "DynamicTable",
    "EmbeddingCollection",
    "EmbeddingFeature",
    "EmbeddingOptimizer",
    "EmbeddingOutputs",
    "JaggedTensor",
    "Lookup",
    "LookupHandle",
    "Plan",
    "ShardedEmbeddings",
    "Sharding",
    "Table",
    "TableSharding",
    "ZeroCopyVectors",
    "apply_changes",
    "load_dynamic",
    "load_shards",
    "plan_tables",
    "row_wise",
    "save_changes",
    "save_dynamic",
    "save_shards",
    "shared_directory",
    "write_index",
]
