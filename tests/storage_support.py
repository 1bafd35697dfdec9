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
    place = home / "thing"
    place.begin("shared")
    for name in ("a", "b"):
        (place.building("shared") / name).put_text(text)
    (place.building("shared") / f"only-{text}").put_text(text)
    place.commit("shared")


def seen(place: Location) -> Any:
    """All that a reader sees; None: nothing."""
    if place.is_dir():
        return {f.below(place): f.read_text() for f in place.files()}
    return place.read_text() if place.exists() else None
