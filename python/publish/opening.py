"""Opening of warehouses: the pipeline's target, client libraries, passwords and failures.

Passwords and access tokens are read just before connecting and are never part of a spec.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import cast

from headrace.config import Online, Spec, Warehouse
from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.logs import hide, redact
from headrace.plugins import resolve
from headrace.publish.target import Target
from headrace.stage import RunLock


@contextmanager
def client_library(kind: str, section: str = "publish.warehouse", package: str | None = None) -> Iterator[None]:
    """Import a client library within the block.

    Args:
        kind: what needs it, the value of `kind` in the section.
        section: the section of the spec.
        package: the package to install, which brings the library; None: headrace with an extra of the kind's name.

    Raises:
        UserError: it is not installed.
    """
    try:
        yield
    except ImportError:
        install = f"'headrace[{kind}]'" if package is None else package
        raise UserError(f"{section}.kind {kind} needs its client library: pip install {install}") from None


@contextmanager
def connecting(warehouse: Warehouse) -> Iterator[None]:
    """For the call by which a client library connects, with `publish.warehouse.options` among its arguments.

    Raises:
        UserError: it has no such arguments, or wants them of another type.
    """
    try:
        yield
    except TypeError as e:
        if not warehouse.options:
            raise
        raise UserError(
            f"publish.warehouse.options ({', '.join(warehouse.options)}): the client library of {warehouse.kind} does "
            f"not take them: {redact(str(e))}. Name what its documentation has, with values that are texts"
        ) from None


def password_of(warehouse: Warehouse | Online, section: str = "publish.warehouse") -> str | None:
    """Return the password of the variable or file in the spec; None where it names neither (trust, ~/.pgpass, ...).

    Raises:
        UserError: it is not there.
    """
    if warehouse.password_env:
        # The spec names the variable, so the spec is still what says where the password comes from.
        password = os.environ.get(warehouse.password_env)
        if not password:
            raise UserError(
                f"{section}.password_env names the variable {warehouse.password_env}, which is "
                f"{'empty' if password == '' else 'not set'}: export it, or use password_file"
            )
        hide(password)
        return password
    if warehouse.password_file:
        path = Path(warehouse.password_file).expanduser()
        try:
            password = path.read_text(encoding="utf-8").rstrip("\r\n")
        except (OSError, UnicodeDecodeError) as e:
            reason = e.strerror if isinstance(e, OSError) else "not a text file"
            raise UserError(f"{section}.password_file: cannot read {path}: {reason}") from None
        if not password:
            raise UserError(f"{section}.password_file: {path} is empty")
        hide(password)
        return password
    return None


def open_target(spec: Spec, ws: Workspace, lock: RunLock | None = None) -> AbstractContextManager[Target]:
    """Open the warehouse of a pipeline that publishes, for a `with` block.

    Args:
        spec: the pipeline.
        ws: the workspace.
        lock: that this process is at work on the pipeline; None: the block changes nothing.

    Raises:
        UserError: it cannot be reached, or fails in the block: the day's rows are as they were.
    """
    assert spec.publish is not None, "asked for pipelines that publish"
    opens = resolve(spec.publish.warehouse.known.opens, "publish.warehouse.kind", "warehouse")
    return cast(AbstractContextManager[Target], opens(spec, ws, lock))
