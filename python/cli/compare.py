"""`headrace compare`: several models over one dataset, and a table of them."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.root import VAR, Ds, Home, Json, Overlays, Panel, Pipeline, Sets, app, examples, overrides, workspace
from headrace.cli.run import resolve, run_stages
from headrace.cli.screen import out, print_json, table
from headrace.errors import EXIT_DONE, UserError
from headrace.quality.report import facts

if TYPE_CHECKING:
    from headrace.config import Spec
    from headrace.config.workspace import Workspace
    from headrace.stage.manifest import Manifest


@app.command(
    rich_help_panel=Panel.MODELS,
    epilog=examples(
        "headrace compare clicks --ds 2026-01-08 --models dcn.yaml,deep.yaml",
        "headrace compare clicks --ds 2026-01-08 --overlay models.yaml --against dcn --json",
        "headrace compare clicks 7 @champion --ds 2026-01-08",
    ),
)
def compare(
    pipeline: Pipeline,
    versions: Annotated[
        list[str] | None,
        typer.Argument(
            help="Versions of the registry, or @ and an alias: these, and none is trained.", metavar="[VERSION...]"
        ),
    ] = None,
    ds: Ds = None,
    models: Annotated[
        str,
        typer.Option(
            help="Files with keys of model, train or baseline, a model each, besides the pipeline's own settings.",
            metavar="FILE,FILE...",
        ),
    ] = "",
    against: Annotated[
        str | None, typer.Option(help="The model that the others are tested against; else the first.", metavar="NAME")
    ] = None,
    overlays: Overlays = None,
    sets: Sets = None,
    as_json: Json = False,
    home: Home = VAR,
) -> None:
    """Test several models against each other on a day's rows: train those of the section compare, or of files; or take
    registered versions as they are.

    What is trained already is not trained again, and what was stopped goes on with the same command. None is
    registered: the day's model stays what it is. The day's next report has the table.

    Registered versions, whichever days they were trained for, predict the day's split as they are, each by its own
    workflow; the others are tested against the first.
    """
    if versions:
        raise typer.Exit(compare_versions(pipeline, workspace(home), ds, overrides(overlays, sets), versions, as_json))

    files = [Path(name) for name in models.split(",") if name]
    raise typer.Exit(compare_models(pipeline, workspace(home), ds, overrides(overlays, sets), files, against, as_json))


#: The pipeline's own settings, where files are compared with them.
AS_IT_IS = "as_it_is"
#: Metrics of the table on the screen, besides those that the spec asks for.
_METRICS = ("auc", "log_loss", "hr_at_k", "ndcg_at_k")


def compare_models(
    pipeline: str,
    ws: Workspace,
    ds: str | None,
    overrides: Sequence[str],
    models: Sequence[Path] = (),
    against: str | None = None,
    as_json: bool = False,
) -> int:
    """Train the missing models, then show the table.

    Args:
        pipeline: a shipped pipeline's name or a YAML file.
        ws: the workspace.
        ds: the day whose dataset is trained on; None: the spec's.
        overrides: `key=value` for the spec.
        models: files of one variant each, named by the file, besides those of the section `compare`.
        against: the model that the others are tested against, instead of the spec's.
        as_json: print JSON, and everything else on the other stream.

    Returns:
        the exit code.

    Raises:
        UserError: what the user can mend, found before anything was started.
    """
    from headrace.stage.manifest import Manifest

    overrides = [*overrides, *_further(pipeline, overrides, models, against)]
    spec, day = resolve(pipeline, ds, overrides)
    ws = ws.of(spec)
    if spec.compare is None:
        raise UserError(
            f"pipeline '{spec.pipeline}' has no section compare, so it is not known what to compare. Name files, "
            f"--models dcn.yaml,deep.yaml, or write, for example, "
            f"compare: {{models: {{as_it_is: {{}}, dcn: {{model: {{class: dcn_v2}}}}}}}}"
        )
    if as_json:
        with redirect_stdout(sys.stderr):
            code = run_stages(pipeline, ws, day, overrides, "compare", "compare", show_results=False)
    else:
        code = run_stages(pipeline, ws, day, overrides, "compare", "compare", show_results=False)
    if code != EXIT_DONE:
        return code
    manifest = Manifest.load(ws.manifest(spec.pipeline, day, "compare"))
    assert manifest is not None
    if as_json:
        print_json({"pipeline": spec.pipeline, "ds": day, "key": manifest.key, **manifest.facts})
    else:
        _show(spec, manifest, [*_METRICS, *spec.train.evaluation.metrics])
    return code


def compare_versions(
    pipeline: str, ws: Workspace, ds: str | None, overrides: Sequence[str], versions: Sequence[str], as_json: bool
) -> int:
    """Have registered versions predict a day's rows, then show the table.

    Args:
        versions: numbers, or `@` and an alias; the others are tested against the first.

    Returns:
        the exit code.

    Raises:
        UserError: what the user can mend, found before anything was started.
    """
    from headrace.config.load import flow
    from headrace.stage.manifest import Manifest

    overrides = [*overrides, f"compare.versions={flow(list(versions))}"]
    spec, day = resolve(pipeline, ds, overrides)
    ws = ws.of(spec)
    stage = "compare_versions"
    if as_json:
        with redirect_stdout(sys.stderr):
            code = run_stages(pipeline, ws, day, overrides, stage, stage, show_results=False)
    else:
        code = run_stages(pipeline, ws, day, overrides, stage, stage, show_results=False)
    if code != EXIT_DONE:
        return code
    manifest = Manifest.load(ws.manifest(spec.pipeline, day, stage))
    assert manifest is not None
    if as_json:
        print_json({"pipeline": spec.pipeline, "ds": day, "key": manifest.key, **manifest.facts})
    else:
        _show(spec, manifest, [*_METRICS, "calibration", *spec.train.evaluation.metrics])
    return code


def _further(pipeline: str, overrides: Sequence[str], models: Sequence[Path], against: str | None) -> list[str]:
    """Return the overrides for files and `--against`."""
    from headrace.config import load_spec
    from headrace.config.load import flow, read_mapping

    settings = []
    if models:
        spec = load_spec(pipeline, overrides)
        known: dict[str, Any] = {AS_IT_IS: {}}
        if spec.compare is not None:
            known = spec.compare.model_dump(mode="json", exclude_unset=True)["models"]
        for path in models:
            name = path.stem.replace("-", "_")
            if name in known:
                raise UserError(f"--models {path}: there is a model '{name}' already; give the file another name")
            known[name] = read_mapping(path)
        settings.append(f"compare.models={flow(known)}")
    return settings if against is None else [*settings, f"compare.against={against}"]


def _show(spec: Spec, manifest: Manifest, metric_names: Sequence[str]) -> None:
    models, reference = facts.records(manifest.facts.get("models")), manifest.facts["reference"]
    names = [n for n in dict.fromkeys(metric_names) if any(n in m["metrics"] for m in models)]
    tested = any(m["against"] for m in models)
    headings = [h for name in names for h in (f">{name}", ">interval", *([">p"] if tested else []))]
    summary_table = table("model", "class", *headings, ">time", ">peak memory", ">on disk")
    for m in models:
        cells = [c for name in names for c in _cells(m, name, tested)]
        peak = max(facts.numbers(m["peak_memory_mib"]).values(), default=None)
        summary_table.add_row(
            m["name"], m["class"], *cells, facts.duration(m["seconds"]), facts.memory(peak), _size(m["mib"])
        )
    out.print()
    out.print(summary_table)
    if tested:
        out.print(f"p: of no difference from '{reference}', two-sided, by a paired bootstrap over users", markup=False)
    else:
        out.print("No intervals: set train.evaluation.user, a carried column, and train.evaluation.bootstrap={}")
    if manifest.stage != "compare":
        return
    out.print(f"In the report: headrace report {spec.argument} --ds {manifest.ds}", markup=False)


def _cells(model: Mapping[str, Any], name: str, tested: bool) -> list[str]:
    ends = model["intervals"].get(name)
    interval = f"[{facts.decimals(ends[0])}, {facts.decimals(ends[1])}]" if ends else ""
    p = facts.number(facts.mapping(model["against"].get(name)).get("p"))
    cells = [facts.decimals(model["metrics"].get(name)), interval]
    return [*cells, "" if p is None else f"{p:.3f}"] if tested else cells


def _size(mib: float) -> str:
    return f"{mib:,.1f} MiB"
