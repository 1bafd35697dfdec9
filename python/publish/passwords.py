"""Passwords and access tokens of warehouses: read just before connecting, never part of a spec."""

from __future__ import annotations

import os
from pathlib import Path

from headrace.config import Online, Warehouse
from headrace.errors import UserError
from headrace.redaction import hide


def password_of(warehouse: Warehouse | Online, section: str = "publish.warehouse") -> str | None:
    """From the variable or the file that the spec names; None where it names neither (trust, ~/.pgpass, ...).

    Raises:
        UserError: it is not there.
    """
    if warehouse.password_env and warehouse.password_file:
        raise UserError(f"{section}: give password_env or password_file, not both")
    if warehouse.password_env:
        # The spec names the variable, so the spec is still what says where the password comes from.
        found = os.environ.get(warehouse.password_env)
        if not found:
            raise UserError(
                f"{section}.password_env names the variable {warehouse.password_env}, which is "
                f"{'empty' if found == '' else 'not set'}: export it, or use password_file"
            )
        hide(found)
        return found
    if warehouse.password_file:
        path = Path(warehouse.password_file).expanduser()
        try:
            found = path.read_text(encoding="utf-8").rstrip("\r\n")
        except (OSError, UnicodeDecodeError) as e:
            reason = e.strerror if isinstance(e, OSError) else "not a text file"
            raise UserError(f"{section}.password_file: cannot read {path}: {reason}") from None
        if not found:
            raise UserError(f"{section}.password_file: {path} is empty")
        hide(found)
        return found
    return None
