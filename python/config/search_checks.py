"""Whether `train.search` searches what can be searched, by what is measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from headrace.config.compare import ModelVariant
from headrace.config.paths import leaves
from headrace.config.search import SEARCHABLE, Parameter, Search, parameter_type
from headrace.config.section import Section
from headrace.config.train import Train
from headrace.errors import nearest


def check_search(
    spec: type[Section], search: Search, train: Train, kind: str, kind_of: Callable[[ModelVariant], str]
) -> None:
    """See that fields, models and the objective are such as the pipeline has.

    Args:
        spec: the class of a whole pipeline, whose fields are searched.
        search: `train.search`.
        train: the section it is of.
        kind: the pipeline's class of model.
        kind_of: that of a variant; raises ValueError where a section does not take what it says.

    Raises:
        ValueError: one is not.
    """
    _check_parameters(spec, search.parameters, "train.search.parameters", kind)
    for name, model in search.models.items():
        where = f"train.search.models.{name}"
        try:
            own_kind = kind_of(model)
        except ValueError as e:
            raise ValueError(f"{where}: {e}") from None
        _check_parameters(spec, model.parameters, f"{where}.parameters", own_kind)
    if search.of_lists and train.rank_group is None:
        raise ValueError(f"train.search.objective is '{search.objective}', but train.rank_group is not set")
    if search.objective not in (known := train.objectives()):
        hint = nearest(search.objective, known)
        raise ValueError(f"train.search.objective: '{search.objective}' is none of {', '.join(known)}{hint}")


def _check_parameters(spec: type[Section], parameters: Mapping[str, Parameter], key: str, kind: str) -> None:
    """See that parameters of a search are fields of the spec that can be searched, of the model class `kind`."""
    known = [p for p in leaves(spec) if _is_searchable(p)]
    for path, parameter in parameters.items():
        where = f"{key}: '{path}'"
        try:
            number = parameter_type(spec, path, parameter, kind)
        except KeyError:
            hint = nearest(path, known) or f"; fields that can be searched: {', '.join(known)}"
            raise ValueError(f"{where} is no field of the spec{hint}") from None
        if not _is_searchable(path):
            raise ValueError(
                f"{where} changes nothing that a trial could tell; below these all can be searched: "
                f"{', '.join(SEARCHABLE)}"
            )
        if parameter.choices is None and number is None:
            raise ValueError(f"{where} takes no numbers, so it has no low and high: write {{choices: [...]}}")
        bounds = (parameter.low, parameter.high, parameter.step)
        if number is int and any(b is not None and b != int(b) for b in bounds):
            raise ValueError(f"{where} takes whole numbers: low, high and step must be such")


def _is_searchable(path: str) -> bool:
    return any(path == s or path.startswith(f"{s}.") for s in SEARCHABLE)
