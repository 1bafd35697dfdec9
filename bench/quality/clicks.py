"""Parts of `make quality` that predict one label: Adult, TalkingData, Open Bandit, generated clicks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from bench.quality.cases import CaseResult, Goal, PublishedResult, QualityCase, QualityPart, data_folder, pipeline_case
from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.quality.report import facts
from headrace.quality.report.stage import read_truth
from headrace.stage.manifest import Manifest

_ADULT_SOURCE = "Gorishniy et al., Revisiting Deep Learning Models for Tabular Data, 2021"
#: Of the training rows that validate, and the seed by which they are drawn.
_ADULT_VALID, _ADULT_SEED = 0.1, 0


def write_file(adult: Path, target: Path) -> None:
    """Write the rows of adult.data and adult.test with a column `split`: a tenth of the former validates.

    Args:
        adult: the folder of both files, whose first lines name the columns.
        target: the file to write; there already, it is left alone.
    """
    if target.is_file():
        return
    header, *rows = (adult / "adult.data").read_text().splitlines()
    _, *test = (adult / "adult.test").read_text().splitlines()
    rows, test = ([r for r in part if r.strip()] for part in (rows, test))
    valid = np.random.default_rng(_ADULT_SEED).random(len(rows)) < _ADULT_VALID
    lines = [f"{header}, split", *(f"{r}, {'valid' if v else 'train'}" for r, v in zip(rows, valid, strict=True))]
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_suffix(".unfinished")
    unfinished.write_text("\n".join([*lines, *(f"{r}, test" for r in test)]) + "\n")
    unfinished.replace(target)


def _with_file(case: QualityCase) -> QualityCase:
    def run(seed: int, folder: Path, run: Callable[[int, Path], CaseResult] = case.run) -> CaseResult:
        write_file(data_folder() / "adult", folder / "home" / "landing" / "adult" / "adult.csv")
        return run(seed, folder)

    return replace(case, run=run)


def _adult_case(name: str, goal: Goal, *overrides: str, stage: str) -> QualityCase:
    metrics = ("test.error_rate", "test.auc", "test.log_loss", "error_rate")
    goals = {"test.error_rate": goal}
    return _with_file(pipeline_case(name, "adult", overrides=overrides, stage=stage, goals=goals, metrics=metrics))


ADULT = QualityPart(
    title="Adult",
    data=("adult",),
    protocol="""
Census income, the official split: all 16,281 rows of `adult.test`, with no row removed for missing values. A tenth of
the rows of `adult.data`, drawn once, decides when training stops. Its log loss chose the settings.

`test.error_rate` is the share of test rows on the wrong side of a probability of .5. `error_rate` is that of the tenth.
""",
    cases=(
        _adult_case("XGBoost", Goal(floor=0.128, aim=0.1277, lower=True), stage="baseline"),
        _adult_case(
            "XGBoost, rows and columns sampled",
            Goal(floor=0.128, aim=0.1277, lower=True),
            "baseline.learning_rate=0.05",
            "baseline.max_depth=5",
            "baseline.subsample=0.8",
            "baseline.colsample_bytree=0.6",
            stage="baseline",
        ),
        _adult_case("Wide & Deep", Goal(floor=0.15, aim=0.1478, lower=True), stage="train"),
    ),
    published=(
        PublishedResult("XGBoost, default settings", {"test.error_rate": 0.1259, "test.auc": 0.9265}, _ADULT_SOURCE),
        PublishedResult("XGBoost, tuned", {"test.error_rate": 0.1277, "test.auc": 0.9254}, _ADULT_SOURCE),
        PublishedResult("MLP", {"test.error_rate": 0.1478, "test.auc": 0.9047}, _ADULT_SOURCE),
        PublishedResult("DCN-v2", {"test.error_rate": 0.1471, "test.auc": 0.9057}, _ADULT_SOURCE),
    ),
)


#: The newest day is measured once; the day before says when training stops.
_TALKINGDATA_SPLIT = (
    "features.split={by: time, valid_days: 1, test_days: 1}",
    "features.carried=[ip]",
    "train.evaluation={metrics: [pr_auc, normalized_entropy], user: ip, bootstrap: {replicates: 200}}",
)
_TALKINGDATA_METRICS = ("test.auc", "test.pr_auc", "test.normalized_entropy", "auc")


def _talkingdata_case(name: str, *overrides: str, stage: str = "train") -> QualityCase:
    return pipeline_case(
        name, "talkingdata", overrides=(*_TALKINGDATA_SPLIT, *overrides), stage=stage, metrics=_TALKINGDATA_METRICS
    )


TALKINGDATA = QualityPart(
    title="TalkingData, sample",
    data=("talkingdata",),
    protocol="""
The competition's sample of 100,000 clicks, of which 227 led to an installation, split by time:

- the clicks of 2017-11-09 are measured once (`test.auc`);
- those of the day before decide when training stops;
- those of the two days before that are for training.

Intervals are of a bootstrap over IP addresses. They are wide, as the test day has few installations.
""",
    cases=(
        _talkingdata_case("DLRM"),
        _talkingdata_case("DeepFM", "model={class: deepfm, embedding_dim: 8, args: {deep_mlp: [16]}}"),
        _talkingdata_case(
            "XGBoost",
            "baseline={rounds: 500, early_stopping_rounds: 20, learning_rate: 0.1, max_depth: 4, subsample: 0.8}",
            stage="baseline",
        ),
    ),
)


_OPEN_BANDIT_METRICS = (
    "test.auc",
    "test.logged_value",
    "test.ips",
    "test.snips",
    "test.dr",
    "test.dm",
    "test.effective_sample_size",
)


def _open_bandit_case(name: str, *overrides: str, stage: str = "train") -> QualityCase:
    return pipeline_case(name, "open_bandit", overrides=overrides, stage=stage, metrics=_OPEN_BANDIT_METRICS)


OPEN_BANDIT = QualityPart(
    title="Open Bandit, men",
    data=("obd",),
    protocol="""
The small sample of the campaign for men. Two policies with known propensities logged it: uniformly random, and
Bernoulli Thompson sampling. It is split by time: the last two days are measured once, and the day before decides when
training stops.

The model as a policy shows one of the 34 items with probabilities softmax(logit). Its value is clicks an impression.

| metric | meaning |
| --- | --- |
| `ips`, `snips`, `dr` | the value, estimated by inverse propensity scores, self-normalised, and doubly robust |
| `logged_value` | what the logging policies earned |
| `dm` | what the model itself expects |
| `effective_sample_size` | the number of rows that remain effective under the weights |

Intervals are of a bootstrap over impressions. Half a percent of the impressions are clicked, so intervals are wide.
Values whose intervals overlap are not distinguished.
""",
    cases=(_open_bandit_case("DeepFM"), _open_bandit_case("XGBoost", stage="baseline")),
)


#: Eight days; the last one validates.
DS = "2026-01-08"
ROWS_PER_DAY = 500_000

_GENERATED_LOG = (f"generate.rows_per_day={ROWS_PER_DAY}",)
_GENERATED_GOALS = {"ceiling_share": Goal(floor=0.97)}


def _generated_ceiling(manifest: Manifest, ws: Workspace) -> float:
    ceiling = facts.number(read_truth(ws, manifest.pipeline, manifest.ds).get("auc_ceiling"))
    assert ceiling is not None
    return ceiling


def ceiling_share(manifest: Manifest, ws: Workspace) -> Mapping[str, float]:
    """Return `ceiling_share`: how far from .5 to the ceiling. Raises UserError where a model is above it."""
    auc, ceiling = manifest.facts["metrics"]["auc"], _generated_ceiling(manifest, ws)
    share = facts.ceiling_share(auc, ceiling)
    assert share is not None
    if share > 1:
        raise UserError(f"AUC {auc:.4f} is above the ceiling, {ceiling:.4f}: the model has seen what it should not")
    return {"ceiling_share": share}


def _generated_notes(manifest: Manifest, ws: Workspace) -> Mapping[str, str]:
    return {"AUC ceiling": f"{_generated_ceiling(manifest, ws):.4f} on {manifest.rows['valid']:,} rows"}


def _generated_case(
    name: str, *overrides: str, stage: str = "train", goals: Mapping[str, Goal] = _GENERATED_GOALS
) -> QualityCase:
    return pipeline_case(
        name,
        "clicks",
        ds=DS,
        overrides=(*_GENERATED_LOG, *overrides),
        stage=stage,
        goals=goals,
        metrics=("auc", "ceiling_share", "log_loss"),
        generate=True,
        measure=ceiling_share,
        notes=_generated_notes,
    )


def _generated_network(name: str, kind: str) -> QualityCase:
    return _generated_case(name, f"model={{class: {kind}, embedding_dim: 16}}")


GENERATED = QualityPart(
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
        _generated_case("DLRM"),
        _generated_network("Wide & Deep", "wide_deep"),
        _generated_network("DeepFM", "deepfm"),
        _generated_network("DCN-v2", "dcn_v2"),
        _generated_network("FinalMLP", "final_mlp"),
        _generated_network("MaskNet", "masknet"),
        # Trees cut codes of ids, whose order says how frequent they are and no more: it is shown, and has no floor.
        _generated_case("XGBoost", stage="baseline", goals={}),
    ),
)

PARTS = {"adult": ADULT, "talkingdata": TALKINGDATA, "open_bandit": OPEN_BANDIT, "generated": GENERATED}
