"""`headrace serve`: a server of models."""

from __future__ import annotations

import logging
import os
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.root import Panel, app, examples
from headrace.cli.screen import out
from headrace.errors import UserError
from headrace.logs import hide

if TYPE_CHECKING:
    from headrace.export.serve.options import ServeOptions


class Control(StrEnum):
    """Modes of loading: all models of the repository, or those that requests name."""

    poll = "poll"
    explicit = "explicit"


@app.command(
    rich_help_panel=Panel.SERVE,
    epilog=examples(
        "headrace serve models",
        "headrace serve models --port 0 --no-grpc --poll-seconds 1",
        "headrace serve models --host 0.0.0.0 --certificate cert.pem --key key.pem --token-file token",
        "curl localhost:8000/v2/models/clicks",
    ),
)
def serve(
    repository: Annotated[str, typer.Argument(metavar="REPOSITORY", help="A folder of MODEL/VERSION/model.onnx.")],
    host: Annotated[str, typer.Option("--host", help="Address to listen on.", metavar="ADDRESS")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, help="Port of HTTP; 0: any free one.", metavar="N")
    ] = 8000,
    grpc_port: Annotated[
        int, typer.Option("--grpc-port", min=0, max=65535, help="Port of gRPC; 0: any free one.", metavar="N")
    ] = 8001,
    grpc: Annotated[bool, typer.Option("--grpc/--no-grpc", help="Serve gRPC, too.")] = True,
    control: Annotated[
        Control, typer.Option("--control", help="Load what the repository has, or what requests name.")
    ] = Control.poll,
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model", help="With explicit: model to load at the start; may be repeated; else all.", metavar="MODEL"
        ),
    ] = None,
    versions: Annotated[
        int, typer.Option("--versions", min=1, help="Number of versions of each model to keep loaded.", metavar="N")
    ] = 1,
    poll_seconds: Annotated[
        float,
        typer.Option(
            "--poll-seconds", min=0.05, help="Seconds between two looks at the repository.", metavar="SECONDS"
        ),
    ] = 5.0,
    threads: Annotated[
        int | None, typer.Option("--threads", min=1, help="Threads of onnxruntime; else one per core.", metavar="N")
    ] = None,
    max_body_mib: Annotated[
        int, typer.Option("--max-body-mib", min=1, help="Largest request body, in MiB.", metavar="N")
    ] = 64,
    max_rows: Annotated[int, typer.Option("--max-rows", min=1, help="Largest request, in rows.", metavar="N")] = 65536,
    batch_rows: Annotated[
        int, typer.Option("--batch-rows", min=1, help="Requests are merged up to so many rows.", metavar="N")
    ] = 256,
    batch_delay_ms: Annotated[
        float, typer.Option("--batch-delay-ms", min=0, help="Wait for requests to merge with.", metavar="MS")
    ] = 0.0,
    timeout_ms: Annotated[
        float,
        typer.Option(
            "--timeout-ms", min=1, help="Longest wait of a request before it is refused with 503.", metavar="MS"
        ),
    ] = 1000.0,
    receive_seconds: Annotated[
        float,
        typer.Option("--receive-seconds", min=0.1, help="Time within which a request must arrive.", metavar="SECONDS"),
    ] = 10.0,
    max_connections: Annotated[
        int,
        typer.Option(
            "--max-connections",
            min=1,
            help="Most connections; more are refused with 503, with TLS closed at once.",
            metavar="N",
        ),
    ] = 4096,
    allow_nan: Annotated[bool, typer.Option("--allow-nan", help="Accept NaN in float inputs.")] = False,
    certificate: Annotated[
        Path | None, typer.Option("--certificate", help="TLS certificate, PEM.", metavar="FILE")
    ] = None,
    key: Annotated[Path | None, typer.Option("--key", help="TLS key, PEM.", metavar="FILE")] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(
            "--token-file",
            help="File of the token that requests must have; else $HEADRACE_SERVE_TOKEN.",
            metavar="FILE",
        ),
    ] = None,
) -> None:
    """Answer requests by ONNX models of a repository: KServe's inference protocol 2, HTTP and gRPC.

    New versions are taken while requests are answered (docs/serving.md).
    """
    from headrace.export.serve.options import RequestLimits, ServeOptions

    limits = RequestLimits(
        body_bytes=max_body_mib << 20,
        rows=max_rows,
        batch_rows=batch_rows,
        batch_delay=batch_delay_ms / 1e3,
        timeout=timeout_ms / 1e3,
        receive_seconds=receive_seconds,
        connections=max_connections,
    )
    serve_models(
        ServeOptions(
            repository=Path(repository),
            host=host,
            http_port=port,
            grpc_port=grpc_port if grpc else None,
            control=control.value,
            models=tuple(model or ()),
            versions=versions,
            poll_seconds=poll_seconds,
            threads=threads or len(os.sched_getaffinity(0)),
            certificate=certificate,
            key=key,
            token=token_of(token_file),
            allow_nan=allow_nan,
            limits=limits,
        )
    )


logger = logging.getLogger(__name__)
#: Where the token is, unless a file has it.
TOKEN = "HEADRACE_SERVE_TOKEN"


def token_of(file: Path | None) -> str | None:
    """Return the token of a file or of the environment, or None. Raises UserError: no header can have it."""
    if file is None:
        token = os.environ.get(TOKEN)
        origin = TOKEN
    else:
        try:
            token, origin = file.read_text().strip(), str(file)
        except (OSError, UnicodeDecodeError) as e:
            raise UserError(f"{file}, the token's file, cannot be read: {e}") from None
    if token is None:
        return None
    if not token or not all("!" <= c <= "~" for c in token):
        raise UserError(f"{origin} has no token: one line of printable ASCII without spaces")
    hide(token)
    return token


def serve_models(options: ServeOptions) -> None:
    """Serve until a signal ends the process.

    Raises:
        UserError: what the server needs is not installed, the repository is no folder, or see
            `headrace.export.serve.server.serve`.
    """
    if not options.repository.is_dir():
        raise UserError(f"{options.repository} is no folder: a model repository has MODEL/VERSION/model.onnx")
    if options.models and options.control == "poll":
        raise UserError("--model says what is loaded at the start with --control explicit; with poll all models are")
    if (options.certificate is None) != (options.key is None):
        raise UserError("TLS needs both --certificate and --key")
    from headrace.export.serve.server import is_loopback, serve

    if not is_loopback(options.host) and options.token is None:
        logger.warning("%s is reached from other machines, and no token is asked for (--token-file)", options.host)

    def started(http: str, over_grpc: str | None) -> None:
        out.print(f"HTTP {http}" + (f", gRPC {over_grpc}" if over_grpc else ""))

    serve(options, started)
