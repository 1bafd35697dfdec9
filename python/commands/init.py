"""`headrace init`: a first pipeline for data that nobody has described yet."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from headrace.commands.scaffold.columns import ColumnProfile, profile
from headrace.commands.scaffold.pipeline_yaml import partition_day, pipeline_yaml
from headrace.commands.scaffold.roles import Named, Roles, find_roles
from headrace.commands.scaffold.sample import Sample, take_sample
from headrace.commands.screen import out, plain, table
from headrace.config import load_spec
from headrace.config.section import NAME
from headrace.errors import UserError
from headrace.features.workflow.workflow import Workflow
from headrace.score.columns import check_columns
from headrace.storage import local


def init(path: str, target: Path | None, name: str | None, named: Named, force: bool) -> None:
    """Look at data, write a pipeline for it, and print what was found.

    Args:
        path: of a file, a folder, a glob, a Delta or an Iceberg table.
        target: the pipeline's file; None: `<name>.yaml` in this folder.
        name: of the pipeline; None: from the path.
        named: what the user says of columns.
        force: whether a file that is there is replaced.

    Raises:
        UserError: nothing is there, no label is likely, or the pipeline's file is there already.
    """
    if name is not None and not NAME.fullmatch(name):
        raise UserError(f"--name {name}: a pipeline's name must match {NAME.pattern}")
    sample = take_sample(path)
    name = name or sample.name
    file = target or Path(f"{name}.yaml")
    if file.exists() and not force:
        raise UserError(f"{file} is there already: name another (-o FILE), or replace it with --force")
    columns = profile(sample.rows, copied=sample.source["format"] in ("csv", "jsonl"))
    roles = find_roles(columns, named, sample.partitions)
    if not roles.features:
        raise UserError(f"{path}: no column is left to learn from: {'; '.join(map(': '.join, roles.left_out.items()))}")
    local(file).put_text(pipeline_yaml(sample, columns, roles, name))
    _show(sample, columns, roles)
    spec = load_spec(file)
    Workflow.from_spec(spec)
    if spec.score is not None:
        check_columns(spec, spec.score)
    day = f" --ds {_newest_day(sample, columns) or 'DATE'}" if spec.ds is None else ""
    quoted = shlex.quote(str(file))
    out.print(f"\nwrote {file}. Read it, then:\n", markup=False, soft_wrap=True)
    out.print(f"  headrace run {quoted}{day} --dry-run", markup=False, soft_wrap=True)
    out.print(f"  headrace run {quoted}{day}", markup=False, soft_wrap=True)


def _newest_day(sample: Sample, columns: Sequence[ColumnProfile]) -> str | None:
    """Return the newest day among the paths of files, or of the partitions that are days."""
    if sample.newest_day is not None:
        return sample.newest_day
    partition = partition_day(sample, columns)
    return None if partition is None else next(c for c in columns if c.name == partition).days()[1]


def _show(sample: Sample, columns: Sequence[ColumnProfile], roles: Roles) -> None:
    seen = "all" if sample.is_complete else f"{sample.rows.num_rows:,}"
    about = "" if sample.is_complete else "about "
    out.print(f"{sample.description}: {about}{sample.total_rows:,} rows, {seen} looked at", markup=False)
    if sample.unread_lines:
        out.print(f"{sample.unread_lines:,} further lines could not be read: they go to quarantine", markup=False)
    out.print()
    rows_table = table("column", "type", ">nulls", ">values", "for", "why")
    for c in columns:
        use, why = _use(c, roles)
        style = {"label": "bold green", "-": "dim"}.get(use, "")
        nulls = f"{c.null_rate:.1%}" if c.nulls else ""
        values = "" if c.fault else f"{c.distinct:,}"
        rows_table.add_row(
            plain(c.name), plain("" if c.fault else c.type), nulls, values, plain(use, style=style), plain(why)
        )
    out.print(rows_table)


def _use(column: ColumnProfile, roles: Roles) -> tuple[str, str]:
    name, label = column.name, roles.label
    if name == label.column.name:
        how = f"; 1 where {label.expression}" if label.expression else ""
        return "label", f"{label.reason}{how}; {label.rate:.2%} positive"
    if roles.time is not None and name == roles.time.name:
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
