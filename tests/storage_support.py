"""Changes that tests of both kinds of stores make to a place, and a reader's view of it."""

from __future__ import annotations

from typing import Any

from headrace.storage import Location


def put_file(home: Location, text: str) -> None:
    (home / "thing").put_text(text * 100)


def put_folder(home: Location, text: str) -> None:
    with (home / "thing").new_folder() as folder:
        (folder / "a").put_text(text)
        (folder / "deep" / "b").put_text(text)
        (folder / f"only-{text}").put_text(text)
        with (folder / "c").new_file() as path:
            path.write_text(text)


def fill_by_two(home: Location, text: str) -> None:
    thing = home / "thing"
    thing.begin("shared")
    for name in ("a", "b"):
        (thing.building("shared") / name).put_text(text)
    (thing.building("shared") / f"only-{text}").put_text(text)
    thing.commit("shared")


def seen(thing: Location) -> Any:
    """All that a reader sees; None: nothing."""
    if thing.is_dir():
        return {f.below(thing): f.read_text() for f in thing.files()}
    return thing.read_text() if thing.exists() else None
