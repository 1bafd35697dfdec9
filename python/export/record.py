"""`export.json`: what an export has, for those who serve it. Imports neither torch nor ONNX."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from headrace import __version__
from headrace.config.schema import DatasetSchema
from headrace.errors import UserError
from headrace.storage import Location

RECORD = "export.json"
#: Names of an export's graphs: predictions of rows; vectors of queries; vectors of items.
MODEL, QUERY, ITEM = "model", "query", "item"


Dtype = Literal["float32", "float16", "uint8", "int64", "bool", "string", "float64"]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True, protected_namespaces=())


class GraphTensor(_Part):
    """An input or output of a graph: a whole number in `shape` is fixed, a name is not."""

    name: str
    dtype: Dtype
    shape: tuple[int | str, ...]


class TableArgument(_Part):
    """A matrix that a torch program is given behind its inputs, as it lies in a file."""

    name: str
    file: str
    offset: int
    dtype: Dtype
    shape: tuple[int, ...]


class ExportedGraph(_Part):
    """One of the graphs of an export.

    Attributes:
        file: of the graph, below the export's folder.
        inputs: by the names of features.
        outputs: what it gives.
        files: with the tables that it reads.
        tables: of a torch program, its arguments behind the inputs.
    """

    file: str
    inputs: tuple[GraphTensor, ...]
    outputs: tuple[GraphTensor, ...]
    files: tuple[str, ...] = ()
    tables: tuple[TableArgument, ...] = ()


class ItemVectorsFile(_Part):
    """The vectors of all items: NumPy's format, float32 [rows, columns], by code of the vocabulary.

    Codes below `first_code` stand for null and for what the vocabulary lacks.
    """

    file: str
    feature: str
    vocabulary: str
    rows: int
    columns: int
    first_code: int


class ExportRecord(_Part):
    """See the module.

    Attributes:
        kind: the model's class (`class`).
        tables: numbers of embedding tables; None of trees.
        outputs: names of what the graph `model` gives.
        graphs: by name: `model`, and of a model in retrieval form `query` and `item`.
        items: of a model in retrieval form whose items' vectors follow from their codes.
        files: bytes of each file but this record.
    """

    format: Literal["onnx", "torch"]
    kind: str = Field(alias="class")
    pipeline: str
    ds: str
    key: str
    tables: Literal["fp32", "fp16", "int8"] | None
    outputs: tuple[str, ...]
    graphs: Mapping[str, ExportedGraph]
    items: ItemVectorsFile | None = None
    files: Mapping[str, int]
    dataset_schema: DatasetSchema = Field(alias="schema")
    code: str = __version__


def write_record(folder: Location, record: ExportRecord) -> None:
    """Write the record, which is the last file of an export."""
    (folder / RECORD).put_text(record.model_dump_json(by_alias=True, indent=1) + "\n")


def read_record(folder: Location) -> ExportRecord:
    """Read an export's record.

    Raises:
        UserError: the folder is no export, or a file is missing or of another size.
    """
    path = folder / RECORD
    try:
        record = ExportRecord.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        raise UserError(f"{folder} is no export: {RECORD} is missing") from None
    except ValidationError as e:
        first = e.errors()[0]
        key = ".".join(str(p) for p in first["loc"])
        raise UserError(f"{path} is no record of an export: {key}: {first['msg']}: export the model again") from None
    for name, size in record.files.items():
        file = folder / name
        actual_size = file.size() if file.is_file() else None
        if actual_size != size:
            fault = "missing" if actual_size is None else f"damaged: {actual_size} bytes instead of {size}"
            raise UserError(f"{file} of an export is {fault}: copy it, or export the model, again")
    return record


def file_sizes(folder: Location) -> dict[str, int]:
    """Return the size in bytes of each file of an export, except its record."""
    names = sorted(f.below(folder) for f in folder.files())
    return {name: (folder / name).size() for name in names if name != RECORD}
