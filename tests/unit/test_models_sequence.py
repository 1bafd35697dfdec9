"""Models of histories beside their papers' formulas, a row and a place at a time in float64; causality; ragged rows."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import layer_norm

from headrace.config.model_args import DINArgs, HSTUArgs, SASRecArgs
from headrace.embeddings.jagged import JaggedTensor
from headrace.errors import UserError
from headrace.models.din import DIN
from headrace.models.inputs import InputFeatures, Inputs
from headrace.models.next_item import HSTU, LengthGroups, SASRec, newest_of, places_of

D, ITEMS, TIMES = 6, 12, 10
FEATURES = InputFeatures(
    {"age": 1, "times": TIMES},
    ("user", "item", "history"),
    D,
    ("history",),
    {"user": 5, "item": ITEMS, "history": ITEMS},
    {"user": 2, "item": 2, "history": 2},
)
#: With a row of none, of one, of more than a model's `length`, and of two groups.
LENGTHS = (3, 0, 1, 10, 9, 2)
Weights = dict[str, Tensor]


class Batch:
    """Ids and a table, and the `Inputs` of both; `table` has the gradient."""

    def __init__(self, lengths: tuple[int, ...] = LENGTHS, shared: bool = False, all_items: bool = False) -> None:
        torch.manual_seed(0)
        self.all_items = all_items
        self.table = (torch.randn(ITEMS, D, dtype=torch.float64) / 2).requires_grad_()
        self.users = torch.randn(len(lengths), D, dtype=torch.float64).requires_grad_()
        self.history = JaggedTensor.of_lengths(
            torch.randint(1, ITEMS, (sum(lengths),)), torch.tensor(lengths, dtype=torch.int64)
        )
        self.item = torch.randint(1, ITEMS, (len(lengths),))
        self.item[:2] = torch.tensor([1, 5])[: len(lengths)]  # not in the vocabulary; of a row without history
        self.negatives = torch.randint(2, ITEMS, (4,) if shared else (len(lengths), 4))
        self.labels = torch.ones(len(lengths), dtype=torch.float64)
        self.labels[2:3] = 0
        self.weights = torch.rand(len(lengths), dtype=torch.float64) + 0.5
        self.age = torch.randn(len(lengths), 1, dtype=torch.float64)
        self.times = (torch.rand(len(lengths), TIMES, dtype=torch.float64) * 500).cumsum(1)

    @property
    def rows(self) -> range:
        return range(len(self.item))

    def inputs(self) -> Inputs:
        offsets = self.history.offsets
        embeddings = {
            "history": JaggedTensor(self.table[self.history.values], offsets),
            "item": self.table[self.item],
            "user": self.users,
            "others": self.table if self.all_items else self.table[self.negatives],
        }
        return Inputs(
            FEATURES,
            torch.cat([self.age, self.times], 1),
            torch.zeros(len(self.item), 0, D),
            self.labels,
            self.weights,
            embeddings=embeddings,
            ids={"item": self.item, "history": self.history},
            negatives=self.negatives,
        )

    def row(self, b: int) -> list[int]:
        start, end = self.history.offsets[b : b + 2].tolist()
        return self.history.values[start:end].tolist()  # type: ignore[no-any-return]


def _network(made_of: Any, args: Any) -> Any:
    torch.manual_seed(11)
    model = made_of(FEATURES, args).double()
    with torch.no_grad():  # starts of ones and zeros would hide a weight that is not used
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.3)
    return model


def _linear(w: Weights, name: str, x: Tensor) -> Tensor:
    return w[f"{name}.weight"] @ x + w[f"{name}.bias"]


def _norm(w: Weights, name: str, x: Tensor) -> Tensor:
    return layer_norm(x, x.shape, w[f"{name}.weight"], w[f"{name}.bias"])


def _sasrec(args: SASRecArgs, w: Weights, items: list[Tensor], times: list[float]) -> list[Tensor]:
    width = D // args.heads
    xs = [x * math.sqrt(D) + w["positions.weight"][i] for i, x in enumerate(items)]
    for layer in range(args.blocks):
        name = f"blocks.{layer}"
        projections = [_linear(w, f"{name}.query_key_value", _norm(w, f"{name}.attention_norm", x)) for x in xs]
        after = []
        for i, x in enumerate(xs):
            heads = []
            for h in range(args.heads):
                q, k, v = (slice(part * D + h * width, part * D + (h + 1) * width) for part in range(3))
                powers = [torch.exp(projections[i][q] @ projections[j][k] / math.sqrt(width)) for j in range(i + 1)]
                heads.append(sum(p * projections[j][v] for j, p in enumerate(powers)) / sum(powers))
            y = x + _linear(w, f"{name}.out", torch.cat(heads))
            hidden = torch.clamp(_linear(w, f"{name}.mlp.0", _norm(w, f"{name}.mlp_norm", y)), min=0)
            after.append(y + _linear(w, f"{name}.mlp.3", hidden))
        xs = after
    return [_norm(w, "norm", x) for x in xs]


def _hstu(args: HSTUArgs, w: Weights, items: list[Tensor], times: list[float]) -> list[Tensor]:
    def silu(x: Tensor) -> Tensor:
        return x / (1 + torch.exp(-x))

    value, key = args.linear_dim or D // args.heads, args.attention_dim or D // args.heads
    xs = [x * math.sqrt(D) + w["positions.weight"][i] for i, x in enumerate(items)]
    for layer in range(args.blocks):
        name = f"layers.{layer}"
        gates, heads_of = [], []
        for x in xs:
            projected = silu(_linear(w, f"{name}.gate_value_query_key", _norm(w, f"{name}.norm", x)))
            gates.append(projected[: args.heads * value])
            heads_of.append(projected[args.heads * value :].view(args.heads, value + 2 * key))
        after = []
        for i, x in enumerate(xs):
            heads = []
            for h in range(args.heads):
                total = torch.zeros(value, dtype=x.dtype)
                for j in range(i + 1):
                    score = heads_of[i][h, value : value + key] @ heads_of[j][h, value + key :]
                    score = score + w[f"{name}.bias.by_place"][i - j]
                    if args.times:
                        bucket = int(math.log(max(1.0, abs(times[i] - times[j]))) / 0.301)
                        score = score + w[f"{name}.bias.by_time"][min(bucket, args.time_buckets - 1)]
                    total = total + silu(score) / args.length * heads_of[j][h, :value]
                heads.append(total)
            y = _norm(w, f"{name}.attention_norm", torch.cat(heads)) * gates[i]
            after.append(x + _linear(w, f"{name}.out", y))
        xs = after
    return [_norm(w, "norm", x) for x in xs]


def _loss_and_logits(
    args: Any, states_of: Callable[..., list[Tensor]], w: Weights, batch: Batch
) -> tuple[Tensor, Tensor]:
    """Return loss and logits of a next-item model, one target at a time."""

    def scored(x: Tensor) -> Tensor:
        return x if args.temperature is None else x / x.norm()

    total, logits = torch.zeros((), dtype=torch.float64), []
    for b in batch.rows:
        history, times = batch.row(b), batch.times[b].tolist()[: len(batch.row(b))]
        if args.newest == "first":
            history, times = history[::-1], times[::-1]
        history, times = history[-args.length :], times[-args.length :]
        states = states_of(args, w, [batch.table[i] for i in history], times)
        if args.temperature is not None:
            states = [x / x.norm() / args.temperature for x in states]
        queries = states or [w["start"]]
        targets = [*history[1:], int(batch.item[b])] if history else [int(batch.item[b])]
        logits.append(queries[-1] @ scored(batch.table[targets[-1]]))
        for place, (query, target) in enumerate(zip(queries, targets, strict=True), 1 if history else 0):
            last = place == len(history)
            if target < 2 or (args.positions == "last" and not last):
                continue
            weight = batch.weights[b] * (batch.labels[b] if last else 1)
            drawn = batch.negatives.flatten().tolist()
            if args.negatives == "row":
                drawn = batch.negatives[b].tolist()
            elif args.negatives == "position":
                drawn = [int(batch.negatives[b, place % batch.negatives.shape[1]])]
            if args.loss == "softmax":
                drawn = range(2, ITEMS)
            negative_logits = [query @ scored(batch.table[n]) for n in drawn if n != target]
            target_logit = query @ scored(batch.table[target])
            if args.loss == "bce":
                row_loss = torch.log1p(torch.exp(-target_logit)) + sum(
                    torch.log1p(torch.exp(x)) for x in negative_logits
                )
            else:
                row_loss = -target_logit + torch.log(
                    torch.exp(target_logit) + sum(torch.exp(x) for x in negative_logits)
                )
            total = total + weight * row_loss
    return total, torch.stack(logits)


_COMMON = {"item": "item", "history": "history", "length": 9, "dropout": 0.0}
CASES: dict[str, tuple[Any, Any, Callable[..., list[Tensor]]]] = {
    "sasrec": (SASRec, SASRecArgs(**_COMMON, heads=2), _sasrec),
    "sasrec, bce with one negative": (SASRec, SASRecArgs(**_COMMON, mlp=5, loss="bce", negatives="position"), _sasrec),
    "sasrec, bce with many": (SASRec, SASRecArgs(**_COMMON, loss="bce", negatives="row", newest="first"), _sasrec),
    "sasrec, last item alone": (SASRec, SASRecArgs(**_COMMON, positions="last", negatives="row"), _sasrec),
    "sasrec, all items": (SASRec, SASRecArgs(**_COMMON, loss="softmax", temperature=0.5), _sasrec),
    "sasrec, bce with shared negatives": (SASRec, SASRecArgs(**_COMMON, loss="bce"), _sasrec),
    "sasrec, shared negatives": (SASRec, SASRecArgs(**_COMMON), _sasrec),
    "hstu": (HSTU, HSTUArgs(**_COMMON, heads=2, attention_dim=2, linear_dim=4), _hstu),
    "hstu with times": (HSTU, HSTUArgs(**_COMMON, times="times", time_buckets=20, newest="first"), _hstu),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_loss_and_gradients_are_the_papers(case: str) -> None:
    made_of, args, states_of = CASES[case]
    model, batch = _network(made_of, args), Batch(shared="shared" in case, all_items=args.loss == "softmax")
    inputs = batch.inputs()
    outputs = model(inputs)
    loss = model.loss(outputs, inputs)
    loss.backward()
    gradient, batch.table.grad = batch.table.grad, None

    weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    expected, logits = _loss_and_logits(args, states_of, weights, batch)
    expected.backward()

    torch.testing.assert_close(outputs["logits"], logits, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(loss, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(gradient, batch.table.grad, rtol=1e-9, atol=1e-9)
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        assert p.grad.abs().sum() > 0, name
        torch.testing.assert_close(p.grad, weights[name].grad, rtol=1e-9, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")
    queries, items = model.queries(inputs), model.items(inputs)
    torch.testing.assert_close((queries * items).sum(1), outputs["logits"], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("made_of", [SASRec, HSTU])
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_later_items_and_other_rows_change_no_state(made_of: Any, data: st.DataObject) -> None:
    lengths = tuple(data.draw(st.lists(st.integers(0, 40), min_size=1, max_size=6)))
    changed_row = data.draw(st.integers(0, len(lengths) - 1))
    place = data.draw(st.integers(0, max(0, lengths[changed_row] - 1)))
    length = data.draw(st.sampled_from([5, 64]))
    torch.manual_seed(3)
    args = made_of.Args(item="item", history="history", length=length, dropout=0.5)
    model = made_of(FEATURES, args).eval()
    values = torch.randn(sum(lengths), D)
    first = sum(lengths[:changed_row])
    changed = values.clone()
    changed[first + place : first + lengths[changed_row]] = torch.randn(D) * 1e3
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    inputs = Batch(lengths=lengths).inputs()

    def states(given_values: Tensor) -> JaggedTensor:
        items = newest_of(JaggedTensor(given_values, offsets), length)
        return JaggedTensor(model.encode(items, inputs), items.offsets)

    with torch.no_grad():
        states_before, states_after = states(values), states(changed)
    for b, n in enumerate(lengths):
        start, end = states_before.offsets[b : b + 2].tolist()
        known = end - start if b != changed_row else min(end - start, max(0, place - (n - (end - start))))
        assert torch.equal(states_before.values[start : start + known], states_after.values[start : start + known])
        row_alone = JaggedTensor(values[int(offsets[b]) : int(offsets[b + 1])], torch.tensor([0, n]))
        with torch.no_grad():  # a batch of another size may be summed in another order
            single = model.encode(newest_of(row_alone, length), inputs)
        torch.testing.assert_close(states_before.values[start:end], single, rtol=1e-4, atol=1e-5)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 70), max_size=12), st.integers(1, 80), st.booleans())
def test_rows_are_cut_grouped_and_packed_again(lengths: list[int], length: int, newest_first: bool) -> None:
    rows = [list(range(100 * b + 1, 100 * b + 1 + n)) for b, n in enumerate(lengths)]  # 0 is padding
    values = torch.tensor([x for row in rows for x in row], dtype=torch.float64)
    sequence = JaggedTensor.of_lengths(values, torch.tensor(lengths, dtype=torch.int64))
    newest = newest_of(sequence, length, newest_first=newest_first)
    expected = [row[:length][::-1] if newest_first else row[-length:] for row in rows]
    assert newest.values.tolist() == [x for row in expected for x in row]
    assert newest.lengths.tolist() == [len(row) for row in expected]
    assert places_of(newest.offsets).tolist() == [i for row in expected for i in range(len(row))]

    groups = LengthGroups.from_offsets(newest.offsets)
    padded = groups.padded(newest.values.unsqueeze(1))
    if padded:
        assert torch.equal(groups.packed(padded).squeeze(1), newest.values)
    unpacked = []
    for group in padded:
        longest = group.shape[1]
        for row in group.squeeze(2).tolist():
            n = max(i + 1 for i, x in enumerate(row) if x)
            unpacked.append(row[:n])
            assert longest == 8 or longest < 2 * n
    assert sorted(unpacked) == sorted(row for row in expected if row)


def _din(args: DINArgs, w: Weights, batch: Batch) -> Tensor:
    """A layer over all rows at a time, since Dice looks at all of them; otherwise plain loops."""

    def activated(name: str, xs: list[Tensor]) -> list[Tensor]:
        if args.activation == "prelu":
            return [torch.where(x > 0, x, w[f"{name}.weight"] * x) for x in xs]
        mean = sum(xs) / len(xs)
        variance = sum((x - mean) ** 2 for x in xs) / len(xs)
        shares = [1 / (1 + torch.exp(-(x - mean) / torch.sqrt(variance + 1e-8))) for x in xs]
        return [p * x + (1 - p) * w[f"{name}.alpha"] * x for p, x in zip(shares, xs, strict=True)]

    def mlp(name: str, xs: list[Tensor], layers: int) -> list[Tensor]:
        for i in range(layers):
            xs = activated(f"{name}.activations.{i}", [_linear(w, f"{name}.linear.{i}", x) for x in xs])
        return [_linear(w, f"{name}.linear.{layers}", x) for x in xs]

    pairs = [(b, batch.table[h]) for b in batch.rows for h in batch.row(b)]
    targets = [batch.table[batch.item[b]] for b in batch.rows]
    seen = [torch.cat([h, targets[b], h - targets[b], h * targets[b]]) for b, h in pairs]
    shares = [x[0] for x in mlp("attention.0", seen, len(args.attention_mlp))]
    rows = []
    for b in batch.rows:
        row_pairs = [(share, h) for share, (owner, h) in zip(shares, pairs, strict=True) if owner == b]
        if args.softmax and row_pairs:
            total = sum(torch.exp(share) for share, _ in row_pairs)
            row_pairs = [(torch.exp(share) / total, h) for share, h in row_pairs]
        interest = sum((share * h for share, h in row_pairs), torch.zeros(D, dtype=torch.float64))
        rows.append(torch.cat([batch.age[b], batch.times[b], batch.users[b], targets[b], interest]))
    return torch.cat(mlp("mlp", rows, len(args.mlp)))


_DIN = {"histories": {"item": "history"}, "attention_mlp": (5, 3), "mlp": (6,)}


@pytest.mark.parametrize(
    "args", [DINArgs(**_DIN), DINArgs(**_DIN, activation="prelu"), DINArgs(**_DIN, softmax=True)], ids=str
)
def test_din_is_the_papers(args: DINArgs) -> None:
    model, batch = _network(DIN, args), Batch()
    logits = model(batch.inputs())["logits"]
    shares = torch.randn(len(batch.item), dtype=torch.float64)
    (logits * shares).sum().backward()
    gradients, batch.table.grad, batch.users.grad = (batch.table.grad, batch.users.grad), None, None

    weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    expected = _din(args, weights, batch)
    (expected * shares).sum().backward()
    torch.testing.assert_close(logits, expected, rtol=1e-9, atol=1e-9)
    for actual, reference in zip(gradients, (batch.table.grad, batch.users.grad), strict=True):
        torch.testing.assert_close(actual, reference, rtol=1e-9, atol=1e-9)
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        torch.testing.assert_close(p.grad, weights[name].grad, rtol=1e-7, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


def test_dice_in_evaluation_has_the_averages_of_training() -> None:
    model, batch = _network(DIN, DINArgs(**_DIN)), Batch()
    with torch.no_grad():
        for _ in range(150):
            trained = model(batch.inputs())["logits"]
        torch.testing.assert_close(model.eval()(batch.inputs())["logits"], trained, rtol=1e-6, atol=1e-6)


def test_dice_counts_in_float32_whatever_the_precision() -> None:
    model, batch = DIN(FEATURES, DINArgs(**_DIN)).train(), Batch(lengths=(1,) * 1001)
    batch.table, batch.users, batch.age, batch.times = (
        x.detach().float() for x in (batch.table, batch.users, batch.age, batch.times)
    )
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):  # 1001 is 1000 there
        model(batch.inputs())
        x = model.attention[0].linear[0](torch.cat(_pairs(batch), dim=1))
    dice = model.attention[0].activations[0]
    torch.testing.assert_close(dice.mean, 0.1 * x.double().mean(0).float(), rtol=1e-5, atol=1e-6)


def test_the_order_of_histories_in_a_spec_changes_nothing() -> None:
    """Names that a torch module has itself change nothing either."""
    shape = InputFeatures(
        {}, ("items", "type", "seen", "types"), D, ("seen", "types"), dict.fromkeys(("items", "type"), ITEMS)
    )
    networks = []
    for histories in ({"items": "seen", "type": "types"}, {"type": "types", "items": "seen"}):
        torch.manual_seed(3)
        networks.append(DIN(shape, DINArgs(histories=histories, attention_mlp=(3,), mlp=(4,))))
    batch = Batch()
    history = JaggedTensor(batch.table.detach().float()[batch.history.values], batch.history.offsets)
    user, item = batch.users.detach().float(), batch.table.detach().float()[batch.item]
    embeddings = {
        "items": item,
        "type": user,
        "seen": history,
        "types": JaggedTensor(history.values * 2, history.offsets),
    }
    rows = len(user)
    inputs = Inputs(shape, torch.zeros(rows, 0), torch.zeros(rows, 0, D), embeddings=embeddings)
    assert torch.equal(networks[0](inputs)["logits"], networks[1](inputs)["logits"])


def _pairs(batch: Batch) -> list[Tensor]:
    """Return the pairs that DIN's attention sees of rows with one item each."""
    items, targets = batch.table[batch.history.values], batch.table[batch.item]
    return [items, targets, items - targets, items * targets]


def test_mistakes_name_what_is_wrong() -> None:
    with pytest.raises(
        UserError, match=r"args\.history: 'item' is no categorical feature, a list of ids; there are: hi"
    ):
        SASRec(FEATURES, SASRecArgs(item="item", history="item"))
    with pytest.raises(UserError, match=r"args\.item: 'itm' is no categorical feature, of one id a row; did you mean"):
        SASRec(FEATURES, SASRecArgs(item="itm", history="history"))
    with pytest.raises(UserError, match="'history' has 12 codes and 'user' 5: let both be of one vocabulary"):
        SASRec(FEATURES, SASRecArgs(item="user", history="history"))
    other_features = replace(FEATURES, vocabulary={"item": "item", "history": "history"})
    with pytest.raises(UserError, match="'history' and 'item' have vocabularies of their own"):
        SASRec(other_features, SASRecArgs(**_COMMON))
    with pytest.raises(UserError, match="embedding_dim 6 is no multiple of heads 4"):
        SASRec(FEATURES, SASRecArgs(**_COMMON, heads=4))
    with pytest.raises(UserError, match=r"args\.times: 'when' is no feature of numbers"):
        HSTU(FEATURES, HSTUArgs(**_COMMON, times="when"))
    model = HSTU(FEATURES, HSTUArgs(item="item", history="history", times="times"))
    with pytest.raises(UserError, match="'times' has 10 times a row, but a history has 11 items"):
        model(Batch(lengths=(11,)).inputs())
    with pytest.raises(UserError, match=r"args\.histories: 'user' is no categorical feature, a list of ids"):
        DIN(FEATURES, DINArgs(histories={"item": "user"}))
