"""Open Bandit: clicks on logged items, and what the trained models would earn as policies."""

from __future__ import annotations

from bench.quality.part import QualityCase, QualityPart
from bench.quality.pipeline import pipeline_case

_METRICS = (
    "test.auc",
    "test.logged_value",
    "test.ips",
    "test.snips",
    "test.dr",
    "test.dm",
    "test.effective_sample_size",
)


def _case(name: str, *overrides: str, stage: str = "train") -> QualityCase:
    return pipeline_case(name, "open_bandit", overrides=overrides, stage=stage, metrics=_METRICS)


PART = QualityPart(
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
    cases=(_case("DeepFM"), _case("XGBoost", stage="baseline")),
)
