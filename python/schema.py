"""Columns: what the lake declares, and what a dataset hands to a model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator

from headrace.errors import nearest

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
#: What a number in a column of times counts, since 1970 in UTC.
EpochUnit = Literal["epoch_seconds", "epoch_milliseconds", "epoch_microseconds", "epoch_nanoseconds"]
#: Directives of formats of times (headrace.lake.blocks.spellings), and those that stand for several.
_DIRECTIVES = "YymdbaHIpMSfzZ"
_SEVERAL = {"F": "%Y-%m-%d", "D": "%m/%d/%y", "T": "%H:%M:%S", "R": "%H:%M", "B": "%b", "A": "%a", "e": "%d", "h": "%b"}
#: Other names of types that people bring along.
_SPELLED = {"byte": "tinyint", "short": "smallint", "integer": "int", "long": "bigint", "bool": "boolean"}
#: A step of `path`: a name, behind a dot but for the first, or a key in brackets and quotes, which are doubled in it.
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
    hint = f"; did you mean '{_SPELLED[text]}'?" if text in _SPELLED else nearest(text, COLUMN_TYPES)
    raise ValueError(f"'{text}' is no type; types: {', '.join(COLUMN_TYPES)}, decimal(p,s){hint}")


#: One of COLUMN_TYPES, or `decimal(p,s)`.
ColumnType = Annotated[str, AfterValidator(_column_type)]


def decimal_digits(type_: str) -> tuple[int, int] | None:
    """(precision, scale) of `decimal(p,s)`; None of another type."""
    match = _DECIMAL.fullmatch(type_)
    return None if match is None else (int(match.group(1)), int(match.group(2)))


def path_steps(path: str) -> tuple[str, ...]:
    """The names and keys of `user.geo.country`, `attributes['os']` or `['a.b'].c`, outermost first.

    Of `items[].id` the second step is EACH, of `items[0].id` it is an `Element`. A key behind a list of records with a
    field `key` means the first record that has it: `params['os'].value`.

    Raises:
        ValueError: it is no path.
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


class Each(str):
    """The step of a path into all elements of a list."""


class Element(str):
    """The step of a path to one element of a list, by its number from 0."""


EACH = Each("[]")
#: The field of a list's records by which a key in a path finds one.
KEY_FIELD = "key"


def is_of_list(step: str) -> bool:
    """Return whether a step of a path is EACH or an Element."""
    return isinstance(step, (Each, Element))


@dataclass(frozen=True)
class TimeFormat:
    """A format of times or dates, in the words of `strptime`: `%d.%m.%Y %H:%M`."""

    text: str

    def __post_init__(self) -> None:
        """Check the format.

        Raises:
            ValueError: it has a directive that is not known or is there twice, or says no day or no half of the day.
        """
        names = [directive for directive, _ in self.tokens if directive is not None]
        for name in names:
            if name not in _DIRECTIVES:
                raise ValueError(f"'{self.text}': %{name} is no directive; directives: %{' %'.join(_DIRECTIVES)}")
            if names.count(name) > 1:
                raise ValueError(f"'{self.text}' has %{name} twice")
        has = set(names)
        for either, what in (("Yy", "one year (%Y or %y)"), ("mb", "one month (%m or %b)"), ("d", "a day (%d)")):
            if len(has & set(either)) != 1:
                raise ValueError(f"'{self.text}' must have {what}")
        if ("H" in has and "I" in has) or ("I" in has) != ("p" in has):
            raise ValueError(f"'{self.text}': an hour is %H, or %I with %p")
        if "z" in has and "Z" in has:
            raise ValueError(f"'{self.text}' must have one of %z and %Z")
        if not self.has_time and (has & set("zZ") or self.is_utc):
            raise ValueError(f"'{self.text}' has a zone and no hour")

    @property
    def tokens(self) -> list[tuple[str | None, str]]:
        """(directive, its text) in order; the directive is None for text that stands for itself."""
        text = re.sub("%([FDTRBAeh])", lambda m: _SEVERAL[m.group(1)], self.text)
        found: list[tuple[str | None, str]] = []
        for match in re.finditer(r"%(.)|[^%]+|%", text, re.DOTALL):
            directive = match.group(1)
            found.append((None, "%") if directive == "%" else (directive, match.group()))
        return found

    @property
    def directives(self) -> frozenset[str]:
        return frozenset(directive for directive, _ in self.tokens if directive is not None)

    @property
    def has_time(self) -> bool:
        """Whether it says an hour; else it is one of dates."""
        return bool(self.directives & set("HI"))

    @property
    def has_zone(self) -> bool:
        """Whether it says of which zone times are; else they are local ones."""
        return bool(self.directives & set("zZ")) or self.is_utc

    @property
    def is_utc(self) -> bool:
        """Whether all its times are of UTC."""
        directive, text = self.tokens[-1]
        return directive == "Z" or (directive is None and re.search(r"(UTC|GMT|Z)$", text) is not None)


def match_names(wanted: Iterable[str], names: Iterable[str]) -> dict[str, str]:
    """Return, by wanted name, the name that a source has for it: the same one, else the one that differs in case alone.

    Names that the source has neither way are left out. The rule holds for columns and fields of all sources.

    Raises:
        ValueError: two names of the source differ from a wanted one in case alone, and none is the same.
    """
    present = list(dict.fromkeys(names))
    exact = set(present)
    by_lower: dict[str, list[str]] = {}
    for name in present:
        by_lower.setdefault(name.lower(), []).append(name)
    found: dict[str, str] = {}
    for name in dict.fromkeys(wanted):
        same = [name] if name in exact else by_lower.get(name.lower(), [])
        if len(same) > 1:
            raise ValueError(f"'{same[0]}' and '{same[1]}' both differ from column '{name}' in case alone")
        if same:
            found[name] = same[0]
    return found


#: Vocabulary codes that mean the same in every vocabulary, for ever; one with more than one out-of-vocabulary bucket
#: has its first value's code further behind (`Feature.first_code`).
NULL_CODE = 0
OOV_CODE = 1
FIRST_CODE = 2


class TableColumn(BaseModel):
    """One declared column of the source and of the lake's table."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    #: As the source has it, where `path` does not say: exactly so, else the only name that differs in case alone.
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
    """What a feature is to a model."""

    CONTINUOUS = "continuous"
    CATEGORICAL = "categorical"
    LABEL = "label"
    #: Not fed to the model: carried for evaluation (the user of a ranking group, an event's id).
    CARRIED = "carried"


#: The unit of a carried timestamp, in the feature's metadata.
MICROSECONDS = "microseconds since 1970 (UTC)"


class Feature(BaseModel):
    """One logical column of a dataset.

    A dataset stores it as one Parquet column `name`; a multi-hot or list feature as lists without their padding. In a
    batch a list of length k is k columns `name__0 .. name__{k-1}`, padded with 0 (headrace.dataset.parquet.lists).
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
    #: Of a vocabulary: values that it lacks have codes 1..oov_buckets, those that it has begin behind.
    oov_buckets: int = Field(default=1, ge=1)
    tags: tuple[str, ...] = ()
    #: What the workflow says of it besides; JSON values.
    metadata: Mapping[str, Any] = Field(default_factory=dict)
    #: The columns of the events that it is made of; empty for label and carried columns.
    sources: tuple[str, ...] = ()

    @property
    def is_timestamp(self) -> bool:
        """Whether it is a carried timestamp, in `MICROSECONDS`."""
        return self.metadata.get("unit") == MICROSECONDS

    @property
    def first_code(self) -> int:
        """The first code that stands for a value that the vocabulary has."""
        return OOV_CODE + self.oov_buckets

    @property
    def physical(self) -> tuple[str, ...]:
        """Names of the columns of a batch that hold this feature, in order. A dataset stores one column, `name`."""
        return tuple(f"{self.name}__{i}" for i in range(self.length)) if self.is_list else (self.name,)


#: Behind the name of a carried column beside a feature of the same name.
CARRIED_SUFFIX = "__carried"


class DatasetSchema(BaseModel):
    """The features of a dataset, in the order in which batches hold them."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    features: tuple[Feature, ...]

    def of(self, kind: Kind) -> tuple[Feature, ...]:
        """The features of one kind, in order."""
        return tuple(f for f in self.features if f.kind is kind)

    @property
    def label(self) -> Feature:
        """The single label."""
        (label,) = self.of(Kind.LABEL)
        return label

    @property
    def carried_columns(self) -> dict[str, Feature]:
        """The carried features by the column of the lake's table that each is; see `carried_name`."""
        found = {}
        for f in self.of(Kind.CARRIED):
            column = f.name.removesuffix(CARRIED_SUFFIX)
            found[column if self.carried_name(column) == f.name else f.name] = f
        return found

    def carried_name(self, column: str) -> str:
        """The name under which a column of the lake's table is carried: `<column>__carried` beside a feature of it."""
        taken = {f.name for f in self.features if f.kind is not Kind.CARRIED}
        return f"{column}{CARRIED_SUFFIX}" if column in taken else column
