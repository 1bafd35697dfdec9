"""What all sections of a spec share."""

from __future__ import annotations

import re
from datetime import date

from pydantic import BaseModel, ConfigDict

from headrace.errors import UserError

#: Names that become part of paths and table names.
#: Asked with `fullmatch`: `match` with a `$` lets a newline at the end pass.
NAME = re.compile(r"[a-z][a-z0-9_]*")
_DS = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")


class Section(BaseModel):
    """Base of all sections: immutable, unknown keys refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


def parse_ds(text: str) -> str:
    """A date as YYYY-MM-DD.

    Raises:
        UserError: it is none.
    """
    try:
        if not _DS.fullmatch(text):
            raise ValueError
        return date.fromisoformat(text).isoformat()
    except ValueError:
        raise UserError(f"'{text}' is not a date of the form YYYY-MM-DD") from None
