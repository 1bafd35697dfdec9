"""Lineage: from a table, a model or a file back to the landing files, by walking manifests.

A manifest names its inputs by version and its outputs by version; a run of a stage is a node, an input that a stage
of ours did not make (a landing file) is a leaf.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from headrace.config.stages import ORDER, in_order
from headrace.config.workspace import Workspace
from headrace.errors import UserError, nearest
from headrace.stage import identity
from headrace.stage.manifest import Input, Manifest, Output

#: (pipeline, ds, stage) -> manifest.
Runs = Mapping[tuple[str, str, str], Manifest]

#: Landing days or files are listed up to this many a run; the rest is counted.
_LISTED = 8


@dataclass(frozen=True)
class Node:
    """Node of the tree: a run of a stage, or an input that no stage made."""

    title: str
    detail: str = ""
    #: Set where the chain is broken: the input was made again since, or its manifest is missing.
    warning: str = ""
    children: tuple[Node, ...] = ()
    #: The line as JSON. A run has `stage`, `pipeline`, `ds`, `key`, `outputs` (or `repeated`: it is listed above);
    #: an input or an output has `kind`, `name`, `version`; the rest of a list has `kind` and `more`, their number.
    facts: Mapping[str, Any] = field(default_factory=dict)


def load_runs(ws: Workspace, pipeline: str | None = None) -> dict[tuple[str, str, str], Manifest]:
    """Return all manifests of a workspace (of one pipeline), by pipeline, day and order of stages.

    Raises:
        UserError: a file among them is no manifest.
    """
    runs: dict[tuple[str, str, str], Manifest] = {}
    for name in [pipeline] if pipeline else sorted(ws.pipelines()):
        stages: dict[str, list[str]] = {}
        for stage, days in ws.days_of_stages(name).items():
            for ds in days:
                stages.setdefault(ds, []).append(stage)
        for ds in sorted(stages):
            for stage in in_order(stages[ds]):
                if (manifest := Manifest.load(ws.manifest(name, ds, stage))) is not None:
                    runs[(name, ds, stage)] = manifest
    return runs


def find(runs: Runs, name: str, ds: str | None = None) -> tuple[Manifest, Output]:
    """Return the run that made a thing, and the thing; of several days the newest, unless `ds` is given.

    Args:
        runs: from `load_runs`.
        name: an output's path (`lake/clicks/scores`), `<pipeline>_<table>` or `<pipeline>/<table>`, a warehouse's
            table with or without its schema, a registered model's name (`clicks`, `clicks-baseline`, with `/VERSION`
            or `@KEY`), or a key.
        ds: the day.

    Raises:
        UserError: nothing of that name was made (on that day).
    """
    known: dict[str, list[tuple[Manifest, Output]]] = {}
    for (_, day, _), manifest in runs.items():
        for output in manifest.outputs if ds is None or day == ds else ():
            for alias in _aliases(manifest, output):
                known.setdefault(alias, []).append((manifest, output))
    matches = known.get(name.strip("/"))
    if not matches:
        day = f" on {ds}" if ds else ""
        if not known:
            raise UserError(f"nothing has been made{day} yet: no manifests. Run: headrace run PIPELINE --ds DATE")
        tables = sorted(
            {o.name for pairs in known.values() for m, o in pairs if o.kind == "delta" or m.stage == "publish"}
        )
        models = sorted({_registered_name(m) for pairs in known.values() for m, o in pairs if o.kind == "model"})
        existing = f"Tables: {', '.join(tables) or 'none'}; models: {', '.join(models) or 'none'}"
        raise UserError(f"no run made '{name}'{day}{nearest(name, known, cutoff=0.5)}. {existing}")
    return max(matches, key=lambda pair: pair[0].ds)


def _registered_name(manifest: Manifest) -> str:
    """Under which name a stage registers its model."""
    return manifest.pipeline + ("" if manifest.stage == "train" else f"-{manifest.stage}")


def _aliases(manifest: Manifest, output: Output) -> set[str]:
    """Return the names by which a person may ask for an output."""
    names = {output.name, f"{output.name}@{output.version}"}
    parts = output.name.split("/")
    if output.kind in ("delta", "quarantine") and len(parts) >= 3 and parts[0] == "lake":
        names |= {"_".join(parts[1:]), "/".join(parts[1:])}
    if manifest.stage == "publish" and output.kind != "delta":  # the table in the warehouse
        names.add(output.name.rpartition("/")[2].rpartition(".")[2])
    if output.kind == "model":
        model = _registered_name(manifest)
        names |= {model, f"{model}@{output.version}", output.version}
        registered = manifest.facts.get("registered")
        if isinstance(registered, Mapping) and "version" in registered:
            names.add(f"{registered.get('name', model)}/{registered['version']}")
    if output.kind == "dataset":
        names.add(output.version)
    return names


def trace(runs: Runs, manifest: Manifest, output: Output | None = None) -> Node:
    """Return the tree below a run (and one of its outputs, as the root)."""
    seen: set[tuple[str, str, str]] = set()
    below = _run_node(runs, manifest, seen)
    if output is None:
        return below
    return Node(title=output.name, detail=_describe(output), children=(below,), facts=output.model_dump())


def _run_node(runs: Runs, manifest: Manifest, seen: set[tuple[str, str, str]], version: str | None = None) -> Node:
    """Return the node of a run. `version`: the identity that the reader saw; the node warns if the run was repeated."""
    title = f"{manifest.stage} {manifest.ds}"
    warning = ""
    if version is not None and identity(manifest) != version:
        warning = "has been run again since with another result"
    elif manifest.removed:
        warning = manifest.why_removed or ""
    place = (manifest.pipeline, manifest.ds, manifest.stage)
    facts: dict[str, Any] = {f: getattr(manifest, f) for f in ("stage", "pipeline", "ds", "key")}
    if place in seen:
        return Node(title, "as above", warning, facts=facts | {"repeated": True})
    facts["outputs"] = [o.model_dump() for o in manifest.outputs]
    if manifest.removed:
        facts["removed"] = [r.model_dump(mode="json") for r in manifest.removed]
    seen.add(place)
    outputs_text = "; ".join(f"{o.name} {_describe(o)}" for o in manifest.outputs)
    # Upstream stages in the day's order, so that shared ones are listed once, near the root, with the tables that they
    # made.
    read = sorted((i for i in manifest.inputs if i.kind != "landing"), key=_order)
    stages = [runs.get((manifest.pipeline, manifest.ds, i.name)) for i in read if i.kind == "stage"]
    shown_outputs = {(o.name, o.version) for m in stages if m for o in m.outputs}
    children = [_input_node(runs, manifest, i, seen) for i in read if (i.name, i.version) not in shown_outputs]
    children += _landing(manifest)
    if manifest.stage == "ingest":
        children += _earlier_days(runs, manifest, seen)
    named = any(o.version == manifest.key for o in manifest.outputs)
    detail = "; ".join(
        [*([] if named else [f"key {manifest.key}"]), *([f"made {outputs_text}"] if outputs_text else [])]
    )
    return Node(title, detail, warning, tuple(children), facts)


def _order(read: Input) -> int:
    return ORDER.index(read.name) if read.kind == "stage" and read.name in ORDER else len(ORDER)


def _input_node(runs: Runs, reader: Manifest, read: Input, seen: set[tuple[str, str, str]]) -> Node:
    if read.kind == "stage":
        upstream = runs.get((reader.pipeline, reader.ds, read.name))
        if upstream is None:
            facts = {"stage": read.name, "pipeline": reader.pipeline, "ds": reader.ds, "key": None}
            return Node(f"{read.name} {reader.ds}", warning="its manifest is gone", facts=facts)
        return _run_node(runs, upstream, seen, read.version)
    title, detail = read.name, f"{read.kind}, version {read.version}"
    for maker in runs.values():
        if maker is not reader and any(o.name == read.name and o.version == read.version for o in maker.outputs):
            return Node(title, detail, children=(_run_node(runs, maker, seen),), facts=read.model_dump())
    return Node(title, detail, facts=read.model_dump())


def _landing(manifest: Manifest) -> list[Node]:
    # A run covers earlier days, too; only the newest are listed.
    files = sorted((i for i in manifest.inputs if i.kind == "landing"), key=lambda i: i.name, reverse=True)
    nodes = [Node(i.name, f"landing, version {i.version}", facts=i.model_dump()) for i in files[:_LISTED]]
    if (more := len(files) - _LISTED) > 0:
        nodes.append(Node(f"and {more} more from landing", facts={"kind": "landing", "more": more}))
    return nodes


def _earlier_days(runs: Runs, manifest: Manifest, seen: set[tuple[str, str, str]]) -> list[Node]:
    """Other days of the same table, beyond those that this run looked at: its version holds them, too."""
    looked_at = {i.name for i in manifest.inputs}
    nodes = []
    for place, earlier in runs.items():
        pipeline, ds, stage = place
        if pipeline != manifest.pipeline or stage != "ingest" or ds >= manifest.ds or place in seen:
            continue
        if any(i.kind == "landing" and i.name in looked_at for i in earlier.inputs):
            continue
        files = sum(i.kind == "landing" for i in earlier.inputs)
        rows = earlier.rows.get("kept")
        rows_text = f", {rows:,} rows kept" if rows is not None else ""
        facts = {"stage": stage, "pipeline": pipeline, "ds": ds, "key": earlier.key, "rows": dict(earlier.rows)}
        nodes.append(
            Node(f"ingest {ds}", f"earlier day of the same table: {files} landing inputs{rows_text}", facts=facts)
        )
    return nodes


def _describe(output: Output) -> str:
    rows = f", {output.rows:,} rows" if output.rows is not None else ""
    return f"({output.kind}, version {output.version}{rows})"
