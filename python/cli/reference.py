"""`headrace reference`: a pipeline's keys, operators and the commands as Markdown pages, from the code itself."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.root import Panel, app, examples
from headrace.cli.screen import out

if TYPE_CHECKING:
    from pydantic import BaseModel

    from headrace.config.documentation import Key


@app.command(
    rich_help_panel=Panel.SET_UP,
    epilog=examples(
        "headrace reference | less",
        "headrace reference --write docs/reference",
        "headrace reference --json-schema > pipeline.schema.json",
    ),
)
def reference(
    write: Annotated[
        Path | None, typer.Option("--write", help="Write each page as a file of this folder instead.", metavar="FOLDER")
    ] = None,
    json_schema: Annotated[
        bool, typer.Option("--json-schema", help="Print the JSON schema of a pipeline's YAML instead, for editors.")
    ] = False,
) -> None:
    """Print every key of a pipeline's YAML and every operator: type, default, meaning; then all commands.

    The JSON schema has the operators and formats of the packages that are installed, too.
    """
    from headrace.storage import local

    if json_schema:
        from headrace.cli.json_schema import json_schema as schema_text

        out.print(schema_text(), markup=False, soft_wrap=True, end="")
    elif write is not None:
        for name, text in pages().items():
            local(write / name).put_text(text)
    else:
        out.print("\n".join(pages().values()), markup=False, soft_wrap=True, end="")


#: The command that writes the pages anew.
COMMAND = "headrace reference --write docs/reference"
_KEYS = f"""\
# Keys of a pipeline

Every key of a pipeline's YAML: type, default and meaning. A key without a default must be given; a type that leads to
a section below stands for the keys of that section. `NAME` is a name of your own, `[]` stands for each entry of a list.

Written by `{COMMAND}` from the models of `python/config/`: a change goes there.
"""
_OPERATORS = f"""\
# Operators

Every operator with its parameters: [row operators](#row-operators) see one row, [table operators](#table-operators)
all events. [Features](../features.md) explains how they work together.

Written by `{COMMAND}` from the operators of `python/features/`: a change goes there.
"""
_COMMANDS = f"""\
# Commands

Every command with its arguments and options. [Exit codes and JSON](../commands.md) has what all of them share.

Written by `{COMMAND}` from the commands of `python/cli/`: a change goes there.
"""


def pages() -> dict[str, str]:
    """Return the pages of the reference by their files' names."""
    return {"keys.md": _keys_page(), "operators.md": _operators_page(), "commands.md": _commands_page()}


def _keys_page() -> str:
    from headrace.config import Spec
    from headrace.config.documentation import keys_of
    from headrace.config.model_args import MODEL_ARGS

    places: dict[type[BaseModel], list[str]] = {Spec: []}
    # Sections in the order in which the file names them, each before those within it.
    order: list[type[BaseModel]] = []
    waiting: list[tuple[type[BaseModel], str]] = [(Spec, "")]
    while waiting:
        model, place = waiting.pop(0)
        if model not in order:
            order.append(model)
        inner = [(m, _place(place, key)) for key in keys_of(model) for m in key.models]
        for m, inner_place in inner:
            if inner_place not in places.setdefault(m, []):
                places[m].append(inner_place)
        waiting = [*inner, *waiting]
    parts = [_KEYS, *(_section(m, keys_of(m), places=places[m]) for m in order)]
    parts += _by_name("Model classes", "What `model.args` may hold, by `model.class`.", MODEL_ARGS)
    return _page(parts)


def _operators_page() -> str:
    from headrace.features.ops import OPERATORS
    from headrace.features.table_ops import TABLE_OPERATORS

    operators = "Operators {}, written `name` or `name: {{key: value}}`."
    parts = [_OPERATORS]
    parts += _by_name("Row operators", operators.format("of a chain's `ops`"), OPERATORS.own_classes())
    parts += _by_name("Table operators", operators.format("of `features.prepare`"), TABLE_OPERATORS.own_classes())
    return _page(parts)


def _page(parts: Sequence[str]) -> str:
    return "\n".join(parts).rstrip() + "\n"


def _place(outer: str, key: Key) -> str:
    many = {"list": "[]", "mapping": ".NAME"}.get(key.accepts.split(" ", 1)[0], "")
    return f"{outer}.{key.name}{many}".removeprefix(".")


def _section(
    model: type[BaseModel], keys: Sequence[Key], level: str = "##", title: str = "", places: Sequence[str] = ()
) -> str:
    from headrace.config.documentation import meaning_of

    lines = [f"{level} {title or model.__name__}", ""]
    if places:
        lines += [f"At {', '.join(f'`{p}`' for p in places)}.", ""]
    if meaning := meaning_of(model):
        lines += [meaning, ""]
    if keys:
        lines += ["| key | type | default | meaning |", "|---|---|---|---|"]
        lines += [f"| `{k.name}` | {_cell(k.accepts)} | {_code(k.default)} | {_cell(k.meaning)} |" for k in keys]
        lines.append("")
    return "\n".join(lines)


def _by_name(heading: str, introduction: str, known: Mapping[str, type[BaseModel]]) -> Iterator[str]:
    from headrace.config.documentation import keys_of

    yield f"## {heading}\n\n{introduction}\n"
    documented: set[type[BaseModel]] = set()
    for name, op in sorted(known.items()):
        keys = keys_of(op)
        yield _section(op, keys, "###", f"`{name}`")
        for model in dict.fromkeys(m for k in keys for m in k.models):
            if model not in documented:
                documented.add(model)
                yield _section(model, keys_of(model), "####")


def _commands_page() -> str:
    from headrace.cli import app as whole_app

    return _page([_COMMANDS, *_command("headrace", typer.main.get_command(whole_app))])


def _command(name: str, command: Any) -> Iterator[str]:
    """Yield a command's section, and those of the commands below it."""
    context = command.make_context(name, [], resilient_parsing=True)
    lines = [f"## `{name}`", "", f"    {' '.join([name, *command.collect_usage_pieces(context)])}", ""]
    if command.help:
        lines += [_without_markup(command.help), ""]
    parameters = [p for p in command.params if not getattr(p, "hidden", False)]
    if parameters:
        lines += ["| argument or option | meaning | default |", "|---|---|---|"]
        lines += [
            f"| {_names(p, context)} | {_cell(_without_markup(p.help or ''))} | {_default(p)} |" for p in parameters
        ]
        lines.append("")
    if command.epilog:
        heading, *commands = _without_markup(command.epilog).split("\n\n")
        lines += [f"{heading}:", "", *(f"    {line}" for line in commands), ""]
    yield "\n".join(lines)
    for inner_name in getattr(command, "list_commands", lambda _: ())(context):
        inner = command.get_command(context, inner_name)
        if not inner.hidden:
            yield from _command(f"{name} {inner_name}", inner)


def _names(param: Any, context: Any) -> str:
    """Return an argument's name, or an option's names with what stands behind them, as code."""
    if param.param_type_name == "argument":
        return _code(" ".join(param.get_usage_pieces(context)))
    metavar = "" if param.is_flag else param.metavar or param.display_type(context)
    return ", ".join(_code(f"{name} {metavar}".strip()) for name in (*param.opts, *param.secondary_opts))


def _default(param: Any) -> str:
    """Return a default as code; empty for flags, and where nothing is given."""
    if param.required or param.default in (None, False, ()) or callable(param.default):
        return ""
    value = getattr(param.default, "value", param.default)
    return _code(str(value))


def _without_markup(text: str) -> str:
    """Return a help text without rich's markup: `[bold]`, `[/]`."""
    return re.sub(r"\[/?[a-z ]*\]", "", text).strip()


def _code(text: str) -> str:
    return f"`{_cell(text)}`" if text else ""


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
