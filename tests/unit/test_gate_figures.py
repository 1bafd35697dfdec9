"""Figures that the gate judges: sizes, metrics, and values of policies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from bench.simulated_days import day, run_day
from headrace.config import Train
from headrace.config.evaluation import OffPolicy
from headrace.config.workspace import Workspace
from headrace.errors import UserError
from headrace.quality.gate import predictions
from headrace.quality.gate.day_evaluation import model_facts, requested_metrics
from headrace.quality.gate.evaluate import GateTask, ModelResult, _measured
from headrace.quality.gate.predictions import KnownValues, RawActions, logits_of
from headrace.stage.manifest import Manifest
from headrace.train.evaluation.ranks import Ranks


def test_a_model_of_changed_rows_is_as_large_as_all_that_it_lies_upon(tmp_path: Path) -> None:
    ws, days = Workspace(tmp_path), [day(n) for n in range(3)]
    for n, ds in enumerate(days):
        run_day(ws, ds, size=5, base=days[n - 1] if n else None)
    folders = [ws.model("clicks", ds, f"train-{ds}") / "model" for ds in days]
    sizes = [sum(p.stat().st_size for p in f.local_path().rglob("*") if p.is_file()) for f in folders]
    facts = [model_facts(f, ModelResult({}, 0, {}, []), ("valid",), 64, None) for f in folders]
    assert [t["bytes"] for t in facts] == [sum(sizes[: n + 1]) for n in range(3)]


def rows_of(labels: Any, scores: list[Any]) -> Any:
    """Predicted rows of so many models, of which no action was logged."""
    return SimpleNamespace(
        labels=labels,
        carried=(),
        scores=scores.__getitem__,
        known=[KnownValues(())] * len(scores),
        choices=lambda model, features: None,
    )


@pytest.mark.parametrize(
    ("empty", "measured"), [((), (True, True)), ((0,), (False, False)), ((1,), (True, False)), ((0, 1), (False, False))]
)
def test_where_no_row_has_a_number_of_both(
    tmp_path: Path, make_dataset: Callable[..., Manifest], empty: tuple[int, ...], measured: tuple[bool, bool]
) -> None:
    """The day's model, the first, is measured alone; what is undefined is named, so that a rule refuses it."""
    ws = Workspace(tmp_path)
    manifest = make_dataset(ws, train=100, valid=20)
    assert manifest.dataset_schema is not None
    dataset = ws.locate(manifest.output("dataset").name)
    task = GateTask(
        (), ws.mapped("clicks"), dataset, manifest.dataset_schema, Train(), ("valid",), "probability", (), {}
    )
    rng = np.random.default_rng(3)
    labels = (rng.random(50) < 0.4).astype(np.float32)
    scores: list[Any] = [np.full(50, np.nan, np.float32) if i in empty else rng.random(50, np.float32) for i in (0, 1)]
    rows = rows_of(labels, scores)
    task = replace(task, models=(dataset, dataset))
    figures = _measured(task, Ranks(), {"valid": rows}, ())
    assert figures["rows"] == 50
    metric_names = requested_metrics(task)
    assert metric_names == ["auc", "log_loss", "calibration", "base_rate"]
    for i, model in enumerate(figures["models"]):
        assert model["finite"] == (0 if i in empty else 50)
        assert (list(model["evaluations"]) == ["valid"]) == measured[i]
        if measured[i]:
            metrics = model["evaluations"]["valid"]["metrics"]
            assert metrics["auc"] == pytest.approx(roc_auc_score(labels, scores[i]), abs=1e-9)
            assert list(metrics) == metric_names

    # A third model that is optional changes nothing of this, and is measured where it lacks none of their rows.
    for lacks in (slice(0), slice(1), slice(50)):
        third = rng.random(50, np.float32)
        third[lacks] = np.nan
        rows_of_three = rows_of(labels, [*scores, third])
        of_three = replace(task, models=(dataset,) * 3, optional=1)
        three = _measured(of_three, Ranks(), {"valid": rows_of_three}, ())
        assert three["models"][:2] == figures["models"]
        last = three["models"][2]
        is_complete = lacks.stop == 0
        assert last["finite"] == int(np.isfinite(third).sum())
        assert bool(last["evaluations"]) == (is_complete and empty not in ((0,), (0, 1)))
        if last["evaluations"]:
            auc = last["evaluations"]["valid"]["metrics"]["auc"]
            assert auc == pytest.approx(roc_auc_score(labels, third), abs=1e-9)


ITEMS, PRICES = ["a", "b", "c"], [1.0, 2.5, 4.0]


def actions(policy: str = "softmax") -> RawActions:
    settings = OffPolicy.model_validate({"propensity": "p", "action": "item", "policy": policy, "temperature": 0.5})
    return RawActions(settings, "item", pa.table({"item": ITEMS, "price": pa.array(PRICES, pa.float32())}))


def predict(rows: pa.RecordBatch) -> np.ndarray:
    """Looks at what follows from the action, and at what does not."""
    price, age = (rows.column(name).to_numpy(zero_copy_only=False) for name in ("price", "age"))
    return (1 / (1 + np.exp(-(price / 3 - age / 40)))).astype(np.float32)


@given(
    st.lists(st.tuples(st.sampled_from([*ITEMS, "new", None]), st.integers(0, 90)), min_size=1, max_size=30),
    st.integers(1, 40),
)
def test_choices_are_a_softmax_of_the_logits_of_all_actions(rows: list[tuple[str | None, int]], cells: int) -> None:
    items, ages = zip(*rows, strict=True)
    batch = pa.RecordBatch.from_pydict(
        {"age": pa.array(ages, pa.int32()), "item": pa.array(items, pa.large_string()), "price": [7.0] * len(rows)}
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(predictions, "_CELLS", cells)  # blocks of any size
        choices = actions().choices(predict, batch)
        greedy = actions("greedy").choices(predict, batch)
    for i, (item, age) in enumerate(rows):
        logits = np.array([price / 3 - age / 40 for price in PRICES])
        share = np.exp(logits / 0.5) / np.exp(logits / 0.5).sum()
        reward = 1 / (1 + np.exp(-logits))
        assert choices.chosen[i] == pytest.approx(share[ITEMS.index(item)] if item in ITEMS else 0.0, rel=1e-4)
        assert choices.expected[i] == pytest.approx((share * reward).sum(), rel=1e-4)
        assert greedy.chosen[i] == (item == "c")
        assert greedy.expected[i] == pytest.approx(reward[2], rel=1e-4)


def test_numbers_that_are_no_probabilities_are_refused() -> None:
    assert logits_of(np.array([0.5, 0.0, 1.0], np.float32)).tolist() == pytest.approx([0.0, -16.118, 16.118], abs=1e-3)
    for value in (1.5, -0.1, np.nan):
        with pytest.raises(UserError, match="no probabilities"):
            logits_of(np.array([value], np.float32))
