"""The command `headrace`: its root and groups, exit codes of errors, and options that several commands take."""

from __future__ import annotations

import gc
import json
import logging
import os
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from headrace import __version__, logs
from headrace.config.installation import pipeline_file
from headrace.config.stages import ORDER, STAGES
from headrace.logs import print_error
from headrace.storage import local_folder

if TYPE_CHECKING:
    from headrace.config.workspace import Workspace


class Group(TyperGroup):
    """Group of commands that converts exceptions to one message and an exit code.

    Errors that the user can fix exit with 2, an outage of a store with 75, Ctrl-C with 130, SIGTERM with 143.
    """

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (typer.Exit, typer.Abort, typer.TyperException):  # an inner group has printed the message
            raise
        except KeyboardInterrupt as e:
            typer.echo("\nstopped. Finished stages are kept: the same command goes on from here.", err=True)
            raise typer.Exit(128 + getattr(e, "signum", 2)) from None
        except Exception as e:
            from headrace.errors.translate import exit_message

            if (message := exit_message(e)) is None:
                raise
            print_error(message[0])
            raise typer.Exit(message[1]) from None


class Panel(StrEnum):
    """Panels of commands in `headrace --help`, in their order; each command names its panel (`rich_help_panel`)."""

    SET_UP = "Set up"
    A_DAY = "A day"
    MODELS = "Models"
    SERVE = "Serve"
    OPERATE = "Operate"
    STAGES = "Stages, in the day's order"


class Root(Group):
    """The root group: it lists commands by panel, and stages in the day's order."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all commands, in the order of help."""
        names, panels, stages = super().list_commands(ctx), list(Panel), list(STAGES)

        def sort_key(name: str) -> tuple[int, int]:
            panel = getattr(self.commands[name], "rich_help_panel", None)
            return (
                panels.index(panel) if panel in panels else len(panels),
                stages.index(name) if panel == Panel.STAGES else names.index(name),
            )

        return sorted(names, key=sort_key)


class StageGroup(Group):
    """Group of a stage whose default command is `build`: `headrace features clicks` builds the day's features."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, *ctx.help_option_names):
            args = ["build", *args]
        return super().parse_args(ctx, args)


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
    """Return completions for the shell: the shipped pipelines, and paths of files."""
    shipped = (p.stem for p in pipeline_file("x").parent.glob("*.yaml"))
    folder = Path(incomplete) if incomplete.endswith("/") else Path(incomplete).parent
    files = sorted(folder.iterdir()) if folder.is_dir() else []
    paths = (f"{p}/" if p.is_dir() else str(p) for p in files if p.is_dir() or p.suffix in (".yaml", ".yml"))
    return sorted(n for n in (*shipped, *paths) if n.startswith(incomplete))


def complete_stage(incomplete: str) -> list[str]:
    """Return completions for the shell: names of stages."""
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
    """Return the workspace of `--home` and the environment; `Workspace.of` then applies the roots that a spec sets."""
    from headrace.config.workspace import Workspace

    return Workspace.from_environment(home, os.environ)


def overrides(overlays: list[Path] | None, sets: list[str] | None, model: str | None = None) -> list[str]:
    """Return overrides for `load_spec`: the keys of the overlays, then those of `--set`, then `--model`."""
    from headrace.config import load_overlay

    model_override = [] if model is None else [f"score.model={json.dumps(model)}"]
    return [*(o for path in overlays or [] for o in load_overlay(path)), *(sets or []), *model_override]


def examples(*lines: str) -> str:
    """Return the examples at the end of a command's help, one a line."""
    return "\n\n".join(["[bold]Examples[/]", *lines])


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
    if requested.value != logs.log_format():  # child processes log in the same form
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


#: Number of new objects after which Python looks for garbage; its default is 700.
_COLLECT_AFTER = 50_000


def main() -> None:
    """Run the console script."""
    # Most objects of a short command belong to imported modules and stay: scanning them again and again takes an eighth
    # of its time.
    gc.set_threshold(_COLLECT_AFTER)
    app(prog_name="headrace")
