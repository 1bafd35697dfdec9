"""Cases of `make quality`, what they are measured against, and the parts that have them.

A case is usually a pipeline: `headrace run` in a workspace of the part, as a user would, and the stage's record.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.usage import peak_of_tree
from headrace.config import load_overlay, load_spec
from headrace.config.installation import checkout
from headrace.config.workspace import Workspace
from headrace.errors import UserError, nearest
from headrace.quality.report import facts
from headrace.stage.manifest import Manifest

#: Modules of this package with `PARTS`, in the page's order.
_MODULES = ("rankings", "clicks")


@dataclass(frozen=True)
class Goal:
    """Goal of a metric: `floor` at least, `aim` where papers have it. `lower`: less is better (an error)."""

    floor: float | None = None
    aim: float | None = None
    lower: bool = False

    def reached(self, value: float) -> str:
        """Return `aim`, `floor`, or `below floor`: what a value comes to."""
        sign = -1 if self.lower else 1
        if self.aim is not None and sign * value >= sign * self.aim:
            return "aim"
        if self.floor is None:
            return "below aim"
        return "floor" if sign * value >= sign * self.floor else "below floor"


@dataclass(frozen=True)
class PublishedResult:
    """Result that others have published on this very split."""

    model: str
    metrics: Mapping[str, float]
    source: str


@dataclass(frozen=True)
class CaseResult:
    """Result of one run of a case.

    metrics: by name, as in the train stage's record (`auc`, `hr_at_k`), `SPLIT.NAME` of other splits than `valid` and
    `rank`. intervals: by metric, [low, high] of one run's bootstrap. seconds: of training and evaluation; None where an
    earlier run had begun it. peak_mib: the largest sum over the processes of the run, MiB. notes: facts that the page
    shows once a case, such as the hash of the test targets; of all seeds the same.
    """

    metrics: Mapping[str, float]
    seconds: float | None
    peak_mib: float | None
    intervals: Mapping[str, Sequence[float]] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class QualityCase:
    """A model with its settings.

    run: takes the seed and the part's folder. settings: JSON values that the result depends on besides the seed, or a
    function that makes them. goals: by metric; those of a case with goals are shown first.
    """

    name: str
    run: Callable[[int, Path], CaseResult]
    settings: Mapping[str, Any] | Callable[[], Mapping[str, Any]]
    goals: Mapping[str, Goal] = field(default_factory=dict)
    #: Metrics that the table shows; empty: those with goals or published figures, else all.
    metrics: tuple[str, ...] = ()

    def all_settings(self) -> Mapping[str, Any]:
        """Return the settings. Raises UserError where a spec has faults."""
        return self.settings() if callable(self.settings) else self.settings


@dataclass(frozen=True)
class QualityPart:
    """A data set, its protocol, and the models that are trained on it; see the package's docstring."""

    title: str
    protocol: str
    cases: tuple[QualityCase, ...]
    published: tuple[PublishedResult, ...] = ()
    #: Folders of `data_folder()` that must be there.
    data: tuple[str, ...] = ()

    def missing(self) -> str | None:
        """Return the reason why the part cannot run here; None: it can."""
        absent = [name for name in self.data if not (data_folder() / name).is_dir()]
        return f"../shared/data/{absent[0]} is not there" if absent else None

    def shown_metrics(self, case: QualityCase, measured: Sequence[str]) -> list[str]:
        """Return the metrics of a case that tables show, of those that it has."""
        known = [*case.goals, *(m for p in self.published for m in p.metrics)]
        return [m for m in dict.fromkeys(case.metrics or known or measured) if m in measured]


def data_folder() -> Path:
    """Return the folder of the data sets; it need not exist."""
    return checkout().parent / "shared" / "data"


def load_parts(names: Sequence[str] = ()) -> dict[str, QualityPart]:
    """Return parts by name; without names all of them, in the page's order.

    Raises:
        UserError: no such part.
    """
    parts: dict[str, QualityPart] = {}
    for module in _MODULES:
        parts |= importlib.import_module(f"bench.quality.{module}").PARTS
    for name in names:
        if name not in parts:
            raise UserError(f"no part '{name}'{nearest(name, parts)}; parts: {', '.join(parts)}")
    return {name: parts[name] for name in names or parts}


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
