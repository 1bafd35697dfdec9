"""Effects of the keys of `train` and `model`: what another value of a key changes, written beside the key.

The key of the stage `train`, the fingerprint that a checkpoint and its continuation share, the check of a model that a
day starts from, and the key of a search are derived from them, so that no two can look at different keys.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import Enum
from typing import Any

from pydantic.fields import FieldInfo

from headrace.config.section import Section


class Effect(Enum):
    """An effect of another value of a key; written into the field's annotation: `Annotated[int, Effect.SPEED]`."""

    #: Which numbers are learned.
    WEIGHTS = "weights"
    #: How numbers are rounded, at rest or on their way between ranks: so which are learned, too.
    STORAGE = "storage"
    #: The figures that are measured of the trained model, and reported.
    METRICS = "metrics"
    #: How fast, how safely and where training runs. A finished run stays as it is.
    SPEED = "speed"
    #: The keys of the section below have effects of their own.
    BY_KEY = "by key"


#: Effects of the keys that a checkpoint and its continuation must have in common.
OF_CHECKPOINTS = frozenset({Effect.WEIGHTS, Effect.STORAGE})
#: Effects of the keys another value of which makes a finished run anew.
OF_RUNS = OF_CHECKPOINTS | {Effect.METRICS}


class TrainedSection(Section):
    """A section each of whose keys has an effect. A class with a key that has none is refused when it is defined."""

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        for name, info in cls.model_fields.items():
            effect_of(cls, name, info)


def effect_of(section: type[Section], name: str, info: FieldInfo) -> Effect:
    """Return the effect of a key.

    Raises:
        TypeError: the key has none, or several.
    """
    effects = [entry for entry in info.metadata if isinstance(entry, Effect)]
    if len(effects) != 1:
        raise TypeError(f"{section.__name__}.{name} must say what it changes: Annotated[..., Effect.WEIGHTS], say")
    return effects[0]


def keys_with(section: TrainedSection, effects: Collection[Effect]) -> dict[str, Any]:
    """Return the keys of a section that have one of some effects, named as in YAML, with their values as JSON."""
    dumped, selected = section.model_dump(mode="json", by_alias=True), dict[str, Any]()
    for name, info in type(section).model_fields.items():
        key, effect, value = info.alias or name, effect_of(type(section), name, info), getattr(section, name)
        if effect is Effect.BY_KEY:
            selected |= {key: inner} if (inner := _nested_keys_with(value, effects)) else {}
        elif effect in effects and key in dumped:
            # A fingerprint ignores the order of a mapping; the order of tasks is that of a model's towers.
            has_order = isinstance(value, Mapping) and any(isinstance(v, Section) for v in value.values())
            selected[key] = list(dumped[key].items()) if has_order else dumped[key]
    return selected


def _nested_keys_with(
    value: TrainedSection | Mapping[str, TrainedSection], effects: Collection[Effect]
) -> dict[str, Any]:
    if isinstance(value, TrainedSection):
        return keys_with(value, effects)
    # In an exception for one table null means: as for the other tables.
    by_table = {
        table: {key: v for key, v in keys_with(section, effects).items() if v is not None}
        for table, section in value.items()
    }
    return {table: keys for table, keys in by_table.items() if keys}
