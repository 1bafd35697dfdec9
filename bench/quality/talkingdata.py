"""TalkingData: was the app installed after the click? The competition's sample, split by time."""

from __future__ import annotations

from bench.quality.part import QualityCase, QualityPart
from bench.quality.pipeline import pipeline_case

#: The newest day is measured once; the day before says when training stops.
_SPLIT = (
    "features.split={by: time, valid_days: 1, test_days: 1}",
    "features.carried=[ip]",
    "train.evaluation={metrics: [pr_auc, normalized_entropy], user: ip, bootstrap: {replicates: 200}}",
)
_METRICS = ("test.auc", "test.pr_auc", "test.normalized_entropy", "auc")


def _case(name: str, *overrides: str, stage: str = "train") -> QualityCase:
    return pipeline_case(name, "talkingdata", overrides=(*_SPLIT, *overrides), stage=stage, metrics=_METRICS)


PART = QualityPart(
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
        _case("DLRM"),
        _case("DeepFM", "model={class: deepfm, embedding_dim: 8, args: {deep_mlp: [16]}}"),
        _case(
            "XGBoost",
            "baseline={rounds: 500, early_stopping_rounds: 20, learning_rate: 0.1, max_depth: 4, subsample: 0.8}",
            stage="baseline",
        ),
    ),
)
