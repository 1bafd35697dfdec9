"""Landing files, read by the standard library's JSON and CSV readers and compared with what the truth file says."""

from __future__ import annotations

import csv
import gzip
import io
import json
import logging
import signal
import subprocess
import sys
from collections import Counter
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from headrace.config import Spec, load_spec
from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.lake.generate import DayTruth, GenerationProgress, days_between, generate, landing_files, truth_path
from headrace.lake.generate.click_model import ClickModel, events
from headrace.lake.generate.event_lines import COLUMNS
from headrace.lake.generate.landing_files import MAX_FILE_ROWS, DayPlan
from headrace.stage import run_lock

DAYS = ["2026-01-01", "2026-01-02", "2026-01-03", "2026-01-04"]
SMALL = ("generate.rows_per_day=3000", "generate.users=200", "generate.items=60")
FAULTY = (*SMALL, "generate.malformed=0.05", "generate.duplicates=0.05", "generate.late=0.1", "generate.nulls=0.1")


def spec_of(*overrides: str) -> Spec:
    return load_spec("clicks", overrides)


def read_day(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir())}


def strict_row(record: dict[str, Any], ds: str, late_days: int) -> dict[str, Any] | None:
    """A row typed as conf/pipelines/clicks.yaml declares it, None where it is bad: a reader of the test's own."""
    try:
        ts = datetime.strptime(record["ts"], "%Y-%m-%dT%H:%M:%S.%fZ").replace(tzinfo=UTC)
        day = datetime.fromisoformat(ds).replace(tzinfo=UTC)
        if not day - timedelta(days=late_days) <= ts < day + timedelta(days=1):
            return None
        row = {**record, "ts": ts}
        for name in ("user_id", "item_id", "clicked", "user_age", "hour"):
            row[name] = None if record[name] is None else int(record[name])
        for name in ("user_activity", "item_price", "item_age_days"):
            row[name] = None if record[name] is None else float(record[name])
    except (KeyError, TypeError, ValueError):
        return None
    required = ("event_id", "user_id", "item_id", "clicked")
    if any(row.get(name) is None for name in required) or row["clicked"] not in (0, 1) or not 0 <= row["hour"] <= 23:
        return None
    return row if row["item_price"] is None or row["item_price"] >= 0 else None


def parse(folder: Path, ds: str, late_days: int = 3) -> tuple[list[dict[str, Any]], int]:
    """Good rows (with repetitions) and the number of bad lines of a day."""
    good, bad = [], 0
    for path in sorted(folder.glob("*.gz")):
        text = gzip.decompress(path.read_bytes()).decode("utf-8")
        records: list[dict[str, Any] | None] = []
        if path.name.endswith(".csv.gz"):
            header, *fields = list(csv.reader(io.StringIO(text)))
            assert tuple(header) == COLUMNS
            for f in fields:
                full = dict(zip(COLUMNS, (v or None for v in f), strict=True)) if len(f) == len(COLUMNS) else None
                if full is not None:
                    full["item_tags"] = full["item_tags"].split("|") if full["item_tags"] else None
                records.append(full)
        else:
            for line in text.splitlines():
                try:
                    records.append(json.loads(line))
                except json.JSONDecodeError:
                    records.append(None)
        for record in records:
            row = None if record is None else strict_row(record, ds, late_days)
            if row is None:
                bad += 1
            else:
                good.append(row)
    return good, bad


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[DayTruth]]:
    """Four days with many faults: the landing folder and the truths."""
    ws = Workspace(tmp_path_factory.mktemp("faulty"))
    return ws.landing("clicks"), generate(spec_of(*FAULTY), ws, DAYS)


def test_what_a_strict_reader_finds_is_what_the_truth_says(faulty: tuple[Path, list[DayTruth]]) -> None:
    landing, truths = faulty
    seen: set[str] = set()
    for day, truth in enumerate(truths):
        rows, bad = parse((landing / truth.ds).local_path(), truth.ds)
        assert len(rows) + bad == truth.lines == 3000 + 150 + 150
        assert bad == sum(truth.faults["malformed"].values()) == 150
        ids = [r["event_id"] for r in rows]
        new = {r["event_id"]: r for r in rows if r["event_id"] not in seen}
        assert len(new) == truth.rows == 3000
        assert sum(i in seen for i in ids) == truth.faults["duplicates"]["day_before"]
        assert sum(truth.faults["duplicates"].values()) == 150
        assert (truth.faults["duplicates"]["day_before"] > 0) == (day > 0)
        valid = [r for r in new.values() if r["ts"].date().isoformat() == truth.ds]
        assert len(valid) == truth.valid_rows
        assert truth.base_rate == pytest.approx(np.mean([r["clicked"] for r in valid]), abs=1e-9)
        lags = Counter(str((datetime.fromisoformat(truth.ds).date() - r["ts"].date()).days) for r in new.values())
        assert {k: v for k, v in truth.faults["late"].items() if v} == {k: v for k, v in lags.items() if k != "0"}
        assert len(lags) == min(day, 3) + 1
        for name in ("user_age", "user_country", "user_activity", "item_category", "item_price", "device"):
            assert truth.faults["nulls"][name] == sum(r[name] is None for r in new.values()) > 0
        assert all(r["hour"] == r["ts"].hour for r in new.values())
        seen |= set(ids)
    assert set(truths[0].faults["malformed"]) == {
        "broken_line",
        "wrong_type",
        "out_of_range",
        "missing_required",
        "bad_time",
    }
    assert all(n > 0 for t in truths for n in t.faults["malformed"].values())


def test_a_repeated_event_is_an_exact_copy(faulty: tuple[Path, list[DayTruth]]) -> None:
    landing, truths = faulty
    first: dict[str, dict[str, Any]] = {}
    repeated = 0
    for truth in truths:
        for row in parse((landing / truth.ds).local_path(), truth.ds)[0]:
            # A CSV file has no way to tell an empty list from none.
            row["item_tags"] = row["item_tags"] or None
            original = first.setdefault(row["event_id"], row)
            repeated += original is not row
            assert row == original
    assert repeated == sum(sum(t.faults["duplicates"].values()) for t in truths)


def test_entities_keep_their_traits_and_new_ones_come(faulty: tuple[Path, list[DayTruth]]) -> None:
    landing, truths = faulty
    traits: dict[tuple[str, int, str], Any] = {}
    users: list[set[int]] = []
    for truth in truths:
        rows, _ = parse((landing / truth.ds).local_path(), truth.ds)
        users.append({r["user_id"] for r in rows})
        for r in rows:
            for key, names in (
                ("user_id", ("user_age", "user_country", "user_activity")),
                ("item_id", ("item_category", "item_price")),
            ):
                for name in names:
                    if r[name] is not None:
                        assert traits.setdefault((key, r[key], name), r[name]) == r[name]
    assert users[3] - (users[0] | users[1] | users[2])
    assert max(users[0]) > 2**53
    assert [(t.users, t.new_users) for t in truths] == [(200, 200), (202, 2), (204, 2), (206, 2)]
    assert [(t.items, t.new_items) for t in truths] == [(60, 60), (60, 0), (61, 1), (61, 0)]


def test_the_ceiling_is_the_auc_of_the_true_probabilities(faulty: tuple[Path, list[DayTruth]]) -> None:
    landing, truths = faulty
    spec = spec_of(*FAULTY)
    assert spec.generate is not None
    e = events(ClickModel(spec.generate, spec.table.late_days), np.full(3000, 3), np.arange(3000))
    p_of = {f"{i:016x}": 1 / (1 + np.exp(-z)) for i, z in zip(e.event_id.tolist(), e.logit, strict=True)}
    rows = {r["event_id"]: r for r in parse((landing / DAYS[3]).local_path(), DAYS[3])[0] if r["event_id"] in p_of}
    valid = [r for r in rows.values() if r["ts"].date().isoformat() == DAYS[3]]
    labels, p = np.array([r["clicked"] for r in valid]), np.array([p_of[r["event_id"]] for r in valid])
    assert truths[3].auc_method == "exact"
    assert truths[3].auc_ceiling == pytest.approx(roc_auc_score(labels, p), abs=1e-8)
    assert truths[3].log_loss_floor == pytest.approx(-np.mean(np.log(np.where(labels == 1, p, 1 - p))), abs=1e-8)
    assert truths[3].auc_expected is not None
    # 600 clicks: the labels' noise is below 0.5 / sqrt(600) = 0.02.
    assert truths[3].auc_ceiling == pytest.approx(truths[3].auc_expected, abs=0.04)


def test_a_large_days_histograms_say_nearly_the_same(ws: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_of(*SMALL)
    (exact,) = generate(spec, ws, DAYS[1:2])
    monkeypatch.setattr(landing_files, "EXACT_ROWS", 2_999)
    (rough,) = generate(spec, ws, DAYS[1:2], force=True)
    assert (exact.auc_method, rough.auc_method) == ("exact", "histogram")
    assert rough.auc_ceiling != exact.auc_ceiling
    assert rough.auc_ceiling == pytest.approx(exact.auc_ceiling, abs=1e-4)
    assert rough.auc_expected == pytest.approx(exact.auc_expected, abs=1e-6)
    same = {"auc_ceiling": None, "auc_expected": None, "auc_method": "exact"}
    assert rough.model_copy(update=same) == exact.model_copy(update=same)


def test_a_days_bytes_depend_on_nothing_but_seed_parameters_and_day(tmp_path: Path) -> None:
    spec = spec_of(*FAULTY)
    all_days, two_days, seeded = (Workspace(tmp_path / name) for name in ("one", "other", "seeded"))
    generate(spec, all_days, DAYS)
    generate(spec, two_days, [DAYS[3], DAYS[1]])
    generate(spec_of(*FAULTY, "generate.seed=8"), seeded, DAYS[3:])
    for ds in (DAYS[1], DAYS[3]):
        assert read_day(all_days.landing("clicks").local_path() / ds) == read_day(
            two_days.landing("clicks").local_path() / ds
        )
        texts = [truth_path(w.landing("clicks"), ds).read_text() for w in (all_days, two_days)]
        assert texts[0] == texts[1]
    assert not (two_days.landing("clicks") / DAYS[2]).exists()
    of_seed = read_day(seeded.landing("clicks").local_path() / DAYS[3])
    assert all(
        of_seed[name] != data for name, data in read_day(all_days.landing("clicks").local_path() / DAYS[3]).items()
    )
    # Neither a time nor a name in gzip's header (RFC 1952: MTIME at 4..8, flags at 3).
    for data in of_seed.values():
        assert data[3:8] == b"\0" * 5


def test_a_rerun_does_nothing_and_says_so(ws: Workspace, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "headrace.generate")
    spec, folder = spec_of(*SMALL), ws.landing("clicks").local_path() / DAYS[0]
    first = generate(spec, ws, DAYS[:1])
    truth = truth_path(ws.landing("clicks"), DAYS[0]).local_path()
    times = {p: p.stat().st_mtime_ns for p in [*folder.iterdir(), folder, truth]}
    caplog.clear()
    assert generate(spec, ws, DAYS[:1]) == first
    assert {p: p.stat().st_mtime_ns for p in times} == times
    assert "nothing to do" in caplog.text
    data = read_day(folder)
    generate(spec, ws, DAYS[:1], force=True)
    assert read_day(folder) == data
    assert folder.stat().st_mtime_ns != times[folder]
    caplog.clear()
    (changed,) = generate(spec_of(*SMALL, "generate.nulls=0.3"), ws, DAYS[:1])
    assert "its parameters have changed (nulls 0.02 -> 0.3)" in caplog.text
    assert changed.key != first[0].key
    assert read_day(folder) != data
    assert sorted(p.name for p in ws.landing("clicks").local_path().iterdir()) == [DAYS[0], "truth"]


@pytest.mark.parametrize("damage", ["truncated", "other bytes", "gone", "stray", "no truth", "old truth"])
def test_a_damaged_day_is_made_again(ws: Workspace, caplog: pytest.LogCaptureFixture, damage: str) -> None:
    caplog.set_level(logging.INFO, "headrace.generate")
    spec, landing = spec_of(*SMALL), ws.landing("clicks").local_path()
    generate(spec, ws, DAYS[:1])
    files, path = read_day(landing / DAYS[0]), landing / DAYS[0] / "part-0001.json.gz"
    match damage:
        case "truncated":
            path.write_bytes(files[path.name][:-9])
        case "other bytes":
            path.write_bytes(files[path.name][:-8] + b"12345678")
        case "gone":
            path.unlink()
        case "stray":
            (landing / DAYS[0] / "part-0009.json.gz").write_bytes(files[path.name])
        case "no truth":
            truth_path(ws.landing("clicks"), DAYS[0]).local_path().unlink()
        case "old truth":
            truth_path(ws.landing("clicks"), DAYS[0]).local_path().write_text('{"ds": "2026-01-01"}')
    caplog.clear()
    generate(spec, ws, DAYS[:1])
    assert "writing 3,000 rows" in caplog.text
    assert read_day(landing / DAYS[0]) == files


# Kills itself just before the n-th rename: files (2), the truth, the new day.
_KILLED = """
import os, signal, sys
from pathlib import Path
from headrace.config import load_spec
from headrace.lake.generate import generate
from headrace.storage import system
from headrace.config.workspace import Workspace

home, ds, at, *overrides = sys.argv[1:]
left, calls = int(at), {name: getattr(system, name) for name in ('replace', 'exchange')}

def dying(name):
    def call(*args):
        global left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return calls[name](*args)
    return call

for name in calls:
    setattr(system, name, dying(name))
generate(load_spec("clicks", overrides), Workspace(Path(home)), [ds])
"""


@pytest.mark.parametrize("call_number", [1, 2, 3, 4])
def test_killed_anywhere_it_shows_the_old_day_and_a_rerun_heals(tmp_path: Path, call_number: int) -> None:
    old_spec = spec_of(*SMALL, "generate.files_per_day=2")
    changes = (*SMALL, "generate.files_per_day=2", "generate.seed=9")
    ws, calm = Workspace(tmp_path / "killed"), Workspace(tmp_path / "calm")
    generate(old_spec, ws, DAYS[:1])
    generate(spec_of(*changes), calm, DAYS[:1])
    folder = ws.landing("clicks").local_path() / DAYS[0]
    old, expected = read_day(folder), read_day(calm.landing("clicks").local_path() / DAYS[0])
    command = [sys.executable, "-c", _KILLED, str(ws.home), DAYS[0], str(call_number), *changes]
    assert subprocess.run(command, check=False, capture_output=True).returncode == -signal.SIGKILL
    visible = {p.name: p.read_bytes() for p in ws.landing("clicks").local_path().glob(f"{DAYS[0]}/*.gz")}
    assert visible == old
    generate(spec_of(*changes), ws, DAYS[:1])
    assert read_day(folder) == expected
    assert sorted(p.name for p in ws.landing("clicks").local_path().iterdir()) == [DAYS[0], "truth"]
    truths = [truth_path(w.landing("clicks"), DAYS[0]).read_text() for w in (ws, calm)]
    assert truths[0] == truths[1]


def test_a_failure_leaves_nothing_behind(ws: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(landing_files, "write_gzip", full)
    with pytest.raises(OSError, match="No space"):
        generate(spec_of(*SMALL), ws, DAYS[:1])
    assert list(ws.landing("clicks").local_path().iterdir()) == []


def test_progress_reaches_the_end(ws: Workspace) -> None:
    seen: list[GenerationProgress] = []
    generate(spec_of(*SMALL), ws, DAYS[:2], progress=seen.append)
    assert [(p.ds, p.files_done) for p in seen if p.days_done == 0] == [(DAYS[0], n) for n in (1, 2, 3, 4)]
    assert (seen[-1].days_done, seen[-1].days, seen[-1].rows_done) == (2, 2, 6_000)
    seen.clear()
    generate(spec_of(*SMALL), ws, DAYS[:2], progress=seen.append)
    assert [(p.days_done, p.rows_done) for p in seen] == [(1, 0), (2, 0)]


@pytest.mark.parametrize(
    "overrides",
    [
        ("generate.rows_per_day=1",),
        ("generate.rows_per_day=500", "generate.formats=[csv]", "generate.malformed=1", "generate.duplicates=1"),
        ("generate.rows_per_day=500", "generate.late=1", "generate.nulls=1", "table.late_days=0"),
    ],
)
def test_extremes(ws: Workspace, overrides: tuple[str, ...]) -> None:
    spec = spec_of("generate.users=2", "generate.items=2", *overrides)
    truths = generate(spec, ws, DAYS[:2])
    seen: set[str] = set()
    for truth in truths:
        rows, bad = parse(ws.landing("clicks").local_path() / truth.ds, truth.ds, spec.table.late_days)
        ids = {r["event_id"] for r in rows}
        assert len(ids - seen) == truth.rows
        assert len(rows) + bad == truth.lines
        assert bad == sum(truth.faults["malformed"].values())
        seen |= ids


def test_files_grow_in_number_with_the_day() -> None:
    def files(rows: int) -> int:
        spec = spec_of(f"generate.rows_per_day={rows}")
        assert spec.generate is not None
        return DayPlan(ClickModel(spec.generate, 3), DAYS[0], date(2026, 1, 1), 0).files

    assert [files(n) for n in (1, 3, 60_000, 4 * MAX_FILE_ROWS, 4 * MAX_FILE_ROWS + 1)] == [1, 3, 4, 4, 5]
    assert files(300_000_000) == 600


def test_what_the_user_gets_wrong(ws: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_of(*SMALL)
    with pytest.raises(UserError, match="2025-12-31 is before the log's first day, 2026-01-01"):
        generate(spec, ws, ["2026-01-02", "2025-12-31"])
    with pytest.raises(UserError, match="'tomorrow' is not a date"):
        generate(spec, ws, ["tomorrow"])
    with pytest.raises(UserError, match="has no 'generate' section"):
        generate(spec.model_copy(update={"generate": None}), ws, DAYS[:1])
    with pytest.raises(UserError, match="2026-01-01 is before the first day 2026-01-05"):
        days_between("2026-01-05", "2026-01-01")
    with pytest.raises(UserError, match=r"generate\.start: 'soon' is not a date"):
        spec_of("generate.start=soon")
    with run_lock(ws, "clicks-generate"), pytest.raises(UserError, match="another run"):
        generate(spec, ws, DAYS[:1])
    monkeypatch.setattr(landing_files, "_BYTES_PER_LINE", 2**50)
    with pytest.raises(UserError, match=r"lower generate\.rows_per_day"):
        generate(spec, ws, DAYS[:1])
    assert not ws.landing("clicks").exists()


def test_days_between_crosses_a_leap_day() -> None:
    assert days_between("2028-02-28", "2028-03-01") == ["2028-02-28", "2028-02-29", "2028-03-01"]
    assert days_between("2026-01-01", "2026-01-01") == ["2026-01-01"]
