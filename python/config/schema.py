"""Schemas: columns that the lake declares, and features that a dataset feeds to a model.

A name is a column's whole name, whatever characters it has: dots, blanks, quotes, `%`, reserved words. `quoted` is the
one rule by which names stand in SQL and in Spark's functions.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator

from headrace.errors import nearest

if TYPE_CHECKING:
    from pyspark.sql import Column

#: Column types that can be declared, as Spark's `simpleString` spells them; and `decimal(p,s)`.
COLUMN_TYPES = (
    "string",
    "tinyint",
    "smallint",
    "int",
    "bigint",
    "float",
    "double",
    "boolean",
    "timestamp",
    "timestamp_ntz",
    "date",
    "binary",
    "array<string>",
    "array<int>",
    "array<bigint>",
    "array<float>",
    "array<double>",
)
_DECIMAL = re.compile(r"decimal\(\s*(\d{1,2})\s*,\s*(\d{1,2})\s*\)")
_MOST_DIGITS = 38
#: Unit of numbers in a column of times, since 1970 in UTC.
EpochUnit = Literal["epoch_seconds", "epoch_milliseconds", "epoch_microseconds", "epoch_nanoseconds"]
#: Directives of time formats (headrace.lake.landing.spellings), and those that abbreviate others.
_DIRECTIVES = "YymdbaHIpMSfzZ"
_SEVERAL = {"F": "%Y-%m-%d", "D": "%m/%d/%y", "T": "%H:%M:%S", "R": "%H:%M", "B": "%b", "A": "%a", "e": "%d", "h": "%b"}
#: Other systems' names of types, for hints.
_SYNONYMS = {"byte": "tinyint", "short": "smallint", "integer": "int", "long": "bigint", "bool": "boolean"}
#: A step of a path: a name, after a dot unless first, or a key in brackets and quotes; quotes within it are doubled.
_STEP = re.compile(
    r"""(?:^|(?<=[^.])\.)(?P<name>[^.\[\]'"]+)"""
    r"""|\[(?:'(?P<single>(?:[^']|'')+)'|"(?P<double>(?:[^"]|"")+)"|(?P<element>\d{0,9}))\]"""
)


def _column_type(text: str) -> str:
    if text in COLUMN_TYPES:
        return text
    if digits := decimal_digits(text):
        precision, scale = digits
        if not 1 <= precision <= _MOST_DIGITS or scale > precision:
            raise ValueError(f"'{text}': a decimal has 1 to {_MOST_DIGITS} digits, of which none to all are its scale")
        return f"decimal({precision},{scale})"
    hint = f"; did you mean '{_SYNONYMS[text]}'?" if text in _SYNONYMS else nearest(text, COLUMN_TYPES)
    raise ValueError(f"'{text}' is no type; types: {', '.join(COLUMN_TYPES)}, decimal(p,s){hint}")


#: One of COLUMN_TYPES, or `decimal(p,s)`.
ColumnType = Annotated[str, AfterValidator(_column_type)]


def decimal_digits(type_: str) -> tuple[int, int] | None:
    """Parse `decimal(p,s)` to (precision, scale); None for another type."""
    match = _DECIMAL.fullmatch(type_)
    return None if match is None else (int(match.group(1)), int(match.group(2)))


#: Types of numbers, each with room for all values of those before it.
_WIDER = (("tinyint", "smallint", "int", "bigint"), ("float", "double"))


def is_wider(new: str, old: str) -> bool:
    """Return whether a type has room for all values of another one of its kind, and for more.

    Kinds are whole numbers, floating-point numbers, decimals, and lists of the same kind.

    Args:
        new: a declared or stored type, such as `bigint`, `decimal(12,2)` or `array<double>`.
        old: the type to compare it with.
    """
    if new.startswith("array<") and old.startswith("array<"):
        return is_wider(new[6:-1], old[6:-1])
    digits, old_digits = decimal_digits(new), decimal_digits(old)
    if digits and old_digits:
        (precision, scale), (old_precision, old_scale) = digits, old_digits
        return digits != old_digits and scale >= old_scale and precision - scale >= old_precision - old_scale
    return any(old in kind and new in kind and kind.index(new) > kind.index(old) for kind in _WIDER)


def path_steps(path: str) -> tuple[str, ...]:
    """Split `user.geo.country`, `attributes['os']` or `['a.b'].c` into names and keys, outermost first.

    The second step of `items[].id` is EACH, that of `items[0].id` is an `Element`. A key after a list of records with a
    field `key` means the first record that has it: `params['os'].value`.

    Raises:
        ValueError: the text is no path.
    """
    steps, end = list[str](), 0
    for match in _STEP.finditer(path):
        if match.start() != end:
            break
        if match.lastgroup == "name":
            steps.append(match.group("name"))
        elif match.lastgroup == "element":
            steps.append(Element(match.group("element")) if match.group("element") else EACH)
        else:
            quote = "'" if match.lastgroup == "single" else '"'
            steps.append(match.group(str(match.lastgroup)).replace(2 * quote, quote))
        end = match.end()
    if end != len(path) or not steps or is_of_list(steps[0]):
        raise ValueError(
            f"'{path}' is no path; write names with dots, user.geo.country, keys, attributes['os'], all elements of a "
            f"list, items[].id, or one of them, items[0].id"
        )
    return tuple(steps)


def path_of(steps: Sequence[str]) -> str:
    """Return the path of names and keys as `path_steps` splits it; odd ones stand in brackets and quotes."""
    parts = list[str]()
    for step in steps:
        quoted = step.replace("'", "''")
        is_plain = re.fullmatch(r"[^.\[\]'\"]+", step) is not None
        parts.append((f".{step}" if parts else step) if is_plain else f"['{quoted}']")
    return "".join(parts)


class Each(str):
    """A step of a path into all elements of a list."""


class Element(str):
    """A step of a path to one element of a list, by its number from 0."""


EACH = Each("[]")
#: The field of a list's records that a key in a path is compared with.
KEY_FIELD = "key"


def is_of_list(step: str) -> bool:
    """Return whether a step of a path is EACH or an Element."""
    return isinstance(step, (Each, Element))


@dataclass(frozen=True)
class TimeFormat:
    """A format of times or dates, in the directives of `strptime`: `%d.%m.%Y %H:%M`."""

    text: str

    def __post_init__(self) -> None:
        """Check the format.

        Raises:
            ValueError: a directive is unknown or repeated, or the format lacks a part of the date or a half of the day.
        """
        names = [directive for directive, _ in self.tokens if directive is not None]
        for name in names:
            if name not in _DIRECTIVES:
                raise ValueError(f"'{self.text}': %{name} is no directive; directives: %{' %'.join(_DIRECTIVES)}")
            if names.count(name) > 1:
                raise ValueError(f"'{self.text}' has %{name} twice")
        has = set(names)
        for either, requirement in (("Yy", "one year (%Y or %y)"), ("mb", "one month (%m or %b)"), ("d", "a day (%d)")):
            if len(has & set(either)) != 1:
                raise ValueError(f"'{self.text}' must have {requirement}")
        if ("H" in has and "I" in has) or ("I" in has) != ("p" in has):
            raise ValueError(f"'{self.text}': an hour is %H, or %I with %p")
        if "z" in has and "Z" in has:
            raise ValueError(f"'{self.text}' must have one of %z and %Z")
        if not self.has_time and (has & set("zZ") or self.is_utc):
            raise ValueError(f"'{self.text}' has a zone and no hour")

    @property
    def tokens(self) -> list[tuple[str | None, str]]:
        """Pairs (directive, its text) in order; the directive is None for literal text."""
        text = re.sub("%([FDTRBAeh])", lambda m: _SEVERAL[m.group(1)], self.text)
        tokens: list[tuple[str | None, str]] = []
        for match in re.finditer(r"%(.)|[^%]+|%", text, re.DOTALL):
            directive = match.group(1)
            tokens.append((None, "%") if directive == "%" else (directive, match.group()))
        return tokens

    @property
    def directives(self) -> frozenset[str]:
        return frozenset(directive for directive, _ in self.tokens if directive is not None)

    @property
    def has_time(self) -> bool:
        """True where the format has an hour; else it is a format of dates."""
        return bool(self.directives & set("HI"))

    @property
    def has_zone(self) -> bool:
        """True where the format has a time zone; else its times are local."""
        return bool(self.directives & set("zZ")) or self.is_utc

    @property
    def is_utc(self) -> bool:
        """True where all times of the format are in UTC."""
        directive, text = self.tokens[-1]
        return directive == "Z" or (directive is None and re.search(r"(UTC|GMT|Z)$", text) is not None)


def match_names(requested: Iterable[str], names: Iterable[str]) -> dict[str, str]:
    """Map requested names to names of a source: to the equal one, else to the only one that differs in case.

    A name of the source that is itself requested stands for no other one. Names without a match are left out. The rule
    holds for columns and fields of all sources.

    Raises:
        ValueError: two names of the source differ from a requested one only in case, and none is equal.
    """
    present, unique = list(dict.fromkeys(names)), dict.fromkeys(requested)
    exact = set(present)
    by_lower: dict[str, list[str]] = {}
    for name in present:
        by_lower.setdefault(name.lower(), []).append(name)
    matches: dict[str, str] = {}
    for name in unique:
        same = [name] if name in exact else [n for n in by_lower.get(name.lower(), []) if n not in unique]
        if len(same) > 1:
            raise ValueError(
                f"'{same[0]}' and '{same[1]}' both differ from column '{name}' in case alone: {how_to_declare(same)}"
            )
        if same:
            matches[name] = same[0]
    return matches


def how_to_declare(twins: Sequence[str]) -> str:
    """Return what to write for columns of a source whose names differ in case alone: for messages."""
    columns = []
    for number, twin in enumerate(twins, 1):
        path = twin if re.fullmatch(r"[A-Za-z_]\w*", twin) else json.dumps(path_of([twin]), ensure_ascii=False)
        name = re.sub(r"\W+", "_", twin.lower()).strip("_") or "column"
        columns.append(f"{{name: {name}_{number}, path: {path}}}")
    return f"declare those that are needed by their exact names (table.columns: {', '.join(columns)})"


def unique_names(names: Sequence[str]) -> list[str]:
    """Return names with a number behind each that differs from an earlier one in case alone."""
    unique: list[str] = []
    taken = {name.lower() for name in names}
    seen: set[str] = set()
    for name in names:
        new = name
        if name.lower() in seen:
            new = next(n for n in (f"{name}_{k}" for k in itertools.count(2)) if n.lower() not in taken)
        taken.add(new.lower())
        seen.add(new.lower())
        unique.append(new)
    return unique


#: Codes with a fixed meaning in every vocabulary. With several out-of-vocabulary buckets the first value's code is
#: higher (`Feature.first_code`).
NULL_CODE = 0
OOV_CODE = 1
FIRST_CODE = 2


def quoted(name: str, quote: str = "`", escape: str = "") -> str:
    """Return a name as an identifier: between quotes, which are doubled within it.

    Args:
        name: the whole name of one column or table.
        quote: the character around identifiers: a backtick for Spark, a quotation mark in standard SQL.
        escape: a character by which others are escaped within quotes, which is doubled likewise; empty: there is none.
    """
    if escape:
        name = name.replace(escape, escape * 2)
    return quote + name.replace(quote, quote * 2) + quote


def quoted_names(names: Sequence[str]) -> list[str]:
    """Return names for Spark's column functions, whatever characters they have."""
    return [quoted(name) for name in names]


def column(name: str) -> Column:
    """Return Spark's column of exactly this name."""
    from pyspark.sql import functions as F

    return F.col(quoted(name))


class TableColumn(BaseModel):
    """One declared column of the source and of the lake's table."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    #: Name of the column. Without `path` also its name in the source: an exact match, else the only name that differs
    #: in case alone.
    name: str
    #: One of string, tinyint, smallint, int, bigint, float, double, decimal(p,s), boolean, timestamp, timestamp_ntz (a
    #: local time without zone), date, binary (kept as its SHA-256 in hexadecimal: text), and array<...> of string,
    #: int, bigint, float or double.
    type: ColumnType = "string"
    #: A row with a null here goes to quarantine.
    required: bool = False
    #: Where the source has it, when not under its own name: nested fields with dots (`user.geo.country`), keys of maps
    #: likewise or in brackets (`attributes['os']`), another column's name alone (`userId`). Of tables and JSON lines
    #: also lists: a field of all their records as a list (`items[].id`), an element (`items[0].id`), and the first
    #: record with a key in its field `key` (`params['os'].value`).
    path: str | None = None

    @field_validator("path")
    @classmethod
    def _is_path(cls, value: str | None) -> str | None:
        if value is not None:
            path_steps(value)
        return value

    @property
    def steps(self) -> tuple[str, ...]:
        """The names and keys that lead to it in the source, outermost first."""
        return (self.name,) if self.path is None else path_steps(self.path)

    @property
    def stored_type(self) -> str:
        """Spark's type of the lake's column."""
        return "string" if self.type == "binary" else self.type


class Kind(StrEnum):
    """Role of a feature in a model."""

    CONTINUOUS = "continuous"
    CATEGORICAL = "categorical"
    LABEL = "label"
    #: Not an input of the model: carried along for evaluation (the user of a ranking group, an event's id).
    CARRIED = "carried"


#: The unit of a carried timestamp, in the feature's metadata.
MICROSECONDS = "microseconds since 1970 (UTC)"


class Feature(BaseModel):
    """One logical column of a dataset.

    A dataset stores it as one Parquet column `name`; a multi-hot or list feature as lists without their padding. In a
    batch a list of length k is k columns `name__0 .. name__{k-1}`, padded with 0 (headrace.dataset.lists).
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    kind: Kind
    #: NumPy's name: float32 for continuous features and labels, int32 for codes, int64 for raw ids.
    dtype: str
    #: Scalars a row: 1, or the padded length of a list.
    length: int = Field(default=1, ge=1)
    is_list: bool = False
    #: Categorical only: number of codes, the two special ones included; the embedding table has that many rows.
    cardinality: int | None = None
    #: Features that name the same vocabulary share codes, and may share an embedding table.
    vocabulary: str | None = None
    #: Categorical only: raw 64-bit ids in place of codes, 0 where there is none. No cardinality and no vocabulary; the
    #: table's rows come and go with the ids (headrace.embeddings.dynamic.tables).
    dynamic: bool = False
    #: Number of codes for values outside the vocabulary: 1..oov_buckets. Codes of its values follow.
    oov_buckets: int = Field(default=1, ge=1)
    tags: tuple[str, ...] = ()
    #: Further properties that the workflow sets; JSON values.
    metadata: Mapping[str, Any] = Field(default_factory=dict)
    #: Columns of the events that the feature is computed from; empty for label and carried columns.
    sources: tuple[str, ...] = ()

    @property
    def is_timestamp(self) -> bool:
        """True for a carried timestamp, in `MICROSECONDS`."""
        return self.metadata.get("unit") == MICROSECONDS

    @property
    def first_code(self) -> int:
        """First code of a value in the vocabulary."""
        return OOV_CODE + self.oov_buckets

    @property
    def physical(self) -> tuple[str, ...]:
        """Names of the batch columns that hold this feature, in order. A dataset stores one column, `name`."""
        return tuple(f"{self.name}__{i}" for i in range(self.length)) if self.is_list else (self.name,)


#: Suffix of a carried column whose name is also that of a feature.
CARRIED_SUFFIX = "__carried"


class DatasetSchema(BaseModel):
    """The features of a dataset, in the order in which batches hold them."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    features: tuple[Feature, ...]

    def of(self, kind: Kind) -> tuple[Feature, ...]:
        """Return the features of one kind, in order."""
        return tuple(f for f in self.features if f.kind is kind)

    @property
    def label(self) -> Feature:
        """The single label."""
        (label,) = self.of(Kind.LABEL)
        return label

    @property
    def carried_columns(self) -> dict[str, Feature]:
        """Carried features, by their column in the lake's table; see `carried_name`."""
        columns = {}
        for f in self.of(Kind.CARRIED):
            column = f.name.removesuffix(CARRIED_SUFFIX)
            columns[column if self.carried_name(column) == f.name else f.name] = f
        return columns

    def carried_name(self, column: str) -> str:
        """Return the carried name of a lake column: itself, or `<column>__carried` beside a feature of that name."""
        taken = {f.name for f in self.features if f.kind is not Kind.CARRIED}
        return f"{column}{CARRIED_SUFFIX}" if column in taken else column
