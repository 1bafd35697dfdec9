"""What all warehouses say in the same words when they are opened: a library that is missing, and a failure."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from headrace.config import Warehouse
from headrace.errors import UserError
from headrace.redaction import redact


@contextmanager
def client_library(kind: str, section: str = "publish.warehouse", package: str | None = None) -> Iterator[None]:
    """Within, a client library is imported.

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


@contextmanager
def failures(
    error: type[Exception] | tuple[type[Exception], ...], of: str, label: str, *, transactions: bool = True
) -> Iterator[None]:
    """For the block in which a warehouse is open.

    Args:
        error: what its client library raises.
        of: the warehouse and the pipeline, for people.
        label: the table.
        transactions: whether a day and its record are one step.

    Raises:
        UserError: it failed.
    """
    try:
        yield
    except error as e:
        left = f"; {label} holds what it held before. Run" if transactions else f". Each day of {label} is whole; run"
        reason = (str(e).splitlines() or [type(e).__name__])[0]
        raise UserError(f"{of} failed: {reason}{left} the same command again once that is mended") from None
