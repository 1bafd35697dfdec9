"""Meaning of columns' names: the words that people use for labels, times, users, items."""

from __future__ import annotations

import re

_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")


def _list(text: str) -> tuple[str, ...]:
    return tuple(text.split())


#: Words of a label, the surest first.
LABELS = _list(
    "label target click clicked clicks converted conversion purchase purchased bought buy order ordered attributed "
    "installed install churn churned fraud default defaulted outcome response liked like watched booked subscribed "
    "survived class classification income y"
)
#: Values of a label that mean 1.
POSITIVE = frozenset(_list("1 1.0 yes true y t positive pos click clicked buy bought purchase converted churned won"))
#: Words of a judgement with more than two values.
RATINGS = frozenset(_list("rating stars score grade"))
#: Words of the time of an event, the surest first.
TIMES = _list("timestamp ts time datetime date at created day")
_USERS = frozenset(
    _list("user customer member visitor client account buyer viewer subscriber player reader guest shopper cookie")
)
_ITEMS = frozenset(
    _list(
        "item product article movie film video song track book ad advert advertisement sku listing offer content post "
        "news restaurant hotel app campaign creative asin isbn"
    )
)
#: Words that say which one, not what about it; and those that are also counts.
_IDS = frozenset(_list("id ids key uid uuid guid hash code sk pk zip zipcode postcode"))
_NUMBERS = frozenset(_list("no nr num number"))


def words(name: str) -> tuple[str, ...]:
    """Return the words of a name in small letters: `userId`, `user_id`, `user id` are the same."""
    return tuple(w.lower() for w in _WORDS.findall(name))


def is_identifier(name: str) -> bool:
    """Return whether a name is of identifiers: `user_id`, zip_code, `uid`."""
    parts = words(name)
    return bool(parts) and (parts[-1] in _IDS or parts[-1] in ("userid", "itemid"))


def is_key(name: str) -> bool:
    """Return whether a column may number the rows themselves."""
    parts = words(name)
    if not parts:
        return True
    return parts[-1] in _IDS | _NUMBERS or is_line_number(name)


def is_line_number(name: str) -> bool:
    """Return whether a column counts the lines of a file: pandas writes its index without a name, as `column0`."""
    return name in ("column0", "index", "row") or words(name) in (("unnamed", "0"), ("row", "index"))


def is_time(name: str) -> bool:
    """Return whether a name is of a time."""
    return any(w in TIMES or w in ("timestamps", "epoch", "unixtime") for w in words(name))


def is_user(name: str) -> bool:
    """Return whether a name is of users: `user_id`, `customer`, `uid`; not `user_age`."""
    return _is_side(words(name), _USERS) or name.lower() in ("uid", "userid")


def is_item(name: str) -> bool:
    """Return whether a name is of items."""
    return _is_side(words(name), _ITEMS) or name.lower() == "itemid"


def _is_side(parts: tuple[str, ...], side: frozenset[str]) -> bool:
    named = [w for w in parts if w not in _IDS | _NUMBERS]
    return len(named) == 1 and named[0] in side and len(parts) <= 3


def side_of(name: str) -> str | None:
    """`user` or `item` where the first word says so and no other word says the other; `both` where one does."""
    parts = words(name)
    user, item = any(w in _USERS for w in parts), any(w in _ITEMS for w in parts)
    if user and item:
        return "both"
    if parts and parts[0] in _USERS:
        return "user"
    return "item" if parts and parts[0] in _ITEMS else None


def label_rank(name: str) -> int | None:
    """Return how surely a name is of a label, 0 the surest; None where nothing indicates it."""
    ranks = [LABELS.index(w) for w in words(name) if w in LABELS]
    return min(ranks, default=None)


def time_rank(name: str) -> int:
    """Return how surely a name is of the event's time, 0 the surest."""
    parts = words(name)
    if "event" in parts:
        return 0
    return min((1 + TIMES.index(w) for w in parts if w in TIMES), default=len(TIMES) + 1)
