"""Which version is in use: the alias `champion`, who gave it to whom, and when.

A version is `registered`; a day's stage `promote` makes it `promoted` or `refused`, by the verdict of its gate. People
overrule a verdict (`overridden`) and take a champion back (`rolled_back`): what they decided, no stage changes. An
alias that was moved in MLflow's own page is obeyed: a stage gives it to a model that has never had it, not back to one.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from headrace.account import user_name
from headrace.errors import UserError
from headrace.registry.client import Client, alias_holder, quoted
from headrace.registry.store import is_there
from headrace.registry.versions import CHAMPION, DS, KEY, REGISTERED, STATUS, Version, is_ours, version_of
from headrace.workspace import Workspace

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

log = logging.getLogger("headrace.registry")
PROMOTED, REFUSED, OVERRIDDEN, ROLLED_BACK = "promoted", "refused", "overridden", "rolled_back"
#: What a verdict held the version against: JSON of version, key and name (the saved model's place); `null`: nothing.
JUDGED_AGAINST = "headrace.judged_against"
#: Who changed the version's status by hand, when (UTC) and why.
BY, AT, REASON = "headrace.by", "headrace.at", "headrace.reason"
#: Tag of the registered model: the version that headrace gave the alias last.
_LAST = "headrace.champion"
#: Why a version gets no alias, by the status that it has then.
_NOT_WANTED = {REFUSED: "it was refused", REGISTERED: "it passed, and is not the one to be champion"}
#: Statuses of versions that were champion of their day; None: from before there were statuses.
IN_USE = (PROMOTED, OVERRIDDEN, None)


@dataclass(frozen=True)
class Promotion:
    """What became of the alias."""

    #: The version that had it, and the one that has it.
    before: str | None
    now: str | None
    #: Why it stays where it is; empty where it moved.
    stays: str = ""


def settle(
    ws: Workspace,
    name: str,
    version: str,
    *,
    passed: bool = True,
    chosen: bool = True,
    judged_against: Mapping[str, str] | None = None,
    check: Callable[[], None] = lambda: None,
) -> Promotion:
    """Give a day's new version the alias `champion` if its verdict is that; what the stage `promote` does. Idempotent.

    It stays where it is where the champion is of a later day, where the version has had it before and somebody has
    moved it since, and where people have decided about the version. Of a champion whose verdict has turned to refused
    it goes back to the version that it was judged against (where that one is no champion any more, to the newest
    before it), unless somebody has given it to this one outside headrace.

    Args:
        passed: its verdict.
        chosen: False: it gets no alias although it may have passed; another version of the day does, or none.
        judged_against: see JUDGED_AGAINST.
        check: called right before the alias moves; raises where another process is at work by now.

    Raises:
        UserError: there is no such version, or the store cannot be written.
    """
    with Client(ws) as client:
        found, holder = _found(client, name, version), alias_holder(client, name, CHAMPION)
        before = None if holder is None else str(holder.version)
        by_hand = moved_by_hand(client, name, holder)
        if by_hand:
            log.info("the alias %s of %s was moved to version %s outside headrace: obeyed", CHAMPION, name, before)
        status = found.tags.get(STATUS)
        if status in (OVERRIDDEN, ROLLED_BACK):
            return Promotion(before, before, f"version {version} was {status.replace('_', ' ')} by hand")
        against = json.dumps(judged_against)
        if found.tags.get(JUDGED_AGAINST) != against:
            client.set_model_version_tag(name, version, JUDGED_AGAINST, against)
        wanted = REFUSED if not passed else PROMOTED if chosen else REGISTERED
        if wanted != PROMOTED and before == version and not by_hand:
            check()
            now = _take_back(ws, client, name, found, judged_against)
            _set_status(client, name, version, wanted)
            return Promotion(before, now)
        stays = _why_not(found, holder, by_hand) if wanted == PROMOTED else _NOT_WANTED[wanted]
        if not stays:
            check()
            _give(ws, client, name, version, before, {"action": "promote"})
        if status is not None or wanted != PROMOTED:
            _set_status(client, name, version, wanted)
        if stays and before is not None:
            log.info("the alias %s of %s stays at version %s: %s", CHAMPION, name, before, stays)
        return Promotion(before, before if stays else version, stays)


def _take_back(
    ws: Workspace, client: MlflowClient, name: str, refused: Any, judged_against: Mapping[str, str] | None
) -> str | None:
    """Take the alias from a version, give it to the one before; returns that one, None where there is none."""
    version, key = str(refused.version), (judged_against or {}).get("key")
    earlier = [v for v in _in_use(client, name) if age(v) < age(refused) and _there(client, name, v)]
    target = max(earlier, key=lambda v: (v.tags.get(KEY) == key, age(v)), default=None)
    said = {"action": "refuse"}
    if target is not None:
        _give(ws, client, name, str(target.version), version, said)
        return str(target.version)
    client.delete_registered_model_alias(name, CHAMPION)
    client.delete_registered_model_tag(name, _LAST)
    _log_move(ws, name, version, None, said)
    return None


def _why_not(found: Any, holder: Any, by_hand: bool) -> str:
    """Why the alias stays where it is; empty where it moves."""
    if holder is not None and str(holder.version) == str(found.version):
        return "it is there already"
    if STATUS not in found.tags:
        return f"version {found.version} had its turn when it was registered"
    if holder is None:
        return ""
    ds, latest = found.tags.get(DS), holder.tags.get(DS)
    if _is_later(holder, found):
        return f"that is of {latest}, a later day than {ds}"
    # A day that was trained again, first with other settings and then with those from before, has its model back.
    if found.tags[STATUS] == PROMOTED and (by_hand or ds != latest):
        return f"version {found.version} has had it before"
    return ""


def promote(
    ws: Workspace, name: str, version: str, reason: str, *, allow_older: bool = False, user: str | None = None
) -> Promotion:
    """Give a version the alias `champion`, whatever its verdict.

    Args:
        reason: for the version's tags and the log of promotions.
        allow_older: also where the champion is of a later day.
        user: who wants it; None: the user of this process.

    Raises:
        UserError: there is no such version or its folder is gone, or the champion is of a later day.
    """
    with Client(ws) as client:
        found, holder = _found(client, name, version), alias_holder(client, name, CHAMPION)
        before = None if holder is None else str(holder.version)
        _check_folder(client, name, found)
        ds, latest = found.tags.get(DS), None if holder is None else holder.tags.get(DS)
        if not allow_older and ds is not None and latest is not None and ds < latest:
            raise UserError(
                f"version {version} of model '{name}' is of {ds}, and the champion, version {before}, of {latest}: to "
                f"move the alias to an older day, say so: --allow-older, or headrace rollback"
            )
        _decide(client, name, version, OVERRIDDEN, reason, user)
        said = {"action": "override", "reason": reason, "was": found.tags.get(STATUS)}
        _give(ws, client, name, version, before, said, user)
        return Promotion(before, version)


def roll_back(
    ws: Workspace, name: str, to: str | None = None, reason: str = "", *, user: str | None = None
) -> Promotion:
    """Take the alias `champion` back from its version, and give it to an earlier one.

    Args:
        to: the version; None: the newest one before it that was champion of its day, and whose folder is there.
        reason: as of `promote`.
        user: as of `promote`.

    Raises:
        UserError: there is no champion, no such version, or none before it; or it is the champion.
    """
    with Client(ws) as client:
        holder = alias_holder(client, name, CHAMPION)
        if holder is None:
            raise UserError(f"model '{name}' has no champion, so there is nothing to take back")
        before = str(holder.version)
        if to is None:
            earlier = [v for v in _in_use(client, name) if age(v) < age(holder) and _there(client, name, v)]
            if not earlier:
                raise UserError(f"no version of model '{name}' was champion before version {before}: name one, --to N")
            target = max(earlier, key=age)
        else:
            target = _found(client, name, to)
            _check_folder(client, name, target)
        version = str(target.version)
        if version == before:
            raise UserError(f"version {version} of model '{name}' is the champion already")
        if target.tags.get(STATUS) not in IN_USE:
            _decide(client, name, version, OVERRIDDEN, reason or f"rolled back from version {before}", user)
        _decide(client, name, before, ROLLED_BACK, reason, user)
        _give(ws, client, name, version, before, {"action": "rollback", "reason": reason}, user)
        return Promotion(before, version)


def set_alias(ws: Workspace, name: str, alias: str, version: str) -> None:
    """Give a version an alias that is not the champion's, such as `challenger`, unless that is at one of a later day.

    Raises:
        UserError: there is no such version, or the store cannot be written.
    """
    if alias == CHAMPION:
        raise ValueError("the champion's alias is given by settle, promote and roll_back")
    with Client(ws) as client:
        found, holder = _found(client, name, version), alias_holder(client, name, alias)
        if holder is None or not _is_later(holder, found):
            client.set_registered_model_alias(name, alias, version)


def champion_of_day(ws: Workspace, name: str, ds: str | None, besides: Collection[str] = ()) -> Version | None:
    """The champion as a day may know it: never one of a later day.

    Args:
        ds: the day.
        besides: keys of versions that are not meant.

    Returns:
        What the alias says; where that is of a later day, or one of `besides`, the newest version up to the day that
        was champion of its day. None where there is none.
    """
    if not is_there(ws):
        return None
    with Client(ws) as client:
        holder = alias_holder(client, name, CHAMPION)
        if holder is not None and holder.tags.get(KEY) not in besides and _not_after(holder, ds):
            return version_of(client, name, holder)
        known = [v for v in _in_use(client, name) if v.tags.get(KEY) not in besides and _not_after(v, ds)]
        found = max(known, key=age, default=None)
        return None if found is None else version_of(client, name, found)


def judged_against(version: Version) -> Mapping[str, str] | None:
    """What a version's verdict held it against (version, key, name); None: nothing.

    Raises:
        KeyError: no verdict was settled.
    """
    found: Mapping[str, str] | None = json.loads(version.tags[JUDGED_AGAINST])
    return found


def moved_by_hand(client: MlflowClient, name: str, holder: Any) -> bool:
    """Whether the alias is at another version than headrace gave it to, as far as that is known."""
    last = next(
        (m.tags.get(_LAST) for m in client.search_registered_models(filter_string=f"name = '{quoted(name)}'")), None
    )
    return last is not None and holder is not None and str(holder.version) != last


def _give(
    ws: Workspace,
    client: MlflowClient,
    name: str,
    version: str,
    before: str | None,
    said: Mapping[str, Any],
    user: str | None = None,
) -> None:
    client.set_registered_model_alias(name, CHAMPION, version)
    client.set_registered_model_tag(name, _LAST, version)
    _log_move(ws, name, before, version, said, user)


def _log_move(
    ws: Workspace, name: str, before: str | None, version: str | None, said: Mapping[str, Any], user: str | None = None
) -> None:
    at = datetime.now(UTC).isoformat(timespec="seconds")
    record = {"at": at, "by": user or user_name(), "model": name, "from": before, "to": version, **said}
    file = ws.promotions(name)
    file.parent.make_dir()
    file.append(json.dumps(record).encode() + b"\n")
    log.info("the alias %s of %s is at version %s (before: %s)", CHAMPION, name, version or "none", before or "none")


def _decide(client: MlflowClient, name: str, version: str, status: str, reason: str, user: str | None) -> None:
    at = datetime.now(UTC).isoformat(timespec="seconds")
    for tag, value in ((BY, user or user_name()), (AT, at), (REASON, reason)):
        client.set_model_version_tag(name, version, tag, value)
    _set_status(client, name, version, status)


def _set_status(client: MlflowClient, name: str, version: str, status: str) -> None:
    client.set_model_version_tag(name, version, STATUS, status)


def _found(client: MlflowClient, name: str, version: str) -> Any:
    for v in client.search_model_versions(f"name = '{quoted(name)}'"):
        if str(v.version) == version:
            return v
    raise UserError(f"model '{name}' has no version {version}: see headrace models")


def _in_use(client: MlflowClient, name: str) -> list[Any]:
    found = client.search_model_versions(f"name = '{quoted(name)}'")
    return [v for v in found if is_ours(v) and v.tags.get(STATUS) in IN_USE]


def age(version: Any) -> tuple[str, int]:
    """What versions (MLflow's or ours) are ordered by: the day, then the number."""
    return version.tags.get(DS) or "", int(version.version)


def _is_later(one: Any, other: Any) -> bool:
    ds, than = one.tags.get(DS), other.tags.get(DS)
    return ds is not None and than is not None and ds > than


def _not_after(version: Any, ds: str | None) -> bool:
    own = version.tags.get(DS)
    return ds is None or own is None or own <= ds


def _there(client: MlflowClient, name: str, version: Any) -> bool:
    return version_of(client, name, version).source.is_dir()


def _check_folder(client: MlflowClient, name: str, found: Any) -> None:
    version = version_of(client, name, found)
    if not version.source.is_dir():
        raise UserError(f"{version.source}, version {version.version} of model '{name}', is gone: choose another one")
