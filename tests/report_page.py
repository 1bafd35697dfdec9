"""A report's page, made and parsed."""

from __future__ import annotations

from collections.abc import Mapping
from html.parser import HTMLParser
from typing import Any

from headrace.config import Spec, load_spec
from headrace.manifest import Manifest
from headrace.quality.report.blocks import Day
from tests.report_support import DS


def make_day(manifests: Mapping[str, Manifest], spec: Spec | None = None, **more: Any) -> Day:
    return Day(spec=spec or load_spec("clicks"), ds=DS, manifests=manifests, **more)


class Checker(HTMLParser):
    """Every tag that is opened is closed in order; collects text, attributes and ids."""

    VOID = frozenset({"meta", "br", "img", "link", "path", "use"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()
        assert not self.stack, self.stack

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.stack[-1:] == [tag]
            self.stack.pop()

    def handle_data(self, data: str) -> None:
        if not self.stack or self.stack[-1] != "style":
            self.text.append(data)

    @property
    def words(self) -> str:
        return " ".join(" ".join(self.text).split())
