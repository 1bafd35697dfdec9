"""Embedding tables of a model on any number of ranks: see docs/embeddings.md.

What stands here is public: the tables, how they are planned, looked up, trained, saved and loaded. A name is imported
with its module, and torch with that, when it is first asked for: `from headrace.embeddings import ShardedEmbeddings`.
Modules that need no torch (embeddings.sharding.plan, embeddings.dynamic.spec) are imported by their own names there.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.config import DynamicTable as DynamicTable
    from headrace.config import EmbeddingOptimizer as EmbeddingOptimizer
    from headrace.config import Sharding as Sharding
    from headrace.config import TableSharding as TableSharding
    from headrace.embeddings.checkpoint.delta import apply_changes as apply_changes
    from headrace.embeddings.checkpoint.delta import save_changes as save_changes
    from headrace.embeddings.checkpoint.dynamic import load_dynamic as load_dynamic
    from headrace.embeddings.checkpoint.dynamic import save_dynamic as save_dynamic
    from headrace.embeddings.checkpoint.index import write_index as write_index
    from headrace.embeddings.checkpoint.shards import load_shards as load_shards
    from headrace.embeddings.checkpoint.shards import save_shards as save_shards
    from headrace.embeddings.checkpoint.shared_directory import shared_directory as shared_directory
    from headrace.embeddings.collection.collection import EmbeddingCollection as EmbeddingCollection
    from headrace.embeddings.collection.features import EmbeddingFeature as EmbeddingFeature
    from headrace.embeddings.collection.outputs import EmbeddingOutputs as EmbeddingOutputs
    from headrace.embeddings.dynamic.spec import DynamicSpec as DynamicSpec
    from headrace.embeddings.dynamic.tables import DynamicEmbeddings as DynamicEmbeddings
    from headrace.embeddings.input.jagged import JaggedTensor as JaggedTensor
    from headrace.embeddings.lookup.handle import LookupHandle as LookupHandle
    from headrace.embeddings.lookup.zero_copy import ZeroCopyVectors as ZeroCopyVectors
    from headrace.embeddings.planner.search import plan_tables as plan_tables
    from headrace.embeddings.sharded import ShardedEmbeddings as ShardedEmbeddings
    from headrace.embeddings.sharding.plan import Block as Block
    from headrace.embeddings.sharding.plan import Lookup as Lookup
    from headrace.embeddings.sharding.plan import Plan as Plan
    from headrace.embeddings.sharding.plan import Table as Table
    from headrace.embeddings.sharding.plan import row_wise as row_wise

#: By name, the module that it is from.
_MODULES = {
    "Block": "headrace.embeddings.sharding.plan",
    "DynamicEmbeddings": "headrace.embeddings.dynamic.tables",
    "DynamicSpec": "headrace.embeddings.dynamic.spec",
    "DynamicTable": "headrace.config",
    "EmbeddingCollection": "headrace.embeddings.collection.collection",
    "EmbeddingFeature": "headrace.embeddings.collection.features",
    "EmbeddingOptimizer": "headrace.config",
    "EmbeddingOutputs": "headrace.embeddings.collection.outputs",
    "JaggedTensor": "headrace.embeddings.input.jagged",
    "Lookup": "headrace.embeddings.sharding.plan",
    "LookupHandle": "headrace.embeddings.lookup.handle",
    "Plan": "headrace.embeddings.sharding.plan",
    "ShardedEmbeddings": "headrace.embeddings.sharded",
    "Sharding": "headrace.config",
    "Table": "headrace.embeddings.sharding.plan",
    "TableSharding": "headrace.config",
    "ZeroCopyVectors": "headrace.embeddings.lookup.zero_copy",
    "apply_changes": "headrace.embeddings.checkpoint.delta",
    "load_dynamic": "headrace.embeddings.checkpoint.dynamic",
    "load_shards": "headrace.embeddings.checkpoint.shards",
    "plan_tables": "headrace.embeddings.planner.search",
    "row_wise": "headrace.embeddings.sharding.plan",
    "save_changes": "headrace.embeddings.checkpoint.delta",
    "save_dynamic": "headrace.embeddings.checkpoint.dynamic",
    "save_shards": "headrace.embeddings.checkpoint.shards",
    "shared_directory": "headrace.embeddings.checkpoint.shared_directory",
    "write_index": "headrace.embeddings.checkpoint.index",
}
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


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(import_module(_MODULES[name]), name)
