"""`headrace compare`: several models over one dataset, and a table of them."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from headrace.commands.run import resolve, run
from headrace.commands.screen import out, print_json, table
from headrace.config import Spec, load_spec
from headrace.config.load import flow, read_mapping
from headrace.errors import EXIT_DONE, UserError
from headrace.manifest import Manifest
from headrace.quality.report import facts
from headrace.workspace import Workspace

#: The pipeline's own settings, where files are compared with them.
AS_IT_IS = "as_it_is"
#: Metrics of the table on the screen, besides those that the spec asks for.
_SHOWN = ("auc", "log_loss", "hr_at_k", "ndcg_at_k")


def compare(
    pipeline: str,
    ws: Workspace,
    ds: str | None,
    overrides: Sequence[str],
    models: Sequence[Path] = (),
    against: str | None = None,
    as_json: bool = False,
) -> int:
    """Train what is missing, then show the table.

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
            code = run(pipeline, ws, day, overrides, "compare", "compare", show_results=False)
    else:
        code = run(pipeline, ws, day, overrides, "compare", "compare", show_results=False)
    if code != EXIT_DONE:
        return code
    manifest = Manifest.load(ws.manifest(spec.pipeline, day, "compare"))
    assert manifest is not None
    if as_json:
        print_json({"pipeline": spec.pipeline, "ds": day, "key": manifest.key, **manifest.facts})
    else:
        _show(spec, manifest, [*_SHOWN, *spec.train.evaluation.metrics])
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
    overrides = [*overrides, f"compare.versions={flow(list(versions))}"]
    spec, day = resolve(pipeline, ds, overrides)
    ws = ws.of(spec)
    stage = "compare_versions"
    if as_json:
        with redirect_stdout(sys.stderr):
            code = run(pipeline, ws, day, overrides, stage, stage, show_results=False)
    else:
        code = run(pipeline, ws, day, overrides, stage, stage, show_results=False)
    if code != EXIT_DONE:
        return code
    manifest = Manifest.load(ws.manifest(spec.pipeline, day, stage))
    assert manifest is not None
    if as_json:
        print_json({"pipeline": spec.pipeline, "ds": day, "key": manifest.key, **manifest.facts})
    else:
        _show(spec, manifest, [*_SHOWN, "calibration", *spec.train.evaluation.metrics])
    return code


def _further(pipeline: str, overrides: Sequence[str], models: Sequence[Path], against: str | None) -> list[str]:
    """Return the overrides for files and `--against`."""
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
