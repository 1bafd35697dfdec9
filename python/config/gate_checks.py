"""Whether the section `gate` names models, metrics, slices and splits that the pipeline has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

from headrace.config.baseline import Trees
from headrace.config.evaluation import CatalogueMetric, RankingMetric, UserMetric
from headrace.config.features import Features
from headrace.config.gate import Gate
from headrace.config.score import Score
from headrace.config.train import Train
from headrace.errors import nearest

#: Of candidate lists, those that are always there among them.
_OF_LISTS = ("hr_at_k", "ndcg_at_k", *get_args(RankingMetric), *get_args(CatalogueMetric))


def check_gate(
    gate: Gate,
    trees: Mapping[str, Trees | None],
    score: Score | None,
    train: Train,
    features: Features,
    *,
    has_drift: bool,
    has_challenger: bool,
    predicts_numbers: bool,
) -> None:
    """See that the gate can judge.

    Args:
        gate: the section.
        trees: the sections `baseline` and `second_stage`.
        score: the section.
        train: the section.
        features: the section.
        has_drift: whether there is the section `drift`.
        has_challenger: whether there is the section `challenger`.
        predicts_numbers: whether the neural model's predictions are no probabilities.

    Raises:
        ValueError: it asks for something that there is not.
    """
    if gate.model != "neural" and trees[gate.model] is None:
        raise ValueError(f"gate.model is '{gate.model}', and there is no such section")
    _check_scored(gate, score)
    if gate.challenger == "promote" and not (has_challenger and gate.model == "neural"):
        lacks = "there is no section `challenger`" if not has_challenger else f"gate.model is '{gate.model}'"
        raise ValueError(f"gate.challenger is 'promote', of the neural model's challenger, and {lacks}")
    if gate.challenger == "promote" and not predicts_numbers:
        _check_monitor(train)
    split = features.split
    has_test = split.by == "column" or (split.by == "time" and bool(split.test_days))
    if gate.split == "test" and not has_test:
        raise ValueError("gate.split is 'test', of which there is none: see features.split")
    if gate.model == "second_stage" and gate.split == "valid":
        raise ValueError("gate.split is 'valid', from which the second stage learns: leave it out")
    _check_metrics(gate, train)
    if not has_drift and (gate.drift.max_psi is not None or gate.drift.max_columns is not None):
        raise ValueError("gate.drift is of what the stage drift counts: add the section `drift`")
    judged = trees.get(gate.model)
    of_numbers = predicts_numbers if judged is None else judged.objective != "classification"
    if of_numbers and (gate.calibration.ratio is not None or gate.calibration.max_error is not None):
        raise ValueError("gate.calibration is of probabilities, and the model predicts none")


def _check_monitor(train: Train) -> None:
    """A challenger is better by what the stage evaluate measures: neither tasks nor full rankings are."""
    full = train.evaluation.full_ranking
    if "." in train.monitor or (full is not None and train.monitor in full.metrics()):
        raise ValueError(
            f"gate.challenger is 'promote', of a challenger that is better by train.monitor, and the stage evaluate "
            f"does not measure '{train.monitor}': set train.monitor to another metric, or gate.challenger to 'report'"
        )


def _check_scored(gate: Gate, score: Score | None) -> None:
    """What scores by default is what is judged."""
    if score is None or score.of_registry or score.model in ("today", gate.model):
        return
    if score.model == "best":
        raise ValueError(
            "score.model is 'best', and a gate has one champion: set it to 'neural' or 'baseline', and gate.model, too"
        )
    raise ValueError(
        f"score.model is '{score.model}', and gate.model '{gate.model}': a model that is not judged would score; set "
        f"gate.model to '{score.model}'"
    )


def _check_metrics(gate: Gate, train: Train) -> None:
    for key, entries in (("champion", gate.champion), ("slices", gate.slices)):
        for metric in entries:
            if metric in _OF_LISTS and train.rank_group is None:
                raise ValueError(f"gate.{key}.{metric} is of lists: set train.rank_group")
            if metric in get_args(UserMetric) and train.evaluation.user is None:
                raise ValueError(f"gate.{key}.{metric} is of users: set train.evaluation.user")
            if entries[metric].bound != "value" and train.evaluation.user is None:
                raise ValueError(
                    f"gate.{key}.{metric}: an interval draws users: set train.evaluation.user, a carried column, or "
                    f"take the difference itself, bound: value"
                )
    slices = train.evaluation.slices
    for metric, limit in gate.slices.items():
        if not slices:
            raise ValueError(f"gate.slices.{metric}: there are no slices: set train.evaluation.slices")
        for name in limit.of:
            if name not in slices:
                raise ValueError(f"gate.slices.{metric}.of: no slice '{name}'{nearest(name, slices)}")
