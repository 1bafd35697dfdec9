"""Metrics of a pipeline for Prometheus: of the newest run of each stage, and of the workspace.

They are a text file for the textfile collector of node_exporter, written anew by each stage, or the output of
`headrace metrics`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from prometheus_client import generate_latest
from prometheus_client.core import GaugeMetricFamily

from headrace.config import Spec
from headrace.config.stages import in_order
from headrace.config.workspace import Workspace
from headrace.jobs.observe.output_files import size_of
from headrace.quality.report import facts
from headrace.stage.manifest import Manifest
from headrace.storage import Location, local, local_folder

_MIB = 1 << 20


@dataclass
class GaugeFamily:
    """A gauge by its name and help text, and a value by labels: the last one that was set of equal labels.

    All labels of a family have the same names, in the same order.
    """

    name: str
    help: str
    values: dict[tuple[tuple[str, str], ...], float] = field(default_factory=dict)

    def set(self, value: float | int | None, **labels: str) -> None:
        """Set the value of these labels; None sets none."""
        if value is not None:
            self.values[tuple(labels.items())] = float(value)


@dataclass(frozen=True)
class _Collector:
    """The families that have values, as prometheus-client collects them."""

    families: Iterable[GaugeFamily]

    def collect(self) -> Iterable[GaugeMetricFamily]:
        for family in self.families:
            if family.values:
                names = [name for name, _ in next(iter(family.values))]
                metric = GaugeMetricFamily(family.name, family.help, labels=names)
                for labels, value in family.values.items():
                    metric.add_metric([text for _, text in labels], value)
                yield metric


def exposition(families: Iterable[GaugeFamily]) -> str:
    """Return the text format of Prometheus; families without values are left out."""
    return generate_latest(_Collector(families)).decode()


def metrics_file(spec: Spec, folder: str) -> Location:
    """Return where a pipeline's metrics are in the folder of the textfile collector."""
    return local(local_folder(folder, "observe.prometheus")) / f"headrace_{spec.pipeline}.prom"


def write_metrics(ws: Workspace, spec: Spec, folder: str) -> None:
    """Write a pipeline's metrics anew, in one step: the collector never reads half a file.

    Raises:
        OSError: the folder cannot be written to.
        UserError: a manifest is damaged.
    """
    file = metrics_file(spec, folder)
    file.parent.make_dir()
    file.put_text(exposition(metrics_of(ws, spec.pipeline)))


def newest(ws: Workspace, pipeline: str) -> dict[str, Manifest]:
    """Return the manifest of the newest day of each stage, in the day's order. No other manifest is read."""
    days = ws.days_of_stages(pipeline)
    loaded = {stage: Manifest.load(ws.manifest(pipeline, days[stage][-1], stage)) for stage in in_order(days)}
    # None: `gc` has removed it since its folder was listed.
    return {stage: manifest for stage, manifest in loaded.items() if manifest is not None}


def metrics_of(ws: Workspace, pipeline: str) -> list[GaugeFamily]:
    """Return all metrics of a pipeline.

    Raises:
        UserError: a manifest is damaged.
    """
    manifests = newest(ws, pipeline)
    return [
        *_stages(ws, pipeline, manifests),
        *_models(pipeline, manifests),
        *_gate(pipeline, manifests.get("gate")),
        *_drift(pipeline, manifests.get("drift")),
        *_outcomes(pipeline, manifests.get("outcomes")),
        _disk(ws, pipeline),
    ]


def _stages(ws: Workspace, pipeline: str, manifests: Mapping[str, Manifest]) -> list[GaugeFamily]:
    success = GaugeFamily(
        "headrace_stage_last_success_timestamp_seconds", "When the stage last ended well, by the clock."
    )
    day = GaugeFamily(
        "headrace_stage_day_timestamp_seconds", "The newest day (UTC midnight) of which the stage is done."
    )
    seconds = GaugeFamily("headrace_stage_duration_seconds", "Time that its last run took.")
    rows = GaugeFamily(
        "headrace_stage_rows", "Rows that its last run counted: read, kept, quarantined, train, scores, ..."
    )
    out = GaugeFamily("headrace_stage_output_rows", "Rows of what its last run made.")
    size = GaugeFamily("headrace_stage_output_bytes", "Bytes of what its last run made.")
    cores = GaugeFamily(
        "headrace_stage_core_seconds", "Processor time that its last run used, all cores and processes."
    )
    read = GaugeFamily(
        "headrace_stage_storage_read_bytes", "Bytes that its last run had from storage, past the page cache."
    )
    written = GaugeFamily("headrace_stage_storage_written_bytes", "Bytes that its last run sent to storage.")
    memory = GaugeFamily("headrace_stage_peak_memory_bytes", "Peak resident memory of its last run, by process.")
    for stage, m in manifests.items():
        labels = {"pipeline": pipeline, "stage": stage}
        success.set((m.started + timedelta(seconds=m.seconds)).timestamp(), **labels)
        day.set(datetime.fromisoformat(m.ds).replace(tzinfo=UTC).timestamp(), **labels)
        seconds.set(m.seconds, **labels)
        for name, count in m.rows.items():
            rows.set(count, **labels, count=name)
        for output in m.outputs:
            files = size_of(ws, output)
            # A dataset's or model's folder has the day and the key in its name: a new series each day.
            name = output.name if output.kind not in ("dataset", "model", "file") else output.kind
            out.set(output.rows, **labels, output=name)
            size.set(files.bytes if files else None, **labels, output=name)
        if m.resources is not None:
            cores.set(m.resources.core_seconds, **labels)
            read.set(m.resources.read_bytes, **labels)
            written.set(m.resources.written_bytes, **labels)
        for process, mib in m.peak_memory_mib.items():
            memory.set(mib * _MIB, **labels, process=process)
    return [success, day, seconds, rows, out, size, cores, read, written, memory]


def _models(pipeline: str, manifests: Mapping[str, Manifest]) -> list[GaugeFamily]:
    metric = GaugeFamily("headrace_model_metric", "Metrics of the newest model on its validation rows.")
    version = GaugeFamily("headrace_model_version", "The version that the newest model has in the registry.")
    forgetting = GaugeFamily("headrace_model_forgetting_metric", "Metrics on the rows of retrain.forgetting_day.")
    saved = GaugeFamily("headrace_model_saved_embedding_bytes", "Bytes of the embeddings that the newest model saved.")
    for stage in ("train", "challenger", "baseline", "second_stage"):
        train_facts = manifests[stage].facts if stage in manifests else {}
        labels = {"pipeline": pipeline, "stage": stage}
        for name, value in facts.numbers(train_facts.get("metrics")).items():
            metric.set(value, **labels, metric=name)
        number = str(facts.mapping(train_facts.get("registered")).get("version", ""))
        version.set(int(number) if number.isdecimal() else None, **labels)
        for name, value in facts.numbers(facts.mapping(train_facts.get("forgetting")).get("metrics")).items():
            forgetting.set(value, **labels, metric=name)
        saved.set(facts.number(facts.mapping(train_facts.get("saved")).get("embeddings_bytes")), **labels)
    return [metric, version, forgetting, saved]


def _gate(pipeline: str, manifest: Manifest | None) -> list[GaugeFamily]:
    passed = GaugeFamily("headrace_gate_passed", "Whether the gate let the newest model pass: 1 or 0.")
    rule = GaugeFamily("headrace_gate_rule_passed", "Whether a rule of the gate holds: 1 or 0.")
    value = GaugeFamily("headrace_gate_rule_value", "The figure that a rule of the gate looks at.")
    limit = GaugeFamily("headrace_gate_rule_limit", "Its limit.")
    if manifest is not None:
        passed.set(manifest.facts.get("verdict") != "refused", pipeline=pipeline)
        for r in facts.records(manifest.facts.get("rules")):
            labels = {"pipeline": pipeline, "rule": str(r.get("key")), "figure": str(r.get("figure", ""))}
            rule.set(r["passed"] if isinstance(r.get("passed"), bool) else None, **labels)
            value.set(facts.number(r.get("value")), **labels)
            limit.set(facts.number(r.get("limit")), **labels)
    return [passed, rule, value, limit]


def _drift(pipeline: str, manifest: Manifest | None) -> list[GaugeFamily]:
    psi = GaugeFamily("headrace_drift_psi", "Population stability index of the newest rows beside the training range.")
    over = GaugeFamily("headrace_drift_over_limit", "How many of a column's limits of drift are exceeded.")
    for r in facts.records(manifest.facts.get("columns")) if manifest else ():
        labels = {"pipeline": pipeline, "side": str(r.get("side")), "column": str(r.get("column"))}
        psi.set(facts.number(r.get("psi")), **labels)
        over.set(len(facts.records(r.get("breaches"))), **labels)
    return [psi, over]


def _outcomes(pipeline: str, manifest: Manifest | None) -> list[GaugeFamily]:
    """Return figures of the newest served day of each label, and of the newest one whose labels are known for good."""
    outcome = GaugeFamily(
        "headrace_outcome", "What users did with the lists of a served day: rate, AUC, calibration, HR@k."
    )
    low = GaugeFamily("headrace_outcome_low", "The lower end of its 95 % interval.")
    high = GaugeFamily("headrace_outcome_high", "The upper end of its 95 % interval.")
    day = GaugeFamily("headrace_outcome_day_timestamp_seconds", "The served day (UTC midnight) that it is of.")
    alerts = GaugeFamily("headrace_outcome_alerts", "Figures of outcomes that are beyond a limit.")
    if manifest is None:
        return []
    days = facts.records(manifest.facts.get("days"))
    for label in dict.fromkeys(str(r.get("label")) for r in days):
        for state, ripe in (("newest", None), ("ripe", True)):
            records = [r for r in days if str(r.get("label")) == label and (ripe is None or r.get("ripe") is ripe)]
            served = max((str(r.get("served_ds")) for r in records), default=None)
            if served is None:
                continue
            labels = {"pipeline": pipeline, "label": label, "days": state}
            day.set(datetime.fromisoformat(served).replace(tzinfo=UTC).timestamp(), **labels)
            for r in records:
                if str(r.get("served_ds")) == served:
                    name = str(r.get("metric"))
                    outcome.set(facts.number(r.get("estimate")), **labels, metric=name)
                    low.set(facts.number(r.get("low")), **labels, metric=name)
                    high.set(facts.number(r.get("high")), **labels, metric=name)
    alerts.set(len(facts.records(manifest.facts.get("alerts"))), pipeline=pipeline)
    return [outcome, low, high, day, alerts]


def _disk(ws: Workspace, pipeline: str) -> GaugeFamily:
    used = GaugeFamily("headrace_disk_used_bytes", "Bytes of a pipeline's files in the workspace, by kind.")
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
            used.set(_bytes_below(place), pipeline=pipeline, kind=kind)
    return used


def _bytes_below(folder: Location) -> int:
    total = 0
    for file in folder.files():
        try:
            total += file.size()
        except FileNotFoundError:  # another process has removed it since
            continue
    return total
