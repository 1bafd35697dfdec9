"""Whether the sections `baseline` and `second_stage` agree with the others."""

from __future__ import annotations

from headrace.config.baseline import Baseline, Trees
from headrace.config.features import Features
from headrace.config.publish import Publish
from headrace.config.score import Score
from headrace.config.second_stage import SecondStage
from headrace.config.train import Train


def check_baseline(
    baseline: Baseline, train: Train, features: Features, score: Score | None, publish: Publish | None
) -> None:
    """See that its lists have a column, its labels are what it learns, and what is published are probabilities.

    Raises:
        ValueError: one of it does not hold.
    """
    _check_trees("baseline", baseline, train, features)
    if baseline.label is not None and score and score.model == "best":
        raise ValueError(
            f"score.model is 'best', but the baseline learns '{baseline.label}' (baseline.label) and is measured "
            f"by it: no metric says which model is better; set score.model to 'neural' or 'baseline'"
        )
    if baseline.objective != "classification" and score and score.model in ("baseline", "best"):
        _refuse_to_publish("baseline", baseline, publish)


def check_second_stage(
    trees: SecondStage, train: Train, features: Features, score: Score | None, publish: Publish | None
) -> None:
    """See that there are rows of which the first model has learned nothing, to learn from and to measure by.

    Raises:
        ValueError: there are none, or what `check_baseline` asks does not hold.
    """
    _check_trees("second_stage", trees, train, features)
    split = features.split
    if split.by == "position" or (split.by == "time" and not split.test_days):
        raise ValueError(
            "second_stage learns from the split valid and is evaluated on the split test, of which there is none: "
            "set features.split.test_days (by time), or split by a column"
        )
    if train.pretrained:
        raise ValueError(
            "second_stage learns from rows of which the neural model has learned nothing, and what the models of "
            "train.pretrained learned from is not known; leave one of the two out"
        )
    if trees.objective != "classification" and score and score.model == "second_stage":
        _refuse_to_publish("second_stage", trees, publish)


def _check_trees(name: str, trees: Trees, train: Train, features: Features) -> None:
    """Lists have a column, and labels are what is learned."""
    if trees.objective == "ranking" and not (trees.group or train.rank_group):
        raise ValueError(f"{name}.objective is 'ranking': name the carried column of its lists, {name}.group")
    if trees.objective == "classification" and features.label_type == "number" and trees.column is None:
        another = ", or name a carried column of 0 and 1, baseline.label" if name == "baseline" else ""
        raise ValueError(
            f"features.label_type is 'number', and {name}.objective is 'classification': set it to "
            f"'regression'{another}"
        )


def _refuse_to_publish(name: str, trees: Trees, publish: Publish | None) -> None:
    if publish:
        raise ValueError(
            f"publish takes probabilities, and the scores of a {name} for {trees.objective} are none: set "
            f"score.model to 'neural', or leave publish out"
        )
