"""What the stages baseline and second_stage say of their spec, their dataset and their saved models."""

from __future__ import annotations

from typing import Any

from headrace.config import Spec, Trees
from headrace.config.effects import Effect, keys_with
from headrace.errors import UserError
from headrace.manifest import Manifest
from headrace.models.predictor import damaged_model
from headrace.registry.store import missing_version
from headrace.stage import Context


def trees_part(spec: Spec, name: str, conf: Trees | None) -> dict[str, Any]:
    """Return the section, the seed, the weights of rows and what is measured.

    `workers` is part of it: each sketches its own rows, so others cut elsewhere. The device is not: the trees that
    grow on it differ by rounding alone.
    """
    return {
        name: conf.model_dump(mode="json") if conf else None,
        "seed": spec.train.seed,
        "sample_weight": spec.train.sample_weight if is_weighted(spec, conf) else None,
        **keys_with(spec.train, {Effect.METRICS}),
    }


def is_weighted(spec: Spec, conf: Trees | None) -> bool:
    """Whether rows have weights. For ranking XGBoost takes one for a list, not for a row."""
    is_ranking = conf is not None and conf.objective == "ranking"
    return spec.train.sample_weight is not None and not is_ranking


def refuse_drawn_negatives(spec: Spec, name: str) -> None:
    """See that the dataset has negatives.

    Raises:
        UserError: they are drawn while the neural model trains.
    """
    if spec.train.negatives is not None:
        raise UserError(
            f"{name}: pipeline '{spec.pipeline}' draws its negatives batch by batch while the neural model trains "
            f"(train.negatives), so its dataset has nothing for XGBoost to tell clicks from; remove the section "
            f"`{name}`"
        )


def verify_trees(ctx: Context, manifest: Manifest) -> str | None:
    """Why the saved model or the registry is not there any more, or None."""
    damaged = damaged_model(ctx.ws.locate(manifest.output("model").name))
    return damaged or missing_version(ctx.ws, manifest.facts.get("registered"))
