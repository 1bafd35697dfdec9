"""The command `headrace` itself; each module beside this one adds its commands."""

from __future__ import annotations

import logging
import os
from enum import StrEnum
from typing import Annotated

import typer

from headrace import __version__, logs
from headrace.cli.groups import Root

app = typer.Typer(
    cls=Root,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    help="From clicks in a data lake to a recommender retrained every day and scores in a warehouse.",
    epilog="[bold]A first day[/]\n\nheadrace generate clicks --until 2026-01-08\n\n"
    "headrace run clicks --ds 2026-01-08\n\nheadrace warehouse sample clicks",
)


def _version(show: bool) -> None:
    if show:
        typer.echo(f"headrace {__version__}")
        raise typer.Exit


class LogFormat(StrEnum):
    """Forms of log lines."""

    text = "text"
    json = "json"


def _log_format(requested: LogFormat) -> None:
    if requested.value != logs.log_format():  # what is started from here logs in the same form
        os.environ[logs.VARIABLE] = requested.value
    logs.configure(level=logging.WARNING)


@app.callback()
def _headrace(
    log_format: Annotated[
        LogFormat,
        typer.Option(
            "--log-format",
            envvar=logs.VARIABLE,
            callback=_log_format,
            help="Log lines as text, or as JSON, one object a line.",
        ),
    ] = LogFormat.text,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass
