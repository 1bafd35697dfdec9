"""Figures of `make quality`: which runs are made, which results are kept, and the page."""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench.quality import __main__ as command
from bench.quality import cases as cases_module
from bench.quality import page as page_module
from bench.quality.cases import (
    CaseResult,
    Goal,
    PublishedResult,
    QualityCase,
    QualityPart,
    load_parts,
    pipeline_case,
    recorded,
)
from bench.quality.clicks import ceiling_share
from bench.quality.page import Results, lines_of, page
from bench.quality.rankings import popularity, write_split
from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.quality.report.stage import truth_file
from headrace.stage.manifest import Manifest


class Model:
    """A case's function that counts its runs; the metric is a function of the seed."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.runs: list[int] = []
        self.fails_at = fails_at

    def __call__(self, seed: int, folder: Path) -> CaseResult:
        self.runs.append(seed)
        if seed == self.fails_at:
            raise UserError("no such table")
        return CaseResult(
            metrics={"auc": 0.7 + 0.01 * seed, "log_loss": 0.5},
            seconds=10.0 * seed,
            peak_mib=100.0,
            intervals={"auc": [0.6, 0.8]},
            notes={"targets": "abc"},
        )


def part_of(*cases: QualityCase, data: tuple[str, ...] = ()) -> QualityPart:
    published = (PublishedResult("FM", {"auc": 0.71}, "A, 2020"),)
    return QualityPart("Somebody's clicks", "The last day validates.", cases, published, data)


@pytest.fixture(autouse=True)
def below(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Send results and workspaces to a folder of the test."""
    monkeypatch.setattr(command, "quality_folder", lambda: tmp_path)
    monkeypatch.setattr(page_module, "quality_folder", lambda: tmp_path)
    monkeypatch.setattr(cases_module, "data_folder", lambda: tmp_path / "data")
    return tmp_path


def test_what_is_finished_is_not_run_again_unless_its_settings_change(below: Path) -> None:
    model, results = Model(), Results.default()
    part = part_of(QualityCase("FM", model, {"width": 8}))
    assert command.run_part("x", part, [1, 2], results) == 0
    assert command.run_part("x", part, [1, 2, 3], results) == 0
    assert model.runs == [1, 2, 3]
    wider = part_of(QualityCase("FM", model, {"width": 16}))
    assert lines_of("x", wider, results, [1, 2, 3]) == []
    command.run_part("x", wider, [1], results)
    assert model.runs == [1, 2, 3, 1]


def test_one_that_fails_keeps_no_other_from_being_run(below: Path, capfd: pytest.CaptureFixture[str]) -> None:
    failing, passing, results = Model(fails_at=2), Model(), Results.default()
    part = part_of(QualityCase("FM", failing, {}), QualityCase("MLP", passing, {}))
    assert command.run_part("x", part, [1, 2], results) == 1
    assert passing.runs == [1, 2]
    assert "FM, seed 2 failed: no such table" in capfd.readouterr().err
    failing.fails_at = None
    assert command.run_part("x", part, [1, 2], results) == 0
    assert (failing.runs, passing.runs) == ([1, 2, 2], [1, 2])


def test_a_result_that_is_cut_short_is_none(below: Path) -> None:
    case, results = QualityCase("FM", Model(), {}), Results.default()
    command.run_part("x", part_of(case), [1], results)
    path = results.path("x", case, 1)
    complete = path.read_text()
    assert results.load("x", case, 1) == Model()(1, below)
    for text in ("", complete[: len(complete) // 2], "[]", json.dumps({**json.loads(complete), "form": 0})):
        path.write_text(text)
        assert results.load("x", case, 1) is None, text


def test_a_part_without_its_data_is_skipped_with_the_reason(below: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model, results = Model(), Results.default()
    part = part_of(QualityCase("FM", model, {}), data=("somewhere",))
    assert command.run_part("x", part, [1], results) == 0
    assert model.runs == []
    assert "x: skipped: ../shared/data/somewhere is not there" in capfd.readouterr().out
    (below / "data" / "somewhere").mkdir(parents=True)
    command.run_part("x", part, [1], results)
    assert model.runs == [1]


def test_lines_have_mean_and_spread_beside_the_goal(below: Path) -> None:
    results = Results.default()
    part = part_of(QualityCase("FM", Model(), {}, goals={"auc": Goal(floor=0.7, aim=0.8)}))
    command.run_part("x", part, [1, 2, 3], results)
    (line,) = lines_of("x", part, results, [1, 2, 3])
    values = [0.71, 0.72, 0.73]
    assert (line.metric, line.seeds) == ("auc", (1, 2, 3))
    assert line.mean == pytest.approx(sum(values) / 3)
    assert line.sd == pytest.approx(statistics.pstdev(values) * (3 / 2) ** 0.5)
    assert (line.seconds, line.peak_mib, line.interval) == (30.0, 100.0, (0.6, 0.8))
    assert line.record()["reached"] == "floor"
    (summary,) = lines_of("x", part, results, [2])
    assert (summary.mean, summary.sd) == (pytest.approx(0.72), None)


def test_goals_of_errors_are_reached_from_above() -> None:
    assert [Goal(0.7, 0.8).reached(v) for v in (0.69, 0.7, 0.8)] == ["below floor", "floor", "aim"]
    error = Goal(floor=0.128, lower=True)
    assert [error.reached(v) for v in (0.126, 0.13)] == ["floor", "below floor"]
    assert [Goal(aim=0.8).reached(v) for v in (0.79, 0.81)] == ["below aim", "aim"]


def test_the_page_has_protocol_figures_and_sources(below: Path) -> None:
    results = Results.default()
    part = part_of(
        QualityCase("FM", Model(), {}, metrics=("auc",)), QualityCase("MLP", Model(), {}, metrics=("log_loss",))
    )
    empty = page({"x": part}, results)
    assert "No results yet." in empty
    command.run_part("x", part, [1, 2, 3], results)
    text = page({"x": part}, results)
    assert "## Somebody's clicks" in text
    assert "The last day validates." in text
    assert "| FM | auc | 0.7200 | 0.0100 | 1, 2, 3 |  |  |  | 30 | 100 | 0.6000 to 0.8000 |" in text
    assert "| MLP | log_loss | 0.5000 | 0.0000 |" in text
    assert "| FM | 0.71 | A, 2020 |" in text
    assert "- targets: abc" in text
    _, title, tables = text.partition("## Somebody's clicks")  # the head of the page has a table of its own
    assert title
    for row in (r for r in tables.splitlines() if r.startswith("| ")):
        assert row.count("|") in (4, 12), row


def test_a_record_has_the_metrics_of_all_splits() -> None:
    manifest = Manifest(
        stage="train",
        pipeline="p",
        ds="2026-01-01",
        key="k",
        spec_hash="s",
        facts={
            "metrics": {"auc": 0.8, "calibration": None},
            "evaluation": {
                "valid": {"metrics": {"auc": 0.8, "pr_auc": 0.3}, "intervals": {"auc": [0.7, 0.9]}},
                "test": {"metrics": {"auc": 0.6}, "intervals": {"auc": [0.5, 0.7]}},
                "rank": {"metrics": {"hr_at_k": 0.7}, "intervals": {}},
            },
        },
    )
    values, intervals = recorded(manifest)
    assert values == {"auc": 0.8, "pr_auc": 0.3, "test.auc": 0.6, "hr_at_k": 0.7}
    assert intervals == {"auc": [0.7, 0.9], "test.auc": [0.5, 0.7]}


def test_settings_of_a_pipeline_are_its_spec_without_how_the_machine_is_used() -> None:
    def key(**more: object) -> str:
        return page_module.settings_key(pipeline_case("x", "movielens", **more))  # type: ignore[arg-type]

    same = key()
    assert key(overrides=("train.ranks=1", "train.threads=1")) == same
    assert key(goals={"hr_at_k": Goal(0.7)}) == same
    assert key(overrides=("train.epochs=6",)) != same
    assert key(overrides=("features.workflow=[{columns: [user_id], ops: [categorify]}]",)) != same


def test_the_parts_that_there_are_can_be_loaded() -> None:
    parts = load_parts()
    assert list(parts) == [
        "movielens",
        "leave_one_out",
        "beauty",
        "gowalla",
        "adult",
        "talkingdata",
        "open_bandit",
        "generated",
    ]
    for name, part in parts.items():
        keys = [page_module.settings_key(case) for case in part.cases]
        assert len(set(keys)) == len({case.name for case in part.cases}) == len(keys), name
        files = {Results.default().path(name, case, 1) for case in part.cases}
        assert len(files) == len(part.cases), name
    with pytest.raises(UserError, match="no part 'beuty'"):
        load_parts(["beuty"])


def test_the_command_refuses_what_it_does_not_know(capfd: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--parts", "nothing"]) == 2
    assert "no part 'nothing'" in capfd.readouterr().err
    assert command.main(["--parts", "generated", "--seeds", "one"]) == 2


def test_a_reproduced_seed_is_the_same_case(below: Path) -> None:
    results = Results.default()
    case = QualityCase("FM", Model(), {"width": 8})
    results.save("x", case, 1, case.run(1, below))
    assert results.load("x", replace(case, settings=lambda: {"width": 8}), 1) == Model()(1, below)


def test_a_model_above_the_ceiling_fails(below: Path) -> None:
    ws = Workspace(below)
    truth_file(ws, "clicks", "2026-01-08").put_text('{"auc_ceiling": 0.85}')

    def manifest_with(auc: float) -> Manifest:
        facts = {"metrics": {"auc": auc}}
        return Manifest(stage="train", pipeline="clicks", ds="2026-01-08", key="k", spec_hash="s", facts=facts)

    assert ceiling_share(manifest_with(0.8465), ws) == {"ceiling_share": pytest.approx(0.99)}
    with pytest.raises(UserError, match=r"AUC 0\.8510 is above the ceiling, 0\.8500"):
        ceiling_share(manifest_with(0.851), ws)


def test_one_item_is_left_out_among_items_that_the_user_never_had(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    # Items of low numbers are popular: a left-out one is sometimes among the first.
    drawn = {user: np.minimum(rng.geometric(0.05, 40), 199) for user in range(1, 40)}
    items_of_user = {user: list(dict.fromkeys(items.tolist()))[: 3 + user % 5] for user, items in drawn.items()} | {
        40: [199, 0]
    }
    lines = [f"{user} {item}\n" for user, items in items_of_user.items() for item in items]
    (tmp_path / "all.txt").write_text("".join(lines))
    write_split(tmp_path / "all.txt", tmp_path, "x")
    train = [tuple(map(int, line.split()[:2])) for line in (tmp_path / "x.train.rating").read_text().splitlines()]
    assert sorted(train) == sorted((user, item) for user, items in items_of_user.items() for item in items[:-1])
    tests = [tuple(map(int, line.split()[:2])) for line in (tmp_path / "x.test.rating").read_text().splitlines()]
    assert tests == [(user, items[-1]) for user, items in items_of_user.items()]
    counts = Counter(item for _, item in train)
    hits, gain = 0, 0.0
    for (user, positive), line in zip(tests, (tmp_path / "x.test.negative").read_text().splitlines(), strict=True):
        head, *rest = line.split("\t")
        assert head == f"({user},{positive})"
        negatives = {int(item) for item in rest}
        assert len(negatives) == len(rest) == 99
        assert not negatives & set(items_of_user[user])
        place = sum(counts[item] >= counts[positive] for item in negatives)
        hits += place < 10
        gain += 1 / math.log2(place + 2) if place < 10 else 0.0
    assert popularity(tmp_path, "x") == pytest.approx((hits / len(tests), gain / len(tests)))
    assert 0 < hits < len(tests)
