"""Summary at the end of a run: stages, quality beside its ceiling, the report, the published scores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from headrace.cli.screen import out, table
from headrace.quality.report import facts
from headrace.stages import ORDER, STAGES
from headrace.workspace import Workspace

if TYPE_CHECKING:
    from headrace.config import Spec
    from headrace.manifest import Manifest


_SAMPLE_ROWS = 10


def manifests_of(ws: Workspace, pipeline: str, ds: str) -> dict[str, Manifest]:
    """Return the manifests of a day, in order."""
    from headrace.manifest import Manifest

    return {s: m for s in ORDER if (m := Manifest.load(ws.manifest(pipeline, ds, s))) is not None}


def show(spec: Spec, ws: Workspace, ds: str, states: Mapping[str, str]) -> None:
    """Print the results of a day. `states`: what this run did, by stage."""
    from headrace.quality.report.stage import read_truth

    manifests = manifests_of(ws, spec.pipeline, ds)
    out.print()
    rows_table = table("stage", "state", ">rows", ">time", ">peak memory")
    for stage, state in states.items():
        rows_table.add_row(stage, state, *_numbers(manifests.get(stage)))
    out.print(rows_table)
    for line in data_lines(manifests, ds) if "ingest" in states else []:
        out.print(line, markup=False)
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
    names = [n for n in STAGES[manifest.stage].counts if n in manifest.rows] or list(manifest.rows)[:2]
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


def quality_lines(manifests: Mapping[str, Manifest], ceiling: float | None) -> list[str]:
    """AUC (and ranking metrics) of the models, one a line, beside the ceiling."""
    lines = []
    for name, stage in (("neural", "train"), ("XGBoost", "baseline")):
        metrics = facts.mapping(manifests[stage].facts.get("metrics")) if stage in manifests else {}
        auc = facts.number(metrics.get("auc"))
        ranking = [f"{n} {v:.4f}" for n, v in facts.numbers(metrics).items() if n.startswith(("hr", "ndcg"))]
        if auc is None and not ranking:
            continue
        share = facts.ceiling_share(auc, ceiling)
        share_text = f"  {facts.percent(share)} of the way from 0.5 to the ceiling" if share is not None else ""
        value = f"{auc:.4f}" if auc is not None else "–     "
        lines.append(f"{name:<8}{value}{share_text}{'  ' + ', '.join(ranking) if ranking else ''}")
    if lines and ceiling is not None:
        lines.append(f"{'ceiling':<8}{ceiling:.4f}  the AUC of the probabilities that the clicks were drawn from")
    return ["", "AUC on the validation split", *lines] if lines else []


def _show_sample(publish: Manifest) -> None:
    from headrace.cli.screen import psql_table
    from headrace.publish.target import described

    if left_out := publish.rows.get("left_out"):
        named = "; ".join(described(dict(key)) for key in facts.records(publish.facts.get("left_out")))
        out.print(f"\nleft out  {left_out:,} rows whose keys the target cannot hold: {named}", markup=False)
    sample = facts.records(publish.facts.get("sample"))[:_SAMPLE_ROWS]
    table_name = publish.facts.get("table", "scores")
    out.print(f"\nSELECT * FROM {table_name} WHERE ds = '{publish.ds}' LIMIT {len(sample)};", markup=False)
    out.print(psql_table(sample), markup=False, soft_wrap=True)
