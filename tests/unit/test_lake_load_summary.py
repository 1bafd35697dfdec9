"""The summary of a load history beside the log answers as all commits do, read newest first for each question."""

from __future__ import annotations

import gzip
import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.lake.delta.log import DeltaLog, FileAction
from headrace.lake.landing import load_history
from headrace.lake.landing.load_history import DayState, LoadHistory, LoadRecord
from headrace.storage import local
from tests.unit.test_lake_log import add, commit, remove

DAYS = ("2026-03-01", "2026-03-02", "2026-03-03")


class Table:
    """A table whose commits are drawn: loads, and what others do to loaded days."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.random, self.version = folder, random.Random(seed), 0
        #: Rows of each live file, by day and path, after each version.
        self.past: list[dict[str, dict[str, int]]] = [{}]
        commit(folder, 0, {"metaData": {"schemaString": '{"fields": []}'}})

    def draw(self) -> None:
        live = {ds: dict(files) for ds, files in self.past[-1].items()}
        ds = self.random.choice(DAYS)
        kind = self.random.choice(("load", "load", "delete", "optimize", "restore", "write", "erase", "retain", "none"))
        after = {day: dict(files) for day, files in live.items()}
        metadata, operation = None, kind.upper()
        if kind == "load":
            after[ds] = {self.new(ds): self.random.randrange(1, 4) for _ in range(self.random.randrange(3))}
            kept_rows = sum(after[ds].values()) - (self.random.random() < 0.1)
            key, then = f"k{self.random.randrange(4)}", self.random.choice(([], [], [DAYS[2]], [*DAYS]))
            metadata = LoadRecord(ds, key, "d", "j", [["a", 1, "s"]], {"kept": kept_rows}, then).metadata()
        elif kind == "restore":
            after = self.random.choice(self.past)
        elif kind == "retain":
            first = self.random.choice((DAYS[0], DAYS[0], DAYS[1]))
            after = {day: files for day, files in after.items() if day >= first}
            metadata = json.dumps({"headrace.retention": {"first": first}})
        elif kind != "none" and (files := after.get(ds)):
            path = self.random.choice(sorted(files))
            rows = files[path]
            if kind in ("delete", "optimize", "erase"):
                del files[path]
            left = {"delete": rows - 1, "erase": rows - 1, "optimize": rows, "write": 1}[kind]
            if left or kind == "optimize":
                files[self.new(ds)] = left
            if kind == "erase":
                metadata = json.dumps({"headrace.erasure": {"request": "r", "rows": {ds: 1}}})
        self.write(operation, live, after, metadata, kind != "optimize")

    def new(self, ds: str) -> str:
        return f"ds={ds}/{self.version + 1}-{self.random.randrange(10**9)}.parquet"

    def write(
        self,
        operation: str,
        live: dict[str, dict[str, int]],
        after: dict[str, dict[str, int]],
        metadata: str | None,
        data_change: bool,
    ) -> None:
        self.version += 1
        actions: list[dict[str, Any]] = [
            {"commitInfo": {"operation": operation} | ({} if metadata is None else {"userMetadata": metadata})}
        ]
        for ds in sorted({*live, *after}):
            old, new = live.get(ds, {}), after.get(ds, {})
            says_day = self.random.random() < 0.8
            actions += [remove(path, ds if says_day else None, data_change) for path in sorted(old.keys() - new.keys())]
            for path in sorted(new.keys() - old.keys()):
                action = add(self.folder, path, ds, new[path])
                action["add"]["dataChange"] = data_change
                actions.append(action)
        commit(self.folder, self.version, *actions)
        self.past.append(after)


class PlainHistory:
    """The same answers by reading all commits, newest first, for each question."""

    def __init__(self, log: DeltaLog) -> None:
        self.commits = list(log.commits())
        self.records: dict[str, tuple[int, str, int]] = {}
        self.then: dict[str, list[str]] = {}
        expired = ""
        for c in self.commits:
            metadata = json.loads(c.user_metadata or "{}")
            record = metadata.get("headrace.ingest")
            if record and record["ds"] >= expired:
                self.then.setdefault(record["ds"], record["then"])
                self.records.setdefault(record["ds"], (c.version, record["key"], record["rows"]["kept"]))
            expired = max(expired, metadata.get("headrace.retention", {}).get("first", ""))

    def state(self, ds: str) -> tuple[int, list[str], bool | str]:
        """Rows, what removed some, and whether the day is damaged."""
        loaded, _, kept_rows = self.records[ds]
        live: dict[Any, FileAction] = {}
        changes: list[tuple[str, bool]] = []
        past: list[tuple[set[Any], list[tuple[str, bool]]]] = []
        erased = 0
        for c in reversed(self.commits):
            if c.version < loaded:
                continue
            removes = [r for r in c.removes if r.key in live]
            new = [a for a in c.adds if a.partition and a.partition["ds"] == ds]
            for action in removes:
                del live[action.key]
            for action in new:
                live[action.key] = action
            metadata = json.loads(c.user_metadata or "{}")
            if "headrace.erasure" in metadata:
                erased += metadata["headrace.erasure"]["rows"].get(ds, 0)
            elif c.version > loaded and (removes or new):
                if c.operation == "RESTORE":
                    same = [ch for files, ch in past if files == set(live)]
                    if not same:
                        return 0, [], f"the load was undone by RESTORE at version {c.version}"
                    changes = list(same[-1])
                elif any(a.data_change for a in (*removes, *new)):
                    changes = [*changes, (f"{c.operation} at version {c.version}", bool(removes))]
            past.append((set(live), changes))
        rows = sum(a.rows or 0 for a in live.values())
        removed = [description for description, is_removal in changes if is_removal]
        return rows, removed, bool(not removed and (changes or rows + erased != kept_rows))

    def last_change(self, ds: str) -> int:
        for c in self.commits:
            metadata = json.loads(c.user_metadata or "{}")
            days = {str(a.path).split("/ds=")[1][:10] for a in (*c.adds, *c.removes)}
            if "headrace.ingest" in metadata:
                days = {metadata["headrace.ingest"]["ds"]}
            if "headrace.retention" not in metadata and any(day <= ds for day in days):
                return c.version
        return self.commits[-1].version

    def removed_by_others(self, after: int, ds: str) -> str | None:
        by_others = [
            c
            for c in self.commits
            if c.version > after
            and not (c.user_metadata or "").startswith('{"headrace.')
            and any(r.data_change and str(r.path).split("/ds=")[1][:10] <= ds for r in c.removes)
        ]
        return f"{by_others[-1].operation} at version {by_others[-1].version}" if by_others else None


def assert_same_answers(log: DeltaLog) -> None:
    history, plain = LoadHistory(log), PlainHistory(log)
    assert {ds: (r.version, r.key, r.rows["kept"]) for ds, r in history.records.items()} == plain.records
    for key in ("k0", "k1", "k2", "k3"):
        assert [r.ds for r in history.loaded_by(key)] == sorted(ds for ds, r in plain.records.items() if r[1] == key)
    loaded = plain.records
    again = {d for ds, then in plain.then.items() for d in then if d in loaded and loaded[d][0] < loaded[ds][0]}
    assert history.to_load_again() == again
    for ds in plain.records:
        state, (rows, removed, damage) = history.state(ds), plain.state(ds)
        assert (state.rows, list(state.changed_by)) == (rows, removed)
        assert state.damage == damage if isinstance(damage, str) else (state.damage is not None) == damage
    for ds in ("2026-02-28", *DAYS, "2026-04-01"):
        assert history.last_change(ds) == plain.last_change(ds)
        for after in range(-1, history.version + 1):
            assert history.removed_by_others(after, ds) == plain.removed_by_others(after, ds)


@pytest.fixture
def each_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A summary is written however few commits came."""
    monkeypatch.setattr(load_history, "_COMMITS_AFTER_SUMMARY", 0)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32), commits=st.integers(1, 25), saved_share=st.floats(0, 1))
def test_the_summary_answers_as_the_commits_do(
    seed: int, commits: int, saved_share: float, tmp_path_factory: pytest.TempPathFactory, each_commit: None
) -> None:
    folder = tmp_path_factory.mktemp("table") / "events"
    table, log = Table(folder, seed), DeltaLog(local(folder))
    for _ in range(commits):
        table.draw()
        if table.random.random() < saved_share:
            LoadHistory(log).save_summary()
            load_history._replay_commits.cache_clear()  # another process reads it
    assert_same_answers(log)


def test_commits_before_it_are_not_read(tmp_path: Path, each_commit: None) -> None:
    table, log = Table(tmp_path / "events", 7), DeltaLog(local(tmp_path / "events"))
    for _ in range(30):
        table.draw()
    LoadHistory(log).save_summary()
    expected = LoadHistory(log)
    for version in range(30):  # whoever reads them finds no commit
        (table.folder / "_delta_log" / f"{version:020d}.json").write_text("{}\n" if version else "")
    (table.folder / "_delta_log" / f"{0:020d}.json").write_text(json.dumps({"metaData": {"schemaString": "{}"}}) + "\n")
    load_history._replay_commits.cache_clear()
    history = LoadHistory(log)
    assert history.records == expected.records != {}
    assert [history.state(ds) for ds in history.records] == [expected.state(ds) for ds in expected.records]


def test_few_commits_are_not_worth_it(tmp_path: Path) -> None:
    table, log = Table(tmp_path / "events", 7), DeltaLog(local(tmp_path / "events"))
    summary = table.folder / "_delta_log" / "_headrace_loads.json.gz"
    written = []
    for _ in range(70):
        table.draw()
        LoadHistory(log).save_summary()
        written.append(summary.read_bytes() if summary.exists() else b"")
    assert [n + 1 for n in range(1, 70) if written[n] != written[n - 1]] == [32, 65]


@pytest.mark.parametrize("damage", ["empty", "torn", "another form", "another table", "not ours", "a newer log"])
def test_what_is_no_summary_of_this_log_is_not_believed(damage: str, tmp_path: Path, each_commit: None) -> None:
    table, log = Table(tmp_path / "events", 11), DeltaLog(local(tmp_path / "events"))
    for _ in range(20):
        table.draw()
    LoadHistory(log).save_summary()
    summary = table.folder / "_delta_log" / "_headrace_loads.json.gz"
    content = summary.read_bytes()
    if damage == "another table":
        other_table = Table(tmp_path / "other", 12)
        for _ in range(20):
            other_table.draw()
        LoadHistory(DeltaLog(local(other_table.folder))).save_summary()
        shutil.copy(other_table.folder / "_delta_log" / summary.name, summary)
    elif damage == "a newer log":  # a backup of the table came back without its last commits
        for version in (19, 20):
            (table.folder / "_delta_log" / f"{version:020d}.json").unlink()
    else:
        text = gzip.decompress(content).replace(b'"form":2', b'"form":3')
        summary.write_bytes(
            {"empty": b"", "torn": content[: len(content) // 2], "another form": gzip.compress(text)}.get(
                damage, gzip.compress(b"[]\n[]")
            )
        )
    load_history._replay_commits.cache_clear()
    assert_same_answers(log)


def test_a_day_as_it_was_loaded(tmp_path: Path, each_commit: None) -> None:
    folder = tmp_path / "events"
    table, log = Table(folder, 1), DeltaLog(local(folder))
    record = LoadRecord(DAYS[0], "k", "d", "j", [["é", 1, "s"]], {"kept": 2}, bad_files={"b": "why"})
    table.write("WRITE", {}, {DAYS[0]: {f"ds={DAYS[0]}/a%20b.parquet": 2}}, record.metadata(), True)
    LoadHistory(log).save_summary()
    load_history._replay_commits.cache_clear()
    history = LoadHistory(log)
    assert history.state(DAYS[0]) == DayState(2)
    assert history.records[DAYS[0]].metadata() == record.metadata()
    (folder / f"ds={DAYS[0]}" / "a b.parquet").unlink()
    assert "is gone" in str(history.state(DAYS[0]).damage)


def test_a_removal_that_does_not_say_its_day(tmp_path: Path, each_commit: None) -> None:
    """Tables with random prefixes have no day in their paths, and a `remove` need not have the partition's values."""
    folder = tmp_path / "events"
    table, log = Table(folder, 1), DeltaLog(local(folder))
    for ds in DAYS:
        record = LoadRecord(ds, "k", "d", "j", [["a", 1, "s"]], {"kept": 2})
        table.version += 1
        info = {"commitInfo": {"operation": "WRITE", "userMetadata": record.metadata()}}
        commit(folder, table.version, info, add(folder, f"a{ds[-1]}/part.parquet", ds, 2))
    LoadHistory(log).save_summary()
    load_history._replay_commits.cache_clear()
    commit(folder, table.version + 1, {"commitInfo": {"operation": "DELETE"}}, remove("a2/part.parquet", None, True))
    history = LoadHistory(log)
    assert [history.state(ds).changed_by for ds in DAYS] == [(), (f"DELETE at version {table.version + 1}",), ()]


def test_days_that_nobody_asks_for_are_not_parsed(tmp_path: Path, each_commit: None) -> None:
    folder = tmp_path / "events"
    table, log = Table(folder, 1), DeltaLog(local(folder))
    for number, ds in enumerate(DAYS):
        record = LoadRecord(ds, f"k{number}", "d", "j", [["a", 1, "s"]], {"kept": 2}, then=[DAYS[0]])
        table.write("WRITE", {}, {ds: {f"ds={ds}/a.parquet": 2}}, record.metadata(), True)
    LoadHistory(log).save_summary()
    summary = folder / "_delta_log" / "_headrace_loads.json.gz"
    lines = gzip.decompress(summary.read_bytes()).decode().splitlines()
    assert f'"ds":"{DAYS[0]}"' in lines[2]
    lines[2] = "no JSON"
    summary.write_bytes(gzip.compress("\n".join(lines).encode()))
    load_history._replay_commits.cache_clear()
    history = LoadHistory(log)
    assert history.state(DAYS[1]) == DayState(2)
    assert history.loaded_by("k2") == [history.records[DAYS[2]]]
    with pytest.raises(json.JSONDecodeError):
        history.state(DAYS[0])
