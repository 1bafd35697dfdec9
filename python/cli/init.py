"""`headrace init`: a first pipeline for data that nobody has described yet."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.root import Panel, app, examples
from headrace.cli.screen import out, plain, table
from headrace.errors import UserError

if TYPE_CHECKING:
    from headrace.cli.scaffold.columns import ColumnProfile
    from headrace.cli.scaffold.roles import Named, Roles
    from headrace.cli.scaffold.sample import Sample
    from headrace.config import Spec

#: Features and columns left out that are shown; the file has all.
_MOST_SHOWN = 100


@app.command(
    rich_help_panel=Panel.SET_UP,
    epilog=examples(
        "headrace init clicks.csv.gz",
        "headrace init '/data/clicks/*/*.jsonl' -o clicks.yaml --label clicked",
        "headrace init census.data --label income --positive '>50K'",
        "headrace init ratings.dat --implicit",
        "headrace init /lake/events",
        "headrace init s3://bucket/events",
    ),
)
def init(
    path: Annotated[
        str,
        typer.Argument(
            metavar="TABLE_OR_PATH",
            help="A file, a folder, a glob in quotes, or the folder of a table, which may be in a store (s3://...).",
        ),
    ],
    target: Annotated[
        Path | None, typer.Option("-o", "--out", help="The pipeline's file; default: NAME.yaml here.", metavar="FILE")
    ] = None,
    name: Annotated[str | None, typer.Option(help="The pipeline's name; default: the path's.", metavar="NAME")] = None,
    label: Annotated[str | None, typer.Option(help="The column to predict.", metavar="COLUMN")] = None,
    positive: Annotated[str | None, typer.Option(help="The label's value that means 1.", metavar="VALUE")] = None,
    time: Annotated[str | None, typer.Option(help="The column of the event's time.", metavar="COLUMN")] = None,
    key: Annotated[str | None, typer.Option(help="The column that numbers the rows.", metavar="COLUMN")] = None,
    user: Annotated[
        str | None, typer.Option(help="The column of the users that items are scored for.", metavar="COLUMN")
    ] = None,
    item: Annotated[str | None, typer.Option(help="The column of the items that are scored.", metavar="COLUMN")] = None,
    implicit: Annotated[
        bool, typer.Option("--implicit", help="Each row is something that a user did with an item: draw the negatives.")
    ] = False,
    format_: Annotated[
        str | None,
        typer.Option(
            "--format", help="csv, jsonl, parquet, orc or avro; default: what is in the files.", metavar="FORMAT"
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
) -> None:
    """Look at data of your own and write a pipeline for it, with a comment at each choice.

    CSV, JSON lines, Parquet, ORC, Avro, Delta and Iceberg. Types, missing values, the label, the time, users and items
    are told from a part of the rows, by names and values; the options say what you know better. A log of users and
    items without a label is implicit feedback: negatives are drawn. The pipeline runs as it is.
    """
    from headrace.cli.scaffold.roles import Named

    write_pipeline(path, target, name, Named(label, positive, time, key, user, item, implicit), force, format_)


def write_pipeline(
    path: str, target: Path | None, name: str | None, named: Named, force: bool, format_: str | None = None
) -> None:
    """Look at data, write a pipeline for it, and print what was found.

    Args:
        path: of a file, a folder, a glob, a Delta or an Iceberg table.
        target: the pipeline's file; None: `<name>.yaml` in this folder.
        name: of the pipeline; None: from the path.
        named: what the user says of columns.
        force: whether a file that is there is replaced.
        format_: of the files, whatever is in them; None: by their content and names.

    Raises:
        UserError: nothing is there, neither a label nor users and items are likely, or the pipeline's file is there
            already.
    """
    from headrace.cli.json_schema import editor_line
    from headrace.cli.scaffold.columns import profile
    from headrace.cli.scaffold.label import UndecidedError
    from headrace.cli.scaffold.pipeline_yaml import pipeline_yaml
    from headrace.cli.scaffold.roles import find_roles
    from headrace.cli.scaffold.sample import take_sample
    from headrace.config.section import NAME

    if name is not None and not NAME.fullmatch(name):
        raise UserError(f"--name {name}: a pipeline's name must match {NAME.pattern}")
    sample = take_sample(path, format_)
    name = name or sample.name
    file = target or Path(f"{name}.yaml")
    if file.exists() and not force:
        raise UserError(f"{file} is there already: name another (-o FILE), or replace it with --force")
    columns = profile(sample.rows, sample.source["format"] in ("csv", "jsonl"), sample.marks)
    try:
        roles = find_roles(columns, named, sample.partitions)
    except UndecidedError:
        _show_undecided(path, sample, columns)
        raise
    if not roles.features:
        raise UserError(f"{path}: no column is left to learn from: {'; '.join(map(': '.join, roles.left_out.items()))}")
    spec = _checked(file, f"{editor_line(file)}\n{pipeline_yaml(sample, columns, roles, name)}")
    _show(sample, [*columns, *roles.added], roles)
    _warn_of_packages(spec)
    if roles.implicit:
        out.print(f"\nimplicit feedback: {roles.implicit}", markup=False, soft_wrap=True)
    for column in columns:
        if column.is_ambiguous:
            out.print(f"\n{column.name}: {column.evidence}", markup=False, soft_wrap=True)
    day = f" --ds {_newest_day(sample, columns) or 'DATE'}" if spec.ds is None else ""
    quoted = shlex.quote(str(file))
    steps = [(f"headrace run {quoted}{day} --dry-run", "looks for mistakes, runs nothing")]
    if spec.score is None:
        learned = f"it learns '{spec.features.label}'"
        steps.append((f"headrace run {quoted}{day}", "from the data to a model and its report"))
    else:
        learned = f"it makes a list of {spec.score.top_k} '{spec.score.item.key}' for each '{spec.score.user.key}'"
        steps.append((f"headrace run {quoted}{day}", "from the data to published lists"))
        steps.append((f"headrace warehouse sample {quoted}", "shows some of them"))
    out.print(f"\nwrote {file}: {learned}. Read it, then:\n", markup=False, soft_wrap=True)
    width = max(len(command) for command, _ in steps)
    for command, meaning in steps:
        out.print(f"  {command:<{width}}  # {meaning}", markup=False, soft_wrap=True)


def _checked(file: Path, text: str) -> Spec:
    """Write a pipeline's file, and look at all that its stages, up to the last one, need of the spec.

    Raises:
        UserError: a stage would refuse it; the file is then as it was.
    """
    from headrace.config import load_spec
    from headrace.features.workflow.workflow import Workflow
    from headrace.score.columns import check_columns
    from headrace.storage import local

    previous = file.read_text() if file.exists() else None
    local(file).put_text(text)
    try:
        spec = load_spec(file)
        Workflow.from_spec(spec)
        if spec.score is not None:
            check_columns(spec, spec.score)
    except UserError:
        if previous is None:
            local(file).remove_quietly()
        else:
            local(file).put_text(previous)
        raise
    return spec


def _warn_of_packages(spec: Spec) -> None:
    """Name the packages without which stages of the pipeline cannot run, before the first of them fails."""
    from headrace.cli.connections import missing_packages
    from headrace.stage import stage_entries

    for line in missing_packages(spec, stage_entries(spec)):
        out.print(f"\n{line}", markup=False, soft_wrap=True)


def _newest_day(sample: Sample, columns: Sequence[ColumnProfile]) -> str | None:
    """Return the newest day among the paths of files, or of the partitions that are days."""
    from headrace.cli.scaffold.pipeline_yaml import partition_day

    if sample.newest_day is not None:
        return sample.newest_day
    partition = partition_day(sample, columns)
    return None if partition is None else next(c for c in columns if c.name == partition).days()[1]


def _describe(sample: Sample) -> None:
    seen = "all" if sample.is_complete else f"{sample.rows.num_rows:,}"
    about = "" if sample.is_complete else "about "
    out.print(f"{sample.description}: {about}{sample.total_rows:,} rows, {seen} looked at", markup=False)
    if sample.unread_lines:
        out.print(f"{sample.unread_lines:,} further lines could not be read: they go to quarantine", markup=False)
    out.print()


def _show_undecided(path: str, sample: Sample, columns: Sequence[ColumnProfile]) -> None:
    """Print the columns, and commands to go on with where nothing says what is to be learned."""
    _describe(sample)
    rows_table = table("column", "type", ">nulls", ">values", "such as")
    for c in columns[:_MOST_SHOWN]:
        examples = ", ".join(str(v)[:30] for v in c.uniques.slice(0, 3).to_pylist())
        nulls = f"{c.null_rate:.1%}" if c.nulls else ""
        rows_table.add_row(plain(c.name), plain(c.type), nulls, f"{c.distinct:,}", plain(c.fault or examples))
    out.print(rows_table)
    if len(columns) > _MOST_SHOWN:
        out.print(f"and {len(columns) - _MOST_SHOWN:,} more columns", markup=False)
    quoted = shlex.quote(path)
    command = f"  headrace init {quoted}"
    out.print("\nnothing says what is to be learned. Say it:\n", markup=False)
    for options, meaning in (
        ("--label COLUMN", "a column of 0 and 1, yes and no, or of two texts"),
        ("--label COLUMN --positive VALUE", "one value of it means 1"),
        ("--implicit --user COLUMN --item COLUMN", "each row is something that a user did"),
    ):
        out.print(f"{command} {options}  # {meaning}", markup=False, soft_wrap=True)
    out.print()


def _show(sample: Sample, columns: Sequence[ColumnProfile], roles: Roles) -> None:
    _describe(sample)
    rows_table = table("column", "type", ">nulls", ">values", "for", "why")
    uses = {c.name: _use(c, roles) for c in columns}
    # Of wide tables those with a role of their own, and some of the others.
    plain_columns = [c.name for c in columns if uses[c.name][0] == "-" or uses[c.name][0].endswith("feature")]
    hidden = set(plain_columns[_MOST_SHOWN:])
    for c in columns:
        if c.name in hidden:
            continue
        use, reason = uses[c.name]
        style = {"label": "bold green", "-": "dim"}.get(use, "")
        nulls = f"{c.null_rate:.1%}" if c.nulls else ""
        values = "" if c.fault else f"{c.distinct:,}"
        rows_table.add_row(
            plain(c.name), plain("" if c.fault else c.type), nulls, values, plain(use, style=style), plain(reason)
        )
    out.print(rows_table)
    if hidden:
        out.print(f"and {len(hidden):,} more columns: see the file", markup=False)


def _use(column: ColumnProfile, roles: Roles) -> tuple[str, str]:
    name, label = column.name, roles.label
    if label is not None and name == label.column.name:
        how = f"; 1 where {label.expression}" if label.expression else ""
        return "label", f"{label.reason}{how}; {label.rate:.2%} positive"
    if roles.time is not None and name == roles.time.name:
        return "time", roles.reasons[name]
    if roles.moment is not None and name == roles.moment.name and name not in roles.features:
        return "time", roles.reasons[name]
    if name in roles.left_out:
        return "-", roles.left_out[name]
    if roles.key is not None and name == roles.key.name:
        return "key", roles.reasons[name]
    for side, key in (("user", roles.user), ("item", roles.item)):
        if key is not None and name == key.name:
            return side, roles.reasons[name]
    side = "user's " if name in roles.user_columns else "item's " if name in roles.item_columns else ""
    return f"{side}feature", roles.reasons[name]
