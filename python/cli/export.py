"""`headrace export`."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

import typer

from headrace.cli.options import VAR, Home, Overlays, Pipeline, Sets, examples, overrides, workspace
from headrace.cli.root import app


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
    epilog=examples(
        "headrace export clicks --to exports/clicks",
        "headrace export clicks --model 12 --to exports/clicks --tables int8",
        "headrace export clicks --to exports/clicks --format torch",
        "headrace export clicks --to models --format triton --stage baseline --trees fil",
        "headrace export clicks --to models --format triton --retrieval near.yaml --items items.parquet --item-key id",
    )
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
    from headrace.commands.export import export as command
    from headrace.errors import UserError
    from headrace.storage import local, local_folder

    folder, settings = local(local_folder(to, "--to")), overrides(overlays, sets, None)
    trained = None if stage is None else stage.value
    if form is not Format.triton:
        if retrieval is not None or items is not None or item_key is not None:
            raise UserError("--retrieval, --items and --item-key go with --format triton")
        graphs: Literal["onnx", "torch"] = "torch" if form is Format.torch else "onnx"
        command(workspace(home), pipeline, model, folder, tables.value, settings, graphs, trained)
        return
    from headrace.commands.export_triton import TwoStages, export_triton
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
