"""Promotion of registered versions: the alias `champion` names the version in use.

A version is first `registered`. The day's stage `promote` makes it `promoted` or `refused`, by the verdict of the gate.
A user can overrule a verdict (`overridden`) or roll a champion back (`rolled_back`); no stage changes that decision. If
somebody moves the alias in MLflow's own page, a stage gives it only to a version that has never had it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.models.registry.client import Client, alias_holder, is_there, quoted
from headrace.models.registry.versions import CHAMPION, DS, KEY, REGISTERED, STATUS, Version, is_ours, version_of
from headrace.stage.resources import user_name

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

log = logging.getLogger("headrace.registry")
PROMOTED, REFUSED, OVERRIDDEN, ROLLED_BACK = "promoted", "refused", "overridden", "rolled_back"
#: The model that a verdict compared the version with: JSON of version, key and name (of the saved model), or `null`.
JUDGED_AGAINST = "headrace.judged_against"
#: Tags of a change of the status by a user: the user, the time (UTC) and the reason.
DECIDED_BY, DECIDED_AT, REASON = "headrace.by", "headrace.at", "headrace.reason"
#: Tag of the registered model: the version to which headrace last gave the alias.
_LAST_CHAMPION = "headrace.champion"
#: The reason why a version does not get the alias, by its status.
_NOT_PROMOTED = {REFUSED: "it was refused", REGISTERED: "it passed, and is not the one to be champion"}
#: Statuses of versions that were champion of their day; None: registered before there were statuses.
IN_USE = (PROMOTED, OVERRIDDEN, None)


@dataclass(frozen=True)
class Promotion:
    """Result of a promotion: the alias's version before and after."""

    previous: str | None
    now: str | None
    #: The reason why the alias did not move; empty where it moved.
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
    """Give a day's new version the alias `champion` if its verdict allows, as the stage `promote` does. Idempotent.

    The alias does not move if the champion is of a later day, if a user has decided about this version, or if this
    version had the alias and somebody has moved it since. If a champion's verdict changes to refused, the alias returns
    to the version that it was compared with, or to the newest champion before it if that one was no champion. It stays
    if somebody gave it to this version outside headrace.

    Args:
        passed: the version's verdict.
        chosen: False if another version of the day gets the alias, or none, even if this one has passed.
        judged_against: see JUDGED_AGAINST.
        check: called right before the alias moves; raises if another process is at work.

    Raises:
        UserError: the version does not exist, or the store cannot be written.
    """
    with Client(ws) as client:
        candidate, holder = _get_version(client, name, version), alias_holder(client, name, CHAMPION)
        previous = None if holder is None else str(holder.version)
        by_hand = moved_by_hand(client, name, holder)
        if by_hand:
            log.info("the alias %s of %s was moved to version %s outside headrace: obeyed", CHAMPION, name, previous)
        status = candidate.tags.get(STATUS)
        if status in (OVERRIDDEN, ROLLED_BACK):
            return Promotion(previous, previous, f"version {version} was {status.replace('_', ' ')} by hand")
        against = json.dumps(judged_against)
        if candidate.tags.get(JUDGED_AGAINST) != against:
            client.set_model_version_tag(name, version, JUDGED_AGAINST, against)
        new_status = REFUSED if not passed else PROMOTED if chosen else REGISTERED
        if new_status != PROMOTED and previous == version and not by_hand:
            check()
            now = _take_back(ws, client, name, candidate, judged_against)
            _set_status(client, name, version, new_status)
            return Promotion(previous, now)
        stays = _stay_reason(candidate, holder, by_hand) if new_status == PROMOTED else _NOT_PROMOTED[new_status]
        if not stays:
            check()
            _give(ws, client, name, version, previous, {"action": "promote"})
        if status is not None or new_status != PROMOTED:
            _set_status(client, name, version, new_status)
        if stays and previous is not None:
            log.info("the alias %s of %s stays at version %s: %s", CHAMPION, name, previous, stays)
        return Promotion(previous, previous if stays else version, stays)


def _take_back(
    ws: Workspace, client: MlflowClient, name: str, refused: Any, judged_against: Mapping[str, str] | None
) -> str | None:
    """Move the alias from a refused version to the previous champion; return that, or None without one."""
    version, key = str(refused.version), (judged_against or {}).get("key")
    earlier = [v for v in _in_use(client, name) if age(v) < age(refused) and _has_folder(client, name, v)]
    target = max(earlier, key=lambda v: (v.tags.get(KEY) == key, age(v)), default=None)
    details = {"action": "refuse"}
    if target is not None:
        _give(ws, client, name, str(target.version), version, details)
        return str(target.version)
    client.delete_registered_model_alias(name, CHAMPION)
    client.delete_registered_model_tag(name, _LAST_CHAMPION)
    _log_move(ws, name, version, None, details)
    return None


def _stay_reason(candidate: Any, holder: Any, by_hand: bool) -> str:
    """Return the reason why the alias stays; empty where the version may have it."""
    if holder is not None and str(holder.version) == str(candidate.version):
        return "it is there already"
    if STATUS not in candidate.tags:
        return f"version {candidate.version} had its turn when it was registered"
    if holder is None:
        return ""
    ds, latest = candidate.tags.get(DS), holder.tags.get(DS)
    if _is_later(holder, candidate):
        return f"that is of {latest}, a later day than {ds}"
    # A day that was trained with other settings and then again with the previous ones gets its first model back.
    if candidate.tags[STATUS] == PROMOTED and (by_hand or ds != latest):
        return f"version {candidate.version} has had it before"
    return ""


def promote(
    ws: Workspace, name: str, version: str, reason: str, *, allow_older: bool = False, user: str | None = None
) -> Promotion:
    """Give a version the alias `champion`, whatever its verdict.

    Args:
        reason: the reason, for the version's tags and the log of promotions.
        allow_older: promote even where the champion is of a later day.
        user: the user who decides; None: the user of this process.

    Raises:
        UserError: there is no such version or its folder is gone, or the champion is of a later day.
    """
    with Client(ws) as client:
        candidate, holder = _get_version(client, name, version), alias_holder(client, name, CHAMPION)
        previous = None if holder is None else str(holder.version)
        _check_folder(client, name, candidate)
        ds, latest = candidate.tags.get(DS), None if holder is None else holder.tags.get(DS)
        if not allow_older and ds is not None and latest is not None and ds < latest:
            raise UserError(
                f"version {version} of model '{name}' is of {ds}, and the champion, version {previous}, of {latest}: "
                f"to move the alias to an older day, say so: --allow-older, or headrace rollback"
            )
        _decide(client, name, version, OVERRIDDEN, reason, user)
        details = {"action": "override", "reason": reason, "was": candidate.tags.get(STATUS)}
        _give(ws, client, name, version, previous, details, user)
        return Promotion(previous, version)


def roll_back(
    ws: Workspace, name: str, to: str | None = None, reason: str = "", *, user: str | None = None
) -> Promotion:
    """Move the alias `champion` to an earlier version.

    Args:
        to: the version; None: the newest earlier champion of its day whose folder exists.
        reason: see `promote`.
        user: see `promote`.

    Raises:
        UserError: there is no champion, no such version, or no earlier one; or the version is the champion.
    """
    with Client(ws) as client:
        holder = alias_holder(client, name, CHAMPION)
        if holder is None:
            raise UserError(f"model '{name}' has no champion, so there is nothing to take back")
        previous = str(holder.version)
        if to is None:
            earlier = [v for v in _in_use(client, name) if age(v) < age(holder) and _has_folder(client, name, v)]
            if not earlier:
                raise UserError(
                    f"no version of model '{name}' was champion before version {previous}: name one, --to N"
                )
            target = max(earlier, key=age)
        else:
            target = _get_version(client, name, to)
            _check_folder(client, name, target)
        version = str(target.version)
        if version == previous:
            raise UserError(f"version {version} of model '{name}' is the champion already")
        if target.tags.get(STATUS) not in IN_USE:
            _decide(client, name, version, OVERRIDDEN, reason or f"rolled back from version {previous}", user)
        _decide(client, name, previous, ROLLED_BACK, reason, user)
        _give(ws, client, name, version, previous, {"action": "rollback", "reason": reason}, user)
        return Promotion(previous, version)


def set_alias(ws: Workspace, name: str, alias: str, version: str) -> None:
    """Give a version an alias other than `champion`, such as `challenger`, unless a version of a later day has it.

    Raises:
        UserError: there is no such version, or the store cannot be written.
    """
    if alias == CHAMPION:
        raise ValueError("the champion's alias is given by settle, promote and roll_back")
    with Client(ws) as client:
        candidate, holder = _get_version(client, name, version), alias_holder(client, name, alias)
        if holder is None or not _is_later(holder, candidate):
            client.set_registered_model_alias(name, alias, version)


def champion_of_day(ws: Workspace, name: str, ds: str | None, besides: Collection[str] = ()) -> Version | None:
    """Return the champion as of a day: never one of a later day.

    Args:
        ds: the day.
        besides: keys of versions to leave out.

    Returns:
        the version with the alias. If that is of a later day or left out, the newest version up to the day that was
        champion of its day. None without such a version.
    """
    if not is_there(ws):
        return None
    with Client(ws) as client:
        holder = alias_holder(client, name, CHAMPION)
        if holder is not None and holder.tags.get(KEY) not in besides and _not_after(holder, ds):
            return version_of(client, name, holder)
        known = [v for v in _in_use(client, name) if v.tags.get(KEY) not in besides and _not_after(v, ds)]
        newest = max(known, key=age, default=None)
        return None if newest is None else version_of(client, name, newest)


def judged_against(version: Version) -> Mapping[str, str] | None:
    """Return the model that a version's verdict compared it with (version, key, name), or None.

    Raises:
        KeyError: the version has no verdict.
    """
    reference: Mapping[str, str] | None = json.loads(version.tags[JUDGED_AGAINST])
    return reference


def moved_by_hand(client: MlflowClient, name: str, holder: Any) -> bool:
    """Return whether the alias is at another version than the one to which headrace last gave it, if recorded."""
    last = next(
        (m.tags.get(_LAST_CHAMPION) for m in client.search_registered_models(filter_string=f"name = '{quoted(name)}'")),
        None,
    )
    return last is not None and holder is not None and str(holder.version) != last


def _give(
    ws: Workspace,
    client: MlflowClient,
    name: str,
    version: str,
    previous: str | None,
    details: Mapping[str, Any],
    user: str | None = None,
) -> None:
    client.set_registered_model_alias(name, CHAMPION, version)
    client.set_registered_model_tag(name, _LAST_CHAMPION, version)
    _log_move(ws, name, previous, version, details, user)


def _log_move(
    ws: Workspace,
    name: str,
    previous: str | None,
    version: str | None,
    details: Mapping[str, Any],
    user: str | None = None,
) -> None:
    moved_at = datetime.now(UTC).isoformat(timespec="seconds")
    record = {"at": moved_at, "by": user or user_name(), "model": name, "from": previous, "to": version, **details}
    file = ws.promotions(name)
    file.parent.make_dir()
    file.append(json.dumps(record).encode() + b"\n")
    log.info("the alias %s of %s is at version %s (before: %s)", CHAMPION, name, version or "none", previous or "none")


def _decide(client: MlflowClient, name: str, version: str, status: str, reason: str, user: str | None) -> None:
    decided_at = datetime.now(UTC).isoformat(timespec="seconds")
    for tag, value in ((DECIDED_BY, user or user_name()), (DECIDED_AT, decided_at), (REASON, reason)):
        client.set_model_version_tag(name, version, tag, value)
    _set_status(client, name, version, status)


def _set_status(client: MlflowClient, name: str, version: str, status: str) -> None:
    client.set_model_version_tag(name, version, STATUS, status)


def _get_version(client: MlflowClient, name: str, version: str) -> Any:
    for v in client.search_model_versions(f"name = '{quoted(name)}'"):
        if str(v.version) == version:
            return v
    raise UserError(f"model '{name}' has no version {version}: see headrace models")


def _in_use(client: MlflowClient, name: str) -> list[Any]:
    records = client.search_model_versions(f"name = '{quoted(name)}'")
    return [v for v in records if is_ours(v) and v.tags.get(STATUS) in IN_USE]


def age(version: Any) -> tuple[str, int]:
    """Return the sort key of a version (MLflow's or ours): its day, then its number."""
    return version.tags.get(DS) or "", int(version.version)


def _is_later(version: Any, reference: Any) -> bool:
    ds, reference_ds = version.tags.get(DS), reference.tags.get(DS)
    return ds is not None and reference_ds is not None and ds > reference_ds


def _not_after(version: Any, ds: str | None) -> bool:
    version_ds = version.tags.get(DS)
    return ds is None or version_ds is None or version_ds <= ds


def _has_folder(client: MlflowClient, name: str, version: Any) -> bool:
    return version_of(client, name, version).source.is_dir()


def _check_folder(client: MlflowClient, name: str, record: Any) -> None:
    version = version_of(client, name, record)
    if not version.source.is_dir():
        raise UserError(f"{version.source}, version {version.version} of model '{name}', is gone: choose another one")
