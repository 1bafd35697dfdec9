"""What a page is made of: values for the template, no HTML but the plots'."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from markupsafe import Markup

from headrace.monitor.lineage import Node

Tone = Literal["", "good", "bad", "dim"]


@dataclass(frozen=True)
class Cell:
    """One cell of a table. `bar`: a share of 1 that is drawn behind the text."""

    text: str
    tone: Tone = ""
    bar: float | None = None
    code: bool = False


@dataclass(frozen=True)
class Table:
    """Rows under headings. Headings that start with `>` are of numbers, to the right."""

    headings: tuple[str, ...]
    rows: tuple[tuple[Cell | str, ...], ...]
    title: str = ""
    wide: bool = False

    @property
    def columns(self) -> list[tuple[str, bool]]:
        """(heading, to the right?)."""
        return [(h.removeprefix(">"), h.startswith(">")) for h in self.headings]


@dataclass(frozen=True)
class Plot:
    """An inline SVG."""

    svg: Markup
    title: str
    note: str = ""
    wide: bool = False


@dataclass(frozen=True)
class Text:
    """A paragraph; `pre`: a preformatted one, folded away under its title."""

    text: str
    tone: Tone = ""
    title: str = ""
    pre: bool = False
    wide: bool = True


@dataclass(frozen=True)
class Tree:
    """A lineage tree."""

    root: Node
    wide: bool = True


Block = Table | Plot | Text | Tree


@dataclass(frozen=True)
class Section:
    """A headed part of the page."""

    id: str
    title: str
    blocks: tuple[Block, ...]
    note: str = ""


@dataclass(frozen=True)
class Card:
    """A number at the top of the page. `meter`: a share of 1, drawn as a bar."""

    label: str
    value: str
    detail: str = ""
    tone: Tone = ""
    meter: float | None = None


@dataclass(frozen=True)
class Chip:
    """A stage and its state, in the header."""

    name: str
    state: Literal["done", "not run"]
