"""The gate and the registry by the command line: exit codes, output, and the champion."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from headrace.config import Spec
from headrace.config.workspace import Workspace
from headrace.models import registry
from headrace.models.registry.promotion import settle
from headrace.score.scoring_model import scoring_model
from headrace.stage import Context, Result
from headrace.stage.manifest import Input, Manifest, Output
from headrace.storage import local
from tests.cli_support import DS, Fake, Yard, make_yard

RULES = [
    {"key": "gate.metrics.auc.min", "passed": False, "value": 0.7, "limit": 0.72, "margin": -0.02, "figure": "auc"}
    | {"text": "auc is 0.7, at least 0.72 is asked for: by 0.02 on the wrong side"},
    {"key": "gate.champion.auc", "passed": None, "value": None, "limit": -0.1, "margin": None, "figure": "auc beside"}
    | {"text": "auc beside the champion's: not judged, there is no champion yet"},
]
GATE = ("--set", "gate={metrics: {auc: {min: 0.72}}}")


@dataclass
class Judged(Fake):
    """The stages evaluate and gate."""

    verdict: str = "refused"

    @property
    def needs(self) -> tuple[str, ...]:
        return {"evaluate": ("train",), "gate": ("evaluate",)}[self.name]

    def spec_part(self, spec: Spec) -> Mapping[str, Any]:
        return {"verdict": self.verdict} if self.name == "gate" else {}

    def run(self, ctx: Context) -> Result:
        model = {"version": "2", "key": "k2", "name": "models/b"}
        facts = {"verdict": self.verdict, "registered": "clicks", "model": model, "rows": 50, "split": "valid"}
        rules = RULES if self.verdict == "refused" else []
        champion = {"version": "1", "key": "k1", "name": "models/a"}
        return Result(rows={"rules": 2, "broken": 1}, facts={**facts, "champion": champion, "rules": rules})


@pytest.fixture
def yard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Yard:
    fake_yard = make_yard(tmp_path, monkeypatch)
    fake_yard.fakes |= {name: Judged(name) for name in ("evaluate", "gate")}
    return fake_yard


def test_a_refused_model_ends_the_command_with_3_and_all_is_done(yard: Yard) -> None:
    done = yard.run(*GATE)
    assert done.exit_code == 3, done.output
    assert [s for s in yard.submitted if s in ("evaluate", "gate", "promote", "score", "publish", "report")] == [
        *("evaluate", "gate", "promote", "score", "publish", "report")
    ]
    assert "is refused (version 2); there is no champion" in done.output
    assert "auc is 0.7, at least 0.72 is asked for: by 0.02 on the wrong side (gate.metrics.auc.min)" in done.output
    assert "headrace promote clicks 2 --reason TEXT" in done.output
    # The verdict stands, whether there was something to do or not.
    assert yard.run(*GATE).exit_code == 3
    assert yard.submitted == []
    assert yard.run(*GATE, "--from", "score").exit_code == 0
    status = yard("status", "clicks", *GATE)
    assert "done, refused; auc is 0.7, at least 0.72" in status.output
    (stage,) = (
        s for s in json.loads(yard("status", "clicks", "--json", *GATE).output)["stages"] if s["stage"] == "gate"
    )
    assert (stage["state"], stage["verdict"]) == ("done", "refused")

    alone = yard("gate", "clicks", "--ds", DS, *GATE)
    assert alone.exit_code == 3
    for text in (
        "broken",
        "not judged",
        "clicks version 2 of",
        "refused (50 rows of valid; beside version 1, the champion)",
    ):
        assert text in alone.output
    as_json = yard("gate", "clicks", "--ds", DS, "--json", *GATE)
    assert (as_json.exit_code, json.loads(as_json.stdout)["verdict"]) == (3, "refused")

    yard.fakes["gate"] = replace(yard.fakes["gate"], verdict="passed")  # type: ignore[call-arg]
    assert yard.run(*GATE).exit_code == 0
    assert "gate.metrics.auc.min" not in yard("gate", "clicks", "--ds", DS, *GATE).output


@dataclass
class Scored(Fake):
    """The stage score, as far as which model it takes."""

    def inputs(self, ctx: Context) -> tuple[Input, ...]:
        return (scoring_model(ctx).input,)


def test_a_refused_first_model_ends_the_command_with_3(yard: Yard) -> None:
    yard.fakes["score"] = Scored("score")
    for submitted in (True, False):
        done = yard.run(*GATE)
        assert done.exit_code == 3, done.output
        assert ("promote" in yard.submitted, "score" in yard.submitted) == (submitted, False)
        assert "is refused (version 2); there is no champion" in done.output
        assert "at least 0.72 is asked for: by 0.02 on the wrong side (gate.metrics.auc.min)" in done.output
    yard.fakes["gate"] = replace(yard.fakes["gate"], verdict="passed")  # type: ignore[call-arg]
    assert yard("run", "clicks", "--ds", DS, *GATE, "--to", "gate").exit_code == 0
    assert yard.run(*GATE, "--from", "score").exit_code == 2


def test_bytes_of_changed_rows_beside_a_whole_copy(yard: Yard) -> None:
    """A model of changed rows, by `retrain.full_copy_days`: in the tables of versions and of stages."""
    ws = Workspace(yard.home)
    assert yard.run("--to", "train").exit_code == 0
    assert "embeddings" not in yard("status", "clicks").output
    for number, (ds, saved) in enumerate(
        (
            ("2026-01-02", {"embeddings_bytes": 5 * 2**20, "whole_copy_bytes": 5 * 2**20, "base": None, "saves": 1}),
            (DS, {"embeddings_bytes": 300 * 2**10, "whole_copy_bytes": 5 * 2**20, "base": "models/a", "saves": 2}),
        ),
        start=1,
    ):
        manifest = Manifest.load(ws.manifest("clicks", DS, "train"))
        assert manifest is not None
        output = Output(kind="model", name=f"models/{number}", version=f"k{number}")
        changes = {"ds": ds, "outputs": (output,), "facts": {"saved": saved}}
        manifest.model_copy(update=changes).save(ws.manifest("clicks", ds, "train"))
        folder = ws.home / "models" / str(number)
        folder.mkdir(parents=True)
        registry.register(ws, "clicks", local(folder), {"auc": 0.7}, f"k{number}", ds=ds)
    changed, complete = "300.0 KiB of changed rows, 5.9 % of a whole copy", "5.0 MiB, all rows"
    lines = yard("models", "clicks").output.splitlines()
    assert changed in lines[1]
    assert complete in lines[2]
    as_json = json.loads(yard("models", "clicks", "--json").output)["versions"]
    assert [v["saved"]["embeddings_bytes"] for v in as_json] == [300 * 2**10, 5 * 2**20]
    assert f"embeddings: {changed}" in yard("status", "clicks", "--ds", DS).output
    (stage,) = (s for s in json.loads(yard("status", "clicks", "--ds", DS, "--json").output)["stages"] if "saved" in s)
    assert (stage["stage"], stage["saved"]["saves"]) == ("train", 2)


def test_models_promote_and_rollback(yard: Yard) -> None:
    ws = Workspace(yard.home)
    missing = yard("models", "clicks")
    assert (missing.exit_code, "no version of model 'clicks' is registered" in missing.output) == (2, True)
    for number, ds in ((1, "2026-01-02"), (2, DS)):
        folder = ws.home / "models" / f"m{number}"
        folder.mkdir(parents=True)
        (folder / "weights").write_bytes(b"x" * 2**20 * number)
        registry.register(ws, "clicks", local(folder), {"auc": 0.6 + number / 10}, f"k{number}", ds=ds)
    settle(ws, "clicks", "1")
    settle(ws, "clicks", "2", passed=False)
    done = yard.run(*GATE)
    assert (done.exit_code, "is refused (version 2); version 1 is champion" in done.output) == (3, True)

    lines = yard("models", "clicks", *GATE).output.splitlines()
    assert lines[1].split()[:4] == ["2", DS, "refused", "0.8000"]
    assert lines[2].split()[:5] == ["1", "2026-01-02", "champion", "promoted", "0.7000"]
    assert "2.0 MiB" in lines[1]
    document = json.loads(yard("models", "clicks", "--json", *GATE).output)
    assert [(v["version"], v["verdict"], v["bytes"]) for v in document["versions"]] == [
        ("2", "refused", 2**21),
        ("1", None, 2**20),
    ]

    assert yard("promote", "clicks", "2", *GATE).exit_code == 2
    done = yard("promote", "clicks", "2", "--reason", "labels were late", *GATE)
    assert done.exit_code == 0, done.output
    assert f"the alias champion of clicks is at version 2, of {DS} (before: version 1, of 2026-01-02)" in done.output
    assert "labels were late" in yard("models", "clicks").output
    # Overruled: the day's run is no longer told to be refused.
    assert yard.run(*GATE).exit_code == 0
    rolled_back = yard("rollback", "clicks", "--reason", "clicks fell")
    assert rolled_back.exit_code == 0, rolled_back.output
    assert "is at version 1" in rolled_back.output
    assert [json.loads(line)["action"] for line in ws.promotions("clicks").read_text().splitlines()] == [
        "promote",
        "override",
        "rollback",
    ]
    assert yard("rollback", "clicks").exit_code == 2
    assert yard("promote", "clicks", "9", "--reason", "x").exit_code == 2


def test_versions_to_compare_are_two(yard: Yard) -> None:
    alone = yard("compare", "clicks", "7", "--ds", DS)
    assert (alone.exit_code, "name two at least" in alone.output) == (2, True)
    unknown = yard("compare", "clicks", "7", "best", "--ds", DS)
    assert unknown.exit_code == 2
