"""Promotion of champions: days, verdicts, people, and changes in MLflow's own page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.models import registry
from headrace.models.registry.client import Client
from headrace.models.registry.promotion import (
    Promotion,
    champion_of_day,
    judged_against,
    promote,
    roll_back,
    set_alias,
    settle,
)
from headrace.models.registry.versions import aliases, numbered
from headrace.storage import LeaseLost, local
from tests.publish_support import overtaken


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """One store for the module: making its tables takes seconds."""
    return Workspace(tmp_path_factory.mktemp("registry"))


class Models:
    """Versions of a model of its own, each with a folder."""

    def __init__(self, ws: Workspace, name: str) -> None:
        self.ws, self.name, self.keys = ws, name, 0

    def register(self, ds: str | None, key: str | None = None) -> str:
        self.keys += 1
        key = key or f"k{self.keys}"
        folder = self.ws.home / self.name / key
        folder.mkdir(parents=True, exist_ok=True)
        return registry.register(self.ws, self.name, local(folder), {"auc": 0.7}, key, ds=ds)

    def settle(self, version: str, passed: bool = True, chosen: bool = True) -> Promotion:
        return settle(self.ws, self.name, version, passed=passed, chosen=chosen)

    @property
    def champion(self) -> str | None:
        version = registry.champion(self.ws, self.name)
        return None if version is None else version.version

    def status(self, version: str) -> str | None:
        registered = numbered(self.ws, self.name, version)
        assert registered is not None
        return registered.status

    def of_day(self, ds: str, besides: str | None = None) -> str | None:
        champion = champion_of_day(self.ws, self.name, ds, [] if besides is None else [besides])
        return None if champion is None else champion.version

    def by_hand(self, version: str) -> None:
        """Set the champion as a person does in MLflow's own page."""
        with Client(self.ws) as client:
            client.set_registered_model_alias(self.name, "champion", version)

    def log(self) -> list[tuple[str, str | None, str | None]]:
        lines = self.ws.promotions(self.name).read_text().splitlines()
        return [(r["action"], r["from"], r["to"]) for r in map(json.loads, lines)]


def test_a_run_that_is_not_the_holder_any_more_moves_no_alias(home: Workspace) -> None:
    m = Models(home, "fenced")
    first, second = m.register("2026-01-10"), m.register("2026-01-11")
    m.settle(first)
    lost = overtaken(1)
    with pytest.raises(LeaseLost):
        settle(home, m.name, second, check=lost.check)
    with pytest.raises(LeaseLost):
        settle(home, m.name, first, passed=False, check=lost.check)
    assert (m.champion, m.status(first), m.status(second)) == (first, "promoted", "registered")
    assert m.log() == [("promote", None, first)]


def test_the_newest_day_s_model_that_passed_is_champion(home: Workspace) -> None:
    m = Models(home, "days")
    first = m.register("2026-01-10")
    assert m.champion is None
    assert m.settle(first) == Promotion(None, first)
    second = m.register("2026-01-11")
    assert m.settle(second) == Promotion(first, second)
    assert m.settle(second).stays == "it is there already"
    # A backfill leaves the champion where it is, and was champion of its day.
    older = m.register("2026-01-09")
    assert "a later day" in m.settle(older).stays
    assert (m.champion, m.status(older)) == (second, "promoted")
    assert [m.of_day(f"2026-01-{d:02}") for d in (8, 9, 10, 11, 12)] == [None, older, first, second, second]
    # A day that is trained again has its new version; with the settings from before, the one from before.
    retrained = m.register("2026-01-11")
    assert m.settle(retrained).now == m.champion == retrained
    assert m.settle(second).now == m.champion == second
    refused = m.register("2026-01-12")
    assert m.settle(refused, passed=False) == Promotion(second, second, "it was refused")
    assert (m.champion, m.status(refused), m.of_day("2026-01-12")) == (second, "refused", second)
    # Other rules, another verdict.
    assert m.settle(refused).now == refused
    assert m.log() == [
        ("promote", None, first),
        ("promote", first, second),
        ("promote", second, retrained),
        ("promote", retrained, second),
        ("promote", second, refused),
    ]


def test_an_alias_that_was_moved_in_mlflow_is_obeyed(home: Workspace, caplog: pytest.LogCaptureFixture) -> None:
    m = Models(home, "page")
    first, second, third = (m.register(f"2026-01-{d}") for d in (10, 11, 12))
    for version in (first, second, third):
        m.settle(version)
    m.by_hand(first)
    assert m.of_day("2026-01-12") == first
    with caplog.at_level("INFO", "headrace.registry"):
        for version in (second, third):
            assert m.settle(version).stays == f"version {version} has had it before"
            assert m.settle(version, passed=True).now == first
    assert "was moved to version 1 outside headrace: obeyed" in caplog.text
    # A new model's verdict moves it on.
    fourth = m.register("2026-01-13")
    assert m.settle(fourth) == Promotion(first, fourth)


def test_a_verdict_that_turns_to_refused_takes_the_alias_back(home: Workspace) -> None:
    m = Models(home, "turned")
    first, second, third = (m.register(f"2026-01-{d}") for d in (10, 11, 12))
    judged_by: dict[str, dict[str, str] | None] = {first: None}
    judged_by |= {
        new: {"version": old, "key": f"k{old}", "name": "x"} for old, new in ((first, second), (first, third))
    }

    def settled(version: str, passed: bool) -> Promotion:
        return settle(home, m.name, version, passed=passed, judged_against=judged_by[version])

    settled(first, True)
    settled(second, True)
    assert settled(second, False) == Promotion(second, first)
    assert (m.champion, m.status(second), m.of_day("2026-01-12")) == (first, "refused", first)
    assert settled(second, False) == Promotion(first, first, "it was refused")
    assert settled(second, True).now == second
    # What it was held against comes before a newer one that was champion; a refused one is none any more.
    settled(third, True)
    assert settled(third, False).now == first
    settled(third, True)
    m.by_hand(second)
    m.by_hand(third)
    settled(first, False)
    assert settled(third, False) == Promotion(third, second)
    # Where somebody has put it, it stays; of the only champion there is nothing to go back to.
    settled(third, True)
    m.by_hand(second)
    assert settled(second, False).stays == "it was refused"
    assert m.champion == second
    m.by_hand(third)
    assert settled(third, False) == Promotion(third, None)
    assert (m.champion, m.of_day("2026-01-12")) == (None, None)
    assert m.log()[-1] == ("refuse", third, None)
    assert settled(first, True) == Promotion(None, first)


def test_people_take_a_champion_back_and_overrule_a_verdict(home: Workspace) -> None:
    m = Models(home, "people")
    with pytest.raises(UserError, match="no champion"):
        roll_back(home, m.name)
    first, second, third = (m.register(f"2026-01-{d}") for d in (10, 11, 12))
    for version, passed in ((first, True), (second, True), (third, False)):
        m.settle(version, passed)
    assert roll_back(home, m.name, reason="clicks fell") == Promotion(second, first)
    assert (m.champion, m.status(second)) == (first, "rolled_back")
    registered = numbered(home, m.name, second)
    assert registered is not None
    assert registered.tags["headrace.reason"] == "clicks fell"
    assert {"headrace.by", "headrace.at"} <= registered.tags.keys()
    # A rerun of its day changes nothing of that.
    assert "rolled back by hand" in m.settle(second).stays
    assert m.champion == first
    with pytest.raises(UserError, match="no version of model 'people' was champion before"):
        roll_back(home, m.name)
    assert promote(home, m.name, third, "the data were late", user="ann") == Promotion(first, third)
    assert (m.champion, m.status(third)) == (third, "overridden")
    assert "overridden by hand" in m.settle(third, passed=False).stays
    with pytest.raises(UserError, match=r"2026-01-10.*2026-01-12.*--allow-older"):
        promote(home, m.name, first, "why not")
    assert promote(home, m.name, first, "why not", allow_older=True).now == first
    with pytest.raises(UserError, match="no version 9"):
        promote(home, m.name, "9", "x")
    with pytest.raises(UserError, match="is the champion already"):
        roll_back(home, m.name, first)
    assert roll_back(home, m.name, third).now == third
    (home.home / m.name / "k1").rmdir()
    with pytest.raises(UserError, match="is gone"):
        promote(home, m.name, first, "x", allow_older=True)
    last = json.loads(home.promotions(m.name).read_text().splitlines()[3])
    assert (last["by"], last["reason"], last["was"]) == ("ann", "the data were late", "refused")


@pytest.mark.parametrize("method", ["set_registered_model_alias", "set_registered_model_tag", "set_model_version_tag"])
def test_a_killed_promotion_is_completed(home: Workspace, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow.tracking import MlflowClient

    m = Models(home, f"killed-{method[4:].replace('_', '-')}")
    first, second = m.register("2026-01-10"), m.register("2026-01-11")
    m.settle(first)

    def killed(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(MlflowClient, method, killed)
        with pytest.raises(KeyboardInterrupt):
            m.settle(second)
    assert m.champion in (first, second)
    m.settle(second)
    assert (m.champion, m.status(second)) == (second, "promoted")


def test_versions_from_before_there_were_statuses(home: Workspace) -> None:
    m = Models(home, "old")
    first, second = m.register("2026-01-10"), m.register("2026-01-11")
    with Client(home) as client:
        for version in (first, second):
            client.delete_model_version_tag(m.name, version, "headrace.status")
    m.by_hand(first)
    # They had the alias when they were registered: where it is now, somebody has put it.
    assert "had its turn" in m.settle(second).stays
    assert (m.champion, m.of_day("2026-01-11"), m.of_day("2026-01-11", besides="k1")) == (first, first, second)


def test_a_verdict_remembers_what_it_was_held_against(home: Workspace) -> None:
    m = Models(home, "against")
    number = m.register("2026-01-10")
    settle(home, m.name, number, judged_against={"version": "7", "key": "k", "name": "models/x"})
    registered = numbered(home, m.name, number)
    assert registered is not None
    assert judged_against(registered) == {"version": "7", "key": "k", "name": "models/x"}
    set_alias(home, m.name, "challenger", number)
    assert aliases(home, m.name) == {"challenger": number, "champion": number}
    set_alias(home, m.name, "challenger", m.register("2026-01-09"))  # an older day's
    assert aliases(home, m.name)["challenger"] == number
    with pytest.raises(ValueError, match="settle, promote and roll_back"):
        set_alias(home, m.name, "champion", number)


_DAYS = st.integers(1, 6)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(_DAYS, st.booleans()), min_size=1, max_size=8), st.integers(0, 10**9))
def test_an_alias_never_moves_to_an_older_day(home: Workspace, runs: list[tuple[int, bool]], salt: int) -> None:
    """Days in any order, passed or refused, some again: the champion's day never falls; it is that of a passed one."""
    m = Models(home, f"order-{salt}-{len(runs)}-{abs(hash(tuple(runs)))}")
    held, passed_days = 0, []
    for day, passed in runs:
        version = m.register(f"2026-01-0{day}")
        m.settle(version, passed)
        passed_days += [day] if passed else []
        champion = registry.champion(home, m.name)
        assert (champion is None) == (not passed_days)
        now = 0 if champion is None else int((champion.ds or "")[-1])
        assert now == max([held, *passed_days[-1:]], default=0)
        held = now
        for day_number in range(1, 7):
            known = [d for d in passed_days if d <= day_number]
            champion_then = champion_of_day(home, m.name, f"2026-01-0{day_number}")
            assert (None if champion_then is None else int((champion_then.ds or "")[-1])) == max(known, default=None)


def test_of_two_versions_of_a_day_one_is_chosen(home: Workspace) -> None:
    m = Models(home, "challenged")
    previous, day, challenger = m.register("2026-01-09"), m.register("2026-01-10"), m.register("2026-01-10")
    m.settle(previous)
    # The challenger, whether the day's model has passed or not; the alias moves once.
    for passed, status in ((True, "registered"), (False, "refused")):
        assert m.settle(challenger).now == challenger
        assert m.settle(day, passed, chosen=False).now == challenger
        assert [m.status(v) for v in (previous, day, challenger)] == ["promoted", status, "promoted"]
    assert m.log() == [("promote", None, previous), ("promote", previous, challenger)]
    assert [m.of_day(f"2026-01-{d:02}") for d in (9, 10)] == [previous, challenger]
    # Judged again by other rules: the day's model after all; the challenger has not been champion then.
    assert m.settle(day).now == day
    assert m.settle(challenger, chosen=False).now == day
    assert [m.status(v) for v in (previous, day, challenger)] == ["promoted", "promoted", "registered"]
    # Neither: it goes back to the one before.
    assert m.settle(day, passed=False).now == previous
    assert m.settle(challenger, passed=False, chosen=False).now == m.champion == previous
    # What people have decided stays.
    promote(home, m.name, challenger, "it is better on mobiles")
    assert m.settle(challenger, chosen=False).now == m.champion == challenger


def test_log_is_kept_below_the_store(home: Workspace) -> None:
    assert home.promotions("x") == home.store / "promotions" / "x.jsonl"
    assert Path(home.promotions("x")).parent.is_dir()
