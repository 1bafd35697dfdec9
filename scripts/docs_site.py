"""MkDocs' hook for the documentation's site (mkdocs.yml): what pages link to outside docs/, and no remote parts.

A link such as `../CONTRIBUTING.md#lanes` or `../examples/own_loop.py` is right where the repository is browsed. On the
site the file becomes a page below `repository/`: Markdown as it is, a notebook by its cells, other text as code. A
folder stands for its README.md.
"""

from __future__ import annotations

import json
import logging
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
FOLDER = "repository"
_LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\))")
#: A link whose text is the name of the page's file.
_BY_NAME = re.compile(r"\[[\w-]+\.md\](?=\(([^)\s#]+\.md)(?:#[^)\s]*)?\))")
_HEADING = re.compile(r"^# (.+)$", re.MULTILINE)
#: A block of fenced code, from its line of backticks to the next such line.
_FENCE = re.compile(r"(^ *(`{3,}).*?^ *\2 *$)", re.MULTILINE | re.DOTALL)
_CELL = re.compile(r"<td[^>]*>.*?</td>", re.DOTALL)
_REMOTE = re.compile(
    r"""<(?:script|img|iframe|source)\b[^>]*?\bsrc=["']?(?:https?:)?//[^>]*>|<link\b[^>]*?\bhref=["']?(?:https?:)?//[^>]*>"""
)
#: A warning ends a strict build.
_log = logging.getLogger("mkdocs.hooks.docs_site")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each file of the repository that a page links to, and those that these link to."""
    texts = {file.src_uri: file.content_string for file in files.documentation_pages()}
    nav: list[str] = re.findall(rf"'({FOLDER}/[^']+)'", repr(config.nav))
    needed = [*nav, *(uri for page, text in texts.items() for uri in _outside(page, text))]
    while needed:
        uri = needed.pop()
        if uri not in texts:
            texts[uri] = _page_text(uri)
            files.append(File.generated(config, uri, content=texts[uri], inclusion=InclusionLevel.NOT_IN_NAV))
            needed += _outside(uri, texts[uri])
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links to files of the repository to their pages; call a page by its title, not by its file's name."""

    def titled(link: re.Match[str]) -> str:
        uri = _target(page.file.src_uri, link[1])
        file = None if uri is None else files.get_file_from_path(uri)
        heading = None if file is None else _HEADING.search(file.content_string)
        return link[0] if heading is None else f"[{heading[1]}]"

    parts = _FENCE.split(markdown)
    # Prose, a fenced block, its backticks, prose, ...
    parts[::3] = [
        _LINK.sub(lambda link: _rewritten(page.file.src_uri, link), _BY_NAME.sub(titled, prose)) for prose in parts[::3]
    ]
    del parts[2::3]
    return "".join(parts)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Show `|` in the code of a table's cells, where repository browsers want a backslash before it."""
    return _CELL.sub(lambda cell: cell[0].replace("\\|", "|"), html)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Warn of scripts, styles and pictures that a reader's browser would fetch from elsewhere."""
    for remote in _REMOTE.findall(output):
        _log.warning("%s has a remote part: %s", page.file.src_uri, remote)
    return output


def _repository_path(uri: str) -> str:
    """Return the file that a page is made of, below the repository's root."""
    if not uri.startswith(f"{FOLDER}/"):
        return f"docs/{uri}"
    name = uri.removeprefix(f"{FOLDER}/")
    return name if (ROOT / name).is_file() else name.removesuffix(".md")


def _target(page: str, path: str) -> str | None:
    """Return the URI of the page that a link leads to; None where it leads to no file of the repository.

    Args:
        page: the URI of the page that has the link.
        path: the link's path as it is written.
    """
    if ":" in path or path.startswith("/"):
        return None
    file = posixpath.normpath(posixpath.join(posixpath.dirname(_repository_path(page)), path))
    if (ROOT / file).is_dir():
        file = f"{file}/README.md"
    if file.startswith("../") or not (ROOT / file).is_file():
        return None
    if file.startswith("docs/"):
        return file.removeprefix("docs/")
    return f"{FOLDER}/{file}" if file.endswith(".md") else f"{FOLDER}/{file}.md"


def _outside(page: str, text: str) -> Iterator[str]:
    """Yield the URIs below `repository/` that a page links to."""
    for prose in _FENCE.split(text)[::3]:
        for link in _LINK.finditer(prose):
            target = _target(page, link[2])
            if target is not None and target.startswith(f"{FOLDER}/"):
                yield target


def _rewritten(page: str, link: re.Match[str]) -> str:
    target = _target(page, link[2])
    if target is None:
        return link[0]
    relative = posixpath.relpath(target, posixpath.dirname(page) or ".")
    return f"{link[1]}{relative}{link[3] or ''}{link[4]}"


def _page_text(uri: str) -> str:
    """Return the Markdown of a page below `repository/`."""
    name = _repository_path(uri)
    text = (ROOT / name).read_text(encoding="utf-8")
    if name.endswith(".md"):
        return text
    if name.endswith(".ipynb"):
        return _notebook(name, text)
    language = {".py": "python", ".yaml": "yaml", ".sh": "bash"}.get(Path(name).suffix, "text")
    return f"# {name}\n\n````{language}\n{text.rstrip()}\n````\n"


def _notebook(name: str, text: str) -> str:
    """Return a notebook's cells: its prose, its code, and the text that the code printed."""
    parts = []
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            printed = "".join(output.get("text", output.get("data", {}).get("text/plain", ())))
            parts.append(f"```text\n{printed.rstrip()}\n```")
    heading, _, _ = parts[0].partition("\n")
    note = f"This is `{name}` of the repository. Open it in Jupyter to run it."
    return "\n\n".join([heading, note, parts[0].removeprefix(heading).strip(), *parts[1:]]) + "\n"
