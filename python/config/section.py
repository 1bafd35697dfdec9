"""What all sections of a spec share."""

from __future__ import annotations

import re
from datetime import date
from functools import partial
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict

from headrace.config.day_path import checked_days, path_of_day
from headrace.errors import UserError
from headrace.storage import uri_fault
from headrace.storage.uri import parse_uri, server_fault

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


#: A place in a store, as a path or a URI (headrace.storage.uri.parse_uri), without credentials.
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
    """A date as YYYY-MM-DD.

    Raises:
        UserError: it is none, or one whose neighbours a calendar of the years 1 to 9999 does not have.
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
