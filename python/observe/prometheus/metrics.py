"""What is measured of a pipeline: of the newest run of each stage, and of the workspace."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta

from headrace.manifest import Manifest
from headrace.monitor import facts
from headrace.observe.output_files import size_of
from headrace.observe.prometheus.text import Metric
from headrace.stages import ORDER
from headrace.storage import Location
from headrace.workspace import Workspace

_MIB = 1 << 20


def newest(ws: Workspace, pipeline: str) -> dict[str, Manifest]:
    """Return the manifest of the newest day of each stage, in the day's order. No other manifest is read."""
    days = ws.days_of_stages(pipeline)
    loaded = {stage: Manifest.load(ws.manifest(pipeline, days[stage][-1], stage)) for stage in ORDER if stage in days}
    # None: `gc` has removed it since its folder was listed.
    return {stage: manifest for stage, manifest in loaded.items() if manifest is not None}


def metrics_of(ws: Workspace, pipeline: str) -> list[Metric]:
    """All metrics of a pipeline."""
    manifests = newest(ws, pipeline)
    return [
        *_stages(ws, pipeline, manifests),
        *_models(pipeline, manifests),
        *_gate(pipeline, manifests.get("gate")),
        *_drift(pipeline, manifests.get("drift")),
        *_outcomes(pipeline, manifests.get("outcomes")),
        _disk(ws, pipeline),
    ]


def _stages(ws: Workspace, pipeline: str, manifests: Mapping[str, Manifest]) -> list[Metric]:
    success = Metric("headrace_stage_last_success_timestamp_seconds", "When the stage last ended well, by the clock.")
    day = Metric("headrace_stage_day_timestamp_seconds", "The newest day (UTC midnight) of which the stage is done.")
    seconds = Metric("headrace_stage_duration_seconds", "Time that its last run took.")
    rows = Metric("headrace_stage_rows", "Rows that its last run counted: read, kept, quarantined, train, scores, ...")
    out = Metric("headrace_stage_output_rows", "Rows of what its last run made.")
    size = Metric("headrace_stage_output_bytes", "Bytes of what its last run made.")
    cores = Metric("headrace_stage_core_seconds", "Processor time that its last run used, all cores and processes.")
    read = Metric("headrace_stage_storage_read_bytes", "Bytes that its last run had from storage, past the page cache.")
    written = Metric("headrace_stage_storage_written_bytes", "Bytes that its last run sent to storage.")
    memory = Metric("headrace_stage_peak_memory_bytes", "Peak resident memory of its last run, by process.")
    for stage, m in manifests.items():
        of = {"pipeline": pipeline, "stage": stage}
        success.add((m.started + timedelta(seconds=m.seconds)).timestamp(), **of)
        day.add(datetime.fromisoformat(m.ds).replace(tzinfo=UTC).timestamp(), **of)
        seconds.add(m.seconds, **of)
        for name, count in m.rows.items():
            rows.add(count, **of, count=name)
        for output in m.outputs:
            made = size_of(ws, output)
            # A dataset's or model's folder has the day and the key in its name: a new series each day.
            name = output.name if output.kind not in ("dataset", "model", "file") else output.kind
            out.add(output.rows, **of, output=name)
            size.add(made.bytes if made else None, **of, output=name)
        if m.resources is not None:
            cores.add(m.resources.core_seconds, **of)
            read.add(m.resources.read_bytes, **of)
            written.add(m.resources.written_bytes, **of)
        for process, mib in m.peak_memory_mib.items():
            memory.add(mib * _MIB, **of, process=process)
    return [success, day, seconds, rows, out, size, cores, read, written, memory]


def _models(pipeline: str, manifests: Mapping[str, Manifest]) -> list[Metric]:
    metric = Metric("headrace_model_metric", "Metrics of the newest model on its validation rows.")
    version = Metric("headrace_model_version", "The version that the newest model has in the registry.")
    forgetting = Metric("headrace_model_forgetting_metric", "Metrics on the rows of retrain.forgetting_day.")
    saved = Metric("headrace_model_saved_embedding_bytes", "Bytes of the embeddings that the newest model saved.")
    for stage in ("train", "challenger", "baseline", "second_stage"):
        told = manifests[stage].facts if stage in manifests else {}
        of = {"pipeline": pipeline, "stage": stage}
        for name, value in facts.numbers(told.get("metrics")).items():
            metric.add(value, **of, metric=name)
        number = str(facts.mapping(told.get("registered")).get("version", ""))
        version.add(int(number) if number.isdecimal() else None, **of)
        for name, value in facts.numbers(facts.mapping(told.get("forgetting")).get("metrics")).items():
            forgetting.add(value, **of, metric=name)
        saved.add(facts.number(facts.mapping(told.get("saved")).get("embeddings_bytes")), **of)
    return [metric, version, forgetting, saved]


def _gate(pipeline: str, manifest: Manifest | None) -> list[Metric]:
    passed = Metric("headrace_gate_passed", "Whether the gate let the newest model pass: 1 or 0.")
    rule = Metric("headrace_gate_rule_passed", "Whether a rule of the gate holds: 1 or 0.")
    value = Metric("headrace_gate_rule_value", "The figure that a rule of the gate looks at.")
    limit = Metric("headrace_gate_rule_limit", "Its limit.")
    if manifest is not None:
        passed.add(manifest.facts.get("verdict") != "refused", pipeline=pipeline)
        for r in facts.records(manifest.facts.get("rules")):
            of = {"pipeline": pipeline, "rule": str(r.get("key")), "figure": str(r.get("figure", ""))}
            rule.add(r["passed"] if isinstance(r.get("passed"), bool) else None, **of)
            value.add(facts.number(r.get("value")), **of)
            limit.add(facts.number(r.get("limit")), **of)
    return [passed, rule, value, limit]


def _drift(pipeline: str, manifest: Manifest | None) -> list[Metric]:
    psi = Metric("headrace_drift_psi", "Population stability index of the newest rows beside the training range.")
    over = Metric("headrace_drift_over_limit", "How many of a column's limits of drift are exceeded.")
    for r in facts.records(manifest.facts.get("columns")) if manifest else ():
        of = {"pipeline": pipeline, "side": str(r.get("side")), "column": str(r.get("column"))}
        psi.add(facts.number(r.get("psi")), **of)
        over.add(len(facts.records(r.get("breaches"))), **of)
    return [psi, over]


def _outcomes(pipeline: str, manifest: Manifest | None) -> list[Metric]:
    """Of the newest served day of each label, and of the newest one whose labels are known for good."""
    found = Metric("headrace_outcome", "What users did with the lists of a served day: rate, AUC, calibration, HR@k.")
    low = Metric("headrace_outcome_low", "The lower end of its 95 % interval.")
    high = Metric("headrace_outcome_high", "The upper end of its 95 % interval.")
    day = Metric("headrace_outcome_day_timestamp_seconds", "The served day (UTC midnight) that it is of.")
    alerts = Metric("headrace_outcome_alerts", "Figures of outcomes that are beyond a limit.")
    if manifest is None:
        return []
    days = facts.records(manifest.facts.get("days"))
    for label in dict.fromkeys(str(r.get("label")) for r in days):
        for state, ripe in (("newest", None), ("ripe", True)):
            mine = [r for r in days if str(r.get("label")) == label and (ripe is None or r.get("ripe") is ripe)]
            served = max((str(r.get("served_ds")) for r in mine), default=None)
            if served is None:
                continue
            of = {"pipeline": pipeline, "label": label, "days": state}
            day.add(datetime.fromisoformat(served).replace(tzinfo=UTC).timestamp(), **of)
            for r in mine:
                if str(r.get("served_ds")) == served:
                    name = str(r.get("metric"))
                    found.add(facts.number(r.get("estimate")), **of, metric=name)
                    low.add(facts.number(r.get("low")), **of, metric=name)
                    high.add(facts.number(r.get("high")), **of, metric=name)
    alerts.add(len(facts.records(manifest.facts.get("alerts"))), pipeline=pipeline)
    return [found, low, high, day, alerts]


def _disk(ws: Workspace, pipeline: str) -> Metric:
    used = Metric("headrace_disk_used_bytes", "Bytes of a pipeline's files in the workspace, by kind.")
    places: dict[str, Location] = {
        "landing": ws.landing(pipeline),
        "tables": ws.lake / "lake" / pipeline,
        "datasets": ws.store / "datasets" / pipeline,
        "models": ws.store / "models" / pipeline,
        "manifests": ws.runs(pipeline),
        "reports": ws.store / "reports" / pipeline,
        "searches": ws.store / "search" / pipeline,
        "logs": ws.scratch / "logs" / pipeline,
        "decoded": ws.encoded(pipeline),
        "mapped": ws.mapped(pipeline),
    }
    for kind, place in places.items():
        if place.is_dir():
            used.add(_bytes_below(place), pipeline=pipeline, kind=kind)
    return used


def _bytes_below(folder: Location) -> int:
    total = 0
    for file in folder.files():
        try:
            total += file.size()
        except FileNotFoundError:  # another process has removed it since
            continue
    return total
