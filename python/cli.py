"""`headrace ...` for people. Each imports what it needs when it is called, so that help answers at once."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from headrace import __version__
from headrace.errors import UserError
from headrace.stages import ORDER, STAGES
from headrace.storage import local, local_folder
from headrace.workspace import Workspace


class _Group(TyperGroup):
    """Turns what the user can mend into one message and exit code 2; Ctrl-C into 130, SIGTERM into 143."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except UserError as e:
            typer.echo(f"error: {e}", err=True)
            raise typer.Exit(e.exit_code) from None
        except KeyboardInterrupt as e:
            typer.echo("\nstopped. Finished stages are kept: the same command goes on from here.", err=True)
            raise typer.Exit(128 + getattr(e, "signum", 2)) from None


class _Root(_Group):
    """Lists the stages in the day's order, although one of them is a group, which would come last."""

    def list_commands(self, ctx: Any) -> list[str]:
        names = super().list_commands(ctx)
        first = min(names.index(s) for s in ORDER)
        others = [n for n in names if n not in ORDER]
        return [*others[:first], *ORDER, *others[first:]]


class _Stage(_Group):
    """`headrace features clicks` is `headrace features build clicks`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, *ctx.help_option_names):
            args = ["build", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=_Root,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    help="From clicks in a data lake to a recommender retrained every day and scores in a warehouse.",
    epilog="[bold]A first day[/]\n\nheadrace generate clicks --until 2026-01-08\n\n"
    "headrace run clicks --ds 2026-01-08\n\nheadrace warehouse sample clicks",
)
warehouse_app = typer.Typer(cls=_Group, no_args_is_help=True, help="The embedded PostgreSQL, and what is published.")
app.add_typer(warehouse_app, name="warehouse")

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


def _overrides(overlays: list[Path] | None, sets: list[str] | None) -> list[str]:
    from headrace.config import load_overlay

    return [*(o for path in overlays or [] for o in load_overlay(path)), *(sets or [])]


def _examples(*lines: str) -> str:
    return "\n\n".join(["[bold]Examples[/]", *lines])


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"headrace {__version__}")
        raise typer.Exit


@app.callback()
def _headrace(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Say it and go.")
    ] = False,
) -> None:
    pass


@app.command(
    epilog=_examples(
        "headrace generate clicks --until 2026-01-08",
        "headrace generate clicks --start 2026-01-09 --days 3",
        "headrace generate clicks --days 2 --rows-per-day 5000000",
    )
)
def generate(
    pipeline: Pipeline,
    days: Annotated[int | None, typer.Option(help="How many days (8 without --until).", metavar="N")] = None,
    start: Annotated[
        str | None,
        typer.Option("--start", "--ds", help="The first of them; default: the log's first day.", metavar="DATE"),
    ] = None,
    until: Annotated[str | None, typer.Option(help="The last of them.", metavar="DATE")] = None,
    rows_per_day: Annotated[
        int | None, typer.Option(help="Short for --set generate.rows_per_day=N.", metavar="N")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Make days again that are there already.")] = False,
    spark: Annotated[
        bool | None,
        typer.Option("--spark/--no-spark", help="Let Spark write the files; default: above 2 million rows a day."),
    ] = None,
    sets: Sets = None,
    home: Home = VAR,
) -> None:
    """Write days of a click log as landing files, with the best AUC that any model could reach on them."""
    from headrace.commands import generate as command
    from headrace.config import load_spec

    overrides = [*(sets or []), *([f"generate.rows_per_day={rows_per_day}"] if rows_per_day is not None else [])]
    spec = load_spec(pipeline, overrides)
    command.generate(spec, Workspace(home), command.wanted_days(spec, days, start, until), force, spark)


@app.command(
    epilog=_examples(
        "headrace run clicks --ds 2026-01-08",
        "headrace run clicks --ds 2026-01-08 --from train --to report --set train.epochs=5",
        "headrace run conf/pipelines/clicks.yaml --ds 2026-01-08 --home /data/headrace",
    )
)
def run(
    pipeline: Pipeline,
    ds: Ds = None,
    first: Annotated[str, typer.Option("--from", help="The first stage.", metavar="STAGE")] = ORDER[0],
    last: Annotated[str, typer.Option("--to", help="The last stage.", metavar="STAGE")] = ORDER[-1],
    overlays: Overlays = None,
    sets: Sets = None,
    home: Home = VAR,
) -> None:
    """Bring a day up to date, stage by stage.

    Each stage is a Spark application of its own. One that is done with the same inputs is left alone, so a run that
    was stopped goes on with the same command, and a second run changes nothing.
    """
    from headrace.commands.run import run as command

    raise typer.Exit(command(pipeline, Workspace(home), ds, _overrides(overlays, sets), first, last))


def _stage_command(stage: str) -> Callable[..., None]:
    def command(
        pipeline: Pipeline, ds: Ds = None, overlays: Overlays = None, sets: Sets = None, home: Home = VAR
    ) -> None:
        from headrace.commands.run import run as run_stages

        raise typer.Exit(run_stages(pipeline, Workspace(home), ds, _overrides(overlays, sets), stage, stage))

    return command


for _name, _help in ((entry.name, entry.help) for entry in STAGES.values()):
    if _name == "features":
        continue  # below
    app.command(
        _name,
        short_help=_help,
        help=f"{_help} The same as `run --from {_name} --to {_name}`.",
        epilog=_examples(f"headrace {_name} clicks --ds 2026-01-08"),
        rich_help_panel="Stages, in the day's order",
    )(_stage_command(_name))

features_app = typer.Typer(
    cls=_Stage,
    no_args_is_help=True,
    help=f"{STAGES['features'].help} `features PIPELINE` is `features build PIPELINE`.",
    short_help=STAGES["features"].help,
    epilog=_examples("headrace features clicks --ds 2026-01-08", "headrace features explain clicks"),
)
app.add_typer(features_app, name="features", rich_help_panel="Stages, in the day's order")
features_app.command(
    "build",
    help=f"{STAGES['features'].help} The same as `run --from features --to features`.",
    epilog=_examples("headrace features build clicks --ds 2026-01-08"),
)(_stage_command("features"))


class GraphFormat(StrEnum):
    """What a graph is written as."""

    text = "text"
    mermaid = "mermaid"
    dot = "dot"


@features_app.command(
    epilog=_examples(
        "headrace features explain clicks",
        "headrace features explain clicks --format mermaid",
        "headrace features explain clicks --format dot | dot -Tsvg > features.svg",
    )
)
def explain(
    pipeline: Pipeline,
    form: Annotated[GraphFormat, typer.Option("--format", help="How to write it.")] = GraphFormat.text,
    sets: Sets = None,
) -> None:
    """Show what is made of which columns: operators, types, vocabularies, tags. Needs no data."""
    from headrace.commands.features import explain as command
    from headrace.config import load_spec

    command(load_spec(pipeline, sets or []), form.value)


@app.command(epilog=_examples("headrace status", "headrace status clicks --last 7", "headrace status clicks --verify"))
def status(
    pipeline: MaybePipeline = None,
    ds: Ds = None,
    last: Annotated[int, typer.Option(help="The newest N days; 0: all.", metavar="N", min=0)] = 3,
    verify: Annotated[bool, typer.Option("--verify", help="Look at the outputs, too, not at manifests alone.")] = False,
    sets: Sets = None,
    home: Home = VAR,
) -> None:
    """Show what is done, stale or missing, with rows and times."""
    from headrace.commands.status import status as command

    command(Workspace(home), pipeline, ds, last, verify, sets or [])


@app.command(
    epilog=_examples(
        "headrace lineage clicks_scores --ds 2026-01-08",
        "headrace lineage lake/clicks/scores",
        "headrace lineage clicks",
    )
)
def lineage(
    name: Annotated[str, typer.Argument(metavar="TABLE_OR_MODEL", help="A table, a registered model, or a key.")],
    ds: Ds = None,
    home: Home = VAR,
) -> None:
    """Walk from a table or a model back to the landing files that it came from."""
    from headrace.commands.lineage import lineage as command

    command(Workspace(home), name, ds)


@app.command(
    epilog=_examples(
        "headrace plan --gpu clicks",
        "headrace plan --gpu clicks --set features.row_group_rows=1000000",
        "headrace plan --gpu --operator target_encoding --operator history",
        "headrace plan --gpu",
        "headrace plan --sharding clicks --world 8",
        "headrace plan --sharding --tables mlperf --world 64 --memory 80",
    )
)
def plan(
    pipeline: MaybePipeline = None,
    gpu: Annotated[bool, typer.Option("--gpu", help="What of the features runs on a GPU, and why not.")] = False,
    operators: Annotated[
        list[str] | None, typer.Option("--operator", help="This operator alone; may be repeated.", metavar="NAME")
    ] = None,
    sharding: Annotated[
        bool, typer.Option("--sharding", help="Where embedding tables would live, and what that costs.")
    ] = False,
    world: Annotated[int, typer.Option("--world", min=1, help="Ranks to plan for.", metavar="N")] = 8,
    memory: Annotated[
        float | None, typer.Option("--memory", help="GiB of each rank for the tables.", metavar="GIB")
    ] = None,
    tables: Annotated[
        str | None,
        typer.Option("--tables", help="Declared tables (conf/tables or a .yaml file) instead of a dataset's."),
    ] = None,
    ds: Ds = None,
    sets: Sets = None,
    home: Home = VAR,
) -> None:
    """Show what a pipeline would do, without doing it.

    --gpu asks the RAPIDS plugin, which needs no GPU for it but its jar (make rapids): each step of the features of a
    small table with the pipeline's schema, on the GPU or not, and the reason. Without a pipeline: every operator and
    every shipped pipeline. Exit code 1 when anything leaves the GPU.

    --sharding spreads the tables of a pipeline's newest dataset, or declared ones, over any number of ranks: memory by
    rank, bytes by step, expected time, imbalance; or why it cannot fit and what would make it.
    """
    if sharding:
        from headrace.commands.plan_sharding import sharding as sharding_command

        sharding_command(Workspace(home), pipeline, tables, ds, world, memory, sets or [])
        return
    from headrace.commands.plan import gpu as command

    if not gpu:
        raise UserError("say what to plan: --gpu or --sharding")
    if pipeline and operators:
        raise UserError("name a pipeline or operators, not both")
    raise typer.Exit(command(pipeline, sets or [], operators or []))


@app.command(
    epilog=_examples(
        "headrace tune clicks --ds 2026-01-08 --trials 30",
        "headrace tune clicks --ds 2026-01-08 --overlay space.yaml --out best.yaml",
        "headrace run clicks --ds 2026-01-08 --from train --overlay best.yaml",
    )
)
def tune(
    pipeline: Pipeline,
    ds: Ds = None,
    trials: Annotated[
        int | None, typer.Option(help="Short for --set train.search.trials=N.", metavar="N", min=1)
    ] = None,
    target: Annotated[Path | None, typer.Option("--out", help="Copy the best settings there.", metavar="FILE")] = None,
    overlays: Overlays = None,
    sets: Sets = None,
    home: Home = VAR,
) -> None:
    """Search for better settings by short runs on a sample of the day's dataset.

    What is tried is the section train.search of the spec. A search that was stopped goes on with the same command.
    """
    from headrace.commands.tune import tune as command

    command(pipeline, Workspace(home), ds, _overrides(overlays, sets), trials, target)


@app.command(epilog=_examples("headrace doctor", "headrace doctor clicks"))
def doctor(pipeline: MaybePipeline = None, home: Home = VAR) -> None:
    """Look for everything that headrace needs; exit code 1 when something needed is missing.

    With a pipeline its warehouse is tried, too.
    """
    from headrace.commands.doctor import doctor as command

    raise typer.Exit(command(Workspace(home), pipeline))


@app.command(
    "spark-properties", hidden=True, epilog=_examples("headrace spark-properties clicks --out clicks.properties")
)
def spark_properties(
    pipeline: Pipeline,
    out: Annotated[Path | None, typer.Option(help="Default: below the workspace.", metavar="FILE")] = None,
    sets: Sets = None,
    home: Home = VAR,
) -> None:
    """Write the Spark properties file of a pipeline (for other submitters) and print its path."""
    from headrace.config import load_spec
    from headrace.jobs.submit import properties_file, write_properties

    spec, ws = load_spec(pipeline, sets or []), Workspace(home)
    path = local(out) if out else properties_file(ws, spec.pipeline)
    write_properties(spec, ws, path)
    typer.echo(path)


@warehouse_app.command("start", epilog=_examples("headrace warehouse start"))
def warehouse_start(pipeline: MaybePipeline = None, home: Home = VAR) -> None:
    """Start the embedded PostgreSQL and leave it running; say how to open it."""
    from headrace.commands.warehouse import start

    start(Workspace(home), pipeline)


@warehouse_app.command("stop", epilog=_examples("headrace warehouse stop"))
def warehouse_stop(home: Home = VAR) -> None:
    """Stop the embedded PostgreSQL."""
    from headrace.commands.warehouse import stop

    stop(Workspace(home))


@warehouse_app.command("status", epilog=_examples("headrace warehouse status"))
def warehouse_status(pipeline: MaybePipeline = None, home: Home = VAR) -> None:
    """Say whether the embedded PostgreSQL runs and how to open it."""
    from headrace.commands.warehouse import status

    status(Workspace(home), pipeline)


@warehouse_app.command("sample", epilog=_examples("headrace warehouse sample clicks --ds 2026-01-08 --rows 20"))
def warehouse_sample(
    pipeline: Pipeline,
    ds: Ds = None,
    rows: Annotated[int, typer.Option(help="How many.", metavar="N", min=1)] = 10,
    home: Home = VAR,
) -> None:
    """Show the first published scores of a day as psql would; default: of the newest day."""
    from headrace.commands.warehouse import sample

    sample(Workspace(home), pipeline, ds, rows)


def main() -> None:
    """The console script."""
    app(prog_name="headrace")


if __name__ == "__main__":
    main()
