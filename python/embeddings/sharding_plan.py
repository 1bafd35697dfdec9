"""Sharding plan: which rank holds which rows and columns of each embedding table. The exchange obeys any plan.

    tables, lookups = tables_of(schema, dim=16)
    plan = row_wise(tables, lookups, world_size=2)

A plan cuts a table into blocks of columns and deals the rows of a block, one by one, to consecutive ranks. The usual
kinds are special cases, and they mix freely in one plan:

- table-wise: one block of all columns, one rank;
- row-wise: one block of all columns, several ranks;
- column-wise: several blocks, one rank each;
- data-parallel: one block that every rank holds completely; its gradients are all-reduced, nothing else travels.

The module has plain values and needs no torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from headrace.config.embeddings import ShardingKind
from headrace.errors import UserError

if TYPE_CHECKING:
    from headrace.config.schema import DatasetSchema

#: Storage types of rows. Arithmetic is float32 with all of them.
Storage = Literal["fp32", "fp16", "bf16", "int8"]

#: Bytes of a number, where a row is nothing but numbers.
BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}


def row_bytes(storage: Storage, columns: int) -> int:
    """Return the bytes of a stored row: see headrace.embeddings.storage."""
    return columns + 8 if storage == "int8" else columns * BYTES[storage]


#: Pooling of a list's vectors; `none`: the list is a sequence, a vector for each code.
Pooling = Literal["sum", "mean", "max", "none"]
#: Type of float32 vectors and gradients in messages: unchanged, or rounded to the nearest bfloat16.
CommDtype = Literal["fp32", "bf16"]


@dataclass(frozen=True)
class Table:
    """One embedding table: [rows, dim], stored as `storage`.

    `cached`: the share of a rank's rows that its GPU holds, those used most; all of them are then in host memory. With
    1 they are on the GPU alone (or in host memory, where there is none). Replicated tables are never cached.
    `init_bound`: rows start uniform in +- this; None: as those of the layer's other tables.
    `joined`: no rank holds it; whoever looks it up brings its rows before (`ShardedEmbeddings.set_joined`), to score.
    """

    name: str
    rows: int
    dim: int
    storage: Storage = "fp32"
    cached: float = 1.0
    init_bound: float | None = None
    joined: bool = False


@dataclass(frozen=True)
class Lookup:
    """One feature of the model: which codes are looked up in which table, and how they are pooled.

    In padded codes a list has `length` columns; code 0 is padding there and counts nothing, and a list of padding alone
    gives zeros. For a scalar (`is_list=False`, length 1) code 0 is the row of the missing value like any other row.
    `weighted`: the batch brings a weight for each code, and the pooling is a sum of weight times row.
    """

    feature: str
    table: str
    length: int = 1
    is_list: bool = False
    pooling: Pooling = "sum"
    weighted: bool = False
    #: The code of a jagged batch that is ignored, as torch.nn.EmbeddingBag's; None: each is a row like any other.
    padding_idx: int | None = None


@dataclass(frozen=True)
class Block:
    """Columns of a table, and who holds its rows.

    Row r is on rank (first_rank + r % ranks) % world size. With `ranks` 0 every rank holds all rows. `pooled`: owners
    sum the rows of a bag and send one vector; else each distinct row travels once.
    """

    table: str
    columns: range
    first_rank: int = 0
    ranks: int = 1
    pooled: bool = False

    @property
    def replicated(self) -> bool:
        return self.ranks == 0


@dataclass(frozen=True)
class Plan:
    """Tables, who looks them up, and which rank holds what. The same on all ranks.

    Raises:
        ValueError: the blocks of a table do not hold each column once, or a name is unknown or twice.
    """

    tables: tuple[Table, ...]
    lookups: tuple[Lookup, ...]
    blocks: tuple[Block, ...]
    world_size: int
    comm_dtype: CommDtype = "fp32"
    #: Ranks of a machine, where messages go inside machines first and then between them; 1: they go directly.
    ranks_per_node: int = 1

    def __post_init__(self) -> None:
        if self.ranks_per_node < 1 or self.world_size % self.ranks_per_node:
            raise ValueError(f"machines of {self.ranks_per_node} ranks do not make a world of {self.world_size}")
        if self.ranks_per_node > 1 and any(b.pooled for b in self.blocks):
            raise ValueError("bags that owners sum do not travel by machines (hop > 1)")
        twice = [n for n, count in Counter(t.name for t in self.tables).items() if count > 1]
        if twice:
            raise ValueError(f"two tables of one name: {twice}")
        for lookup in self.lookups:
            if lookup.table not in self.by_name:
                raise ValueError(f"feature '{lookup.feature}' looks up table '{lookup.table}', which is not planned")
            if lookup.length != 1 and not lookup.is_list:
                raise ValueError(f"feature '{lookup.feature}' is no list but has length {lookup.length}")
            if lookup.weighted and lookup.pooling != "sum":
                raise ValueError(f"feature '{lookup.feature}' is weighted: pooling is 'sum', not '{lookup.pooling}'")
        for block in self.blocks:
            if block.table not in self.by_name:
                raise ValueError(f"a block of table '{block.table}', which is not planned")
        if self.world_size > 1 and any(t.joined for t in self.tables):
            raise ValueError("rows are joined in where one rank looks them up, not in a world of several")
        for table in self.tables:
            self._check_blocks(table)

    def _check_blocks(self, table: Table) -> None:
        blocks = self.blocks_of(table.name)
        columns = [c for b in blocks for c in b.columns]
        if table.rows < 1 or columns != list(range(table.dim)):
            raise ValueError(f"table '{table.name}' of {table.dim} columns is not held once by its blocks {blocks}")
        if table.storage == "int8" and len(blocks) > 1:
            raise ValueError(
                f"table '{table.name}' is stored as int8, by whole rows, and cut by columns; cut it by rows"
            )
        if any(b.replicated for b in blocks) and len(blocks) > 1:
            raise ValueError(f"table '{table.name}' is replicated by columns; replicate it whole")
        if any(b.pooled for b in blocks) and (blocks[0].replicated or not can_pool(table.name, self.lookups)):
            raise ValueError(
                f"table '{table.name}' cannot be summed by its owners: not all its lookups are sums of lists"
            )
        if any(not (0 <= b.first_rank < self.world_size and b.ranks <= self.world_size) for b in blocks):
            raise ValueError(f"table '{table.name}' has a block on a rank outside a world of {self.world_size}")

    @cached_property
    def by_name(self) -> dict[str, Table]:
        """Tables by name."""
        return {t.name: t for t in self.tables}

    @cached_property
    def _blocks_by_table(self) -> dict[str, tuple[Block, ...]]:
        blocks_by_table: dict[str, list[Block]] = {t.name: [] for t in self.tables}
        for b in self.blocks:
            blocks_by_table[b.table].append(b)
        return {name: tuple(blocks) for name, blocks in blocks_by_table.items()}

    def blocks_of(self, table: str) -> tuple[Block, ...]:
        """Return the blocks of one table, by column."""
        return self._blocks_by_table[table]

    def kind_of(self, table: str) -> ShardingKind:
        """Return the sharding kind of a table; with one rank, everything is table-wise unless it is replicated."""
        first, *other_blocks = self.blocks_of(table)
        if first.replicated:
            return "data_parallel"
        return "column_wise" if other_blocks else "row_wise" if first.ranks > 1 else "table_wise"

    def rows_on(self, block: Block, rank: int) -> range:
        """Return the rows of a block that a rank holds; may be empty."""
        rows = self.by_name[block.table].rows
        if block.replicated:
            return range(rows)
        shard = (rank - block.first_rank) % self.world_size
        return range(shard, rows, block.ranks) if shard < block.ranks else range(0)

    @property
    def slots(self) -> int:
        """Columns of the codes, S."""
        return sum(x.length for x in self.lookups)


def can_pool(table: str, lookups: Sequence[Lookup]) -> bool:
    """Return whether a table's owners can sum bags: every lookup of it is a sum, weighted sum or mean of a list."""
    return all(x.is_list and x.pooling in ("sum", "mean") for x in lookups if x.table == table)


def tables_of(
    schema: DatasetSchema, dim: int, storage: Storage = "fp32", pooling: Pooling = "sum"
) -> tuple[tuple[Table, ...], tuple[Lookup, ...]]:
    """Return the tables and lookups of a dataset's features of codes, in schema order; those of raw ids have no plan.

    Features of one vocabulary share its codes, and so a table, named after the vocabulary (else after the feature).

    Raises:
        UserError: a categorical feature without a cardinality.
    """
    # Late: whoever names tables by hand has no dataset.
    from headrace.config.schema import NULL_CODE, Kind

    rows: dict[str, int] = {}
    lookups: list[Lookup] = []
    for f in schema.of(Kind.CATEGORICAL):
        if f.dynamic:
            continue
        if f.cardinality is None or f.cardinality < 1:
            raise UserError(f"categorical feature '{f.name}' has no cardinality in the dataset's schema: categorify it")
        name = f.vocabulary or f.name
        rows[name] = max(rows.get(name, 0), f.cardinality)
        lookups.append(
            Lookup(
                feature=f.name,
                table=name,
                length=f.length,
                is_list=f.is_list,
                pooling=pooling if f.is_list else "sum",
                padding_idx=NULL_CODE if f.is_list else None,
            )
        )
    return tuple(Table(name=n, rows=r, dim=dim, storage=storage) for n, r in rows.items()), tuple(lookups)


def blocks_for(
    table: Table, kind: ShardingKind, world_size: int, first_rank: int = 0, parts: int = 0, pooled: bool = False
) -> list[Block]:
    """Return the blocks of a table for one of the usual sharding kinds.

    Args:
        table: what to cut.
        kind: how.
        world_size: ranks.
        first_rank: the first, or only, rank that holds something; the others follow it, after the last comes rank 0.
        parts: row-wise: ranks; column-wise: blocks of columns, of widths that differ by one at most. 0: as many as
            there are ranks (and columns).
        pooled: whether owners sum bags (not for data_parallel).
    """
    all_columns = range(table.dim)
    if kind == "data_parallel":
        return [Block(table.name, all_columns, 0, 0)]
    if kind == "table_wise":
        return [Block(table.name, all_columns, first_rank, 1, pooled)]
    if kind == "row_wise":
        return [Block(table.name, all_columns, first_rank, min(parts or world_size, world_size), pooled)]
    parts = min(parts or world_size, table.dim)
    cuts = [table.dim * i // parts for i in range(parts + 1)]
    return [
        Block(table.name, range(cuts[i], cuts[i + 1]), (first_rank + i) % world_size, 1, pooled) for i in range(parts)
    ]


def row_wise(tables: Sequence[Table], lookups: Sequence[Lookup], world_size: int) -> Plan:
    """Return the plan with row r of every table on rank r % world_size: balanced for any sizes and popularities."""
    blocks = tuple(b for t in tables for b in blocks_for(t, "row_wise", world_size))
    return Plan(tables=tuple(tables), lookups=tuple(lookups), blocks=blocks, world_size=world_size)
