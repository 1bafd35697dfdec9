"""A client of the workspace's registry. MLflow takes seconds to import, so it is imported where it is used."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from headrace.errors import EXIT_INCOMPLETE, UserError
from headrace.redaction import redact
from headrace.registry.store import open_store
from headrace.workspace import Workspace

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

_OPENING = threading.Lock()


class RegistryAway(UserError):
    """The tracking server gives no answer, or says to come later: nothing to mend, try later."""

    exit_code = EXIT_INCOMPLETE


class Client:
    """A client of the workspace's store; what goes wrong inside becomes a UserError that names the store."""

    def __init__(self, ws: Workspace) -> None:
        self._ws = ws

    def __enter__(self) -> MlflowClient:
        quietly_import()
        self._ws.store.make_dir()
        try:
            # MLflow counts on one thread at a time here.
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
    """Whether MLflow's client raised it for a server that gave no answer, or, at its last try, 429 or 5xx."""
    import requests

    while e is not None:
        if isinstance(e, (requests.ConnectionError, requests.Timeout, requests.exceptions.RetryError)):
            # A certificate that is not trusted is to be mended.
            return not isinstance(e, requests.exceptions.SSLError)
        e = e.__cause__ or e.__context__
    return False


def first_line(e: BaseException) -> str:
    """What an error says, for a message of one line."""
    said = redact(str(e)).strip()
    return said.splitlines()[0] if said else type(e).__name__


def quietly_import() -> None:
    """Import it: without telemetry, and without log lines about the store's own tables."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
    import mlflow.tracking  # noqa: F401

    # The import sets up logging anew, so the levels come after it.
    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.WARNING)


def alias_holder(client: MlflowClient, name: str, alias: str) -> Any:
    """MLflow's version that has the alias; None where the model or the alias is not there."""
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
    """A name or a key between the quotes of MLflow's filters. Raises ValueError where it has one of its own."""
    if "'" in text or "\\" in text:
        raise ValueError(f"a name with a quote: {text!r}")
    return text


def pages(search: Callable[..., Any], **asked: Any) -> Iterator[Any]:
    """What a search of MLflow finds, page by page."""
    token = None
    while True:
        page = search(**asked, page_token=token)
        yield from page
        token = page.token
        if not token:
            return
