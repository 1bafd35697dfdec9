"""Open Bandit: clicks on logged items, and what the trained models would earn as policies."""

from __future__ import annotations

from bench.quality.part import Case, Part
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


def _case(name: str, *overrides: str, stage: str = "train") -> Case:
    return pipeline_case(name, "open_bandit", overrides=overrides, stage=stage, metrics=_METRICS)


PART = Part(
    title="Open Bandit, men",
    data=("obd",),
    protocol="""
The small sample of the campaign for men, logged by two policies with known propensities (uniformly random, and
Bernoulli Thompson sampling), split by time: the last two days are measured once, the day before says when training
stops. The model as a policy shows one of the 34 items with probabilities softmax(logit); its value, clicks an
impression, is estimated by inverse propensity scores (`ips`), self-normalised (`snips`) and doubly robust (`dr`), with
intervals by a bootstrap over impressions. `logged_value` is what the logging policies earned, `dm` what the model
itself expects, `effective_sample_size` the rows that the weights leave. Half a percent of the impressions are clicked:
intervals of so few clicks are wide, and values whose intervals overlap are not told apart.
""",
    cases=(_case("DeepFM"), _case("XGBoost", stage="baseline")),
)
