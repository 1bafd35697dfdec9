"""Arguments and options that several commands take, and what their help ends with."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from headrace.stages import ORDER
from headrace.storage import local_folder
from headrace.workspace import Workspace, pipeline_file

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


def _pipelines(incomplete: str) -> list[str]:
    """For the shell: the shipped pipelines, and what may be a file or on the way to one."""
    shipped = (p.stem for p in pipeline_file("x").parent.glob("*.yaml"))
    folder = Path(incomplete) if incomplete.endswith("/") else Path(incomplete).parent
    files = sorted(folder.iterdir()) if folder.is_dir() else []
    ways = (f"{p}/" if p.is_dir() else str(p) for p in files if p.is_dir() or p.suffix in (".yaml", ".yml"))
    return sorted(n for n in (*shipped, *ways) if n.startswith(incomplete))


def complete_stage(incomplete: str) -> list[str]:
    """For the shell: names of stages."""
    return [s for s in ORDER if s.startswith(incomplete)]


Pipeline = Annotated[
    str,
    typer.Argument(
        metavar="PIPELINE", help="A shipped pipeline's name, or the path of a .yaml file.", autocompletion=_pipelines
    ),
]
MaybePipeline = Annotated[
    str | None,
    typer.Argument(metavar="[PIPELINE]", help="A shipped pipeline's name, or a .yaml file.", autocompletion=_pipelines),
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
Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="Which model scores: a version of the registry, @champion or another alias, neural, baseline, best.",
        metavar="MODEL",
    ),
]
Json = Annotated[
    bool, typer.Option("--json", help="One JSON document in place of text, for programs (docs/commands.md).")
]
VAR = Path("var")


def workspace(home: Path) -> Workspace:
    """Return the workspace of `--home` and of the environment; commands then read the spec's own roots."""
    return Workspace.from_environment(home, os.environ)


def overrides(overlays: list[Path] | None, sets: list[str] | None, model: str | None = None) -> list[str]:
    """Return overrides for `load_spec`: the keys of the overlays, then those of `--set`, then `--model`."""
    from headrace.config import load_overlay

    chosen = [] if model is None else [f"score.model={json.dumps(model)}"]
    return [*(o for path in overlays or [] for o in load_overlay(path)), *(sets or []), *chosen]


def examples(*lines: str) -> str:
    """Return the end of a command's help."""
    return "\n\n".join(["[bold]Examples[/]", *lines])
