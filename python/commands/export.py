"""`headrace export`: a registered model as an ONNX graph."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence

from headrace.commands.screen import out
from headrace.config import load_spec
from headrace.errors import UserError
from headrace.export.table_files import Precision
from headrace.models.predictor import read_meta
from headrace.registry.versions import Version, champion, numbered, registered_name
from headrace.storage import Location, local
from headrace.workspace import Workspace


def export(
    ws: Workspace, pipeline: str, asked: str, to: Location, precision: Precision, overrides: Sequence[str] = ()
) -> None:
    """Write a model into a folder, which appears whole; an export that is there is replaced.

    Args:
        ws: the workspace.
        pipeline: a shipped pipeline's name or a YAML file.
        asked: a version's number, or `@` and an alias.
        to: the folder; those above it are made.
        precision: of the embedding tables' rows.
        overrides: `key=value` for the spec.

    Raises:
        UserError: there is no such model, it cannot be exported, the folder is something else or cannot be
            written, ONNX is not installed.
    """
    spec = load_spec(pipeline, overrides)
    name = registered_name(spec.pipeline, "train" if spec.gate is None else spec.gate.stage)
    found = _version(ws, name, asked)
    if to.exists() and not (to / "export.json").is_file():
        raise UserError(f"{to} is there and is no export: choose another folder")
    kind = read_meta(found.source)["kind"]
    if kind in ("xgboost", "second_stage"):
        raise UserError(f"version {found.version} of '{name}' is of the kind '{kind}', which cannot be exported yet")
    try:
        from headrace.export.onnx_model import check_exportable, write_onnx
    except ModuleNotFoundError as e:
        raise UserError(f"{e.name} is not installed: run `make onnx`") from None
    from headrace.models.mapped import load_mapped
    from headrace.models.saved import read_card

    card = read_card(found.source)
    try:
        to.parent.make_dir()
        with tempfile.TemporaryDirectory(dir=to.parent.local_path(), prefix=".export-") as maps:
            model = load_mapped(found.source, local(maps))
            check_exportable(model)
            with to.new_folder() as folder:
                size = write_onnx(model, card, folder, precision)
    except OSError as e:
        raise UserError(f"{to} cannot be written: {e}") from e
    day = f" of {found.ds}" if found.ds else ""
    out.print(
        f"version {found.version} of '{name}'{day} ({card.kind}): {to}, tables {precision}, {size / 2**20:,.1f} MiB"
    )


def _version(ws: Workspace, name: str, asked: str) -> Version:
    found = champion(ws, name, asked[1:]) if asked.startswith("@") else numbered(ws, name, asked)
    if found is None:
        what = f"alias '{asked[1:]}'" if asked.startswith("@") else f"version {asked}"
        raise UserError(f"the registry {ws.registry_uri} has no {what} of model '{name}'")
    if not found.source.is_dir():
        raise UserError(f"{found.source}, version {found.version} of model '{name}', is gone: choose another one")
    return found
