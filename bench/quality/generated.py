"""Generated clicks: how far each ranking model comes from a coin to the AUC of the true probabilities."""

from __future__ import annotations

from collections.abc import Mapping

from bench.quality.part import Goal, QualityCase, QualityPart
from bench.quality.pipeline import pipeline_case
from headrace.errors import UserError
from headrace.manifest import Manifest
from headrace.quality.report import facts
from headrace.quality.report.stage import read_truth
from headrace.workspace import Workspace

#: Eight days; the last one validates.
DS = "2026-01-08"
ROWS_PER_DAY = 500_000

_LOG = (f"generate.rows_per_day={ROWS_PER_DAY}",)
_GOALS = {"ceiling_share": Goal(floor=0.97)}


def _ceiling(manifest: Manifest, ws: Workspace) -> float:
    ceiling = facts.number(read_truth(ws, manifest.pipeline, manifest.ds).get("auc_ceiling"))
    assert ceiling is not None
    return ceiling


def ceiling_share(manifest: Manifest, ws: Workspace) -> Mapping[str, float]:
    """Return `ceiling_share`: how far from .5 to the ceiling. Raises UserError where a model is above it."""
    auc, ceiling = manifest.facts["metrics"]["auc"], _ceiling(manifest, ws)
    share = facts.ceiling_share(auc, ceiling)
    assert share is not None
    if share > 1:
        raise UserError(f"AUC {auc:.4f} is above the ceiling, {ceiling:.4f}: the model has seen what it should not")
    return {"ceiling_share": share}


def _notes(manifest: Manifest, ws: Workspace) -> Mapping[str, str]:
    return {"AUC ceiling": f"{_ceiling(manifest, ws):.4f} on {manifest.rows['valid']:,} rows"}


def _case(name: str, *overrides: str, stage: str = "train", goals: Mapping[str, Goal] = _GOALS) -> QualityCase:
    return pipeline_case(
        name,
        "clicks",
        ds=DS,
        overrides=(*_LOG, *overrides),
        stage=stage,
        goals=goals,
        metrics=("auc", "ceiling_share", "log_loss"),
        generate=True,
        measure=ceiling_share,
        notes=_notes,
    )


def _network(name: str, kind: str) -> QualityCase:
    return _case(name, f"model={{class: {kind}, embedding_dim: 16}}")


PART = QualityPart(
    title="Generated clicks",
    protocol=f"""
`headrace generate clicks` draws each click from a probability that it knows. So the AUC of the true probabilities on
the validation day is the best that any model can reach, apart from the noise of the labels.

The data are eight days of {ROWS_PER_DAY:,} rows (3,000 users, 800 items, a latent taste that drifts). The last day
validates, and all models train on one dataset.

`ceiling_share` is the share of the way from .5 to that ceiling. A model above the ceiling has seen what it should not,
and fails the run.
""",
    cases=(
        _case("DLRM"),
        _network("Wide & Deep", "wide_deep"),
        _network("DeepFM", "deepfm"),
        _network("DCN-v2", "dcn_v2"),
        _network("FinalMLP", "final_mlp"),
        _network("MaskNet", "masknet"),
        # Trees cut codes of ids, whose order says how frequent they are and no more: it is shown, and has no floor.
        _case("XGBoost", stage="baseline", goals={}),
    ),
)
