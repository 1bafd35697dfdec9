"""`headrace models`, `headrace gate`, `headrace promote`, `headrace rollback`: registered models and their champion."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.root import VAR, Ds, Home, Json, Overlays, Panel, Pipeline, Sets, app, examples, overrides, workspace
from headrace.cli.run import resolve, run_stages
from headrace.cli.screen import out, plain, print_json, table
from headrace.cli.summary import show_verdict
from headrace.config.stages import STAGES
from headrace.errors import UserError
from headrace.quality.report import facts

if TYPE_CHECKING:
    from headrace.config import Spec
    from headrace.config.workspace import Workspace
    from headrace.models.registry.promotion import Promotion
    from headrace.models.registry.versions import Version
    from headrace.stage.manifest import Manifest


Reason = Annotated[
    str | None, typer.Option("--reason", help="Why; kept with the version and in the log.", metavar="TEXT")
]


class ModelStage(StrEnum):
    """The stages that register models."""

    train = "train"
    baseline = "baseline"
    second_stage = "second_stage"


@app.command(
    rich_help_panel=Panel.MODELS,
    epilog=examples("headrace models clicks", "headrace models clicks --stage baseline --json"),
)
def models(
    pipeline: Pipeline,
    stage: Annotated[
        ModelStage | None, typer.Option("--stage", help="Whose models; default: those that the gate judges.")
    ] = None,
    sets: Sets = None,
    as_json: Json = False,
    home: Home = VAR,
) -> None:
    """Show registered models: version, day, aliases, verdict, metrics, size; who has decided about them, and why."""
    show_models(workspace(home), pipeline, None if stage is None else stage.value, sets or [], as_json)


@app.command(
    short_help=STAGES["gate"].help,
    epilog=examples("headrace gate clicks --ds 2026-01-08", "headrace gate clicks --ds 2026-01-08 --json"),
    rich_help_panel=Panel.STAGES,
)
def gate(
    pipeline: Pipeline,
    ds: Ds = None,
    overlays: Overlays = None,
    sets: Sets = None,
    as_json: Json = False,
    home: Home = VAR,
) -> None:
    """Judge the day's model by the rules of the spec, and show every rule's figure; exit code 3 where it is refused.

    The same as `run --from gate --to gate`, with a table.
    """
    raise typer.Exit(judge_day(pipeline, workspace(home), ds, overrides(overlays, sets), as_json))


@app.command(
    short_help=STAGES["promote"].help,
    epilog=examples(
        "headrace promote clicks --ds 2026-01-08", "headrace promote clicks 7 --reason 'the labels of Monday were late'"
    ),
    rich_help_panel=Panel.STAGES,
)
def promote(
    pipeline: Pipeline,
    version: Annotated[
        str | None, typer.Argument(metavar="[VERSION]", help="A version of the registry (headrace models).")
    ] = None,
    ds: Ds = None,
    reason: Reason = None,
    allow_older: Annotated[
        bool, typer.Option("--allow-older", help="Also where the champion is of a later day.")
    ] = False,
    overlays: Overlays = None,
    sets: Sets = None,
    home: Home = VAR,
) -> None:
    """Make the day's model the champion, unless its verdict is against it or the champion is of a later day.

    The same as `run --from promote --to promote`. With a VERSION: make that one the champion, whatever its verdict; who
    did so, when and why is kept with it and logged.
    """
    if version is None:
        raise typer.Exit(run_stages(pipeline, workspace(home), ds, overrides(overlays, sets), "promote", "promote"))

    promote_version(workspace(home), pipeline, version, reason, overrides(overlays, sets), allow_older)


@app.command(
    rich_help_panel=Panel.MODELS,
    epilog=examples("headrace rollback clicks", "headrace rollback clicks --to 5 --reason 'clicks fell by a third'"),
)
def rollback(
    pipeline: Pipeline,
    to: Annotated[
        str | None, typer.Option("--to", help="The version; default: the previous champion.", metavar="VERSION")
    ] = None,
    reason: Reason = None,
    sets: Sets = None,
    home: Home = VAR,
) -> None:
    """Return the alias of the champion to an earlier version, which then scores."""
    roll_back_champion(workspace(home), pipeline, to, reason or "", sets or [])


#: Metrics of the table on the screen.
_METRICS = ("auc", "log_loss", "calibration", "hr_at_k", "ndcg_at_k")
_STATUS_STYLES = {"promoted": "green", "overridden": "yellow", "refused": "red", "rolled_back": "red"}


def show_models(ws: Workspace, pipeline: str, stage: str | None, overrides: Sequence[str], as_json: bool) -> None:
    """Show the registered versions of a pipeline, the newest first.

    Args:
        ws: the workspace.
        pipeline: a shipped pipeline's name or a YAML file.
        stage: the stage that trains the models (train, baseline, second_stage); None: the one that the gate judges.
        overrides: `key=value` for the spec.
        as_json: print JSON.

    Raises:
        UserError: no version is registered.
    """
    from headrace.config import load_spec
    from headrace.models.registry.versions import aliases, versions

    spec = load_spec(pipeline, overrides)
    ws = ws.of(spec)
    name = _model_name(spec, stage)
    registered, alias_versions = versions(ws, name), aliases(ws, name)
    if not registered:
        raise UserError(f"no version of model '{name}' is registered. Run: headrace run {spec.argument} --ds DATE")
    records = [
        _version_record(ws, spec, v, alias_versions)
        for v in sorted(registered, key=lambda v: (v.ds or "", int(v.version)), reverse=True)
    ]
    if as_json:
        print_json({"model": name, "versions": records})
        return
    names = [n for n in _METRICS if any(n in record["metrics"] for record in records)]
    saved = [facts.saved_rows(record["saved"]) for record in records]
    embeddings = ["embeddings"] if any(saved) else []
    headings = [*(f">{n}" for n in names), ">on disk", *embeddings, "decided by"]
    rows_table = table("version", "day", "aliases", "verdict", *headings)
    for record, rows in zip(records, saved, strict=True):
        status = record["status"] or "–"
        size = "gone" if record["bytes"] is None else f"{record['bytes'] / 2**20:,.1f} MiB"
        decision = f"{record['by']}: {record['reason']}" if record["by"] else ""
        row = [
            record["version"],
            record["ds"] or "–",
            ", ".join(record["aliases"]),
            plain(status, style=_STATUS_STYLES.get(status, "")),
        ]
        metrics = (facts.decimals(record["metrics"].get(n)) for n in names)
        rows_table.add_row(*row, *metrics, size, *([rows] if embeddings else []), decision)
    out.print(rows_table)


def _version_record(ws: Workspace, spec: Spec, version: Version, alias_versions: Mapping[str, str]) -> dict[str, Any]:
    from headrace.models.registry.promotion import DECIDED_AT, DECIDED_BY, REASON
    from headrace.stage.manifest import Manifest

    gate = None if version.ds is None else Manifest.load(ws.manifest(spec.pipeline, version.ds, "gate"))
    tags = version.tags
    return {
        "version": version.version,
        "ds": version.ds,
        "key": version.key,
        "aliases": [alias for alias, number in alias_versions.items() if number == version.version],
        "status": version.status,
        "verdict": None if gate is None else _verdict(gate, version.key),
        "metrics": dict(version.metrics),
        "bytes": sum(f.size() for f in version.source.files()) if version.source.is_dir() else None,
        "saved": _saved(ws, spec, version),
        "by": tags.get(DECIDED_BY),
        "at": tags.get(DECIDED_AT),
        "reason": tags.get(REASON),
        "lineage": {
            tag.removeprefix("headrace."): tags[tag]
            for tag in ("headrace.dataset", "headrace.train_days", "headrace.warm_start", "headrace.warm_start_version")
            if tag in tags
        },
    }


def _saved(ws: Workspace, spec: Spec, version: Version) -> dict[str, Any] | None:
    """Return the bytes of the saved embeddings and of a full copy; a model may hold only changed rows."""
    from headrace.stage.manifest import Manifest

    for stage in ("train", "challenger") if version.ds is not None else ():
        manifest = Manifest.load(ws.manifest(spec.pipeline, str(version.ds), stage))
        if manifest is not None and any(o.kind == "model" and o.version == version.key for o in manifest.outputs):
            return dict(facts.mapping(manifest.facts.get("saved"))) or None
    return None


def _verdict(gate: Manifest, key: str) -> str | None:
    """Return the verdict of a day's gate on the model with this key: the day's model or its challenger."""
    if facts.mapping(gate.facts.get("model")).get("key") == key:
        return str(gate.facts.get("verdict"))
    challenger = facts.mapping(gate.facts.get("challenger"))
    return str(challenger.get("verdict")) if challenger.get("key") == key else None


def promote_version(
    ws: Workspace, pipeline: str, version: str, reason: str | None, overrides: Sequence[str], allow_older: bool
) -> None:
    """Make a version the champion, whatever its verdict.

    Raises:
        UserError: the reason is missing; see also registry.promotion.promote.
    """
    from headrace.config import load_spec
    from headrace.models.registry.promotion import promote

    if reason is None or not reason.strip():
        raise UserError("say why: --reason TEXT; it is kept with the version and in the log of promotions")
    spec = load_spec(pipeline, overrides)
    ws = ws.of(spec)
    name = _model_name(spec, None)
    _show_promotion(ws, spec, name, promote(ws, name, version, reason.strip(), allow_older=allow_older))


def roll_back_champion(ws: Workspace, pipeline: str, to: str | None, reason: str, overrides: Sequence[str]) -> None:
    """Move the champion's alias to an earlier version.

    Raises:
        UserError: see registry.promotion.roll_back.
    """
    from headrace.config import load_spec
    from headrace.models.registry.promotion import roll_back

    spec = load_spec(pipeline, overrides)
    ws = ws.of(spec)
    name = _model_name(spec, None)
    _show_promotion(ws, spec, name, roll_back(ws, name, to, reason))


def _show_promotion(ws: Workspace, spec: Spec, name: str, promotion: Promotion) -> None:
    from headrace.models.registry.versions import CHAMPION, versions

    by_version = {v.version: v for v in versions(ws, name)}
    previous = (
        "none"
        if promotion.previous is None
        else f"version {promotion.previous}, of {by_version[promotion.previous].ds}"
    )
    assert promotion.now is not None
    out.print(
        f"the alias {CHAMPION} of {name} is at version {promotion.now}, of {by_version[promotion.now].ds} "
        f"(before: {previous})",
        markup=False,
        soft_wrap=True,
    )
    out.print(f"logged in {ws.promotions(name)}", markup=False, soft_wrap=True)
    if spec.score is not None and spec.gate is not None:
        command = f"headrace run {spec.argument} --ds DATE --from score"
        out.print(f"To score a day anew with it: {command}", markup=False, soft_wrap=True)


def judge_day(pipeline: str, ws: Workspace, ds: str | None, overrides: Sequence[str], as_json: bool) -> int:
    """Judge a day's model, and show every rule.

    Returns:
        the exit code: 3 where it is refused.

    Raises:
        UserError: a stage that the gate needs has not finished, or the spec has no section `gate`.
    """
    from headrace.stage.manifest import Manifest

    spec, day = resolve(pipeline, ds, overrides)
    ws = ws.of(spec)
    if as_json:
        with redirect_stdout(sys.stderr):
            code = run_stages(pipeline, ws, day, overrides, "gate", "gate", show_results=False)
    else:
        code = run_stages(pipeline, ws, day, overrides, "gate", "gate", show_results=False)
    manifest = Manifest.load(ws.manifest(spec.pipeline, day, "gate"))
    if manifest is not None:
        if as_json:
            print_json({"pipeline": spec.pipeline, "ds": day, "key": manifest.key, **manifest.facts})
        else:
            show_verdict(manifest)
    return code


def _model_name(spec: Spec, stage: str | None) -> str:
    from headrace.models.registry.versions import registered_name

    if stage is not None:
        return registered_name(spec.pipeline, stage)
    return registered_name(spec.pipeline, "train" if spec.gate is None else spec.gate.stage)
