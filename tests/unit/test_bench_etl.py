"""Parts of benchmarks: tables and days, the memory limit of a process, and the bound of a server."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from bench import bench_day, bench_etl, report
from bench.bench_etl import combined, markdown, part_named
from bench.bench_serve import highest_utilisation, queue_latencies
from bench.criteo_data import CATEGORIES, COUNTS, table_of_day
from bench.etl_peers import differences
from bench.report import Figure, FigureParts
from bench.usage import limited_memory
from headrace.errors import UserError


def leave(folder: Path, part: str, *figures: Figure) -> None:
    (folder / f"{part}.json").write_text(json.dumps({"code": "abc", "figures": [f.row() for f in figures]}))


def total(size: str, rate: float) -> Figure:
    return Figure(f"fit, transform and write, {size}", rate, "rows/s", floor=100.0)


def test_parts_are_put_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = FigureParts("etl", tmp_path)
    leave(tmp_path, "real", total("10,000 real lines", 20))
    leave(tmp_path, "8", total("8 M rows", 500), Figure("against NVTabular 23.8, 8 M rows", 500, "rows/s", peer=40))
    leave(tmp_path, "0.5", total("0.5 M rows", 250))
    figures = combined(measured)
    assert [f.name for f in figures] == [
        "fit, transform and write, 0.5 M rows",
        "fit, transform and write, 8 M rows",
        "against NVTabular 23.8, 8 M rows",
        "fit, transform and write, 10,000 real lines",
        "growth with rows: 8 M against 0.5 M",
    ]
    assert (figures[-1].value, figures[-1].peer) == (500, 250)
    _, _, *lines = markdown(figures).splitlines()
    cells = [[c.strip() for c in line.strip("|").split("|")] for line in lines]
    assert [c[0] for c in cells] == ["0.5 M rows", "8 M rows", "10,000 real lines"]
    assert cells[1][3:9] == ["500", "–", "100", "5.0", "40", "12.5"]
    assert cells[0][7:9] == ["–", "–"]
    # Another code's figures, or those of files that differ from a commit, are measured again.
    monkeypatch.setattr(report, "checkout_version", lambda: "abc")
    assert measured.is_measured("8")
    assert not measured.is_measured("4")
    for version in ("abd", "abc-dirty"):
        monkeypatch.setattr(report, "checkout_version", lambda version=version: version)
        assert not measured.is_measured("8")


def test_what_a_peer_wrote_is_compared_row_by_row(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    # Ours has a and b as 2 and 3, theirs as 3 and 2; 0 is null and 1 unknown in both.
    rows = pd.DataFrame({"C": rng.integers(0, 4, 500), "n": rng.random(500), "label": rng.integers(0, 2, 500)})
    peer_rows = rows.assign(C=np.array([0, 1, 3, 2])[rows["C"]], n=rows["n"] + 1e-7).sample(frac=1, random_state=1)

    def left(name: str, frame: pd.DataFrame, values: dict[str, int]) -> list[str]:
        for folder, table in ((tmp_path / "ours", rows), (tmp_path / name, frame)):
            for split, part in (("train", table[table["n"] < 0.5]), ("valid", table[table["n"] >= 0.5])):
                (folder / split).mkdir(parents=True, exist_ok=True)
                part.astype({"C": "int32", "n": "float32"}).to_parquet(folder / split / "0.parquet")
        (tmp_path / name / "vocabulary").mkdir()
        saved = pd.DataFrame({"value": list(values), "code": list(values.values())})
        saved.to_parquet(tmp_path / name / "vocabulary" / "C.parquet")
        vocabularies = {"C": pa.table({"value": ["a", "b"], "code": [2, 3]})}
        return differences(tmp_path / "ours", tmp_path / name, vocabularies, ["C"], ["n"])

    assert left("same", peer_rows, {"b": 2, "a": 3}) == []
    assert left("codes", peer_rows, {"a": 2, "b": 3}) == [
        f"{split}: rows have other codes or labels" for split in ("train", "valid")
    ]
    assert "lacks 1, 0 are its own" in left("fewer", peer_rows, {"b": 2})[0]
    assert "lacks 1, 1 are its own" in left("other", peer_rows, {"b": 2, "c": 3})[0]
    labels = peer_rows.assign(label=1 - peer_rows["label"])
    assert len(left("labels", labels, {"b": 2, "a": 3})) == 2
    assert "rows, ours has" in left("shorter", peer_rows.head(499), {"b": 2, "a": 3})[-1]
    numbers = peer_rows.assign(n=peer_rows["n"] + 1e-3 * (peer_rows["n"] < 0.4))
    assert left("numbers", numbers, {"b": 2, "a": 3})[0].startswith("train.n: numbers differ by 0.001")


def test_names_of_parts() -> None:
    assert [part_named(p) for p in ("2", "2.0", "0.25", "real")] == ["2", "2", "0.25", "real"]
    for wrong in ("two", "-1", "nan", "0"):
        with pytest.raises(UserError, match=wrong):
            part_named(wrong)


@pytest.mark.skipif(not bench_etl.REAL_LINES.is_file(), reason="the real lines are not here")
def test_real_lines_have_the_columns_of_made_ones(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    tables = [pq.read_table(p) for p in bench_etl.real_days(tmp_path / "days")]
    assert len(tables) == 8
    generated = table_of_day(10, 0).schema
    for table in tables:
        assert {f.name: f.type for f in table.schema} == {f.name: f.type for f in generated}
    lines = bench_etl.REAL_LINES.read_text().splitlines()
    assert sum(t.num_rows for t in tables) == len(lines)
    last, row = lines[-1].split("\t"), tables[-1].slice(tables[-1].num_rows - 1).to_pylist()[0]
    expected = [int(last[0]), *(int(c) if c else None for c in last[1:14]), *(c or None for c in last[14:])]
    assert [row[c] for c in ("label", *COUNTS, *CATEGORIES)] == expected


#: A sync of no file is refused, unless it is none.
_SYNC = "import ctypes, os; libc = ctypes.CDLL(None); print(libc.fsync(-1), libc.fdatasync(-1), libc.syncfs(-1))"


@pytest.mark.skipif(sys.platform != "linux", reason="preloaded into Linux's programs")
def test_syncs_return_at_once() -> None:
    def run(environment: dict[str, str] | None) -> str:
        ran = subprocess.run([sys.executable, "-c", _SYNC], env=environment, capture_output=True, text=True, check=True)
        return ran.stdout.strip()

    assert run(None) == "-1 -1 -1"
    assert run(bench_day.without_syncs()) == "0 0 0"


def test_pairs_take_turns_and_medians_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[bool] = []

    def fake_run(home: Path, arguments: Any, syncs: bool = True) -> bench_day.DayRun:
        assert (home / "landing" / "rows").is_file()
        ran.append(syncs)
        return bench_day.DayRun({}, 100.0 + len(ran) + (4.0 if syncs else 0.0))

    def fake_headrace(*arguments: str, **_: object) -> None:
        landing = Path(arguments[arguments.index("--home") + 1]) / "landing"
        landing.mkdir(parents=True)
        (landing / "rows").touch()

    monkeypatch.setattr(bench_day, "_run", fake_run)
    monkeypatch.setattr(bench_day, "_headrace", fake_headrace)
    pairs = bench_day.measure_pairs(0.1, 3)
    assert ran == [True, False, False, True, True, False]
    assert pairs == [(105.0, 102.0), (108.0, 103.0), (109.0, 106.0)]
    figures = bench_day.of_pairs(0.1, pairs)
    assert [(f.value, f.peer) for f in figures] == [(108.0, 103.0), (3.0, pytest.approx(5.4))]


def test_a_group_goes_with_all_that_is_in_it() -> None:
    program = (
        "import subprocess, sys; input(); "
        "subprocess.Popen([sys.executable, '-c', 'input()'], stdin=subprocess.PIPE).wait()"
    )
    try:
        with limited_memory(1) as group:
            process = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE)
            group.add(process.pid)
            assert process.stdin is not None
            process.stdin.write(b"\n")
            process.stdin.flush()
            until = time.monotonic() + 30
            while len((group.folder / "cgroup.procs").read_text().split()) < 2 and time.monotonic() < until:
                time.sleep(0.02)
            assert group.peak_mib > 0
            assert group.killed == 0
            process.kill()
            process.wait()
    except RuntimeError as e:
        pytest.skip(str(e))
    assert not group.folder.exists()


def test_a_process_that_takes_more_is_killed() -> None:
    try:
        with limited_memory(0.05) as group:
            program = "input(); x = bytearray(2**28)"
            process = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE)
            group.add(process.pid)
            process.communicate(b"\n")
            assert process.returncode == -9
            assert group.killed == 1
    except RuntimeError as e:
        pytest.skip(str(e))


@pytest.mark.parametrize("share", [0.3, 0.7, 0.9])
def test_one_core_waits_as_pollaczek_and_khinchine_say(share: float) -> None:
    service = 0.004
    waits = queue_latencies(service, share / service, 1, 1_000_000, 1)
    assert waits.min() == pytest.approx(service)
    assert waits.mean() == pytest.approx(service + share * service / (2 * (1 - share)), rel=0.03)


def test_cores_serve_as_one_queue() -> None:
    """Against each request given to the core that is free first."""
    service, rate, count = 1.0, 1.6, 5000
    arrivals = np.cumsum(np.random.default_rng(3).exponential(1 / rate, count))
    free, expected = [0.0, 0.0], []
    for moment in arrivals:
        core = int(np.argmin(free))
        free[core] = max(free[core], moment) + service
        expected.append(free[core] - moment)
    assert np.sort(queue_latencies(service, rate, 2, count, 3)) == pytest.approx(np.sort(expected))


def test_the_highest_utilisation() -> None:
    """A limit below the service time allows no load; the nearer the two are, the lower the utilisation."""
    assert highest_utilisation(0.011, 0.010, 0.99) == 0
    shares = [highest_utilisation(service, 0.010, 0.99) for service in (0.004, 0.001, 0.0003)]
    assert shares == sorted(shares)
    assert 0.1 < shares[0] < 0.5 < 0.65 < shares[1] < shares[2] < 1
