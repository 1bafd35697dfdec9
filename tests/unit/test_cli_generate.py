"""`headrace generate`: which days, what it writes and prints; Spark properties written where asked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.cli.generate import requested_days
from headrace.config import load_spec
from headrace.errors import UserError
from tests.cli_support import DS, Yard, make_yard


@pytest.fixture
def yard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Yard:
    return make_yard(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("days", "start", "until", "first", "count"),
    [
        (None, None, None, "2026-01-01", 8),
        (3, None, None, "2026-01-01", 3),
        (None, "2026-01-05", None, "2026-01-05", 8),
        (1, "2026-01-05", None, "2026-01-05", 1),
        (None, None, "2026-01-09", "2026-01-01", 9),
        (2, None, "2026-01-09", "2026-01-08", 2),
        (2, "2026-01-08", "2026-01-09", "2026-01-08", 2),
        (40, "2026-01-20", None, "2026-01-20", 40),
    ],
)
def test_days_to_generate(days: int | None, start: str | None, until: str | None, first: str, count: int) -> None:
    generated = requested_days(load_spec("clicks"), days, start, until)
    assert (generated[0], len(generated), len(set(generated))) == (first, count, count)
    if until:
        assert generated[-1] == until


@pytest.mark.parametrize(
    ("days", "start", "until", "message"),
    [
        (5, "2026-01-01", "2026-01-02", "2 days, not 5"),
        (None, "2026-01-03", "2026-01-02", "before the first day"),
        (0, None, None, "at least 1"),
        (None, "soon", None, "not a date"),
    ],
)
def test_days_that_make_no_sense(days: int | None, start: str | None, until: str | None, message: str) -> None:
    with pytest.raises(UserError, match=message):
        requested_days(load_spec("clicks"), days, start, until)


def test_generate_writes_files_once_and_prints_the_ceiling(yard: Yard) -> None:
    arguments = ["generate", "clicks", "--days", "1", "--rows-per-day", "400"]
    result = yard(*arguments)
    assert result.exit_code == 0, result.output
    truth = json.loads((yard.home / "landing" / "clicks" / "truth" / "2026-01-01.json").read_text())
    row = next(line.split() for line in result.output.splitlines() if line.startswith("2026-01-01 "))
    assert row[1] == "400"
    assert row[-1] == f"{truth['auc_ceiling']:.4f}"
    files = {p: p.stat().st_mtime_ns for p in (yard.home / "landing" / "clicks" / "2026-01-01").iterdir()}
    assert yard(*arguments).exit_code == 0
    assert files == {p: p.stat().st_mtime_ns for p in (yard.home / "landing" / "clicks" / "2026-01-01").iterdir()}


def test_an_overlay_is_obeyed(yard: Yard, tmp_path: Path) -> None:
    overlay = tmp_path / "purchases.yaml"
    overlay.write_text("generate: {purchase_rate: 0.5, rows_per_day: 90, users: 20, items: 10}\n")
    result = yard("generate", "clicks", "--days", "1", "--overlay", str(overlay), "--set", "generate.items=9")
    truth = json.loads((yard.home / "landing" / "clicks" / "truth" / "2026-01-01.json").read_text())
    assert (truth["rows"], truth["items"], "purchases" in truth) == (90, 9, True), result.output


def test_spark_properties_of_a_stage_that_is_done_are_not_written(yard: Yard) -> None:
    """No path is printed: Airflow's task asks so before it submits, and starts no JVM then."""
    words = ("spark-properties", "clicks", "--unless-done", "ingest", "--ds", DS)
    path = yard.home / "spark" / "clicks.properties"
    assert yard(*words).output.strip() == str(path)
    assert yard.run("--to", "ingest").exit_code == 0
    path.unlink()
    assert (yard(*words).output, path.exists()) == ("", False)
    yard.fakes["ingest"].source = "v2"
    assert yard(*words).output.strip() == str(path)
    yard.fakes["ingest"].source = "gone"  # what is wrong the job says
    assert yard(*words).output.strip() == str(path)


def test_spark_properties_are_written_where_asked(yard: Yard, tmp_path: Path) -> None:
    result = yard("spark-properties", "clicks", "--out", str(tmp_path / "s.properties"))
    assert (result.exit_code, result.output.strip()) == (0, str(tmp_path / "s.properties"))
    assert "spark.sql.extensions=io.delta" in (tmp_path / "s.properties").read_text()
    assert yard("spark-properties", "clicks").output.strip() == str(yard.home / "spark" / "clicks.properties")
