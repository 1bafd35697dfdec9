"""Meaning of columns' names: the words that people use for labels, times, users, items, in English and German."""

from __future__ import annotations

import re

_WORDS = re.compile(r"[A-ZÄÖÜ]+(?![a-zäöüß])|[A-ZÄÖÜ]?[a-zäöüß]+|\d+")
#: Names of columns of a file without names, which are numbered.
_NUMBERED = re.compile(r"column\d+")


def _list(text: str) -> tuple[str, ...]:
    return tuple(text.split())


#: Words of a label, the surest first.
LABELS = _list(
    "label target click clicked clicks converted conversion purchase purchased bought buy order ordered attributed "
    "installed install churn churned fraud default defaulted outcome response liked like watched booked subscribed "
    "survived class classification income y geklickt gekauft bestellt gebucht gekündigt"
)
#: Values of a label that mean 1.
POSITIVE = frozenset(
    _list(
        "1 1.0 yes true y t positive pos click clicked buy bought purchase converted churned won ja j wahr gekauft oui "
        "si sí sim"
    )
)
#: Words of a judgement with more than two values.
RATINGS = frozenset(_list("rating ratings stars score grade bewertung sterne"))
#: Words of how much of an item a user took, and of what it cost.
QUANTITIES = frozenset(
    _list(
        "quantity qty count counts amount plays playcount listens watches duration dwell views menge anzahl stück "
        "stueck stk"
    )
)
PRICES = frozenset(_list("price unitprice cost revenue sales total preis stückpreis einzelpreis betrag umsatz"))
#: Words of the time of an event, the surest first.
TIMES = _list("timestamp ts time datetime date at created day zeitstempel zeitpunkt uhrzeit zeit datum")
_USERS = frozenset(
    _list(
        "user customer member visitor client account buyer viewer subscriber player reader guest shopper cookie "
        "nutzer benutzer kunde kunden kundin mitglied besucher käufer abonnent cliente usuario utilisateur"
    )
)
_ITEMS = frozenset(
    _list(
        "item product article movie film video song track book ad advert advertisement sku listing offer content post "
        "news restaurant hotel app campaign creative asin isbn artikel produkt ware angebot produit producto"
    )
)
#: Words of what users and items meet in: a column of these numbers baskets, visits and the like.
_OCCASIONS = frozenset(
    _list(
        "session order invoice transaction basket cart visit receipt request impression event bestellung bestell "
        "rechnung rechnungs auftrag auftrags beleg sitzung vorgang"
    )
)
#: Words that say which one, not what about it; and those that are also counts.
_IDS = frozenset(_list("id ids key uid uuid guid hash code sk pk zip zipcode postcode plz ean gtin upc sku kennung"))
_NUMBERS = frozenset(_list("no nr num number nummer"))
#: Words of places in an order: a number of these is no id.
_PLACES = frozenset(
    _list("year quarter month week day hour minute second line row page rank seq sequence jahr monat woche zeile seite")
)
#: Words that say which item, where an id follows: `StockCode`.
_ITEM_CODES = frozenset(_list("stock title part material"))
_JOINED = re.compile(r"(.+?)(nummer|number|code|uuid|guid|key|ids|id|nr|no|sku)")


def words(name: str) -> tuple[str, ...]:
    """Return the words of a name in small letters: `userId`, `user_id`, `user id` and `userid` are the same."""
    parts: list[str] = []
    for word in (w.lower() for w in _WORDS.findall(name)):
        match = _JOINED.fullmatch(word)
        known = _USERS | _ITEMS | _OCCASIONS | _ITEM_CODES
        joined = match is not None and match[1] in known and word not in known | _IDS
        parts += match.groups() if match and joined else [word]
    return tuple(parts)


def is_identifier(name: str) -> bool:
    """Return whether a name is of identifiers: `user_id`, zip_code, `uid`, `InvoiceNo`, `Kunden-Nr.`; not `week_no`."""
    parts = words(name)
    if not parts:
        return False
    is_number = len(parts) > 1 and parts[-1] in _NUMBERS and parts[-2] not in _PLACES
    return parts[-1] in _IDS or (is_number and parts[-1] != "num") or name.lower() in ("asin", "isbn")


def is_key(name: str) -> bool:
    """Return whether a column may number the rows themselves."""
    parts = words(name)
    if not parts:
        return True
    return parts[-1] in _IDS | _NUMBERS or is_line_number(name)


def is_line_number(name: str) -> bool:
    """Return whether a column counts the lines of a file: pandas writes its index without a name, as `column0`."""
    return name in ("column0", "index", "row") or words(name) in (("unnamed", "0"), ("row", "index"))


def is_numbered(name: str) -> bool:
    """Return whether a name is the number of a column, as those of a file without names are."""
    return _NUMBERED.fullmatch(name) is not None


def is_occasion(name: str) -> bool:
    """Return whether a column numbers what users and items meet in: `InvoiceNo`, `session_id`, `order`."""
    parts = words(name)
    named = [w for w in parts if w not in _IDS | _NUMBERS]
    return len(named) == 1 and named[0] in _OCCASIONS


def is_time(name: str) -> bool:
    """Return whether a name is of a time."""
    return any(w in TIMES or w in ("timestamps", "epoch", "unixtime") for w in words(name))


def is_user(name: str) -> bool:
    """Return whether a name is of users: `user_id`, `customer`, `uid`, `Kunden-Nr.`; not `user_age`."""
    return _is_side(words(name), _USERS) or name.lower() == "uid"


def is_item(name: str) -> bool:
    """Return whether a name is of items: `item_id`, `product_sku`, `StockCode`, `asin`; not `item_price`."""
    parts = words(name)
    return _is_side(parts, _ITEMS) or (len(parts) == 2 and parts[0] in _ITEM_CODES and parts[1] in _IDS | _NUMBERS)


def _is_side(parts: tuple[str, ...], side: frozenset[str]) -> bool:
    named = [w for w in parts if w not in _IDS | _NUMBERS] or list(parts[-1:])
    return len(named) == 1 and named[0] in side and len(parts) <= 3


def amount_of(name: str) -> str | None:
    """Return what a column of numbers says of an event by its name: `rating`, `quantity` or `price`; None: nothing."""
    parts = set(words(name))
    kinds = (("rating", RATINGS), ("quantity", QUANTITIES), ("price", PRICES))
    return next((kind for kind, known in kinds if parts & known), None)


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
