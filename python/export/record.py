"""`export.json`: the record of an export, for its servers. It imports neither torch nor ONNX."""

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
    """An input or output of a graph; a dimension in `shape` is a fixed number, or the name of a variable one."""

    name: str
    dtype: Dtype
    shape: tuple[int | str, ...]


class TableArgument(_Part):
    """A matrix in a file that a torch program takes after its inputs."""

    name: str
    file: str
    offset: int
    dtype: Dtype
    shape: tuple[int, ...]


class ExportedGraph(_Part):
    """One of the graphs of an export.

    Attributes:
        file: path of the graph below the export's folder.
        inputs: inputs, by the names of features.
        outputs: outputs, in order.
        files: files of the tables that it reads.
        tables: for a torch program, its arguments after the inputs.
    """

    file: str
    inputs: tuple[GraphTensor, ...]
    outputs: tuple[GraphTensor, ...]
    files: tuple[str, ...] = ()
    tables: tuple[TableArgument, ...] = ()


class ItemVectorsFile(_Part):
    """The vectors of all items: NumPy's format, float32 [rows, columns], by code of the vocabulary.

    Codes below `first_code` stand for null and for values outside the vocabulary.
    """

    file: str
    feature: str
    vocabulary: str
    rows: int
    columns: int
    first_code: int


class ExportRecord(_Part):
    """Content of `export.json`.

    Attributes:
        kind: the model's class (`class`).
        tables: number format of the embedding tables; None for trees.
        outputs: names of the outputs of the graph `model`.
        graphs: graphs by name: `model`, and for a model in retrieval form `query` and `item`.
        items: vectors of all items, for a model in retrieval form whose items' vectors depend only on their codes.
        files: bytes of each file except this record.
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
