"""Errors of databases: warehouses by their client libraries, and the server of the model registry."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from headrace.errors import EXIT_INCOMPLETE, UserError

if TYPE_CHECKING:
    import psycopg


class RegistryAway(UserError):
    """A tracking server that does not answer, or asks to retry later: there is nothing to mend."""

    exit_code = EXIT_INCOMPLETE


def registry_is_away(e: BaseException | None) -> bool:
    """Return whether an error means that the server did not answer, or answered the last retry with 429 or 5xx."""
    import requests

    while e is not None:
        if isinstance(e, (requests.ConnectionError, requests.Timeout, requests.exceptions.RetryError)):
            # An untrusted certificate is an error that the user can mend.
            return not isinstance(e, requests.exceptions.SSLError)
        e = e.__cause__ or e.__context__
    return False


def _first_line(error: Exception) -> str:
    """Return the first line of an error's message, or the name of its class."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def reason_of_driver(error: Exception) -> str:
    """Return the telling line of an error of SQLAlchemy: the driver's own, without statement and parameters."""
    return str(getattr(error, "orig", None) or error).splitlines()[0]


def reason_of_postgres(error: psycopg.Error) -> str:
    """Return the telling line of an error of the server or of libpq, without its address and position prefixes."""
    if error.diag.message_primary:
        return error.diag.message_primary
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    # "connection failed: connection to server at "h", port 1 failed: FATAL:  the reason"
    return lines[0].rpartition("failed: ")[2].removeprefix("FATAL:").strip()


def postgres_advice(reason: str, sslmode: str, password_source: str) -> str:
    """Return what to do about a PostgreSQL that cannot be reached.

    Args:
        reason: of `reason_of_postgres`.
        sslmode: of the connection.
        password_source: the variable, file or keys that say where the password is.
    """
    if "client certificate" in reason or "certificate required" in reason:
        return "name yours in publish.warehouse.sslcert and sslkey"
    if "pg_hba" not in reason and ("SSL" in reason or "certificate" in reason):
        return (
            f"the connection asks for sslmode {sslmode}: name the server's root certificate in "
            f"publish.warehouse.sslrootcert (a file, or `system`), or set publish.warehouse.sslmode=require to encrypt "
            f"without a look at who answers"
        )
    if "password" in reason or "authentication" in reason or "pg_hba" in reason:
        return f"check publish.warehouse.user and the password in {password_source}"
    if "does not exist" in reason:
        return "create it, or correct publish.warehouse.database and user"
    return "start the server, or correct publish.warehouse.host and port"


@contextmanager
def failures(
    error: type[Exception] | tuple[type[Exception], ...],
    description: str,
    label: str,
    *,
    transactions: bool = True,
    reason_of: Callable[..., str] = _first_line,
) -> Iterator[None]:
    """For the block in which a warehouse is open.

    Args:
        error: what its client library raises.
        description: the warehouse and the pipeline, for people.
        label: the table.
        transactions: whether a day and its record are one step.
        reason_of: returns the telling line of such an error.

    Raises:
        UserError: it failed.
    """
    try:
        yield
    except error as e:
        left = f"; {label} holds what it held before. Run" if transactions else f". Each day of {label} is whole; run"
        raise UserError(f"{description} failed: {reason_of(e)}{left} the same command again once that is mended") from e
