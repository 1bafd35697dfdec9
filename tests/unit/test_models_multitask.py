"""Multi-task models beside their papers' formulas, row by row in float64; losses of several tasks beside loops."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor, nn

from headrace.config import Task, Train, build_spec
from headrace.config.model_args import ESMMArgs, MMoEArgs, PLEArgs, SharedBottomArgs
from headrace.config.schema import MICROSECONDS, DatasetSchema, Feature, Kind
from headrace.errors import UserError
from headrace.models.inputs import InputFeatures, Inputs
from headrace.models.multitask import ESMM, PLE, MMoE, SharedBottom
from headrace.models.objective import Tasks, product_logits
from headrace.train.carried_columns import TaskLabels
from headrace.train.stage import Train as TrainStage

TASKS = ("click", "items", "value")  # `items` is a word of torch's containers, too
FEATURES = InputFeatures(
    {"age": 1, "scores": 2}, ("user", "item"), 4, tasks=TASKS, products={"both": ("click", "items")}
)
ROWS = 6
Weights = dict[str, Tensor]


def _mlp(w: Weights, name: str, x: Tensor, widths: tuple[int, ...], out: int | None = None) -> Tensor:
    """Hidden layers with ReLU, and a linear layer behind them where there is an output."""
    for i in range(len(widths) + (out is not None)):
        x = w[f"{name}.{2 * i}.weight"] @ x + w[f"{name}.{2 * i}.bias"]
        if i < len(widths):
            x = torch.clamp(x, min=0)
    return x


def _mixed(w: Weights, name: str, x: Tensor, experts: list[Tensor]) -> Tensor:
    shares = torch.exp(w[f"{name}.linear.weight"] @ x)
    total = torch.zeros_like(experts[0])
    for share, expert in zip(shares / shares.sum(), experts, strict=True):
        total = total + share * expert
    return total


def _towers(w: Weights, xs: list[Tensor], widths: tuple[int, ...]) -> list[Tensor]:
    return [_mlp(w, f"towers.towers.{k}", x, widths, 1)[0] for k, x in enumerate(xs)]


def _shared_bottom(args: SharedBottomArgs) -> Callable[[Weights, Tensor], list[Tensor]]:
    return lambda w, x: _towers(w, [_mlp(w, "bottom", x, args.bottom_mlp)] * 3, args.tower_mlp)


def _mmoe(args: MMoEArgs) -> Callable[[Weights, Tensor], list[Tensor]]:
    def row(w: Weights, x: Tensor) -> list[Tensor]:
        experts = [_mlp(w, f"experts.experts.{e}", x, args.expert_mlp) for e in range(args.experts)]
        return _towers(w, [_mixed(w, f"gates.{k}", x, experts) for k in range(3)], args.tower_mlp)

    return row


def _ple(args: PLEArgs) -> Callable[[Weights, Tensor], list[Tensor]]:
    def row(w: Weights, x: Tensor) -> list[Tensor]:
        task_states, shared = [x, x, x], x
        for level in range(args.levels):
            prefix = f"levels.{level}"
            task_experts = [
                [
                    _mlp(w, f"{prefix}.own.{k}.experts.{e}", task_states[k], args.expert_mlp)
                    for e in range(args.task_experts)
                ]
                for k in range(3)
            ]
            common = [
                _mlp(w, f"{prefix}.shared.experts.{e}", shared, args.expert_mlp) for e in range(args.shared_experts)
            ]
            task_states = [_mixed(w, f"{prefix}.gates.{k}", task_states[k], task_experts[k] + common) for k in range(3)]
            if level + 1 < args.levels:
                shared = _mixed(
                    w, f"{prefix}.shared_gate", shared, [*task_experts[0], *task_experts[1], *task_experts[2], *common]
                )
        return _towers(w, task_states, args.tower_mlp)

    return row


_BOTTOM = SharedBottomArgs(bottom_mlp=(7, 5), tower_mlp=(4,))
_MMOE = MMoEArgs(experts=3, expert_mlp=(6, 5), tower_mlp=(4,))
_ONE_LEVEL = PLEArgs(levels=1, shared_experts=1, task_experts=2, expert_mlp=(5,), tower_mlp=())
_PLE = PLEArgs(levels=3, shared_experts=2, task_experts=1, expert_mlp=(8, 6), tower_mlp=(5,))
_ESMM = ESMMArgs(tower_mlp=(5, 4))

CASES: dict[str, tuple[Any, Any, Callable[[Weights, Tensor], list[Tensor]]]] = {
    "shared bottom": (SharedBottom, _BOTTOM, _shared_bottom(_BOTTOM)),
    "mmoe": (MMoE, _MMOE, _mmoe(_MMOE)),
    "cgc": (PLE, _ONE_LEVEL, _ple(_ONE_LEVEL)),
    "ple": (PLE, _PLE, _ple(_PLE)),
    "esmm": (ESMM, _ESMM, lambda w, x: _towers(w, [x] * 3, _ESMM.tower_mlp)),
}


@pytest.mark.parametrize("case", CASES)
def test_outputs_and_gradients_are_the_papers(case: str) -> None:
    made_of, args, row = CASES[case]
    torch.manual_seed(11)
    model: nn.Module = made_of(FEATURES, args).double()
    with torch.no_grad():  # starts near zero would leave the ReLUs of small layers dead
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.5 + 0.1)
    numbers = torch.randn(ROWS, FEATURES.continuous_columns, dtype=torch.float64)
    vectors = torch.randn(ROWS, len(FEATURES.categorical), FEATURES.embedding_dim, dtype=torch.float64)
    shares = torch.randn(len(TASKS), ROWS, dtype=torch.float64)  # so that each output's gradient counts differently

    model_vectors = vectors.clone().requires_grad_()
    outputs = model(Inputs(FEATURES, numbers, model_vectors))
    logits = torch.stack([outputs[task] for task in TASKS])
    (logits * shares).sum().backward()
    assert outputs.keys() == {"logits", *TASKS}
    assert outputs["logits"] is outputs["click"]

    weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    reference_vectors = vectors.clone().requires_grad_()
    flat = [torch.cat([numbers[b], *reference_vectors[b]]) for b in range(ROWS)]
    expected = torch.stack([torch.stack(row(weights, x)) for x in flat], dim=1)
    (expected * shares).sum().backward()

    torch.testing.assert_close(logits, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(model_vectors.grad, reference_vectors.grad, rtol=1e-9, atol=1e-9)
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        assert p.grad.abs().sum() > 0, name
        torch.testing.assert_close(p.grad, weights[name].grad, rtol=1e-9, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("made_of", [SharedBottom, MMoE, PLE, ESMM])
def test_one_task_and_features_of_one_kind_are_enough(made_of: Any) -> None:
    products = {"twice": ("label", "label")}
    for features in (
        InputFeatures({}, ("user",), 5, products=products),
        InputFeatures({"age": 1}, (), 5, products=products),
    ):
        networks = []
        for _ in range(2):
            torch.manual_seed(3)
            networks.append(made_of(features, made_of.Args(dropout=0.1)).eval())
        a, b = (m.state_dict() for m in networks)
        assert all(torch.equal(a[k], b[k]) for k in a)
        numbers = torch.randn(ROWS, features.continuous_columns)
        vectors = torch.randn(ROWS, len(features.categorical), features.embedding_dim)
        outputs = networks[0](Inputs(features, numbers, vectors))
        assert torch.equal(outputs["logits"], outputs["label"])
        assert torch.isfinite(outputs["logits"]).all()
        assert networks[0](Inputs(features, numbers[:0], vectors[:0]))["logits"].shape == (0,)


def test_esmm_wants_a_product() -> None:
    with pytest.raises(UserError, match=r"train.tasks has none: write click_and_purchase: \{product:"):
        ESMM(InputFeatures({"age": 1}, (), 5, tasks=("click", "purchase")), ESMMArgs())


def test_targets_are_those_of_tasks() -> None:
    labels, later = torch.tensor([0.0, 1.0]), torch.tensor([torch.nan, 1.0])
    inputs = Inputs(FEATURES, torch.zeros(2, 3), torch.zeros(2, 2, 4), labels, targets={"value": later})
    assert inputs.target("click") is labels
    assert inputs.target("value") is later
    with pytest.raises(ValueError, match="no label of 'items' here"):
        inputs.target("items")


NAN = math.nan
LABEL_TASKS = {
    "click": {},
    "purchase": {"label": "bought", "where": "click", "weight": 0.5},
    "cheap": {"label": "bought", "where": "price < 5", "loss": {"kind": "focal", "gamma": 1.5}, "weight": 3},
    "amount": {"label": "paid", "loss": "squared_error", "weight": 0.1},
    "click_and_purchase": {"product": ["click", "purchase"], "weight": 2},
}


def tasks_of(options: dict[str, Any]) -> dict[str, Task]:
    return dict(Train.model_validate({"tasks": options}).tasks)


def test_the_loss_is_the_sum_over_each_tasks_rows() -> None:
    tasks = Tasks(tasks_of(LABEL_TASKS))
    assert tasks.names == ("click", "purchase", "cheap", "amount")
    features = InputFeatures({"x": 1}, (), 1, tasks=tasks.names, products=tasks.products)
    rows = 40
    rng = np.random.default_rng(5)
    logits = {n: torch.tensor(rng.normal(size=rows), dtype=torch.float64, requires_grad=True) for n in tasks.names}
    outputs = tasks.complete(dict(logits))
    assert outputs["logits"] is logits["click"]
    labels = rng.integers(0, 2, rows).astype(float)
    targets = {n: np.where(rng.random(rows) < 0.4, NAN, rng.integers(0, 2, rows)) for n in ("purchase", "cheap")}
    targets["amount"] = np.where(rng.random(rows) < 0.4, NAN, rng.normal(size=rows) * 9)
    targets["click_and_purchase"] = labels * targets["purchase"]
    weights = rng.random(rows) + 0.1
    inputs = Inputs(
        features,
        torch.zeros(rows, 1),
        torch.zeros(rows, 0, 1),
        torch.tensor(labels),
        torch.tensor(weights),
        targets={n: torch.tensor(t) for n, t in targets.items()},
    )
    loss = tasks.loss(outputs, inputs)

    p = {n: 1 / (1 + np.exp(-x.detach().numpy())) for n, x in logits.items()}
    p["click_and_purchase"] = p["click"] * p["purchase"]
    total = 0.0
    for name, task in tasks.specs.items():
        target = labels if name == "click" else targets[name]
        for b in range(rows):
            if np.isnan(target[b]):
                continue
            if task.loss.kind == "squared_error":
                of_row = (float(logits[name][b].detach()) - target[b]) ** 2
            else:
                right = p[name][b] if target[b] == 1 else 1 - p[name][b]
                of_row = -math.log(right) * ((1 - right) ** 1.5 if task.loss.kind == "focal" else 1)
            total += task.weight * weights[b] * of_row
    assert float(loss.detach()) == pytest.approx(total, rel=1e-10)

    loss.backward()
    for name in ("cheap", "amount"):  # purchase learns from its product as well
        grad = logits[name].grad
        assert grad is not None
        assert ((grad == 0).numpy() == np.isnan(targets[name])).all(), name


def test_rows_without_a_label_change_no_gradient() -> None:
    """A batch whose labels are partly missing gives the gradient of the same batch without those rows."""
    torch.manual_seed(2)
    tasks = Tasks(tasks_of({"click": {"weight": 0}, "amount": {"label": "paid", "loss": "squared_error"}}))
    features = InputFeatures({"x": 2}, ("user", "item"), 3, tasks=tasks.names)
    model = MMoE(features, MMoEArgs(experts=2, expert_mlp=(4,), tower_mlp=(3,)))
    numbers, vectors, target = torch.randn(9, 2), torch.randn(9, 2, 3), torch.randn(9)
    target[[1, 4, 5]] = NAN

    def gradients(rows: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
        model.zero_grad()
        x = vectors[rows].clone().requires_grad_()
        inputs = Inputs(features, numbers[rows], x, torch.ones(len(rows)), targets={"amount": target[rows]})
        tasks.loss(tasks.complete(model(inputs)), inputs).backward()
        assert x.grad is not None
        return x.grad, [None if p.grad is None else p.grad.clone() for p in model.parameters()]

    labelled = torch.tensor([0, 2, 3, 6, 7, 8])
    all_vectors, all_gradients = gradients(torch.arange(9))
    labelled_vectors, labelled_gradients = gradients(labelled)
    assert (all_vectors[[1, 4, 5]] == 0).all()
    torch.testing.assert_close(all_vectors[labelled], labelled_vectors)
    for a, b in zip(all_gradients, labelled_gradients, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b)
    assert sum(a is not None and bool(a.abs().sum() > 0) for a in all_gradients) >= 5


def test_a_task_without_weight_is_not_learned_and_a_network_without_its_output_is_named() -> None:
    tasks = Tasks(tasks_of({"click": {}, "purchase": {"label": "bought", "weight": 0}}))
    features = InputFeatures({"x": 1}, (), 1, tasks=tasks.names)
    x = torch.zeros(3, requires_grad=True)
    outputs = tasks.complete({"click": torch.zeros(3), "purchase": x})
    inputs = Inputs(features, torch.zeros(3, 1), torch.zeros(3, 0, 1), torch.ones(3))  # its label is not asked for
    assert float(tasks.loss(outputs, inputs).detach()) == pytest.approx(3 * math.log(2))
    assert tasks.complete({"logits": x + 1, "click": x, "purchase": x})["logits"] is x  # a network may say otherwise
    with pytest.raises(UserError, match=r"gives no output 'purchase', but: logits, click; choose a model.class"):
        tasks.complete({"logits": x, "click": x})


@given(st.lists(st.floats(-60, 60), min_size=2, max_size=4))
def test_the_logit_of_a_product(logits: list[float]) -> None:
    x = torch.tensor(logits, dtype=torch.float64, requires_grad=True)
    logit = product_logits(list(x[:, None]))
    all_happen = sum(-np.log1p(np.exp(-np.longdouble(z))) for z in logits)
    assert float(logit.detach()) == pytest.approx(float(all_happen - np.log(-np.expm1(all_happen))), rel=1e-9, abs=1e-9)
    logit.sum().backward()
    assert x.grad is not None
    assert torch.isfinite(x.grad).all()


CARRIED = DatasetSchema(
    features=(
        Feature(name="age", kind=Kind.CONTINUOUS, dtype="float32", sources=("age", "income")),
        Feature(name="clicked", kind=Kind.LABEL, dtype="float32"),
        Feature(name="bought", kind=Kind.CARRIED, dtype="bool"),
        Feature(name="paid", kind=Kind.CARRIED, dtype="float64"),
        Feature(name="price", kind=Kind.CARRIED, dtype="int32"),
        Feature(name="age__carried", kind=Kind.CARRIED, dtype="int64"),
        Feature(name="at", kind=Kind.CARRIED, dtype="int64", metadata={"unit": MICROSECONDS}),
        Feature(name="name", kind=Kind.CARRIED, dtype="string"),
    )
)
DAY = 86_400_000_000


def labels_of(tasks: dict[str, Any], ds: str = "1970-01-10") -> TaskLabels:
    return TaskLabels(Train.model_validate({"tasks": tasks}), CARRIED, ds)


@given(
    st.lists(
        st.tuples(
            st.booleans(),
            st.booleans() | st.none(),
            st.integers(0, 9) | st.none(),
            st.floats(-9, 9, width=32) | st.none(),
            st.integers(0, 10 * DAY) | st.none(),
        ),
        max_size=30,
    )
)
def test_labels_are_those_of_the_tasks_rows(rows: list[tuple[bool, bool | None, int | None, float | None, int | None]]):
    labels = labels_of(
        {**LABEL_TASKS, "purchase": {**LABEL_TASKS["purchase"], "known_after": {"days": 2.5, "event_time": "at"}}}
    )
    assert labels.carried == ("bought", "paid", "price", "at")
    assert labels.with_label_columns(["paid", "name"]) == ["paid", "name", "bought", "price", "at"]
    columns = list(zip(*rows, strict=True)) if rows else [()] * 5
    carried = {
        "bought": np.array(columns[1], object),
        "price": np.array([NAN if v is None else v for v in columns[2]], float),
        "paid": np.array([NAN if v is None else v for v in columns[3]], float),
        "at": np.array([NAN if v is None else v for v in columns[4]], float),
    }
    targets = labels.targets(np.array(columns[0], np.float32), carried)
    assert list(targets) == ["purchase", "cheap", "amount", "click_and_purchase"]
    for b, (click, bought, price, paid, time) in enumerate(rows):
        known = time is not None and time + 2.5 * DAY <= 10 * DAY
        expected = {
            "purchase": bought if click and known else None,
            "cheap": bought if price is not None and price < 5 else None,
            "amount": paid,
            "click_and_purchase": None if not known else False if not click else bought,
        }
        for name, value in expected.items():
            np.testing.assert_equal(float(targets[name][b]), NAN if value is None else float(value))


def test_what_is_no_label_is_refused() -> None:
    labels = labels_of({"click": {}, "paid": {"label": "paid"}, "amount": {"label": "paid", "loss": "squared_error"}})
    click = np.zeros(2, np.float32)
    with pytest.raises(UserError, match=r"tasks.paid: the label 'paid' is 7.0 in 1 of 2 rows.*loss: bce are in \[0, 1"):
        labels.targets(click, {"paid": np.array([7.0, 1.0])})
    with pytest.raises(UserError, match=r"tasks.amount: the label 'paid' is inf in 1 of 2 rows"):
        labels_of({"click": {}, "amount": {"label": "paid", "loss": "squared_error"}}).targets(
            click, {"paid": np.array([math.inf, 1.0])}
        )


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ({"label": "cost"}, "label: the column 'cost' is not carried by the dataset"),
        ({"label": "name"}, "label: the column 'name' is text"),
        ({"label": "age"}, "label: the column 'age' is what the feature 'age' is made of, which would leak"),
        ({"label": "bought", "where": "city = 'x'"}, r"where: 'city = 'x'' is no condition .*\(bought, paid, price"),
        ({"label": "bought", "where": "price + 1"}, "is no condition over the carried columns"),
        (
            {"label": "bought", "known_after": {"days": 1, "event_time": "age"}},
            "known_after.event_time: 'age' is no carried column of timestamps",
        ),
    ],
)
def test_what_the_dataset_lacks_is_named(task: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=f"train.tasks.buy.{message}" if ":" in message[:20] else message):
        labels_of({"click": {}, "buy": task})


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ({"click": {"label": "x"}}, "tasks.click.label: the first task is the pipeline's label"),
        ({"click": {"where": "x > 1"}}, "tasks.click.where: the first task"),
        ({"click": {"loss": "squared_error"}}, "the first task ranks, and is a probability"),
        ({"click": {}, "buy": {}}, "tasks.buy: name its label"),
        ({"click": {}, "logits": {"label": "x"}}, "'logits' is no name of a task"),
        ({"click": {}, "Buy": {"label": "x"}}, "'Buy' is no name of a task"),
        ({"click": {}, "a": {"label": "x", "where": "b"}, "b": {"label": "y"}}, "'b' is no task with a label in"),
        ({"click": {}, "a": {"label": "x", "where": "a"}}, "'a' is no task with a label in"),
        ({"click": {}, "a": {"product": ["click"]}}, "a product is of two tasks or more"),
        ({"click": {}, "a": {"product": ["click", "b"]}}, r"'b' is no task of a probability; there are: click"),
        ({"click": {}, "a": {"product": ["click", "click"], "label": "x"}}, "leave out label and known_after"),
        ({"click": {"loss": "bpr"}}, "loss: bpr is no loss of a label alone"),
        ({"click": {"weight": 0}}, "all weights are 0"),
        ({"click": {}, "a": {"label": "x", "metrics": ["gauc"]}}, "metrics are of users: name a carried column"),
        ({"click": {}, "a": {"label": "x", "loss": "squared_error", "metrics": ["pr_auc"]}}, "has rmse and mae"),
    ],
)
def test_tasks_that_do_not_fit_are_refused(tasks: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Train.model_validate({"tasks": tasks})
    assert message in str(caught.value)


def test_tasks_are_in_the_key_and_leaks_are_refused() -> None:
    minimal = {
        "pipeline": "clicks",
        "source": {"format": "clicks", "path": "{ds}"},
        "table": {"columns": [{"name": "click", "type": "int"}, {"name": "w"}, {"name": "v"}]},
        "features": {"label": "click", "workflow": [], "split": {"by": "position"}, "carried": ["w"]},
    }
    tasks = {"click": {}, "buy": {"label": "w"}}
    with_tasks = build_spec({**minimal, "train": {"tasks": tasks}})
    assert TrainStage().spec_part(with_tasks)["train"]["tasks"][1][1]["label"] == "w"
    with pytest.raises(UserError, match=r"train.tasks.buy.label: 'v' must be in features.carried"):
        build_spec({**minimal, "train": {"tasks": {"click": {}, "buy": {"label": "v"}}}})
    score = {"user": {"key": "w"}, "item": {"key": "v"}}
    for more, message in (
        ({"output": "bye"}, r"score.output: 'bye' is no task of train.tasks \(click, buy\)"),
        ({"output": "buy", "model": "best"}, "score.output is of the neural model, and score.model is 'best'"),
    ):
        with pytest.raises(UserError, match=message):
            build_spec({**minimal, "train": {"tasks": tasks}, "score": {**score, **more}})
    scored = build_spec({**minimal, "train": {"tasks": tasks}, "score": {**score, "output": "buy"}, "publish": {}})
    assert scored.score is not None
    assert scored.score.model_dump()["output"] == "buy"
    amounts = {"click": {}, "buy": {"label": "w", "loss": "squared_error"}}
    with pytest.raises(UserError, match="publish takes probabilities, and 'buy' has loss: squared_error"):
        build_spec({**minimal, "train": {"tasks": amounts}, "score": {**score, "output": "buy"}, "publish": {}})
    leaking = {**minimal["features"], "workflow": [{"columns": ["w"]}]}
    with pytest.raises(UserError, match=r"workflow\[0\].columns: 'w' is the label of train.tasks.buy; a feature"):
        build_spec({**minimal, "features": leaking, "train": {"tasks": tasks}})
    with pytest.raises(UserError, match="negatives have no labels of tasks"):
        build_spec({**minimal, "train": {"tasks": tasks, "negatives": {"column": "v"}}})
