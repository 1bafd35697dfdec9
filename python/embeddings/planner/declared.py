"""Tables declared in a YAML file: enough to plan for machines and data that one does not have."""

from __future__ import annotations

from pathlib import Path

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from headrace.config import EmbeddingOptimizerKind
from headrace.config.yaml_text import YamlFault, parse_yaml
from headrace.embeddings.sharding_plan import Lookup, Pooling, Table
from headrace.errors import UserError
from headrace.workspace import installation


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
