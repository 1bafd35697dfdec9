"""`headrace models`, `headrace promote`, `headrace rollback`, `headrace gate`: registered models and their champion."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from typing import Any

from headrace.commands.run import resolve, run
from headrace.commands.screen import out, plain, print_json, table
from headrace.commands.verdict import show_verdict
from headrace.config import Spec, load_spec
from headrace.errors import UserError
from headrace.manifest import Manifest
from headrace.quality.report import facts
from headrace.registry.promotion import DECIDED_AT, DECIDED_BY, REASON, Promotion, promote, roll_back
from headrace.registry.versions import CHAMPION, Version, aliases, registered_name, versions
from headrace.workspace import Workspace

#: Metrics of the table on the screen.
_SHOWN = ("auc", "log_loss", "calibration", "hr_at_k", "ndcg_at_k")
_STYLES = {"promoted": "green", "overridden": "yellow", "refused": "red", "rolled_back": "red"}


def models(ws: Workspace, pipeline: str, stage: str | None, overrides: Sequence[str], as_json: bool) -> None:
    """Show the registered versions of a pipeline, the newest first.

    Args:
        ws: the workspace.
        pipeline: a shipped pipeline's name or a YAML file.
        stage: whose models (train, baseline, second_stage); None: those that the gate judges.
        overrides: `key=value` for the spec.
        as_json: print JSON.

    Raises:
        UserError: there is none.
    """
    spec = load_spec(pipeline, overrides)
    ws = ws.of(spec)
    name = _name(spec, stage)
    found, at = versions(ws, name), aliases(ws, name)
    if not found:
        raise UserError(f"no version of model '{name}' is registered. Run: headrace run {spec.argument} --ds DATE")
    told = [_told(ws, spec, v, at) for v in sorted(found, key=lambda v: (v.ds or "", int(v.version)), reverse=True)]
    if as_json:
        print_json({"model": name, "versions": told})
        return
    names = [n for n in _SHOWN if any(n in t["metrics"] for t in told)]
    saved = [facts.saved_rows(t["saved"]) for t in told]
    embeddings = ["embeddings"] if any(saved) else []
    headings = [*(f">{n}" for n in names), ">on disk", *embeddings, "decided by"]
    rows_table = table("version", "day", "aliases", "verdict", *headings)
    for t, rows in zip(told, saved, strict=True):
        status = t["status"] or "–"
        size = "gone" if t["bytes"] is None else f"{t['bytes'] / 2**20:,.1f} MiB"
        by = f"{t['by']}: {t['reason']}" if t["by"] else ""
        row = [t["version"], t["ds"] or "–", ", ".join(t["aliases"]), plain(status, style=_STYLES.get(status, ""))]
        more = [size, *([rows] if embeddings else []), by]
        rows_table.add_row(*row, *(facts.decimals(t["metrics"].get(n)) for n in names), *more)
    out.print(rows_table)


def _told(ws: Workspace, spec: Spec, version: Version, at: Mapping[str, str]) -> dict[str, Any]:
    gate = None if version.ds is None else Manifest.load(ws.manifest(spec.pipeline, version.ds, "gate"))
    tags = version.tags
    return {
        "version": version.version,
        "ds": version.ds,
        "key": version.key,
        "aliases": [alias for alias, number in at.items() if number == version.version],
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
    """Bytes of the saved embeddings and of a whole copy, of a model that may hold changed rows alone."""
    for stage in ("train", "challenger") if version.ds is not None else ():
        manifest = Manifest.load(ws.manifest(spec.pipeline, str(version.ds), stage))
        if manifest is not None and any(o.kind == "model" and o.version == version.key for o in manifest.outputs):
            return dict(facts.mapping(manifest.facts.get("saved"))) or None
    return None


def _verdict(gate: Manifest, key: str) -> str | None:
    """Return the verdict of a day's gate on the model of a key: the day's, or its challenger."""
    if facts.mapping(gate.facts.get("model")).get("key") == key:
        return str(gate.facts.get("verdict"))
    challenger = facts.mapping(gate.facts.get("challenger"))
    return str(challenger.get("verdict")) if challenger.get("key") == key else None


def override(
    ws: Workspace, pipeline: str, version: str, reason: str | None, overrides: Sequence[str], allow_older: bool
) -> None:
    """Make a version the champion, whatever its verdict.

    Raises:
        UserError: no reason; see registry.promotion.promote.
    """
    if reason is None or not reason.strip():
        raise UserError("say why: --reason TEXT; it is kept with the version and in the log of promotions")
    spec = load_spec(pipeline, overrides)
    ws = ws.of(spec)
    name = _name(spec, None)
    _tell(ws, spec, name, promote(ws, name, version, reason.strip(), allow_older=allow_older))


def rollback(ws: Workspace, pipeline: str, to: str | None, reason: str, overrides: Sequence[str]) -> None:
    """Take the alias back from the champion, and give it to an earlier version.

    Raises:
        UserError: see registry.promotion.roll_back.
    """
    spec = load_spec(pipeline, overrides)
    ws = ws.of(spec)
    name = _name(spec, None)
    _tell(ws, spec, name, roll_back(ws, name, to, reason))


def _tell(ws: Workspace, spec: Spec, name: str, done: Promotion) -> None:
    found = {v.version: v for v in versions(ws, name)}
    before = "none" if done.previous is None else f"version {done.previous}, of {found[done.previous].ds}"
    assert done.now is not None
    out.print(
        f"the alias {CHAMPION} of {name} is at version {done.now}, of {found[done.now].ds} (before: {before})",
        markup=False,
        soft_wrap=True,
    )
    out.print(f"logged in {ws.promotions(name)}", markup=False, soft_wrap=True)
    if spec.score is not None and spec.gate is not None:
        again = f"headrace run {spec.argument} --ds DATE --from score"
        out.print(f"To score a day anew with it: {again}", markup=False, soft_wrap=True)


def gate(pipeline: str, ws: Workspace, ds: str | None, overrides: Sequence[str], as_json: bool) -> int:
    """Judge a day's model, and show every rule.

    Returns:
        the exit code: 3 where it is refused.

    Raises:
        UserError: the stage before has not finished, or there is no section `gate`.
    """
    spec, day = resolve(pipeline, ds, overrides)
    ws = ws.of(spec)
    if as_json:
        with redirect_stdout(sys.stderr):
            code = run(pipeline, ws, day, overrides, "gate", "gate", show_results=False)
    else:
        code = run(pipeline, ws, day, overrides, "gate", "gate", show_results=False)
    manifest = Manifest.load(ws.manifest(spec.pipeline, day, "gate"))
    if manifest is not None:
        if as_json:
            print_json({"pipeline": spec.pipeline, "ds": day, "key": manifest.key, **manifest.facts})
        else:
            show_verdict(manifest)
    return code


def _name(spec: Spec, stage: str | None) -> str:
    if stage is not None:
        return registered_name(spec.pipeline, stage)
    return registered_name(spec.pipeline, "train" if spec.gate is None else spec.gate.stage)
