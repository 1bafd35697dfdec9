"""Stages that work in this process, and a submitter that runs them: what tests of the command line share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from headrace.cli import app, screen
from headrace.config import Spec
from headrace.config.workspace import Workspace
from headrace.errors import RefusedError, UserError
from headrace.jobs import stages, submit
from headrace.jobs.output import StageEvent
from headrace.jobs.stages import days_of, execution_order
from headrace.stage import Context, Result, RunPlan, run_stage
from headrace.stage.manifest import Input, Manifest, Output
from tests.support import CLICKS_STAGES

DS = "2026-01-03"
AUC = {"train": 0.77, "baseline": 0.74}
SAMPLE = [{"ds": DS, "user_id": 7, "item_id": 30, "rank": 1, "score": 0.5}]


@dataclass
class Fake:
    """A stage that works in this process, as fast as it can."""

    name: str
    version: int = 1
    source: str = "v1"

    @property
    def needs(self) -> tuple[str, ...]:
        """The stage before; `score` can do without a baseline, but not without a model, `train` without a judgement."""
        previous_stages = CLICKS_STAGES[: CLICKS_STAGES.index(self.name)][-1:]
        trained = ("train", "baseline?")
        return {"promote": trained, "score": trained, "train": ("features",)}.get(self.name, previous_stages)

    def spec_part(self, spec: Spec) -> Mapping[str, Any]:
        return {"train": spec.train.epochs} if self.name == "train" else {}

    def inputs(self, ctx: Context) -> tuple[Input, ...]:
        if self.name != "ingest":
            return ()
        if self.source == "gone":
            raise UserError("no landing files of 2026-01-03")
        return (Input(kind="landing", name="landing/clicks/2026-01-03", version=self.source),)

    def verify(self, ctx: Context, manifest: Manifest) -> str | None:
        return None

    def run(self, ctx: Context) -> Result:
        facts: dict[str, Any] = {"metrics": {"auc": AUC[self.name]}} if self.name in AUC else {}
        if self.name == "publish":
            facts = {"table": "public.clicks_scores", "sample": SAMPLE}
        if self.name == "report":
            ctx.ws.report("clicks", ctx.ds).local_path().parent.mkdir(parents=True, exist_ok=True)
            ctx.ws.report("clicks", ctx.ds).local_path().write_text("page")
        kind = {"train": "model", "baseline": "model", "publish": "postgres"}.get(self.name, "delta")
        output = Output(kind=kind, name=f"lake/clicks/{self.name}", version=ctx.key, rows=1234)
        rows = {"kept": 1234} if self.name == "ingest" else {"train": 1000, "valid": 234}
        return Result((output,), rows=rows, facts=facts, peak_memory_mib={"jvm": 2048.0})


class Killed(Exception):
    """A stage's application came to its end."""


@dataclass
class Yard:
    """Fake stages, a submitter that runs them here, and what it was asked."""

    home: Path
    fakes: dict[str, Fake] = field(default_factory=lambda: {n: Fake(n) for n in CLICKS_STAGES})
    codes: dict[str, int] = field(default_factory=dict)
    submitted: list[str] = field(default_factory=list)
    #: The day of each of these.
    days: list[str] = field(default_factory=list)
    applications: list[tuple[str, ...]] = field(default_factory=list)
    overrides: list[list[str]] = field(default_factory=list)
    interrupt: BaseException | None = None

    def submit(
        self,
        stages: Sequence[str],
        pipeline: str,
        spec: Spec,
        ws: Workspace,
        ds: str,
        overrides: list[str],
        on_event: Callable[[StageEvent], None],
        until: str | None = None,
    ) -> int:
        self.applications.append(tuple(stages))
        self.overrides.append(list(overrides))
        if self.interrupt:
            raise self.interrupt
        for stage, day in execution_order(stages, days_of(spec, ds, until), spec):
            on_event(StageEvent(stage, "check", ds=day))

            def announce(plan: RunPlan, stage: str = stage, day: str = day) -> None:
                on_event(StageEvent(stage, "skip" if plan.reason is None else "run", plan.reason or "", day))
                if plan.reason is not None:
                    self.submitted.append(stage)
                    self.days.append(day)
                    if self.codes.get(stage):
                        raise Killed

            try:
                outcome = run_stage(self.fakes[stage], spec, ws, day, announce)
            except Killed:
                return self.codes[stage]
            except RefusedError as e:
                return e.exit_code
            if not outcome.skipped:
                on_event(StageEvent(stage, "done", ds=day))
        return 0

    def __call__(self, *arguments: str) -> Any:
        return CliRunner().invoke(app, [*arguments, "--home", str(self.home)])

    def run(self, *arguments: str) -> Any:
        self.submitted.clear()
        self.days.clear()
        self.applications.clear()
        return self("run", "clicks", "--ds", DS, *arguments)


def make_yard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Yard:
    """Fake stages in a home below `tmp_path`, in place of the real ones until the test ends."""
    yard = Yard(tmp_path / "home")
    monkeypatch.setattr(stages, "load_stage", lambda name, spec=None: yard.fakes[name])
    monkeypatch.setattr(submit, "submit", yard.submit)
    # Consoles hold the stream that was there when they were made; under test it changes.
    monkeypatch.setattr(screen.out, "_file", None)
    monkeypatch.setattr(screen.out, "_width", 220)
    return yard
