"""The metrics file, read by Prometheus' own parser."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from headrace.config import load_spec
from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.jobs.observe.application import Observation
from headrace.jobs.observe.openlineage.names import Run
from headrace.jobs.observe.prometheus import GaugeFamily, exposition, write_metrics
from headrace.stage import run_stage
from headrace.stage.manifest import Resources
from headrace.storage import Location
from tests.cli_support import Fake
from tests.report_support import DS, make_manifests

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def parse(text: str) -> Samples:
    """(name, labels) -> value; each family has help and type."""
    samples: Samples = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation
        assert family.type == "gauge"
        for sample in family.samples:
            place = (sample.name, tuple(sorted(sample.labels.items())))
            assert place not in samples
            samples[place] = float(sample.value)
    return samples


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[name, tuple(sorted({"pipeline": "clicks", **labels}.items()))]


def test_a_pipeline_is_told_from_its_manifests(ws: Workspace, tmp_path: Path) -> None:
    earlier = make_manifests("2026-01-07")
    manifests = make_manifests()
    ran = manifests["train"].model_copy(
        update={
            "resources": Resources(core_seconds=101.5, read_bytes=12, written_bytes=34),
            "facts": {
                **manifests["train"].facts,
                "forgetting": {"ds": "2026-01-01", "metrics": {"auc": 0.71}},
                "saved": {"embeddings_bytes": 4096, "whole_copy_bytes": 9999},
            },
        }
    )
    gate = manifests["drift"].model_copy(
        update={
            "stage": "gate",
            "facts": {
                "verdict": "refused",
                "rules": [{"key": "gate.min.auc", "figure": "auc", "passed": False, "value": 0.7, "limit": 0.75}],
            },
        }
    )
    outcomes = manifests["drift"].model_copy(
        update={
            "stage": "outcomes",
            "facts": {
                "days": [
                    {"served_ds": day, "label": "click", "metric": "rate", "estimate": rate, "ripe": day < "2026-01-06"}
                    for day, rate in (("2026-01-04", 0.1), ("2026-01-05", 0.2), ("2026-01-06", 0.3))
                ],
                "alerts": [{}],
            },
        }
    )
    for m in (*earlier.values(), *({**manifests, "train": ran, "gate": gate, "outcomes": outcomes}).values()):
        if (m.ds, m.stage) != (DS, "publish"):  # of the newest day that it is done
            m.save(ws.manifest("clicks", m.ds, m.stage))
    model = ws.locate(manifests["train"].output("model").name).local_path()
    model.mkdir(parents=True)
    (model / "weights").write_bytes(b"x" * 321)
    write_metrics(ws, load_spec("clicks"), str(tmp_path / "collector"))
    assert [p.name for p in (tmp_path / "collector").iterdir()] == ["headrace_clicks.prom"]
    samples = parse((tmp_path / "collector" / "headrace_clicks.prom").read_text())

    end = ran.started + timedelta(seconds=ran.seconds)
    assert value(samples, "headrace_stage_last_success_timestamp_seconds", stage="train") == end.timestamp()
    assert value(samples, "headrace_stage_duration_seconds", stage="train") == 61.7
    midnight = datetime(2026, 1, 7, tzinfo=UTC).timestamp()
    assert value(samples, "headrace_stage_day_timestamp_seconds", stage="publish") == midnight
    assert value(samples, "headrace_stage_day_timestamp_seconds", stage="score") == midnight + 86_400
    assert value(samples, "headrace_stage_rows", stage="ingest", count="quarantined") == 74
    events = {"stage": "ingest", "output": "lake/clicks/events"}
    assert value(samples, "headrace_stage_output_rows", **events) == 60_012
    assert value(samples, "headrace_stage_output_bytes", stage="train", output="model") == 321
    assert value(samples, "headrace_disk_used_bytes", kind="models") == 321
    assert value(samples, "headrace_stage_core_seconds", stage="train") == 101.5
    assert value(samples, "headrace_stage_storage_written_bytes", stage="train") == 34
    assert value(samples, "headrace_stage_peak_memory_bytes", stage="train", process="rank0") == 880.1 * 2**20
    assert value(samples, "headrace_model_metric", stage="train", metric="auc") == 0.7694
    assert value(samples, "headrace_model_metric", stage="baseline", metric="log_loss") == 0.4301
    assert value(samples, "headrace_model_version", stage="train") == 8
    assert value(samples, "headrace_model_forgetting_metric", stage="train", metric="auc") == 0.71
    assert value(samples, "headrace_model_saved_embedding_bytes", stage="train") == 4096
    assert value(samples, "headrace_gate_passed") == 0
    assert value(samples, "headrace_gate_rule_passed", rule="gate.min.auc", figure="auc") == 0
    assert value(samples, "headrace_drift_psi", side="input", column="item_price") == 0.4321
    assert value(samples, "headrace_drift_over_limit", side="input", column="item_price") == 1
    click = {"label": "click", "metric": "rate"}
    assert value(samples, "headrace_outcome", days="newest", **click) == 0.3
    assert value(samples, "headrace_outcome", days="ripe", **click) == 0.2
    assert value(samples, "headrace_outcome_alerts") == 1


def test_nothing_has_run(ws: Workspace, tmp_path: Path) -> None:
    write_metrics(ws, load_spec("clicks"), str(tmp_path))
    assert parse((tmp_path / "headrace_clicks.prom").read_text()) == {}


texts = st.text(st.characters(codec="utf-8", exclude_characters="\r"), max_size=12)
#: Without what the text by hand would have to tell from its own signs.
plain = st.text(st.characters(codec="utf-8", exclude_characters='\r"in'), max_size=12)
finite = st.floats(allow_nan=False)


def by_hand(name: str, help_text: str, samples: dict[tuple[str, str], float]) -> str:
    """The text as https://prometheus.io/docs/instrumenting/exposition_formats/ describes it, written out."""

    def escaped(text: str) -> str:
        return text.replace("\\", "\\\\").replace("\n", "\\n")

    lines = [f"# HELP {name} {escaped(help_text)}", f"# TYPE {name} gauge"]
    for (first, second), number in samples.items():
        labels = [f'{key}="{escaped(text)}"' for key, text in (("one", first), ("other", second))]
        lines.append(f"{name}{{{','.join(labels)}}} {number!r}".replace("inf", "+Inf").replace("-+", "-"))
    return "".join(f"{line}\n" for line in lines)


@given(st.dictionaries(st.tuples(plain, plain), finite, min_size=1, max_size=5), plain)
def test_the_text_is_that_of_the_description(samples: dict[tuple[str, str], float], help_text: str) -> None:
    family = GaugeFamily("headrace_x", f"a{help_text}")
    for (first, second), number in samples.items():
        family.set(number, one=first, other=second)
    expected = by_hand("headrace_x", f"a{help_text}", samples)
    assert [*text_string_to_metric_families(exposition([family]))] == [*text_string_to_metric_families(expected)]


@given(st.dictionaries(texts, finite, min_size=1, max_size=5), texts)
def test_any_label_value_and_number_is_read_back(samples: dict[str, float], help_text: str) -> None:
    family = GaugeFamily("headrace_x", f"a{help_text}")
    for label, number in samples.items():
        family.set(number, column=label)
    (parsed,) = text_string_to_metric_families(exposition([family]))
    assert {s.labels["column"]: float(s.value) for s in parsed.samples} == samples


def test_numbers_that_are_none_and_samples_that_repeat() -> None:
    family = GaugeFamily("headrace_x", "X.")
    for number in (math.nan, math.inf, -math.inf):
        family.set(number, of=str(number))
    family.set(None, of="none")
    family.set(1, of="twice")
    family.set(2, of="twice")
    values = {labels[0][1]: number for (_, labels), number in parse(exposition([family])).items()}
    assert math.isnan(values.pop("nan"))
    assert values == {"inf": math.inf, "-inf": -math.inf, "twice": 2.0}


def test_a_folder_that_is_no_folder_is_told_by_the_spec() -> None:
    with pytest.raises(UserError, match="s3"):
        load_spec("clicks", ["observe.prometheus=s3://bucket/metrics"])


def test_each_stage_writes_the_file_and_a_bad_folder_fails_none(
    ws: Workspace, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "taken").write_text("a file")
    for folder in ("collector", "taken"):
        spec = load_spec("clicks", [f"observe.prometheus={tmp_path / folder}"])
        observation = Observation(spec, ws)
        for ds in ("2026-01-01", "2026-01-02") if folder == "collector" else ("2026-01-03", "2026-01-04"):
            with observation.stage("ingest", ds) as run:
                run.done(run_stage(Fake("ingest"), spec, ws, ds, run.begin).manifest)
        observation.close()
    samples = parse((tmp_path / "collector" / "headrace_clicks.prom").read_text())
    midnight = datetime(2026, 1, 2, tzinfo=UTC).timestamp()
    assert value(samples, "headrace_stage_day_timestamp_seconds", stage="ingest") == midnight
    assert ws.days("clicks")[-1] == "2026-01-04"
    assert len([r for r in caplog.records if "could not report" in r.getMessage()]) == 1


def test_no_more_manifests_are_read_after_a_year_than_after_a_day(
    ws: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pipeline lacks most stages, and one of its stages ran on the first day alone."""
    manifests = make_manifests()
    days = [f"{day:%Y-%m-%d}" for day in (datetime(2025, 1, 1) + timedelta(n) for n in range(400))]
    for n, ds in enumerate(days):
        for stage in ("ingest", "features", "train") if n else ("ingest", "baseline"):
            manifest = manifests[stage].model_copy(update={"ds": ds, "seconds": float(n)})
            manifest.save(ws.manifest("clicks", ds, stage))
    reads: list[Path] = []
    read_text = Location.read_text

    def counted(self: Location) -> str:
        if self.name.endswith(".json") and "runs" in self.path.parts:
            reads.append(Path(str(self)))
        return read_text(self)

    monkeypatch.setattr(Location, "read_text", counted)
    write_metrics(ws, load_spec("clicks"), str(tmp_path / "metrics"))
    assert sorted(p.stem for p in reads) == ["baseline", "features", "ingest", "train"]
    samples = parse((tmp_path / "metrics" / "headrace_clicks.prom").read_text())
    seconds = {stage: value(samples, "headrace_stage_duration_seconds", stage=stage) for stage in ("train", "baseline")}
    assert seconds == {"train": 399.0, "baseline": 0.0}
    # What the stage took the last time is one manifest, too; of one that never ran there is none.
    reads.clear()
    observation = Observation(load_spec("clicks"), ws)
    for stage, expected in (("train", 199.0), ("gate", None)):
        earlier = observation._earlier(Run("clicks", days[200], stage, "run", None, None))
        assert (None if earlier is None else earlier.seconds) == expected
    assert len(reads) == 1
