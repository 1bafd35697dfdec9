"""`headrace export`: a registered model as ONNX graphs, or as programs of torch."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from typing import Literal

from headrace.commands.screen import out
from headrace.config import load_spec
from headrace.errors import UserError
from headrace.models.predictor import read_meta
from headrace.registry.versions import Version, champion, numbered, registered_name
from headrace.storage import Location, StoreAway, local
from headrace.workspace import Workspace

Format = Literal["onnx", "torch"]
Precision = Literal["fp32", "fp16", "int8"]


def export(
    ws: Workspace,
    pipeline: str,
    asked: str,
    to: Location,
    precision: Precision,
    overrides: Sequence[str] = (),
    form: Format = "onnx",
    stage: str | None = None,
) -> None:
    """Write a model into a folder, which appears whole; an export that is there is replaced.

    Args:
        ws: the workspace.
        pipeline: a shipped pipeline's name or a YAML file.
        asked: a version's number, or `@` and an alias.
        to: the folder; those above it are made.
        precision: of the embedding tables' rows.
        overrides: `key=value` for the spec.
        form: of the graphs.
        stage: that trained the model; see `model_version`.

    Raises:
        UserError: there is no such model, it cannot be exported, the folder is something else or cannot be
            written, ONNX is not installed.
    """
    name, found = model_version(ws, pipeline, asked, overrides, stage)
    if to.exists() and not (to / "export.json").is_file():
        raise UserError(f"{to} is there and is no export: choose another folder")
    try:
        to.parent.make_dir()
        with tempfile.TemporaryDirectory(dir=to.parent.local_path(), prefix=".export-") as scratch:
            with to.new_folder() as folder:
                kind, lacking = write_export(found, folder, local(scratch), precision, form)
    except StoreAway:
        raise
    except OSError as e:
        raise UserError(f"{to} cannot be written: {e}") from e
    day = f" of {found.ds}" if found.ds else ""
    size = sum(file.size() for file in to.files()) / 2**20
    tables = "" if kind == "xgboost" else f", tables {precision}"
    out.print(f"version {found.version} of '{name}'{day} ({kind}): {to}{tables}, {size:,.1f} MiB")
    for fault in lacking:
        out.print(f"no graph of the features: {fault}")


def write_export(
    found: Version, folder: Location, scratch: Location, precision: Precision, form: Format = "onnx"
) -> tuple[str, list[str]]:
    """Fill a folder with an export of a registered model.

    Args:
        found: the model.
        folder: empty.
        scratch: for tables while they are put together, on the same disk.
        precision: of the embedding tables' rows.
        form: of the graphs.

    Returns:
        the model's class; why there is no graph of the features, of format ONNX, where there is none.

    Raises:
        UserError: the model cannot be exported, ONNX is not installed.
    """
    kind = str(read_meta(found.source)["kind"])
    if kind == "second_stage" or (kind == "xgboost" and form == "torch"):
        raise UserError(f"version {found.version} is of the kind '{kind}', which cannot be exported as {form}")
    write = _writer(kind, form)
    if kind == "xgboost":
        write(found.source, folder)
    else:
        from headrace.models.mapped import load_mapped
        from headrace.models.saved import read_card

        card = read_card(found.source)
        write(load_mapped(found.source, scratch), card, folder, precision)
        kind = card.kind
    if form == "torch":
        return kind, []
    from headrace.export.features.graph_file import add_features
    from headrace.features.workflow.fitted import FittedWorkflow

    try:
        workflow = FittedWorkflow.load(found.source / "workflow")
    except UserError as e:  # the model's own graph needs none
        return kind, [str(e)]
    return kind, add_features(folder, workflow)


def _writer(kind: str, form: Format) -> Callable[..., object]:
    if form == "torch":
        from headrace.export.torch_model import write_torch

        return write_torch
    try:
        if kind == "xgboost":
            from headrace.export.tree_graph import write_xgboost

            return write_xgboost
        from headrace.export.onnx_model import write_onnx
    except ModuleNotFoundError as e:
        raise UserError(f"{e.name} is not installed: run `make onnx`") from None
    return write_onnx


def model_version(
    ws: Workspace, pipeline: str, asked: str, overrides: Sequence[str] = (), stage: str | None = None
) -> tuple[str, Version]:
    """Return the name of a pipeline's registered model, and one of its versions.

    Args:
        ws: the workspace.
        pipeline: a shipped pipeline's name or a YAML file.
        asked: a version's number, or `@` and an alias.
        overrides: `key=value` for the spec.
        stage: that trained it; None: the one whose models the gate chooses from, else `train`.

    Raises:
        UserError: there is none, or its folder is gone.
    """
    spec = load_spec(pipeline, overrides)
    ws = ws.of(spec)
    name = registered_name(spec.pipeline, stage or ("train" if spec.gate is None else spec.gate.stage))
    return name, _version(ws, name, asked)


def _version(ws: Workspace, name: str, asked: str) -> Version:
    found = champion(ws, name, asked[1:]) if asked.startswith("@") else numbered(ws, name, asked)
    if found is None:
        what = f"alias '{asked[1:]}'" if asked.startswith("@") else f"version {asked}"
        raise UserError(f"the registry {ws.registry_uri} has no {what} of model '{name}'")
    if not found.source.is_dir():
        raise UserError(f"{found.source}, version {found.version} of model '{name}', is gone: choose another one")
    return found
