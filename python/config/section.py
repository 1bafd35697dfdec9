"""The base of all sections of a spec, and what several have: names, days, places, addresses, effects of their keys.

Days in paths: `{ds}` stands for a day as 2026-01-08, `{ds:%Y/%m/%d}` for one as its folders or names spell it.
Formats know %Y, %m and %d, which have leading zeros, and %-m and %-d, which have none; all else stands for itself. A
path may have several: `year={ds:%Y}/month={ds:%-m}/day={ds:%-d}`.

Each key of `train` and `model` says beside it what another value changes (`Effect`). The key of the stage `train`, the
fingerprint that a checkpoint and its continuation share, the check of a model that a day starts from, and the key of a
search are derived from the effects, so that no two can look at different keys.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from datetime import date
from enum import Enum
from functools import partial
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict
from pydantic.fields import FieldInfo

from headrace.errors import UserError
from headrace.storage.uri import parse_uri, server_fault, uri_fault

_PLACE = re.compile(r"\{ds(?::([^{}]*))?\}")
_DIRECTIVE = re.compile(r"%(-?[A-Za-z%])")
_SPELLED: dict[str, Callable[[date], str]] = {
    "Y": lambda day: f"{day.year:04d}",
    "m": lambda day: f"{day.month:02d}",
    "d": lambda day: f"{day.day:02d}",
    "-m": lambda day: str(day.month),
    "-d": lambda day: str(day.day),
}
_PARTS = {"Y": "year", "m": "month", "d": "day"}
_DEFAULT = "%Y-%m-%d"


def names_day(path: str) -> bool:
    """Return whether a path has a day in it."""
    return _PLACE.search(path) is not None


def checked_days(path: str) -> str:
    """Return a path whose days can be spelled.

    Raises:
        ValueError: a format has another directive, or the path's formats leave the day open.
    """
    directives = [name for place in _PLACE.finditer(path) for name in _DIRECTIVE.findall(place[1] or _DEFAULT)]
    unknown = [name for name in directives if name not in _SPELLED]
    if unknown:
        raise ValueError(f"'{path}': a day's format knows {', '.join('%' + n for n in _SPELLED)}, not %{unknown[0]}")
    missing = [part for name, part in _PARTS.items() if name not in {d.removeprefix("-") for d in directives}]
    if directives and missing:
        raise ValueError(f"'{path}' names no {missing[0]}, so a path is of several days: use %Y, %m and %d")
    return path


def path_of_day(path: str, ds: str) -> str:
    """Return a path with a day (yyyy-MM-dd) in its places."""
    day = date.fromisoformat(ds)

    def spelled(place: re.Match[str]) -> str:
        return _DIRECTIVE.sub(lambda d: _SPELLED[d[1]](day), place[1] or _DEFAULT)

    return _PLACE.sub(spelled, path)


def day_regex(path: str, escape: Callable[[str], str]) -> str:
    """Return a regular expression for the beginning of paths; the same in Python and in Java.

    Its groups are the parts of the day: see `day_groups`. A `*` in the path stands for anything within a folder's or
    file's name. Months and days may have one digit or two where no digit follows them.

    Args:
        path: with days in it.
        escape: spells what stands for itself as the paths do that are matched.
    """
    regex, end = "", 0
    for place in _PLACE.finditer(path):
        regex += _literal(path[end : place.start()], escape)
        regex += _format_regex(place[1] or _DEFAULT, path[place.end() :], escape)
        end = place.end()
    return f"{regex}{_literal(path[end:], escape)}"


def day_groups(path: str) -> tuple[int, int, int]:
    """Return the numbers of the groups of `day_regex` that have year, month and day."""
    directives = [name for place in _PLACE.finditer(path) for name in _DIRECTIVE.findall(place[1] or _DEFAULT)]
    parts = [name.removeprefix("-") for name in directives]
    return parts.index("Y") + 1, parts.index("m") + 1, parts.index("d") + 1


def _format_regex(format_: str, rest: str, escape: Callable[[str], str]) -> str:
    regex, end = "", 0
    for directive in _DIRECTIVE.finditer(format_):
        regex += _literal(format_[end : directive.start()], escape)
        end = directive.end()
        following = format_[end:] or rest
        if directive[1] == "Y":
            regex += r"(\d{4})"
        elif following.startswith(("%", "{ds")) or following[:1].isdigit():
            regex += r"(\d{2})"
        else:
            regex += r"(\d{1,2})(?!\d)"
    return regex + _literal(format_[end:], escape)


def _literal(text: str, escape: Callable[[str], str]) -> str:
    return "[^/]*".join(re.escape(escape(part)) for part in text.split("*"))


#: Names that become part of paths and table names.
#: Asked with `fullmatch`: `match` with a `$` lets a newline at the end pass.
NAME = re.compile(r"[a-z][a-z0-9_]*")
#: Stands for any day where a path with days in it is checked.
_A_DAY = "2000-01-31"
#: Of days: windows and what is kept may reach centuries back, or ahead.
_FIRST_YEAR, _LAST_YEAR = 1000, 8999
_DS = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")


def _path(text: str) -> str:
    if fault := uri_fault(text):
        raise ValueError(fault)
    return text


#: A path on a file system.
PathText = Annotated[str, AfterValidator(_path)]


def _place(text: str, glob: bool = False) -> str:
    try:
        parse_uri(path_of_day(checked_days(text), _A_DAY), "place", glob)
    except UserError as e:
        raise ValueError(re.sub("^place:? ", "", str(e))) from None
    return text


#: A place in a store, as a path or a URI (headrace.storage.store.parse_uri), without credentials.
LocationText = Annotated[str, AfterValidator(_place)]
#: A pattern of `glob` that matches places in a store, as a path or a URI.
PatternText = Annotated[str, AfterValidator(partial(_place, glob=True))]


def _server(text: str) -> str:
    if fault := server_fault(text):
        raise ValueError(fault)
    return text.rstrip("/")


#: The address of an HTTP server, without credentials.
ServerText = Annotated[str, AfterValidator(_server)]


class Section(BaseModel):
    """Base of all sections: immutable, unknown keys refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


def parse_ds(text: str) -> str:
    """Return a date as YYYY-MM-DD.

    Raises:
        UserError: the text is no date, or its neighbours are beyond the years 1 to 9999.
    """
    try:
        if not _DS.fullmatch(text):
            raise ValueError
        day = date.fromisoformat(text)
    except ValueError:
        raise UserError(f"'{text}' is not a date of the form YYYY-MM-DD") from None
    if not _FIRST_YEAR <= day.year <= _LAST_YEAR:
        raise UserError(
            f"'{text}' is no day of the years {_FIRST_YEAR} to {_LAST_YEAR}: a run counts days before and after its own"
        )
    return day.isoformat()


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
