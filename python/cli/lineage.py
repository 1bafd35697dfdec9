"""`headrace lineage`: the tree behind a table or a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from headrace.cli.root import VAR, Ds, Home, Json, Panel, app, examples, workspace
from headrace.cli.screen import out, plain, print_json

if TYPE_CHECKING:
    from rich.tree import Tree

    from headrace.quality.report.lineage import Node


@app.command(
    rich_help_panel=Panel.A_DAY,
    epilog=examples(
        "headrace lineage clicks_scores --ds 2026-01-08",
        "headrace lineage lake/clicks/scores",
        "headrace lineage clicks",
    ),
)
def lineage(
    name: Annotated[str, typer.Argument(metavar="TABLE_OR_MODEL", help="A table, a registered model, or a key.")],
    ds: Ds = None,
    as_json: Json = False,
    home: Home = VAR,
) -> None:
    """Walk from a table or a model back to the landing files that it came from."""
    from headrace.config import parse_ds
    from headrace.quality.report.lineage import find, load_runs, trace

    runs = load_runs(workspace(home))
    root = trace(runs, *find(runs, name, parse_ds(ds) if ds else None))
    if as_json:
        print_json(_as_json(root))
    else:
        out.print(_grown(root), soft_wrap=True)


def _as_json(node: Node) -> dict[str, Any]:
    record = dict(node.facts)
    if node.warning:
        record["warning"] = node.warning
    return {**record, "inputs": [_as_json(child) for child in node.children]}


def _grown(node: Node) -> Tree:
    from rich.tree import Tree

    tree = Tree(_label(node), guide_style="dim")
    for child in node.children:
        tree.children.append(_grown(child))
    return tree


def _label(node: Node) -> Text:
    label = plain(node.title, style="bold")
    if node.detail:
        label.append(plain(f"  {node.detail}", "not bold dim"))
    if node.warning:
        label.append(plain(f"  {node.warning}", "yellow"))
    return label
