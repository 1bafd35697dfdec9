"""`headrace reference`: every key of a pipeline's YAML and every operator, as Markdown, from the code itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from pydantic import BaseModel

from headrace.cli.root import app, examples
from headrace.cli.screen import out

if TYPE_CHECKING:
    from headrace.config.documentation import Key


@app.command(epilog=examples("headrace reference > docs/reference.md", "headrace reference | less"))
def reference() -> None:
    """Print every key of a pipeline's YAML and every operator: type, default, meaning (docs/reference.md)."""
    out.print(page(), markup=False, soft_wrap=True, end="")


#: The command that writes the page anew.
COMMAND = "headrace reference > docs/reference.md"
_INTRODUCTION = f"""\
# Reference

Every key of a pipeline's YAML: type, default and meaning. A key without a default must be given; a type that leads to
a section below stands for the keys of that section. `NAME` is a name of your own, `[]` stands for each entry of a list.

Written by `{COMMAND}` from the models of `python/config/` and the operators of `python/features/`: a
change goes there.
"""


def page() -> str:
    """Return the whole page."""
    from headrace.config import Spec
    from headrace.config.documentation import keys_of
    from headrace.config.model_args import MODEL_ARGS
    from headrace.features.ops import OPERATORS
    from headrace.features.table_ops import TABLE_OPERATORS

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
    parts = [_INTRODUCTION, *(_section(m, keys_of(m), places=places[m]) for m in order)]
    operators = "Operators {}, written `name` or `name: {{key: value}}`."
    parts += _by_name("Model classes", "What `model.args` may hold, by `model.class`.", MODEL_ARGS)
    parts += _by_name("Row operators", operators.format("of a chain's `ops`"), OPERATORS.own_classes())
    parts += _by_name("Table operators", operators.format("of `features.prepare`"), TABLE_OPERATORS.own_classes())
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


def _code(text: str) -> str:
    return f"`{_cell(text)}`" if text else ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
