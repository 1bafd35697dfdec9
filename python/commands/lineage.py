"""`headrace lineage`: the tree behind a table or a model."""

from __future__ import annotations

from typing import Any

from rich.text import Text
from rich.tree import Tree

from headrace.commands.screen import out, plain, print_json
from headrace.config import parse_ds
from headrace.quality.report.lineage import Node, find, load_runs, trace
from headrace.workspace import Workspace


def lineage(ws: Workspace, name: str, ds: str | None, as_json: bool = False) -> None:
    """Print the tree from a table, a model, a dataset or a key back to landing files.

    Raises:
        UserError: nothing of that name was made, or a manifest is damaged.
    """
    runs = load_runs(ws)
    root = trace(runs, *find(runs, name, parse_ds(ds) if ds else None))
    if as_json:
        print_json(_as_json(root))
    else:
        out.print(_grown(root), soft_wrap=True)


def _as_json(node: Node) -> dict[str, Any]:
    found = dict(node.facts)
    if node.warning:
        found["warning"] = node.warning
    return {**found, "inputs": [_as_json(child) for child in node.children]}


def _grown(node: Node) -> Tree:
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
