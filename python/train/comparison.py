"""The stage `compare`: it trains the section's models on the day's dataset and compares them statistically."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

from headrace.config import Compare as Settings
from headrace.config import ModelVariant, Spec
from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.models.predictor import read_meta
from headrace.stage import Context, Result, RunPlan, Stage, execute, plan_run
from headrace.stage.manifest import Input, Manifest, Output
from headrace.storage import Location
from headrace.train.baseline.stage import TrainBaseline
from headrace.train.evaluation.bootstrap import Difference, Replicates, difference, read_replicates
from headrace.train.job import REPLICATES
from headrace.train.stage import Train

log = logging.getLogger("headrace.train")

#: Manifest of a model that was trained for a comparison, in the folder of its run.
_MANIFEST = "compared.json"


class Compare(Stage):
    """Comparison of models that are trained on the same day; none of them is registered.

    Each model has the key that its own stage would compute. So a model that the day, or an earlier comparison, has
    trained is not trained again.
    """

    name = "compare"
    version = 1
    needs: tuple[str, ...] = ("features",)

    def spec_part(self, spec: Spec) -> Mapping[str, Any]:
        """Return the spec parts of the models' own stages, and the name of the reference."""
        parts = {}
        for name, variant in _settings(spec).models.items():
            stage = _stage(variant)
            parts[name] = {"stage": stage.name, "spec": stage.spec_part(spec.with_variant(variant))}
        return {"models": parts, "against": _settings(spec).reference if parts else None}

    def inputs(self, ctx: Context) -> tuple[Input, ...]:
        """Return the saved models of an earlier day that models start from."""
        if not _settings(ctx.spec).models:
            raise UserError("compare.models names no model, so there is nothing to train")
        starts: dict[str, Input] = {}
        for variant in _settings(ctx.spec).models.values():
            ctx_of_model = replace(ctx, spec=ctx.spec.with_variant(variant))
            starts |= {i.name: i for i in _stage(variant).inputs(ctx_of_model)}
        return tuple(starts.values())

    def verify(self, ctx: Context, manifest: Manifest) -> str | None:
        """Check that the saved models exist."""
        return next((problem for o in manifest.outputs if (problem := _unreadable(ctx.ws, o)) is not None), None)

    def run(self, ctx: Context) -> Result:
        """Train and compare the models. Raises UserError as the models' stages do."""
        settings, manifests, turn_start = _settings(ctx.spec), dict[str, Manifest](), ctx.turn_start
        for number, (name, variant) in enumerate(settings.models.items(), 1):
            plan = plan_run(_stage(variant), ctx.spec.with_variant(variant), ctx.ws, ctx.ds, verify=False)
            prefix = f"compare: model {number} of {len(settings.models)}, {name}"
            manifest = _trained(ctx.ws, plan)
            if manifest is not None:
                log.info("%s: is trained already", prefix)
            else:
                log.info("%s", prefix)
                plan = replace(plan, ctx=replace(plan.ctx, registers=False, turn_start=turn_start))
                manifest = execute(_stage(variant), plan)
                manifest.save(_folder(ctx.ws, plan) / _MANIFEST)
                turn_start = time.time()
            manifests[name] = manifest
        models = [_model_record(ctx.ws, name, manifests[name]) for name in manifests]
        replicates = {name: _replicates(ctx.ws, manifest) for name, manifest in manifests.items()}
        bootstrap = ctx.spec.train.evaluation.bootstrap
        for record in models:
            record["against"] = (
                _differences(record, _record_named(models, settings.reference), replicates, bootstrap.confidence)
                if bootstrap
                else {}
            )
        return Result(
            outputs=tuple(m.output("model") for m in manifests.values()),
            rows={"models": len(models)},
            facts={"reference": settings.reference, "models": models},
        )


def _settings(spec: Spec) -> Settings:
    assert spec.compare is not None
    return spec.compare


def _stage(variant: ModelVariant) -> Stage:
    return Train() if variant.baseline is None else TrainBaseline()


def _folder(ws: Workspace, plan: RunPlan) -> Location:
    return ws.model(plan.ctx.spec.pipeline, plan.ctx.ds, plan.ctx.key)


def _unreadable(ws: Workspace, output: Output) -> str | None:
    try:
        read_meta(ws.locate(output.name))
    except UserError as e:
        return str(e)
    return None


def _trained(ws: Workspace, plan: RunPlan) -> Manifest | None:
    """Return the manifest of a model that the day's stage or a comparison has trained, if it is complete.

    A model without replicates, although the spec requests intervals, is of a version that did not save them. Its last
    checkpoint exists, and it is measured again.
    """
    earlier = None
    with suppress(UserError):
        earlier = Manifest.load(_folder(ws, plan) / _MANIFEST)
    for manifest in (plan.manifest, earlier):
        if manifest is None or manifest.key != plan.ctx.key or _unreadable(ws, manifest.output("model")):
            continue
        if plan.ctx.spec.train.evaluation.bootstrap is None or _replicates(ws, manifest) is not None:
            return manifest
    return None


def _replicates(ws: Workspace, manifest: Manifest) -> Replicates | None:
    return read_replicates(ws.locate(manifest.output("model").name).parent / REPLICATES)


def _model_record(ws: Workspace, name: str, manifest: Manifest) -> dict[str, Any]:
    """Return the record of a model without its differences."""
    metrics, intervals = dict(manifest.facts["metrics"]), dict[str, Any]()
    for split, evaluation in manifest.facts.get("evaluation", {}).items():
        metrics |= {_key(split, metric): value for metric, value in evaluation["metrics"].items()}
        intervals |= {_key(split, metric): ends for metric, ends in evaluation["intervals"].items()}
    model = ws.locate(manifest.output("model").name)
    return {
        "name": name,
        "stage": manifest.stage,
        "class": read_meta(model)["kind"],
        "metrics": metrics,
        "intervals": intervals,
        "steps": manifest.facts.get("steps"),
        "seconds": manifest.seconds,
        "peak_memory_mib": manifest.peak_memory_mib,
        "mib": round(sum(f.size() for f in model.files()) / 2**20, 3),
        "key": manifest.key,
    }


def _key(split: str, metric: str) -> str:
    """Return the name of a metric in the record of a comparison.

    Metrics of `valid` and `rank` have no prefix. `valid_lists` of trees have the same names as `rank`, which comes
    later and replaces them if the dataset has that split. `test_lists` are lists of the rows of `test`.
    """
    return f"test.{metric}" if split.startswith("test") else metric


def _record_named(models: list[dict[str, Any]], name: str) -> dict[str, Any]:
    return next(m for m in models if m["name"] == name)


def _differences(
    record: Mapping[str, Any],
    reference: Mapping[str, Any],
    replicates: Mapping[str, Replicates | None],
    confidence: float,
) -> dict[str, Any]:
    """Return the difference of each metric from the reference model; empty for the reference itself."""
    own_replicates, reference_replicates = replicates[record["name"]], replicates[reference["name"]]
    if record is reference or own_replicates is None or reference_replicates is None:
        return {}
    differences: dict[str, Difference | None] = {}
    for split in (s for s in own_replicates if s in reference_replicates):  # the last of a name, as in `_model_record`
        for metric in own_replicates[split].keys() & reference_replicates[split].keys():
            key = _key(split, metric)
            values = (record["metrics"].get(key), reference["metrics"].get(key))
            differences[key] = difference(
                *values, own_replicates[split][metric], reference_replicates[split][metric], confidence
            )
    return {key: asdict(value) for key in record["metrics"] if (value := differences.get(key)) is not None}
