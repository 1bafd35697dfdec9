"""`headrace export`: a registered model as ONNX graphs, programs of torch, or in a model repository of Triton."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from headrace.cli.root import VAR, Home, Overlays, Panel, Pipeline, Sets, app, examples, overrides, workspace
from headrace.cli.screen import out
from headrace.errors import UserError

if TYPE_CHECKING:
    from headrace.config.workspace import Workspace
    from headrace.export.triton.config import Options
    from headrace.models.registry.versions import Version
    from headrace.storage import Location


class Tables(StrEnum):
    """Number formats of exported embedding tables."""

    fp32 = "fp32"
    fp16 = "fp16"
    int8 = "int8"


class Format(StrEnum):
    """Formats of an exported model."""

    onnx = "onnx"
    torch = "torch"
    triton = "triton"


class Stage(StrEnum):
    """Stages whose models can be exported."""

    train = "train"
    baseline = "baseline"


class Trees(StrEnum):
    """Formats of trees in a model repository."""

    onnx = "onnx"
    fil = "fil"


class Index(StrEnum):
    """Indexes of items in a model repository."""

    exact = "exact"
    faiss = "faiss"


@app.command(
    rich_help_panel=Panel.SERVE,
    epilog=examples(
        "headrace export clicks --to exports/clicks",
        "headrace export clicks --model 12 --to exports/clicks --tables int8",
        "headrace export clicks --to exports/clicks --format torch",
        "headrace export clicks --to models --format triton --stage baseline --trees fil",
        "headrace export clicks --to models --format triton --retrieval near.yaml --items items.parquet --item-key id",
    ),
)
def export(
    pipeline: Pipeline,
    to: Annotated[
        str,
        typer.Option(
            "--to", help="The folder: an export is replaced, a model repository gets a version.", metavar="DIR"
        ),
    ],
    model: Annotated[
        str, typer.Option("--model", help="A registered version, or @ALIAS.", metavar="VERSION")
    ] = "@champion",
    form: Annotated[
        Format, typer.Option("--format", help="ONNX graphs, programs of torch, or a Triton repository.")
    ] = Format.onnx,
    stage: Annotated[
        Stage | None, typer.Option("--stage", help="Stage that trained it, if not the one that the gate judges.")
    ] = None,
    tables: Annotated[Tables, typer.Option("--tables", help="Numbers of the embedding tables.")] = Tables.fp32,
    as_version: Annotated[
        int | None, typer.Option("--as-version", help="In a model repository, if not the registry's.", min=1)
    ] = None,
    keep: Annotated[int, typer.Option("--keep", help="Versions that a model repository keeps.", min=2)] = 2,
    instances: Annotated[int, typer.Option("--instances", help="Copies of each model that work at once.", min=1)] = 1,
    max_rows: Annotated[int, typer.Option("--max-rows", help="Rows of a batch at most.", min=1)] = 4096,
    delay_us: Annotated[
        int, typer.Option("--delay-us", help="Longest wait of a batch for more requests, in microseconds.", min=0)
    ] = 500,
    trees: Annotated[Trees, typer.Option("--trees", help="XGBoost in a model repository: ONNX or FIL.")] = Trees.onnx,
    index: Annotated[
        Index, typer.Option("--index", help="How items are found: all compared, or by Faiss.")
    ] = Index.exact,
    neighbours: Annotated[int, typer.Option("--found", help="Items that the index finds for a user.", min=1)] = 100,
    retrieval: Annotated[
        str | None,
        typer.Option("--retrieval", help="Two stages: the pipeline that finds what is ranked.", metavar="PIPELINE"),
    ] = None,
    retrieval_model: Annotated[
        str, typer.Option("--retrieval-model", help="Its version, or @ALIAS.", metavar="VERSION")
    ] = "@champion",
    items: Annotated[
        str | None, typer.Option("--items", help="Two stages: a Parquet file of the items.", metavar="FILE")
    ] = None,
    item_key: Annotated[
        str | None, typer.Option("--item-key", help="Its column that names them.", metavar="COLUMN")
    ] = None,
    listed: Annotated[int, typer.Option("--listed", help="Two stages: items of a user's list.", min=1)] = 10,
    overlays: Overlays = None,
    sets: Sets = None,
    home: Home = VAR,
) -> None:
    """Write a registered model as graphs that need nothing of headrace, its embedding tables as files beside them.

    What cannot be exported is said before anything is written.
    """
    from headrace.errors import UserError
    from headrace.storage import local, local_folder

    folder, settings = local(local_folder(to, "--to")), overrides(overlays, sets, None)
    trained = None if stage is None else stage.value
    if form is not Format.triton:
        if retrieval is not None or items is not None or item_key is not None:
            raise UserError("--retrieval, --items and --item-key go with --format triton")
        graphs: Literal["onnx", "torch"] = "torch" if form is Format.torch else "onnx"
        export_model(workspace(home), pipeline, model, folder, tables.value, settings, graphs, trained)
        return
    from headrace.export.triton.config import Batching, Options

    stages = None
    if retrieval is not None and items is not None and item_key is not None:
        stages = TwoStages(retrieval, retrieval_model, local(items), item_key, listed)
    elif retrieval is not None or items is not None or item_key is not None:
        raise UserError("two stages need all of --retrieval, --items and --item-key")
    batching = Batching(max_rows, delay_us, instances)
    options = Options(batching, trees.value, neighbours, index.value, keep)
    export_triton(
        workspace(home), pipeline, model, folder, tables.value, options, settings, trained, as_version, stages
    )


GraphFormat = Literal["onnx", "torch"]
Precision = Literal["fp32", "fp16", "int8"]


def export_model(
    ws: Workspace,
    pipeline: str,
    version_or_alias: str,
    to: Location,
    precision: Precision,
    overrides: Sequence[str] = (),
    form: GraphFormat = "onnx",
    stage: str | None = None,
) -> None:
    """Write a model into a folder, which appears as a whole and replaces an existing export.

    Args:
        ws: the workspace.
        pipeline: a shipped pipeline's name or a YAML file.
        version_or_alias: a version's number, or `@` and an alias.
        to: the folder; those above it are made.
        precision: of the embedding tables' rows.
        overrides: `key=value` for the spec.
        form: of the graphs.
        stage: that trained the model; see `model_version`.

    Raises:
        UserError: there is no such model, it cannot be exported, the folder is something else or cannot be
            written, ONNX is not installed.
    """
    from headrace.storage import StoreAway, local

    name, registered = model_version(ws, pipeline, version_or_alias, overrides, stage)
    if to.exists() and not (to / "export.json").is_file():
        raise UserError(f"{to} is there and is no export: choose another folder")
    try:
        to.parent.make_dir()
        with tempfile.TemporaryDirectory(dir=to.parent.local_path(), prefix=".export-") as scratch:
            with to.new_folder() as folder:
                kind, faults = write_export(registered, folder, local(scratch), precision, form)
    except StoreAway:
        raise
    except OSError as e:
        raise UserError(f"{to} cannot be written: {e}") from e
    day = f" of {registered.ds}" if registered.ds else ""
    size = sum(file.size() for file in to.files()) / 2**20
    tables = "" if kind == "xgboost" else f", tables {precision}"
    out.print(f"version {registered.version} of '{name}'{day} ({kind}): {to}{tables}, {size:,.1f} MiB")
    for fault in faults:
        out.print(f"no graph of the features: {fault}")


def write_export(
    registered: Version, folder: Location, scratch: Location, precision: Precision, form: GraphFormat = "onnx"
) -> tuple[str, list[str]]:
    """Fill a folder with an export of a registered model.

    Args:
        registered: the model.
        folder: empty.
        scratch: for tables while they are put together, on the same disk.
        precision: of the embedding tables' rows.
        form: of the graphs.

    Returns:
        the model's class; why there is no graph of the features, of format ONNX, where there is none.

    Raises:
        UserError: the model cannot be exported, ONNX is not installed.
    """
    from headrace.models.predictor import read_meta

    kind = str(read_meta(registered.source)["kind"])
    if kind == "second_stage" or (kind == "xgboost" and form == "torch"):
        raise UserError(f"version {registered.version} is of the kind '{kind}', which cannot be exported as {form}")
    write = _writer(kind, form)
    if kind == "xgboost":
        write(registered.source, folder)
    else:
        from headrace.models.mapped import load_mapped
        from headrace.models.saved import read_card

        card = read_card(registered.source)
        write(load_mapped(registered.source, scratch), card, folder, precision)
        kind = card.kind
    if form == "torch":
        return kind, []
    from headrace.export.features.graph_file import add_features
    from headrace.features.workflow.fitted import FittedWorkflow

    try:
        workflow = FittedWorkflow.load(registered.source / "workflow")
    except UserError as e:  # the model's own graph needs none
        return kind, [str(e)]
    return kind, add_features(folder, workflow)


def _writer(kind: str, form: GraphFormat) -> Callable[..., object]:
    if form == "torch":
        from headrace.export.torch_model import write_torch

        return write_torch
    if kind == "xgboost":
        from headrace.export.tree_graph import write_xgboost

        return write_xgboost
    from headrace.export.onnx_model import write_onnx

    return write_onnx


def model_version(
    ws: Workspace, pipeline: str, version_or_alias: str, overrides: Sequence[str] = (), stage: str | None = None
) -> tuple[str, Version]:
    """Return the name of a pipeline's registered model, and one of its versions.

    Args:
        ws: the workspace.
        pipeline: a shipped pipeline's name or a YAML file.
        version_or_alias: a version's number, or `@` and an alias.
        overrides: `key=value` for the spec.
        stage: that trained it; None: the one whose models the gate chooses from, else `train`.

    Raises:
        UserError: there is none, or its folder is gone.
    """
    from headrace.config import load_spec
    from headrace.models.registry.versions import registered_name

    spec = load_spec(pipeline, overrides)
    ws = ws.of(spec)
    name = registered_name(spec.pipeline, stage or ("train" if spec.gate is None else spec.gate.stage))
    return name, _version(ws, name, version_or_alias)


def _version(ws: Workspace, name: str, version_or_alias: str) -> Version:
    from headrace.models.registry.versions import champion, numbered

    registered = (
        champion(ws, name, version_or_alias[1:])
        if version_or_alias.startswith("@")
        else numbered(ws, name, version_or_alias)
    )
    if registered is None:
        missing = (
            f"alias '{version_or_alias[1:]}'" if version_or_alias.startswith("@") else f"version {version_or_alias}"
        )
        raise UserError(f"the registry {ws.registry_uri} has no {missing} of model '{name}'")
    if not registered.source.is_dir():
        raise UserError(
            f"{registered.source}, version {registered.version} of model '{name}', is gone: choose another one"
        )
    return registered


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
    version_or_alias: str,
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
        version_or_alias: a version's number, or `@` and an alias.
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
    from headrace.config import load_spec
    from headrace.storage import StoreAway, local

    name, registered = model_version(ws, pipeline, version_or_alias, overrides, stage)
    second = None if stages is None else model_version(ws, stages.pipeline, stages.model)
    if to.exists() and (not to.is_dir() or (to / "export.json").is_file()):
        raise UserError(f"{to} is there and is no model repository: choose another folder")
    catalogue = None
    from headrace.export.triton.repository import write_repository
    from headrace.export.triton.two_stage import Catalogue, ExportedModel, write_two_stage

    if stages is not None:
        catalogue = Catalogue.read(stages.items, stages.key)
    number = version or int(registered.version)
    short = load_spec(pipeline, overrides).pipeline
    try:
        to.parent.make_dir()
        with tempfile.TemporaryDirectory(dir=to.parent.local_path(), prefix=f".{to.name}.export-") as scratch:
            place = local(scratch)
            exported = place / "ranking"
            kind, faults = write_export(registered, _new_folder(exported), _new_folder(place / "tables"), precision)
            if second is None or stages is None or catalogue is None:
                write_repository(exported, registered.source, to, name=short, version=number, options=options)
            else:
                near = place / "retrieval"
                write_export(second[1], _new_folder(near), _new_folder(place / "tables-2"), precision)
                retrieval = ExportedModel(near, second[1].source, load_spec(stages.pipeline).pipeline)
                ranker = ExportedModel(exported, registered.source, short)
                write_two_stage(
                    retrieval, ranker, catalogue, to, version=number, list_length=stages.list_length, options=options
                )
    except StoreAway:
        raise
    except OSError as e:
        raise UserError(f"{to} cannot be written: {e}") from e
    asked_as = short if stages is None else f"{short}.two_stage"
    out.print(f"version {registered.version} of '{name}' ({kind}) is version {number} of {asked_as} in {to}")
    for fault in faults:
        out.print(f"features by the Python back end: {fault}")


def _new_folder(folder: Location) -> Location:
    folder.make_dir()
    return folder
