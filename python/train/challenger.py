"""The stage `challenger`: a model trained from nothing, beside the model that continues from day to day.

A model that starts warm every day still depends on rows that are in no window any more. A model that is trained from
nothing on the same rows shows what that costs or gains.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from datetime import date, timedelta
from typing import Any

from headrace.config import Challenger, Spec
from headrace.config.workspace import Workspace
from headrace.models import registry
from headrace.models.predictor import damaged_model
from headrace.models.registry.promotion import set_alias
from headrace.models.registry.versions import lineage_of
from headrace.stage import Context, Result, Stage, identity
from headrace.stage.manifest import Input, Manifest
from headrace.train.callbacks.progress import spec_monitor
from headrace.train.stage import Train, run_parameters

log = logging.getLogger("headrace.train")

#: Alias of the newest challenger in the registry.
ALIAS = "challenger"


class TrainChallenger(Stage):
    """Training of a challenger on the days when one is due. The gate (headrace.quality.gate) judges both models."""

    name = "challenger"
    version = 1
    needs: tuple[str, ...] = ("features", "train")

    def spec_part(self, spec: Spec) -> Mapping[str, Any]:
        settings = _settings(spec)
        return {"challenger": settings.model_dump(mode="json"), **Train().spec_part(spec.of_challenger())}

    def inputs(self, ctx: Context) -> tuple[Input, ...]:
        """Return the newest model of an earlier day that was trained from nothing."""
        newest = newest_from_nothing(ctx.ws, ctx.spec, ctx.ds)
        return (
            ()
            if newest is None
            else (Input(kind="stage", name=f"{newest.stage} {newest.ds}", version=identity(newest)),)
        )

    def verify(self, ctx: Context, manifest: Manifest) -> str | None:
        """Check that the saved model exists, if one was trained."""
        models = (ctx.ws.locate(output.name) for output in manifest.outputs)
        return next((damage for model in models if (damage := damaged_model(model)) is not None), None)

    def run(self, ctx: Context) -> Result:
        """Train a challenger if one is due. Raises UserError as the stage `train` does."""
        reason = due(ctx.ws, ctx.spec, ctx.ds)
        if reason is None:
            log.info("no challenger is due")
            return Result(outputs=(), rows={}, facts={"due": None})
        log.info("training from nothing: %s", reason)
        spec = ctx.spec.of_challenger()
        upstream = {"features": ctx.upstream["features"]}
        result = Train().run(replace(ctx, spec=spec, upstream=upstream, inputs=(), registers=False))
        deficit = how_far_behind(ctx.spec, ctx.upstream["train"].facts, result.facts)
        version = None
        if ctx.registers:
            version = registry.register(
                ctx.ws,
                ctx.spec.pipeline,
                ctx.ws.locate(result.outputs[0].name),
                result.facts["metrics"],
                ctx.key,
                params=run_parameters(spec),
                ds=ctx.ds,
                lineage=lineage_of(ctx),
                history=[*result.facts["curve"], *result.facts["evals"]],
            )
            set_alias(ctx.ws, ctx.spec.pipeline, ALIAS, version)
        registered = {"name": ctx.spec.pipeline, "version": version} if version else None
        facts = {**result.facts, "due": reason, "behind": deficit, "registered": registered}
        if deficit is not None:
            log.info("by %s the day's model is %+.4f behind", spec_monitor(ctx.spec).metric, deficit)
        return replace(result, facts=facts)


def _settings(spec: Spec) -> Challenger:
    assert spec.challenger is not None
    return spec.challenger


def due(ws: Workspace, spec: Spec, ds: str) -> str | None:
    """Return the reason to train a challenger on a day, or None."""
    settings, last = _settings(spec), newest_from_nothing(ws, spec, ds)
    if last is None:
        today = Manifest.load(ws.manifest(spec.pipeline, ds, "train"))
        if today is not None and today.facts.get("warm_start") is None:
            return None  # the day's own model was trained from nothing
        return f"no model of the {settings.every_days} days before was trained from nothing"
    deficit = last.facts.get("behind")
    if last.stage == "challenger" and deficit is not None and deficit > settings.behind:
        return f"on {last.ds} the day's model was {deficit:.4f} behind by {spec_monitor(spec).metric}"
    return None


def newest_from_nothing(ws: Workspace, spec: Spec, ds: str) -> Manifest | None:
    """Return the manifest of the newest model trained from nothing in the `every_days` - 1 days before `ds`."""
    for back in range(1, _settings(spec).every_days):
        day = (date.fromisoformat(ds) - timedelta(days=back)).isoformat()
        for stage in ("challenger", "train"):
            manifest = Manifest.load(ws.manifest(spec.pipeline, day, stage))
            if manifest is None or (stage == "challenger" and manifest.facts.get("due") is None):
                continue
            if stage == "challenger" or manifest.facts.get("warm_start") is None:
                return manifest
    return None


def how_far_behind(spec: Spec, todays: Mapping[str, Any], challengers: Mapping[str, Any]) -> float | None:
    """Return how much better a challenger is than the day's model by `train.monitor`; None if one lacks the metric.

    Args:
        spec: the pipeline.
        todays: facts of the stage `train`.
        challengers: facts of the challenger's training, on the same dataset.
    """
    monitor = spec_monitor(spec)
    todays_value, challengers_value = todays["metrics"].get(monitor.metric), challengers["metrics"].get(monitor.metric)
    if todays_value is None or challengers_value is None:
        return None
    return float(todays_value - challengers_value if monitor.falls else challengers_value - todays_value)
