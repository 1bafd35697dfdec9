"""Parts that the formats share: the tables that are written, and the record at the end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

from headrace.export import record
from headrace.export.item_file import write_items
from headrace.export.network import ExportedNetwork, vectors_name
from headrace.export.table_files import Precision
from headrace.models.saved import ModelCard
from headrace.storage import Location


def tables_of(exported: ExportedNetwork, used: Iterable[set[str]]) -> set[str]:
    """Return the names of the tables that graphs read, from the names of their arguments."""
    read = set[str]().union(*used)
    return {exported.table_of(w) for w in exported.lookups if vectors_name(w.name) in read}


def finish(
    exported: ExportedNetwork,
    card: ModelCard,
    folder: Location,
    form: Literal["onnx", "torch"],
    precision: Precision,
    graphs: Mapping[str, record.Graph],
) -> None:
    """Write the items' vectors, where there are such, and the record of a folder that has all else."""
    items = write_items(exported, folder, precision)
    record.write_record(
        folder,
        record.Record(
            format=form,
            kind=card.kind,
            pipeline=card.pipeline,
            ds=card.ds,
            key=card.key,
            tables=precision,
            outputs=exported.outputs(record.MODEL),
            graphs=graphs,
            items=items,
            files=record.file_sizes(folder),
            dataset_schema=card.dataset_schema,
        ),
    )
