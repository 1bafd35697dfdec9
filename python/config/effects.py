"""What the keys of `train` and `model` change, said once, beside each key.

The key of the stage `train`, the fingerprint of its checkpoints and the key of a search are derived from it, so that no
two of them can differ in what they look at.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import Enum
from typing import Any

from pydantic.fields import FieldInfo

from headrace.config.section import Section


class Effect(Enum):
    """What another value of a key changes; written into the field's annotation: `Annotated[int, Effect.SPEED]`."""

    #: Which numbers are learned.
    WEIGHTS = "weights"
    #: How numbers are rounded, at rest or on their way between ranks: so which are learned, too.
    STORAGE = "storage"
    #: What is measured of the trained model, and reported.
    METRICS = "metrics"
    #: How fast, how safely and where training runs. A finished run stays as it is.
    SPEED = "speed"
    #: The keys of the section below say it themselves.
    BY_KEY = "by key"


#: Of what a checkpoint and its continuation must have in common.
OF_CHECKPOINTS = frozenset({Effect.WEIGHTS, Effect.STORAGE})
#: Of what makes a finished run another one.
OF_RUNS = OF_CHECKPOINTS | {Effect.METRICS}


class TrainedSection(Section):
    """A section each of whose keys has an effect; one without is refused when the class is made."""

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        for name, info in cls.model_fields.items():
            effect_of(cls, name, info)


def effect_of(section: type[Section], name: str, info: FieldInfo) -> Effect:
    """Return the effect of a key.

    Raises:
        TypeError: it has none, or several.
    """
    effects = [entry for entry in info.metadata if isinstance(entry, Effect)]
    if len(effects) != 1:
        raise TypeError(f"{section.__name__}.{name} must say what it changes: Annotated[..., Effect.WEIGHTS], say")
    return effects[0]


def keys_with(section: TrainedSection, effects: Collection[Effect]) -> dict[str, Any]:
    """Return the keys of a section that have one of some effects, and their values as JSON has them."""
    dumped, found = section.model_dump(mode="json"), dict[str, Any]()
    for name, info in type(section).model_fields.items():
        effect, value = effect_of(type(section), name, info), getattr(section, name)
        if effect is Effect.BY_KEY:
            found |= {name: inner} if (inner := _below(value, effects)) else {}
        elif effect in effects and name in dumped:
            # Fingerprints do not see the order of a mapping; that of tasks is the order of a model's towers.
            has_order = isinstance(value, Mapping) and any(isinstance(v, Section) for v in value.values())
            found[name] = list(dumped[name].items()) if has_order else dumped[name]
    return found


def _below(value: TrainedSection | Mapping[str, TrainedSection], effects: Collection[Effect]) -> dict[str, Any]:
    if isinstance(value, TrainedSection):
        return keys_with(value, effects)
    # Of an exception for one table null means: as for the others.
    by_table = {k: {n: v for n, v in keys_with(of, effects).items() if v is not None} for k, of in value.items()}
    return {table: keys for table, keys in by_table.items() if keys}
