"""The section `experiments`: accepted settings, refusals and their messages."""

from __future__ import annotations

import pytest

from headrace.config import load_spec
from headrace.errors import UserError

ARMS = "arms: {champion: {}, weak: {model: baseline}}"


def test_defaults_are_equal_shares_of_everybody_against_the_first_arm() -> None:
    spec = load_spec("clicks", ["outcomes={}", f"experiments={{ranker: {{{ARMS}}}}}"])
    assert spec.experiments is not None
    experiment = spec.experiments["ranker"]
    assert (experiment.shares, experiment.control_arm, experiment.treatments) == (
        {"champion": 0.5, "weak": 0.5},
        "champion",
        ("weak",),
    )
    assert experiment.has_models
    assert experiment.live("1999-01-01")
    assert spec.scored_by("baseline").score.model == "baseline"  # type: ignore[union-attr]
    assert spec.scored_by("baseline").experiments is None


@pytest.mark.parametrize(
    ("experiment", "message"),
    [
        ("{arms: {a: {}}}", "at least 2 items"),
        ("{arms: {a: {share: 0.5}, b: {}}}", "give each arm a share, or none of them"),
        ("{arms: {a: {share: 0.5}, b: {share: 0.4}}}", "the shares' sum is 0.9, not 1"),
        ("{arms: {a: {share: 0.99999}, b: {share: 0.00001}}}", "shares are kept to 0.0001"),
        ("{arms: {a: {}, B: {}}}", "'B' must match"),
        (f"{{{ARMS}, control: strong}}", "control: 'strong' is none of arms"),
        (f"{{{ARMS}, start: 2026-01-09, end: 2026-01-08}}", "end is 2026-01-08, before start"),
        (f"{{{ARMS}, start: yesterday}}", "is not a date"),
        (f"{{{ARMS}, label: clik}}", "'clik' is none of outcomes.labels (click); did you mean 'click'?"),
        ("{arms: {a: {}, b: {model: second_stage}}}", "arms.b.model: score.model is 'second_stage', and there is no"),
        ("{arms: {a: {}, b: {model: best one}}}", "arms.b.model"),
    ],
)
def test_faults_are_named(experiment: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        load_spec("clicks", ["outcomes={}", f"experiments={{ranker: {experiment}}}"])
    assert message in str(error.value)


def test_other_sections_must_fit() -> None:
    with pytest.raises(UserError, match="add the section `outcomes`"):
        load_spec("clicks", [f"experiments={{ranker: {{{ARMS}}}}}"])
    with pytest.raises(UserError, match="'ranker' is the salt of 'ranker'"):
        load_spec("clicks", ["outcomes={}", f"experiments={{ranker: {{{ARMS}}}, other: {{{ARMS}, salt: ranker}}}}"])
