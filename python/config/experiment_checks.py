"""What `experiments` names in other sections."""

from __future__ import annotations

from collections.abc import Mapping

from headrace.config.experiments import Experiment
from headrace.config.outcomes import Outcomes
from headrace.config.score import Score
from headrace.config.section import NAME
from headrace.errors import nearest


def check_experiments(experiments: Mapping[str, Experiment], score: Score | None, outcomes: Outcomes | None) -> None:
    """See that there are lists to have arms, outcomes to tell them apart, and the labels that are asked for.

    Raises:
        ValueError: with the key and what is wrong.
    """
    if score is None:
        raise ValueError("experiments are on lists: add a score section")
    if outcomes is None:
        raise ValueError("experiments are told by what followed the lists: add the section `outcomes` ({} is a start)")
    if "arms" in (score.user.key, score.item.key):
        raise ValueError("experiments: 'arms' is the name of a column that they make; rename the key of score")
    salts: dict[str, str] = {}
    for name, experiment in experiments.items():
        where = f"experiments.{name}"
        if not NAME.fullmatch(name):
            raise ValueError(f"experiments: '{name}' must match {NAME.pattern}")
        other = salts.setdefault(experiment.salt or name, name)
        if other != name:
            raise ValueError(
                f"{where}.salt: '{experiment.salt or name}' is the salt of '{other}', so that their arms "
                f"were the same; give each its own"
            )
        if experiment.label is not None and experiment.label not in outcomes.labels:
            known = ", ".join(outcomes.labels)
            raise ValueError(
                f"{where}.label: '{experiment.label}' is none of outcomes.labels ({known})"
                f"{nearest(experiment.label, outcomes.labels)}"
            )
