"""Adult: is an income above 50,000 dollars? XGBoost and Wide & Deep on the official split."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from bench.quality.part import CaseResult, Goal, PublishedResult, QualityCase, QualityPart, data_folder
from bench.quality.pipeline import pipeline_case

_SOURCE = "Gorishniy et al., Revisiting Deep Learning Models for Tabular Data, 2021"
#: Of the training rows that validate, and the seed by which they are drawn.
_VALID, _SEED = 0.1, 0


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
    valid = np.random.default_rng(_SEED).random(len(rows)) < _VALID
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


def _case(name: str, goal: Goal, *overrides: str, stage: str) -> QualityCase:
    metrics = ("test.error_rate", "test.auc", "test.log_loss", "error_rate")
    goals = {"test.error_rate": goal}
    return _with_file(pipeline_case(name, "adult", overrides=overrides, stage=stage, goals=goals, metrics=metrics))


PART = QualityPart(
    title="Adult",
    data=("adult",),
    protocol="""
Census income, the official split: all 16,281 rows of `adult.test`, with no row removed for missing values. A tenth of
the rows of `adult.data`, drawn once, decides when training stops. Its log loss chose the settings.

`test.error_rate` is the share of test rows on the wrong side of a probability of .5. `error_rate` is that of the tenth.
""",
    cases=(
        _case("XGBoost", Goal(floor=0.128, aim=0.1277, lower=True), stage="baseline"),
        _case(
            "XGBoost, rows and columns sampled",
            Goal(floor=0.128, aim=0.1277, lower=True),
            "baseline.learning_rate=0.05",
            "baseline.max_depth=5",
            "baseline.subsample=0.8",
            "baseline.colsample_bytree=0.6",
            stage="baseline",
        ),
        _case("Wide & Deep", Goal(floor=0.15, aim=0.1478, lower=True), stage="train"),
    ),
    published=(
        PublishedResult("XGBoost, default settings", {"test.error_rate": 0.1259, "test.auc": 0.9265}, _SOURCE),
        PublishedResult("XGBoost, tuned", {"test.error_rate": 0.1277, "test.auc": 0.9254}, _SOURCE),
        PublishedResult("MLP", {"test.error_rate": 0.1478, "test.auc": 0.9047}, _SOURCE),
        PublishedResult("DCN-v2", {"test.error_rate": 0.1471, "test.auc": 0.9057}, _SOURCE),
    ),
)
