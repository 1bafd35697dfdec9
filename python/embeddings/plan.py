"""Where each row of each embedding table lives. Sharding is a plan, a list of shards; the exchange obeys any plan.

    tables, lookups = tables_of(schema, dim=16)
    plan = row_wise(tables, lookups, world_size=2)

A shard is every `stride`-th row of one table on one rank, so the list can say row-wise modulo (stride = world size),
table-wise (stride 1) and mixtures of both. One rank is the plan with stride 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from headrace.errors import UserError
from headrace.schema import DatasetSchema, Kind

_INT32_MAX = 2**31 - 1


@dataclass(frozen=True)
class Table:
    """One embedding table: float32 [rows, dim]."""

    name: str
    rows: int
    dim: int


@dataclass(frozen=True)
class Lookup:
    """One feature of the model: which columns of the codes are looked up in which table.

    A list of `length` codes is pooled by a sum in which code 0 is padding and counts nothing. For a scalar
    (`is_list=False`, length 1) code 0 is the row of the missing value like any other row.
    """

    feature: str
    table: str
    length: int = 1
    is_list: bool = False


@dataclass(frozen=True)
class Shard:
    """The rows `range(start, rows of the table, stride)` of one table, all on one rank."""

    table: str
    rank: int
    rows: range


@dataclass(frozen=True)
class Plan:
    """Tables, who looks them up, and which rank holds what. The same on all ranks.

    Raises:
        ValueError: the shards of a table do not hold each row once, a name is unknown or twice, or dims differ.
    """

    tables: tuple[Table, ...]
    lookups: tuple[Lookup, ...]
    shards: tuple[Shard, ...]
    world_size: int

    def __post_init__(self) -> None:
        names = [t.name for t in self.tables]
        if len(set(names)) < len(names):
            raise ValueError(f"two tables of one name in {names}")
        if len({t.dim for t in self.tables}) > 1:
            raise ValueError("tables differ in dim: " + ", ".join(f"{t.name} {t.dim}" for t in self.tables))
        for lookup in self.lookups:
            if lookup.table not in names:
                raise ValueError(f"feature '{lookup.feature}' looks up table '{lookup.table}', which is not planned")
            if lookup.length != 1 and not lookup.is_list:
                raise ValueError(f"feature '{lookup.feature}' is no list but has length {lookup.length}")
        for table in self.tables:
            self._check_shards(table)

    def _check_shards(self, table: Table) -> None:
        shards = self.shards_of(table.name)
        stride = len(shards)
        starts = sorted(s.rows.start for s in shards)
        whole = all(s.rows == range(s.rows.start, table.rows, stride) for s in shards)
        if table.rows < 1 or not shards or starts != list(range(stride)) or not whole:
            raise ValueError(f"table '{table.name}' of {table.rows} rows is not held once by its shards {shards}")
        if any(not 0 <= s.rank < self.world_size for s in shards):
            raise ValueError(f"table '{table.name}' has a shard on a rank outside a world of {self.world_size}")

    def shards_of(self, table: str) -> tuple[Shard, ...]:
        """The shards of one table, in plan order."""
        return tuple(s for s in self.shards if s.table == table)

    def shards_on(self, rank: int) -> tuple[Shard, ...]:
        """The shards that a rank holds, in the order of its weight matrix."""
        return tuple(s for s in self.shards if s.rank == rank)

    def local_rows(self, rank: int) -> int:
        """Rows of a rank's weight matrix."""
        return sum(len(s.rows) for s in self.shards_on(rank))

    @property
    def dim(self) -> int:
        """Width of all tables; 0 where there is no table."""
        return self.tables[0].dim if self.tables else 0

    @property
    def slots(self) -> int:
        """Columns of the codes, S."""
        return sum(x.length for x in self.lookups)

    @cached_property
    def addresses(self) -> Addresses:
        """The plan as arithmetic on codes."""
        return Addresses(self)


class Addresses:
    """Turns codes into addresses, and back, without a loop.

    An address is `first address of the owner's rank + row in the owner's weight matrix`: addresses in ascending order
    are grouped by owner, so sorting a batch's addresses both removes duplicates and sorts the mail. They are int32
    where the whole plan has fewer than 2^31 rows: torch sorts those by radix, more than twice as fast.
    """

    def __init__(self, plan: Plan) -> None:
        rank_rows = [plan.local_rows(r) for r in range(plan.world_size)]
        #: First address of each rank, and the end: [W + 1].
        self.rank_starts = torch.tensor([sum(rank_rows[:r]) for r in range(plan.world_size + 1)])
        self.dtype = torch.int32 if sum(rank_rows) <= _INT32_MAX else torch.int64
        used = list(self.rank_starts[:-1].tolist())
        first_address: dict[tuple[str, int], int] = {}
        for shard in plan.shards:
            first_address[shard.table, shard.rows.start] = used[shard.rank]
            used[shard.rank] += len(shard.rows)
        self._first_shard: dict[str, int] = {}
        self._stride: dict[str, int] = {}
        shard_address: list[int] = []
        for table in plan.tables:
            self._first_shard[table.name] = len(shard_address)
            self._stride[table.name] = stride = len(plan.shards_of(table.name))
            shard_address += [first_address[table.name, start] for start in range(stride)]
        #: First address of each shard, shards of a table in order of their first row: [shards].
        self._shard_address = torch.tensor(shard_address, dtype=torch.int64)
        rows = {t.name: t.rows for t in plan.tables}
        self._features = [x.feature for x in plan.lookups for _ in range(x.length)]
        tables = [x.table for x in plan.lookups for _ in range(x.length)]
        #: By slot, [S]: rows of its table, its stride, its table's first shard.
        self._rows = torch.tensor([rows[t] for t in tables], dtype=torch.int64)
        self._strides = torch.tensor([self._stride[t] for t in tables], dtype=torch.int64)
        self._firsts = torch.tensor([self._first_shard[t] for t in tables], dtype=torch.int64)
        self._one_shard_each = bool((self._strides == 1).all())

    def of_codes(self, codes: Tensor) -> Tensor:
        """Addresses [B, S] (int32 or int64) of codes int64 [B, S].

        Raises:
            UserError: a code is outside its table.
        """
        wrong = (codes < 0) | (codes >= self._rows)
        if bool(wrong.any()):
            self._refuse(codes, wrong)
        if self._one_shard_each:
            return (codes + self._shard_address[self._firsts]).to(self.dtype)
        quotient = torch.div(codes, self._strides, rounding_mode="trunc")
        shard = codes - quotient * self._strides + self._firsts
        return (self._shard_address[shard] + quotient).to(self.dtype)

    def of_rows(self, table: str, rows: Tensor) -> Tensor:
        """Addresses int64 [N] of rows int64 [N] of one table."""
        stride = self._stride[table]
        quotient = torch.div(rows, stride, rounding_mode="trunc")
        return self._shard_address[rows - quotient * stride + self._first_shard[table]] + quotient

    def _refuse(self, codes: Tensor, wrong: Tensor) -> None:
        row, slot = wrong.nonzero()[0].tolist()
        raise UserError(
            f"feature '{self._features[slot]}': code {int(codes[row, slot])} is outside its embedding table of "
            f"{int(self._rows[slot])} rows ({int(wrong.sum())} such codes in the batch): the data were coded with a "
            f"newer vocabulary than the model's; use the workflow that is saved with the model"
        )


def tables_of(schema: DatasetSchema, dim: int) -> tuple[tuple[Table, ...], tuple[Lookup, ...]]:
    """The tables and lookups of a dataset's categorical features, in schema order.

    Features of one vocabulary share its codes, and so a table, named after the vocabulary (else after the feature).

    Raises:
        UserError: a categorical feature without a cardinality.
    """
    rows: dict[str, int] = {}
    lookups: list[Lookup] = []
    for f in schema.of(Kind.CATEGORICAL):
        if f.cardinality is None or f.cardinality < 1:
            raise UserError(f"categorical feature '{f.name}' has no cardinality in the dataset's schema: categorify it")
        name = f.vocabulary or f.name
        rows[name] = max(rows.get(name, 0), f.cardinality)
        lookups.append(Lookup(feature=f.name, table=name, length=f.length, is_list=f.is_list))
    return tuple(Table(name=n, rows=r, dim=dim) for n, r in rows.items()), tuple(lookups)


def row_wise(tables: Sequence[Table], lookups: Sequence[Lookup], world_size: int) -> Plan:
    """Row r of every table on rank r % world_size: balanced whatever the tables' sizes and popularities."""
    shards = tuple(
        Shard(table=t.name, rank=rank, rows=range(rank, t.rows, world_size))
        for t in tables
        for rank in range(world_size)
    )
    return Plan(tables=tuple(tables), lookups=tuple(lookups), shards=shards, world_size=world_size)
