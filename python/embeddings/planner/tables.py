"""Tables to plan for: the popularity of their rows, distinct rows in a batch, and tables declared in a YAML file.

Declared tables are enough to plan for machines and data that one does not have.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import yaml
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from headrace.config.embeddings import EmbeddingOptimizerKind
from headrace.embeddings.sharding_plan import Lookup, Pooling, Table
from headrace.errors import UserError

#: Rows with a group of their own; later groups grow by a few percent.
_HEAD = 1_024
_GROWTH = 1.02


@dataclass(frozen=True)
class Popularity:
    """Rows in groups of equal popularity, most popular first."""

    #: Rows of each group: float64 [G].
    rows: NDArray[np.float64]
    #: Probability that a lookup is of one given row of the group: float64 [G].
    chance: NDArray[np.float64]

    @staticmethod
    def zipf(rows: int, exponent: float) -> Popularity:
        """Create a Zipf distribution: row i (from 0) in proportion to (i + 1) ** -exponent; 0: uniform."""
        if exponent == 0:
            return Popularity(np.array([float(rows)]), np.array([1.0 / rows]))
        head = min(rows, _HEAD)
        steps = max(0, int(np.ceil(np.log(max(rows, 1) / head) / np.log(_GROWTH))))
        edges = np.unique(np.concatenate([np.arange(head + 1), np.floor(head * _GROWTH ** np.arange(1, steps + 1))]))
        edges = np.minimum(edges, rows)
        edges = np.unique(np.append(edges, rows)).astype(np.float64)
        counts = np.diff(edges)
        # The rank in the middle of a group stands for all of it.
        weight = ((edges[:-1] + edges[1:] + 1) / 2) ** -exponent
        return Popularity(counts, weight / float((counts * weight).sum()))

    @staticmethod
    def sampled(counts: NDArray[np.int64], rows: int) -> Popularity:
        """Estimate from the counts of rows in a sample of lookups; `counts` may be shorter than the table.

        What the sample did not see is as likely together as the share of lookups whose row was seen once, and those
        seen once as the share of those seen twice (Good and Turing; Good, 1953); rows of one kind are alike.
        """
        times, seen = np.unique(counts[counts > 0], return_counts=True)
        times, seen = times[::-1].astype(np.float64), seen[::-1].astype(np.float64)
        total, rest = float((times * seen).sum()), rows - int(seen.sum())
        once = float(seen[-1]) if times[-1] == 1 else 0.0
        unseen = min(once / total, 0.999) if rest > 0 else 0.0
        mass = times * seen / total
        if unseen and len(times) > 2 and times[-2] == 2:
            mass[-1] = min(mass[-1], 2 * seen[-2] / total)
        mass *= (1 - unseen) / mass.sum()
        chance = mass / seen
        if rest <= 0:
            return Popularity(seen, chance)
        return Popularity(np.append(seen, float(rest)), np.append(chance, unseen / rest))

    def chance_of_lookup(self, lookups: float) -> NDArray[np.float64]:
        """Return the probability that at least one of `lookups` lookups is of a row, by group: float64 [G]."""
        result: NDArray[np.float64] = -np.expm1(lookups * np.log1p(-np.minimum(self.chance, 1 - 1e-12)))
        return result

    def distinct(self, lookups: float) -> float:
        """Return the expected number of distinct rows among `lookups` lookups."""
        return float((self.rows * self.chance_of_lookup(lookups)).sum())

    def distinct_beyond(self, lookups: float, most: float) -> float:
        """Return the expected number of distinct rows among `lookups` lookups outside the `most` popular ones."""
        left = np.clip(np.cumsum(self.rows) - most, 0.0, self.rows)
        return float((left * self.chance_of_lookup(lookups)).sum())

    def distinct_by_shard(self, lookups: float, ranks: int) -> NDArray[np.float64]:
        """Return the expected number of distinct rows on each of `ranks` shards, row i on shard i % ranks: float64
        [ranks].
        """
        return self._by_shard(self.chance_of_lookup(lookups), ranks)

    def share_by_shard(self, ranks: int) -> NDArray[np.float64]:
        """Return the probability that a lookup is on each of `ranks` shards, row i on shard i % ranks: float64
        [ranks].
        """
        return self._by_shard(self.chance, ranks)

    def _by_shard(self, chance_of_lookup: NDArray[np.float64], ranks: int) -> NDArray[np.float64]:
        """Sum a number by group over the rows of each shard."""
        single = int(np.argmin(self.rows == 1)) if (self.rows != 1).any() else len(self.rows)
        shards = np.bincount(np.arange(single) % ranks, weights=chance_of_lookup[:single], minlength=ranks).astype(
            np.float64
        )
        total = float(self.rows.sum())
        tail = float((self.rows[single:] * chance_of_lookup[single:]).sum())
        if tail and total >= ranks:
            shards += tail / ranks
        elif tail:
            shards[: int(total)] += tail / total
        return shards


class DeclaredTable(BaseModel):
    """One table and the feature that looks it up."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    rows: int = Field(ge=1)
    #: Ids of the feature in one sample.
    ids: int = Field(default=1, ge=1)
    #: Width, where it is not the file's.
    dim: int | None = Field(default=None, ge=1)
    pooling: Pooling = "sum"


class DeclaredTables(BaseModel):
    """A file of conf/tables."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    #: Where the numbers are from.
    source: str
    embedding_dim: int = Field(ge=1)
    #: Rows of a step over all ranks.
    batch_size: int = Field(ge=1)
    optimizer: EmbeddingOptimizerKind
    tables: tuple[DeclaredTable, ...] = Field(min_length=1)

    def planned(self) -> tuple[tuple[Table, ...], tuple[Lookup, ...]]:
        """Return the tables and their lookups, one of each."""
        tables = tuple(Table(t.name, t.rows, t.dim or self.embedding_dim) for t in self.tables)
        lookups = tuple(Lookup(t.name, t.name, t.ids, t.ids > 1, t.pooling) for t in self.tables)
        return tables, lookups


def load_tables(path_or_name: str) -> DeclaredTables:
    """Read a YAML file, or a shipped one by name.

    Raises:
        UserError: no such file, or it is not of that form.
    """
    from headrace.config.installation import installation
    from headrace.config.yaml_text import YamlFault, parse_yaml

    path = Path(path_or_name)
    if path.suffix not in (".yaml", ".yml"):
        path = installation() / "conf" / "tables" / f"{path_or_name}.yaml"
        if not path.is_file():
            shipped = ", ".join(sorted(p.stem for p in path.parent.glob("*.yaml")))
            raise UserError(f"no tables '{path_or_name}'; shipped: {shipped}; or give the path of a .yaml file")
    try:
        return DeclaredTables.model_validate(parse_yaml(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise UserError(f"no such file of tables: {path}") from None
    except YamlFault as e:
        raise UserError("\n".join(f"{path}: {fault}" for fault in str(e).splitlines())) from None
    except yaml.YAMLError as e:
        raise UserError(f"{path} is not YAML: {' '.join(str(e).split())}") from None
    except ValidationError as e:
        first = e.errors()[0]
        raise UserError(f"{path}: {'.'.join(str(p) for p in first['loc'])}: {first['msg']}") from None
