"""Results of a day on the screen: stages, quality beside its ceiling, the report, published scores, verdicts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.text import Text

from headrace.cli.screen import out, plain, table
from headrace.config.stages import STAGES
from headrace.errors import EXIT_DONE, EXIT_REFUSED
from headrace.quality.report import facts

if TYPE_CHECKING:
    from headrace.config import Spec
    from headrace.config.workspace import Workspace
    from headrace.stage.manifest import Manifest


_SAMPLE_ROWS = 10


def manifests_of(ws: Workspace, pipeline: str, ds: str, stages: Iterable[str]) -> dict[str, Manifest]:
    """Return the manifests of a day, in the order of the stages."""
    from headrace.stage.manifest import Manifest

    return {s: m for s in stages if (m := Manifest.load(ws.manifest(pipeline, ds, s))) is not None}


def show(spec: Spec, ws: Workspace, ds: str, states: Mapping[str, str]) -> None:
    """Print the results of a day. `states`: what this run did, by stage."""
    from headrace.quality.report.stage import read_truth
    from headrace.stage import stage_order

    manifests = manifests_of(ws, spec.pipeline, ds, stage_order(spec))
    out.print()
    rows_table = table("stage", "state", ">rows", ">time", ">peak memory")
    for stage, state in states.items():
        rows_table.add_row(stage, state, *_numbers(manifests.get(stage)))
    out.print(rows_table)
    for line in data_lines(manifests, ds) if "ingest" in states else []:
        out.print(line, markup=False)
    for line in warning_lines(spec, ws, manifests):
        out.print(line, markup=False, soft_wrap=True)
    for line in quality_lines(manifests, facts.number(read_truth(ws, spec.pipeline, ds).get("auc_ceiling"))):
        out.print(line, markup=False)
    if ws.report(spec.pipeline, ds).is_file() and "report" in states:
        # soft_wrap: a path that is broken over two lines cannot be clicked or copied.
        out.print(f"\nreport  {ws.report(spec.pipeline, ds)}", markup=False, soft_wrap=True)
    publish = manifests.get("publish")
    if publish is not None and "publish" in states:
        _show_sample(publish)


def main_counts(manifest: Manifest | None) -> str:
    """Return the counts that describe a stage's output best."""
    if manifest is None or not manifest.rows:
        return "–"
    described = STAGES[manifest.stage].counts if manifest.stage in STAGES else ()
    names = [n for n in described if n in manifest.rows] or list(manifest.rows)[:2]
    return ", ".join(f"{manifest.rows[n]:,} {n}" for n in names)


def _numbers(manifest: Manifest | None) -> tuple[str, str, str]:
    if manifest is None:
        return "–", "–", "–"
    peak = max(manifest.peak_memory_mib.values(), default=None)
    return main_counts(manifest), facts.duration(manifest.seconds), facts.memory(peak)


def data_lines(manifests: Mapping[str, Manifest], ds: str) -> list[str]:
    """Return warnings of a day's files that could not be read and columns that are not as declared, of all sources."""
    if "ingest" not in manifests:
        return []
    ingest = manifests["ingest"].facts
    lines = []
    for name, of_source in {"": ingest, **facts.mapping(ingest.get("sources"))}.items():
        source = f"source {name}, " if name else ""
        for record in facts.records(facts.mapping(of_source).get("bad_files")):
            file = (
                f"file {record.get('file')} of {record.get('table')}"
                if "table" in record
                else f"landing file {record.get('file')}"
            )
            lines.append(f"warning: {source}{file} was left out: {record.get('reason')}")
        for record in facts.records(facts.mapping(of_source).get("drift")):
            if record.get("ds") == ds and record.get("change") != "new":
                change = f"{record.get('change')}: {record.get('detail')}"
                lines.append(f"warning: {source}column '{record.get('column')}' is {change}")
    return ["", *lines] if lines else []


def warning_lines(spec: Spec, ws: Workspace, manifests: Mapping[str, Manifest]) -> list[str]:
    """Return the warnings about a finished day's results, as its report has them."""
    from headrace.quality.report.warnings import day_warnings, event_days
    from headrace.stage.manifest import Manifest

    days = event_days(spec, manifests.get("features"))
    ingests: dict[str, Manifest] = {}
    if days is not None and spec.source.daily:
        for ds in ws.days(spec.pipeline):
            if days[0] <= ds <= days[1] and (manifest := Manifest.load(ws.manifest(spec.pipeline, ds, "ingest"))):
                ingests[ds] = manifest
    warnings = day_warnings(spec, manifests, ingests)
    return ["", *(f"warning: {warning}" for warning in warnings)] if warnings else []


def quality_lines(manifests: Mapping[str, Manifest], ceiling: float | None) -> list[str]:
    """Return the AUC and the ranking metrics of the models, one a line, beside the ceiling.

    Models that only rank, as those of logs without a label, have no column of AUCs.
    """
    models: list[tuple[str, float | None, str]] = []
    for name, stage in (("neural", "train"), ("XGBoost", "baseline")):
        metrics = facts.mapping(manifests[stage].facts.get("metrics")) if stage in manifests else {}
        auc = facts.number(metrics.get("auc"))
        ranking = ", ".join(f"{n} {v:.4f}" for n, v in facts.numbers(metrics).items() if n.startswith(("hr", "ndcg")))
        if auc is not None or ranking:
            models.append((name, auc, ranking))
    if not models:
        return []
    if ceiling is None and all(auc is None for _, auc, _ in models):
        return ["", "ranking of the validation split", *(f"{name:<8}{ranking}" for name, _, ranking in models)]
    lines = []
    for name, auc, ranking in models:
        share = facts.ceiling_share(auc, ceiling)
        share_text = f"  {facts.percent(share)} of the way from 0.5 to the ceiling" if share is not None else ""
        value = f"{auc:.4f}" if auc is not None else "–     "
        lines.append(f"{name:<8}{value}{share_text}{'  ' + ranking if ranking else ''}")
    if ceiling is not None:
        lines.append(f"{'ceiling':<8}{ceiling:.4f}  the AUC of the probabilities that the clicks were drawn from")
    return ["", "AUC on the validation split", *lines]


def _show_sample(publish: Manifest) -> None:
    from headrace.cli.screen import print_rows
    from headrace.publish.target import described

    if left_out := publish.rows.get("left_out"):
        named = "; ".join(described(dict(key)) for key in facts.records(publish.facts.get("left_out")))
        out.print(f"\nleft out  {left_out:,} rows whose keys the target cannot hold: {named}", markup=False)
    sample = facts.records(publish.facts.get("sample"))[:_SAMPLE_ROWS]
    table_name = publish.facts.get("table", "scores")
    out.print(f"\nSELECT * FROM {table_name} WHERE ds = '{publish.ds}' LIMIT {len(sample)};", markup=False)
    print_rows(sample)


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
    from headrace.models.registry.promotion import OVERRIDDEN
    from headrace.models.registry.versions import numbered

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
    if "gate" not in stages or not STAGES["gate"].applies(spec):
        return EXIT_DONE
    from headrace.models.registry.promotion import champion_of_day
    from headrace.stage.manifest import Manifest

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
