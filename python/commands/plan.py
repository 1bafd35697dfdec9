"""`headrace plan`: what a pipeline would do, without doing it. `--gpu`: which of it runs on a GPU."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headrace.commands.screen import out, plain, print_json, table
from headrace.config import Spec, load_spec
from headrace.errors import EXIT_DONE, EXIT_FAILURE, UserError
from headrace.features.ops import OPERATORS
from headrace.features.table_ops import TABLE_OPERATORS
from headrace.jobs.gpu_plan.explain import Explainer, explain_session
from headrace.jobs.gpu_plan.gate import LOG, ON_CPUS, StepPlans, check_operators, check_pipeline
from headrace.workspace import Workspace, installation

#: Of the engines, the one that may run on GPUs: in place of `auto`.
_ENGINE = "features.engine=spark"


def gpu(pipeline: str | None, sets: Sequence[str], operators: Sequence[str] = (), as_json: bool = False) -> int:
    """Print what stays on the GPU and what does not; 1 when anything leaves it.

    Args:
        pipeline: one pipeline; None: every operator and every shipped pipeline, unless `operators` are named.

    Raises:
        UserError: the plugin's jar is missing, the pipeline has faults, or there is no such operator.
    """
    if unknown := sorted({*operators} - {*OPERATORS.builtin, *TABLE_OPERATORS.builtin}):
        raise UserError(
            f"no operator '{unknown[0]}' (known: {', '.join(sorted({*OPERATORS.builtin, *TABLE_OPERATORS.builtin}))})"
        )
    if pipeline is None and sets:
        raise UserError("--set changes a pipeline: name one")
    specs = [_by_spark(pipeline, sets)] if pipeline else [] if operators else shipped()
    logging.getLogger("headrace.features").setLevel(logging.WARNING)
    with tempfile.TemporaryDirectory(prefix="headrace-gpu-") as folder:
        ws = Workspace(Path(folder))
        with explain_session(ws) as spark:
            seen = check(Explainer(spark), ws, specs, None if pipeline else operators)
    green = all(s.green for s in seen)
    if as_json:
        print_json({"on_gpu": green, "steps": [as_record(s) for s in seen]})
    else:
        _print(seen)
    return EXIT_DONE if green else EXIT_FAILURE


def check(
    explainer: Explainer, ws: Workspace, specs: Sequence[Spec], operators: Sequence[str] | None
) -> list[StepPlans]:
    """Explain each step of operators (none of them named: of all; None: of none) and of pipelines, in a workspace that
    nothing else uses.
    """
    seen = [] if operators is None else [*check_operators(explainer, Workspace(ws.home / "operators"), operators)]
    for spec in specs:
        seen += check_pipeline(explainer, ws, spec)
    return seen


def as_record(seen: StepPlans) -> dict[str, Any]:
    """Return a step for programs.

    What is on the CPU by design, reads of the table's log among it, has `on_gpu` null.
    """
    return {
        "subject": seen.subject,
        "step": seen.step,
        "plans": len(seen.plans),
        "on_gpu": None if seen.step in (LOG, ON_CPUS) else seen.green,
        "operators": _names(seen),
        "faults": seen.faults(),
    }


def shipped() -> list[Spec]:
    """Return the pipelines of conf/pipelines, by Spark's engine but for those that ask for Arrow's."""
    names = sorted(p.stem for p in (installation() / "conf" / "pipelines").glob("*.yaml"))
    return [_by_spark(name, ()) for name in names]


def _by_spark(pipeline: str, sets: Sequence[str]) -> Spec:
    spec = load_spec(pipeline, sets)
    return spec if spec.features.engine == "arrow" else load_spec(pipeline, [*sets, _ENGINE])


def _print(seen: Sequence[StepPlans]) -> None:
    rows_table = table("what", "step", ">plans", "on the GPU", "operators", "what leaves, and why")
    for s in seen:
        state = plain("yes", style="green") if s.green else plain("NO", style="bold red")
        if s.step in (LOG, ON_CPUS):
            state = plain("-", style="dim")
        rows_table.add_row(
            plain(s.subject),
            plain(s.step),
            str(len(s.plans)),
            state,
            plain(_operators(s)),
            plain("\n".join(s.faults())),
        )
    out.print(rows_table)
    out.print()
    red = list(dict.fromkeys(s.subject for s in seen if not s.green))
    subjects = len({s.subject for s in seen})
    plans = sum(len(s.plans) for s in seen if s.step != LOG)
    if red:
        out.print(f"leaves the GPU: {', '.join(red)} ({len(red)} of {subjects})", markup=False)
    else:
        out.print(
            f"all of {plans} plans of {subjects} stay on the GPU; `_delta_log` is read on the CPU by design",
            markup=False,
        )


def _operators(seen: StepPlans) -> str:
    """Return the physical operators of the step, each once, as the plan has them from the top."""
    if seen.step == LOG:
        return "the table's log"
    return ", ".join(_names(seen))


def _names(seen: StepPlans) -> list[str]:
    return list(dict.fromkeys(n.name.removesuffix("Exec") for p in seen.plans for n in p.execs))
