"""`headrace export --format triton`: registered models in a model repository of Triton."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.commands.export import Precision, model_version, write_export
from headrace.commands.screen import out
from headrace.config import load_spec
from headrace.errors import UserError
from headrace.export.triton.config import Options
from headrace.storage import Location, StoreAway, local
from headrace.workspace import Workspace


@dataclass(frozen=True)
class TwoStages:
    """Second pipeline, which retrieves the items that the first one ranks.

    Attributes:
        pipeline: of the model in retrieval form.
        model: its version, or `@` and an alias.
        items: a Parquet file of the items.
        key: its column that names them.
        list_length: items of a user's list.
    """

    pipeline: str
    model: str
    items: Location
    key: str
    list_length: int


def export_triton(
    ws: Workspace,
    pipeline: str,
    asked: str,
    to: Location,
    precision: Precision,
    options: Options,
    overrides: Sequence[str] = (),
    stage: str | None = None,
    version: int | None = None,
    stages: TwoStages | None = None,
) -> None:
    """Add a version of a model, or of two stages, to a model repository.

    Args:
        ws: the workspace.
        pipeline: a shipped pipeline's name or a YAML file.
        asked: a version's number, or `@` and an alias.
        to: the repository; made where it is not.
        precision: of the embedding tables' rows.
        options: of the repository's models.
        overrides: `key=value` for the spec.
        stage: that trained the model.
        version: in the repository; None: the registry's.
        stages: what finds the items that the model ranks.

    Raises:
        UserError: a model is not there or cannot be exported, the repository has other models of these names, the
            folder cannot be written, ONNX is not installed.
    """
    name, found = model_version(ws, pipeline, asked, overrides, stage)
    second = None if stages is None else model_version(ws, stages.pipeline, stages.model)
    if to.exists() and (not to.is_dir() or (to / "export.json").is_file()):
        raise UserError(f"{to} is there and is no model repository: choose another folder")
    catalogue = None
    try:
        from headrace.export.triton.repository import write_repository
        from headrace.export.triton.two_stage import Catalogue, ExportedModel, write_two_stage
    except ModuleNotFoundError as e:
        raise UserError(f"{e.name} is not installed: run `make onnx`") from None
    if stages is not None:
        catalogue = Catalogue.read(stages.items, stages.key)
    number = version or int(found.version)
    short = load_spec(pipeline, overrides).pipeline
    try:
        to.parent.make_dir()
        with tempfile.TemporaryDirectory(dir=to.parent.local_path(), prefix=f".{to.name}.export-") as scratch:
            place = local(scratch)
            exported = place / "ranking"
            kind, lacking = write_export(found, _made(exported), _made(place / "tables"), precision)
            if second is None or stages is None or catalogue is None:
                write_repository(exported, found.source, to, name=short, version=number, options=options)
            else:
                near = place / "retrieval"
                write_export(second[1], _made(near), _made(place / "tables-2"), precision)
                retrieval = ExportedModel(near, second[1].source, load_spec(stages.pipeline).pipeline)
                ranker = ExportedModel(exported, found.source, short)
                write_two_stage(
                    retrieval, ranker, catalogue, to, version=number, list_length=stages.list_length, options=options
                )
    except StoreAway:
        raise
    except OSError as e:
        raise UserError(f"{to} cannot be written: {e}") from e
    asked_as = short if stages is None else f"{short}.two_stage"
    out.print(f"version {found.version} of '{name}' ({kind}) is version {number} of {asked_as} in {to}")
    for fault in lacking:
        out.print(f"features by the Python back end: {fault}")


def _made(folder: Location) -> Location:
    folder.make_dir()
    return folder
