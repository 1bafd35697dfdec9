"""Verdicts of gates on the screen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.text import Text

from headrace.cli.screen import out, plain, table
from headrace.errors import EXIT_DONE, EXIT_REFUSED
from headrace.quality.report import facts
from headrace.stages import STAGES
from headrace.workspace import Workspace

if TYPE_CHECKING:
    from headrace.config import Spec
    from headrace.manifest import Manifest


_REFUSED = "refused"


def show_verdict(gate: Manifest) -> None:
    """Print a table of the rules, and the verdict."""
    challenger = facts.mapping(gate.facts.get("challenger"))
    for judged in (gate.facts, challenger):
        rows_table = table("rule", "", "figure")
        for rule in facts.records(judged.get("rules")):
            rows_table.add_row(str(rule.get("key")), _rule_state(rule), str(rule.get("text")))
        if judged:
            out.print()
            out.print(rows_table)
            text = of_challenger(gate) if judged is challenger else sentence(gate)
            out.print(text, markup=False, soft_wrap=True)


def _rule_state(rule: Mapping[str, Any]) -> Text:
    passed = rule.get("passed")
    if passed is None:
        return plain("not judged", style="dim")
    return plain("holds", style="green") if passed else plain("broken", style="red")


def sentence(gate: Manifest) -> str:
    """Return the verdict in a sentence."""
    model, champion = facts.mapping(gate.facts.get("model")), facts.mapping(gate.facts.get("champion"))
    comparison = f"beside version {champion['version']}, the champion" if champion else "there is no champion yet"
    name = f"{gate.facts.get('registered')} version {model.get('version')} of {gate.ds}"
    rows = f"{facts.count(gate.facts.get('rows'))} rows of {gate.facts.get('split')}"
    return f"{name}: {gate.facts.get('verdict')} ({rows}; {comparison})"


def of_challenger(gate: Manifest) -> str:
    """Return the verdict on the day's challenger in a sentence; empty where none was judged."""
    challenger = facts.mapping(gate.facts.get("challenger"))
    if not challenger:
        return ""
    becomes = ", and becomes champion" if challenger.get("becomes_champion") else ""
    return f"the challenger, version {challenger.get('version')}: {challenger.get('verdict')}{becomes}"


def broken_rules(gate: Manifest) -> list[str]:
    """Return the broken rules, with the figure, the limit and the difference."""
    broken = (r for r in facts.records(gate.facts.get("rules")) if r.get("passed") is False)
    return [f"{r.get('text')} ({r.get('key')})" for r in broken]


def is_refused(ws: Workspace, gate: Manifest | None) -> bool:
    """Return whether a day's model was refused, and nobody has overruled that."""
    from headrace.registry.promotion import OVERRIDDEN
    from headrace.registry.versions import numbered

    if gate is None or gate.facts.get("verdict") != _REFUSED:
        return False
    version = numbered(ws, str(gate.facts["registered"]), str(gate.facts["model"]["version"]))
    return version is None or version.status != OVERRIDDEN


def tell_refusals(spec: Spec, ws: Workspace, stages: Sequence[str], days: Sequence[str]) -> int:
    """Say which days' models were refused, and by what.

    Args:
        spec: the pipeline.
        ws: the workspace.
        stages: those that were brought up to date; nothing is said where the gate is none of them.
        days: of these.

    Returns:
        the exit code: refused, or done.
    """
    from headrace.manifest import Manifest
    from headrace.registry.promotion import champion_of_day

    if "gate" not in stages or not STAGES["gate"].applies(spec):
        return EXIT_DONE
    code = EXIT_DONE
    for ds in days:
        gate = Manifest.load(ws.manifest(spec.pipeline, ds, "gate"))
        if gate is None or not is_refused(ws, gate):
            continue
        code = EXIT_REFUSED
        version, champion = gate.facts["model"]["version"], champion_of_day(ws, str(gate.facts["registered"]), ds)
        goes_on = f"version {champion.version} is champion" if champion else "there is no champion"
        out.print(f"\n[red]The model of {ds} is refused[/] (version {version}); {goes_on}:")
        for text in broken_rules(gate):
            out.print(f"  {text}", markup=False, soft_wrap=True)
        again = f"headrace promote {spec.argument} {version} --reason TEXT"
        out.print(f"To overrule it: {again}", markup=False, soft_wrap=True)
    return code
