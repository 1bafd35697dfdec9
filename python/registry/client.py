"""Clients of the workspace's registry. MLflow takes seconds to import, so it is imported where it is used."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from headrace.errors import EXIT_INCOMPLETE, UserError
from headrace.logs import redact
from headrace.registry.store import open_store
from headrace.workspace import Workspace

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

_OPENING = threading.Lock()


class RegistryAway(UserError):
    """A tracking server that does not answer, or asks to retry later: there is nothing to mend."""

    exit_code = EXIT_INCOMPLETE


class Client:
    """Context manager of a client; errors within its block become UserErrors that name the store."""

    def __init__(self, ws: Workspace) -> None:
        self._ws = ws

    def __enter__(self) -> MlflowClient:
        quietly_import()
        self._ws.store.make_dir()
        try:
            # MLflow expects one thread at a time here.
            with _OPENING:
                return open_store(self._ws)
        except Exception as e:
            raise self._explained(e) from e

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, trace: object) -> None:
        from mlflow.exceptions import MlflowException
        from sqlalchemy.exc import SQLAlchemyError

        if isinstance(e, (MlflowException, SQLAlchemyError)):
            raise self._explained(e) from e

    def _explained(self, e: BaseException) -> UserError:
        if self._ws.registry_server is not None:
            if _is_away(e):
                return RegistryAway(f"the model registry {self._ws.registry_uri} does not answer ({first_line(e)})")
            return UserError(
                f"the model registry {self._ws.registry_uri} cannot be used ({first_line(e)}). See whether the server "
                f"answers, and whether MLflow's own variables (MLFLOW_TRACKING_TOKEN, ...) let you in"
            )
        return UserError(
            f"the model registry {self._ws.registry_uri} cannot be used ({first_line(e)}). Free its disk or file "
            f"permissions; if the file is damaged, move it away: finished models stay where they are"
        )


def _is_away(e: BaseException | None) -> bool:
    """Return whether an error means that the server did not answer, or answered the last retry with 429 or 5xx."""
    import requests

    while e is not None:
        if isinstance(e, (requests.ConnectionError, requests.Timeout, requests.exceptions.RetryError)):
            # An untrusted certificate is an error that the user can mend.
            return not isinstance(e, requests.exceptions.SSLError)
        e = e.__cause__ or e.__context__
    return False


def first_line(e: BaseException) -> str:
    """Return the first line of an error's message without secrets, or the name of its class."""
    message = redact(str(e)).strip()
    return message.splitlines()[0] if message else type(e).__name__


def quietly_import() -> None:
    """Import MLflow without telemetry, and without log lines about the store's tables."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
    import mlflow.tracking  # noqa: F401

    # The import resets logging, so the levels are set after it.
    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.WARNING)


def alias_holder(client: MlflowClient, name: str, alias: str) -> Any:
    """Return MLflow's version with an alias; None where the model or the alias does not exist."""
    from mlflow.exceptions import MlflowException
    from mlflow.protos.databricks_pb2 import INVALID_PARAMETER_VALUE, RESOURCE_DOES_NOT_EXIST, ErrorCode

    absent = (ErrorCode.Name(RESOURCE_DOES_NOT_EXIST), ErrorCode.Name(INVALID_PARAMETER_VALUE))
    try:
        return client.get_model_version_by_alias(name, alias)
    except MlflowException as e:
        if e.error_code in absent:
            return None
        raise


def quoted(text: str) -> str:
    """Check a name or key for use between quotes in MLflow's filters. Raises ValueError where it has a quote."""
    if "'" in text or "\\" in text:
        raise ValueError(f"a name with a quote: {text!r}")
    return text


def pages(search: Callable[..., Any], **arguments: Any) -> Iterator[Any]:
    """Yield the results of a search in MLflow, page after page."""
    token = None
    while True:
        page = search(**arguments, page_token=token)
        yield from page
        token = page.token
        if not token:
            return
