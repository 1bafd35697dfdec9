"""A case that is a pipeline: `headrace run` in a workspace of the part, as a user would, and the stage's record."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.memory import peak_of_tree
from bench.quality.part import CaseResult, Goal, QualityCase
from headrace.config import load_overlay, load_spec
from headrace.errors import UserError
from headrace.manifest import Manifest
from headrace.quality.report import facts
from headrace.workspace import Workspace, checkout

#: Changes no figure, so other values leave results as they are.
_NOT_SETTINGS = ("ranks", "threads", "seed", "search")


def pipeline_case(
    name: str,
    pipeline: str,
    *,
    ds: str | None = None,
    overrides: Sequence[str] = (),
    overlays: Sequence[str] = (),
    stage: str = "train",
    goals: Mapping[str, Goal] | None = None,
    metrics: tuple[str, ...] = (),
    generate: bool = False,
    home: str = "home",
    measure: Callable[[Manifest, Workspace], Mapping[str, float]] | None = None,
    notes: Callable[[Manifest, Workspace], Mapping[str, str]] | None = None,
) -> QualityCase:
    """Return a case that runs a pipeline to its stage `train` or `baseline`.

    Args:
        name: of the case.
        pipeline: a shipped pipeline's name.
        ds: the day; None: the spec's.
        overrides: `key=value` for the spec (`--set`); the seed comes to them.
        overlays: files of conf/overlays (`--overlay`).
        stage: whose record has the metrics; `train`, or `baseline` for XGBoost.
        goals: by metric.
        metrics: those that tables show; empty: see `Case`.
        generate: make the landing files first (`headrace generate`), up to `ds`.
        home: the workspace's folder below the part's. Cases whose datasets differ have one each: features of the other
            case would be made again each time.
        measure: metrics besides those of the stage's record.
        notes: see `CaseResult`.
    """

    def all_overrides() -> list[str]:
        from_overlays = [o for file in overlays for o in load_overlay(checkout() / "conf" / "overlays" / file)]
        return [*from_overlays, *overrides]

    def settings() -> Mapping[str, Any]:
        spec = load_spec(pipeline, all_overrides())
        # Without defaults: a key that a later version adds leaves results as they are.
        left_out = {"train": set(_NOT_SETTINGS), "description": True}
        spec_settings = spec.model_dump(mode="json", exclude=left_out, exclude_defaults=True)
        return {"spec": spec_settings, "ds": ds or spec.ds, "stage": stage}

    def run(seed: int, folder: Path) -> CaseResult:
        ws = Workspace(folder / home)
        run_overrides = [*all_overrides(), f"train.seed={seed}", "train.warm_start=false", *_machine_overrides]
        spec = load_spec(pipeline, run_overrides)
        day = ds or spec.ds
        assert day is not None
        place = ["--home", str(ws.home)]
        sets = [argument for override in run_overrides for argument in ("--set", override)]
        if generate:
            run_headrace("generate", pipeline, *place, "--until", day, *sets)
        run_headrace("run", pipeline, *place, "--ds", day, "--to", "features", *sets)
        record = ws.manifest(spec.pipeline, day, stage)
        earlier = Manifest.load(record)
        peak = run_headrace(stage, pipeline, *place, "--ds", day, *sets)
        manifest = Manifest.load(record)
        assert manifest is not None
        if (
            earlier is not None and earlier.key == manifest.key
        ):  # there was nothing to do: what the stage said of itself
            peak = sum(manifest.peak_memory_mib.values())
        values, intervals = recorded(manifest)
        return CaseResult(
            metrics={**values, **(measure(manifest, ws) if measure else {})},
            seconds=None if manifest.facts.get("resumed_from_step") else manifest.seconds,
            peak_mib=peak,
            intervals=intervals,
            notes=notes(manifest, ws) if notes else {},
        )

    return QualityCase(name, run, settings, goals or {}, metrics)


#: `key=value` that say how this machine is used, of every pipeline; see `use_ranks`.
_machine_overrides: list[str] = []


def use_ranks(ranks: int | None, threads: int | None) -> None:
    """Train on so many ranks, with so many threads each; None: as the specs say. The batches are the same."""
    _machine_overrides[:] = [
        f"train.{key}={value}" for key, value in (("ranks", ranks), ("threads", threads)) if value is not None
    ]


def recorded(manifest: Manifest) -> tuple[dict[str, float], dict[str, list[float]]]:
    """Return the metrics and intervals of a stage's record, `test.NAME` of the split `test`."""
    values = facts.numbers(manifest.facts.get("metrics"))
    intervals: dict[str, list[float]] = {}
    for split, evaluation in facts.mapping(manifest.facts.get("evaluation")).items():
        prefix = "" if split in ("valid", "rank") else f"{split}."
        values |= {f"{prefix}{k}": v for k, v in facts.numbers(facts.mapping(evaluation).get("metrics")).items()}
        ends = facts.mapping(facts.mapping(evaluation).get("intervals"))
        intervals |= {f"{prefix}{k}": list(v) for k, v in ends.items()}
    return values, intervals


def run_headrace(*arguments: str) -> float:
    """Run a command of `headrace` to its end; its peak memory, MiB, JVM and ranks included.

    Raises:
        UserError: it failed.
    """
    process = subprocess.Popen([sys.executable, "-m", "headrace.cli", *arguments], cwd=checkout())
    try:
        with peak_of_tree(process.pid) as peak:
            code = process.wait()
    finally:  # whoever stops this stops the stage too
        process.terminate()
        process.wait()
    if code:
        raise UserError(f"headrace {' '.join(arguments[:2])} failed with {code}")
    return peak.mib
