"""`headrace serve`: models that answer."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from headrace.commands.screen import out
from headrace.errors import UserError
from headrace.logs import hide
from headrace.serve.options import ServeOptions

logger = logging.getLogger(__name__)
#: Where the token is, unless a file has it.
TOKEN = "HEADRACE_SERVE_TOKEN"


def token_of(file: Path | None) -> str | None:
    """Return the token of a file or of the environment, or None. Raises UserError: no header can have it."""
    if file is None:
        token = os.environ.get(TOKEN)
        where = TOKEN
    else:
        try:
            token, where = file.read_text().strip(), str(file)
        except (OSError, UnicodeDecodeError) as e:
            raise UserError(f"{file}, the token's file, cannot be read: {e}") from None
    if token is None:
        return None
    if not token or not all("!" <= c <= "~" for c in token):
        raise UserError(f"{where} has no token: one line of printable ASCII without spaces")
    hide(token)
    return token


def serve(options: ServeOptions) -> None:
    """Serve until told to end.

    Raises:
        UserError: what the server needs is not installed, the repository is no folder, or see
            `headrace.serve.server.serve`.
    """
    if not options.repository.is_dir():
        raise UserError(f"{options.repository} is no folder: a model repository has MODEL/VERSION/model.onnx")
    if options.models and options.control == "poll":
        raise UserError("--model says what is loaded at the start with --control explicit; with poll all models are")
    if (options.certificate is None) != (options.key is None):
        raise UserError("TLS needs both --certificate and --key")
    try:
        from headrace.serve.server import is_loopback, serve
    except ModuleNotFoundError as e:
        raise UserError(f"{e.name} is not installed: run `make onnx serve`") from None
    if not is_loopback(options.host) and options.token is None:
        logger.warning("%s is reached from other machines, and no token is asked for (--token-file)", options.host)

    def started(http: str, over_grpc: str | None) -> None:
        out.print(f"HTTP {http}" + (f", gRPC {over_grpc}" if over_grpc else ""))

    serve(options, started)
