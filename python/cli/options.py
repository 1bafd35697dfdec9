"""Arguments and options that several commands take, and what their help ends with."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headrace.storage import local_folder

Home = Annotated[
    Path,
    typer.Option(
        "--home",
        envvar="HEADRACE_HOME",
        help="The workspace: lake, models, logs, reports. A folder, as a path or file:// URI.",
        parser=lambda text: local_folder(str(text), "--home"),
        metavar="FOLDER",
    ),
]
Pipeline = Annotated[
    str, typer.Argument(metavar="PIPELINE", help="A shipped pipeline's name, or the path of a .yaml file.")
]
MaybePipeline = Annotated[
    str | None, typer.Argument(metavar="[PIPELINE]", help="A shipped pipeline's name, or a .yaml file.")
]
Ds = Annotated[str | None, typer.Option("--ds", help="The day, YYYY-MM-DD.", metavar="DATE")]
Sets = Annotated[
    list[str] | None, typer.Option("--set", help="Override a key of the spec; may be repeated.", metavar="KEY=VALUE")
]
Overlays = Annotated[
    list[Path] | None,
    typer.Option(
        "--overlay",
        help="A YAML file with some keys of the spec, as `headrace tune` writes them; before --set; may be repeated.",
        metavar="FILE",
    ),
]
VAR = Path("var")


def overrides(overlays: list[Path] | None, sets: list[str] | None) -> list[str]:
    """Overrides for `load_spec`: the keys of the overlays, then those of `--set`."""
    from headrace.config import load_overlay

    return [*(o for path in overlays or [] for o in load_overlay(path)), *(sets or [])]


def examples(*lines: str) -> str:
    """The end of a command's help."""
    return "\n\n".join(["[bold]Examples[/]", *lines])
