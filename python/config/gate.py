"""The section `gate`: conditions for a day's model to become the champion."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field, field_validator, model_validator

from headrace.config.baseline import Trees
from headrace.config.evaluation import HIGHER_IS_BETTER, Bootstrap, CatalogueMetric, RankingMetric, UserMetric
from headrace.config.features import Features
from headrace.config.score import Score
from headrace.config.section import NAME, Section
from headrace.config.train import Train
from headrace.errors import nearest

#: The other model, in front of a metric's name.
CHAMPION = "champion"
_MOST_LETTERS = 1_000

_BINARY: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_COMPARE: dict[type[ast.cmpop], Callable[[float, float], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
_FUNCTIONS: dict[str, Callable[..., float]] = {"min": min, "max": max, "abs": abs}


class UndefinedMetric(Exception):
    """A metric that an expression names has no value; `args[0]` is its name as it is written."""


@dataclass(frozen=True)
class MetricExpression:
    """A condition that was checked. `names`: the metrics of the model, `champion_names`: of the champion."""

    text: str
    tree: ast.expr
    names: tuple[str, ...]
    champion_names: tuple[str, ...]

    @staticmethod
    def parse(text: str) -> MetricExpression:
        """Parse a condition.

        Raises:
            ValueError: it is not a condition; names the part that is not allowed.
        """
        if len(text) > _MOST_LETTERS:
            raise ValueError(f"the expression has {len(text):,} letters, more than {_MOST_LETTERS:,}")
        try:
            tree = ast.parse(text.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            raise ValueError(f"'{text}' is no expression: write such as `auc >= champion.auc - 0.001`") from None
        names: dict[str, None] = {}
        of_champion: dict[str, None] = {}
        if not _is_condition(tree):
            raise ValueError(f"'{text}' is no condition: compare something, such as `auc >= 0.7`")
        _check(tree, text, names, of_champion)
        return MetricExpression(text, tree, tuple(names), tuple(of_champion))

    def holds(self, metrics: Mapping[str, float | None], champion: Mapping[str, float | None]) -> bool:
        """Return whether the condition holds.

        Args:
            metrics: of the model, by name.
            champion: of the champion.

        Raises:
            UndefinedMetric: one that it names is missing, or None. A comparison that decides without it does not ask.
            ZeroDivisionError: it divides by 0.
        """
        return bool(_value(self.tree, metrics, champion))


def _is_condition(node: ast.expr) -> bool:
    if isinstance(node, ast.BoolOp):
        return all(_is_condition(v) for v in node.values)
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.Not) and _is_condition(node.operand)
    return isinstance(node, ast.Compare)


def _check(node: ast.expr, text: str, names: dict[str, None], of_champion: dict[str, None]) -> None:
    match node:
        case ast.BoolOp(values=inner):
            pass
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            inner = [operand]
        case ast.Compare(left=left, ops=ops, comparators=others) if all(type(o) in _COMPARE for o in ops):
            inner = [left, *others]
            if any(_is_condition(n) for n in inner):
                raise ValueError(f"'{text}' compares a condition: compare numbers")
        case _:
            _check_number(node, text, names, of_champion)
            return
    for n in inner:
        _check(n, text, names, of_champion)


def _check_number(node: ast.expr, text: str, names: dict[str, None], of_champion: dict[str, None]) -> None:
    inner: list[ast.expr] = []
    match node:
        case ast.Constant(value=bool()):
            raise ValueError(f"'{text}': {ast.unparse(node)} is no number")
        case ast.Constant(value=int() | float()):
            pass
        case ast.Name(id=name):
            names[name] = None
        case ast.Attribute(value=ast.Name(id=model), attr=name) if model == CHAMPION:
            of_champion[name] = None
        case ast.UnaryOp(op=ast.USub() | ast.UAdd(), operand=operand):
            inner = [operand]
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            inner = [left, right]
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS and _fits(name, args):
            inner = args
        case _:
            raise ValueError(
                f"'{text}': `{ast.unparse(node)}` is not taken here; there are numbers, names of metrics, "
                f"champion.NAME, + - * /, comparisons, and, or, not, min, max, abs"
            )
    for n in inner:
        _check_number(n, text, names, of_champion)


def _fits(name: str, args: list[ast.expr]) -> bool:
    return len(args) == 1 if name == "abs" else len(args) >= 2


def _value(node: ast.expr, metrics: Mapping[str, float | None], champion: Mapping[str, float | None]) -> float:
    def value_of(inner: ast.expr) -> float:
        return _value(inner, metrics, champion)

    match node:
        case ast.BoolOp(op=ast.And(), values=values):
            return all(value_of(v) for v in values)
        case ast.BoolOp(values=values):
            return any(value_of(v) for v in values)
        case ast.Compare(left=left, ops=ops, comparators=others):
            numbers = [value_of(n) for n in (left, *others)]
            return all(_COMPARE[type(o)](a, b) for o, a, b in zip(ops, numbers, numbers[1:], strict=False))
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return not value_of(operand)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -value_of(operand)
        case ast.UnaryOp(operand=operand):
            return value_of(operand)
        case ast.BinOp(left=left, op=op, right=right):
            return _BINARY[type(op)](value_of(left), value_of(right))
        case ast.Call(func=ast.Name(id=name), args=args):
            return _FUNCTIONS[name](*(value_of(a) for a in args))
        case ast.Constant(value=value):
            assert isinstance(value, (int, float))
            return value
        case ast.Name(id=name):
            number = metrics.get(name)
        case ast.Attribute(attr=name):
            number, name = champion.get(name), f"{CHAMPION}.{name}"
        case _:
            raise AssertionError("parse has refused it")
    if number is None:
        raise UndefinedMetric(name)
    return number


#: Which number of a paired difference is held against its limit.
Bound = Literal["low", "value", "high"]


class MetricLimit(Section):
    """Limits of a metric: the least and the most that pass."""

    #: Lower limit.
    min: float | None = None
    #: Upper limit.
    max: float | None = None

    @model_validator(mode="after")
    def _has_a_limit(self) -> MetricLimit:
        if self.min is None and self.max is None:
            raise ValueError("give `min`, `max` or both")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"min is {self.min:g}, and max {self.max:g}: nothing passes")
        return self


class NoWorse(Section):
    """A limit of how much worse a metric may be than the champion's on the same rows; a number alone is `by`."""

    #: Largest loss that passes, in units of the metric, whether higher or lower is better.
    by: float = Field(ge=0)
    #: low: even the lower end of the paired interval passes (surely no worse); value: the difference itself; high:
    #: only what is surely worse is refused.
    bound: Bound = "low"


class SlicesNoWorse(Section):
    """A limit of how much worse a metric of each slice may be than the champion's; a number alone is `by`."""

    #: Largest loss that passes, in units of the metric, whether higher or lower is better.
    by: float = Field(ge=0)
    #: As of `champion`. Slices are many and small: by default only what is surely worse is refused.
    bound: Bound = "high"
    #: Slices of `train.evaluation.slices`; empty: all.
    of: tuple[str, ...] = ()
    #: Slices with fewer rows are not judged.
    min_rows: int = Field(default=100, ge=1)


class CalibrationLimits(Section):
    """Limits of the distance between predicted probabilities and labels."""

    #: Sum of predictions over sum of labels: lower and upper limit.
    ratio: tuple[float, float] | None = None
    #: Expected calibration error, over parts of nearly equal size.
    max_error: float | None = Field(default=None, ge=0)

    @model_validator(mode="after")
    def _in_order(self) -> CalibrationLimits:
        if self.ratio is not None and self.ratio[0] > self.ratio[1]:
            raise ValueError(f"ratio: [{self.ratio[0]:g}, {self.ratio[1]:g}] has nothing between")
        return self


class CoverageLimits(Section):
    """Least shares of the day's rows and values that the model covers."""

    #: Rows that the model was measured on, at least.
    min_rows: int | None = Field(default=None, ge=1)
    #: Share of the rows of which it gives a finite number.
    min_finite: float = Field(default=1.0, ge=0, le=1)
    #: By categorical feature, the share of the rows' values that its vocabulary has.
    min_known: Mapping[str, Annotated[float, Field(ge=0, le=1)]] = Field(default_factory=dict)


class DriftLimits(Section):
    """Limits of drift: of the day against the training range, and of its scores against the champion's."""

    #: Population stability index of any column, as the stage `drift` has counted it.
    max_psi: float | None = Field(default=None, ge=0)
    #: Columns over a limit of the section `drift`.
    max_columns: int | None = Field(default=None, ge=0)
    #: Population stability index of the model's predictions against the champion's, of the same rows.
    max_score_psi: float | None = Field(default=None, ge=0)


class SizeLimits(Section):
    """Limits of the saved model's size."""

    #: Bytes of its folder, and of the folders that it lies upon.
    max_bytes: int | None = Field(default=None, ge=1)
    #: Its bytes over the champion's.
    max_growth: float | None = Field(default=None, gt=0)


class LatencyLimits(Section):
    """Limits of the saved model's speed on one core, from raw rows to predictions."""

    #: Rows a second.
    min_rows_per_second: float | None = Field(default=None, gt=0)
    #: Milliseconds for `batch_rows` rows: the median.
    max_batch_ms: float | None = Field(default=None, gt=0)
    #: Rows of a batch.
    batch_rows: int = Field(default=1_024, ge=1, le=65_536)


def _number_is_by(value: Any) -> Any:
    return {"by": value} if isinstance(value, (int, float)) and not isinstance(value, bool) else value


class Gate(Section):
    """Rules for a new model. One that breaks any is registered, and the champion goes on scoring.

    Both models predict the same rows of the day, each by its own saved workflow. Without the section each day's model
    becomes the champion.
    """

    #: The day's model that the gate judges, and that scores where `score.model` names none.
    model: Literal["neural", "baseline", "second_stage"] = "neural"
    #: Split whose rows are measured; null: `test` where the dataset has it, else `valid`.
    split: Literal["valid", "test"] | None = None
    #: Limits by metric (including those of the model's own evaluation).
    metrics: Mapping[str, MetricLimit] = Field(default_factory=dict)
    #: By metric, the largest loss against the champion.
    champion: Mapping[
        str, Annotated[NoWorse, BeforeValidator(_number_is_by, json_schema_input_type=float | NoWorse)]
    ] = Field(default_factory=dict)
    #: By metric, the largest loss against the champion in any slice of `train.evaluation.slices`.
    slices: Mapping[
        str, Annotated[SlicesNoWorse, BeforeValidator(_number_is_by, json_schema_input_type=float | SlicesNoWorse)]
    ] = Field(default_factory=dict)
    #: Limits of the calibration of probabilities.
    calibration: CalibrationLimits = CalibrationLimits()
    #: Limits of the coverage of rows and values.
    coverage: CoverageLimits = CoverageLimits()
    #: Limits of the drift of columns (the section `drift`) and of scores.
    drift: DriftLimits = DriftLimits()
    #: Limits of the saved model's size.
    size: SizeLimits = SizeLimits()
    #: Limits of the saved model's speed.
    latency: LatencyLimits = LatencyLimits()
    #: Conditions over metrics by a name of your own: `auc >= champion.auc - 0.001 and log_loss < 0.5`.
    rules: Mapping[str, str] = Field(default_factory=dict)
    #: Paired intervals of the differences from the champion, over `train.evaluation.user`.
    bootstrap: Bootstrap = Bootstrap()
    #: A challenger that was trained on the day is judged by the same rules on the same rows. report: its verdict is
    #: written; promote: besides, one that passes becomes the champion where it is better by `train.monitor` than the
    #: version that would be champion without it, by more than `challenger.behind`.
    challenger: Literal["report", "promote"] = "report"

    @field_validator("champion", "slices")
    @classmethod
    def _have_a_better_side(cls, value: Mapping[str, Any]) -> Mapping[str, Any]:
        for metric in value:
            if metric not in HIGHER_IS_BETTER:
                raise ValueError(
                    f"'{metric}' tells no better model from a worse; metrics: {', '.join(HIGHER_IS_BETTER)}"
                )
        return value

    @field_validator("rules")
    @classmethod
    def _are_conditions(cls, value: Mapping[str, str]) -> Mapping[str, str]:
        for name, text in value.items():
            if not NAME.fullmatch(name):
                raise ValueError(f"'{name}' must match {NAME.pattern}")
            MetricExpression.parse(text)
        return value

    @property
    def stage(self) -> str:
        """Return the stage whose model is judged."""
        return "train" if self.model == "neural" else self.model

    def expressions(self) -> dict[str, MetricExpression]:
        """Return the rules, parsed, by name."""
        return {name: MetricExpression.parse(text) for name, text in self.rules.items()}

    def metric_names(self) -> list[str]:
        """Return all metrics that a rule names."""
        named = [*self.metrics, *self.champion, *self.slices]
        for rule in self.expressions().values():
            named += [*rule.names, *rule.champion_names]
        return list(dict.fromkeys(named))


#: Of candidate lists, those that are always there among them.
_OF_LISTS = ("hr_at_k", "ndcg_at_k", *get_args(RankingMetric), *get_args(CatalogueMetric))


def check_gate(
    gate: Gate,
    trees: Mapping[str, Trees | None],
    score: Score | None,
    train: Train,
    features: Features,
    *,
    has_drift: bool,
    has_challenger: bool,
    predicts_numbers: bool,
) -> None:
    """See that the gate can judge.

    Args:
        gate: the section.
        trees: the sections `baseline` and `second_stage`.
        score: the section.
        train: the section.
        features: the section.
        has_drift: whether there is the section `drift`.
        has_challenger: whether there is the section `challenger`.
        predicts_numbers: whether the neural model's predictions are no probabilities.

    Raises:
        ValueError: it asks for something that there is not.
    """
    if gate.model != "neural" and trees[gate.model] is None:
        raise ValueError(f"gate.model is '{gate.model}', and there is no such section")
    _check_scored(gate, score)
    if gate.challenger == "promote" and not (has_challenger and gate.model == "neural"):
        lacks = "there is no section `challenger`" if not has_challenger else f"gate.model is '{gate.model}'"
        raise ValueError(f"gate.challenger is 'promote', of the neural model's challenger, and {lacks}")
    if gate.challenger == "promote" and not predicts_numbers:
        _check_monitor(train)
    split = features.split
    has_test = split.by == "column" or (split.by == "time" and bool(split.test_days))
    if gate.split == "test" and not has_test:
        raise ValueError("gate.split is 'test', of which there is none: see features.split")
    if gate.model == "second_stage" and gate.split == "valid":
        raise ValueError("gate.split is 'valid', from which the second stage learns: leave it out")
    _check_metrics(gate, train)
    if not has_drift and (gate.drift.max_psi is not None or gate.drift.max_columns is not None):
        raise ValueError("gate.drift is of what the stage drift counts: add the section `drift`")
    judged = trees.get(gate.model)
    of_numbers = predicts_numbers if judged is None else judged.objective != "classification"
    if of_numbers and (gate.calibration.ratio is not None or gate.calibration.max_error is not None):
        raise ValueError("gate.calibration is of probabilities, and the model predicts none")


def _check_monitor(train: Train) -> None:
    """Check that the stage evaluate measures `train.monitor`: it measures neither tasks nor full rankings."""
    full = train.evaluation.full_ranking
    if "." in train.monitor or (full is not None and train.monitor in full.metrics()):
        raise ValueError(
            f"gate.challenger is 'promote', of a challenger that is better by train.monitor, and the stage evaluate "
            f"does not measure '{train.monitor}': set train.monitor to another metric, or gate.challenger to 'report'"
        )


def _check_scored(gate: Gate, score: Score | None) -> None:
    """Check that the model that scores by default is the one that is judged."""
    if score is None or score.of_registry or score.model in ("today", gate.model):
        return
    if score.model == "best":
        raise ValueError(
            "score.model is 'best', and a gate has one champion: set it to 'neural' or 'baseline', and gate.model, too"
        )
    raise ValueError(
        f"score.model is '{score.model}', and gate.model '{gate.model}': a model that is not judged would score; set "
        f"gate.model to '{score.model}'"
    )


def _check_metrics(gate: Gate, train: Train) -> None:
    for key, entries in (("champion", gate.champion), ("slices", gate.slices)):
        for metric in entries:
            if metric in _OF_LISTS and train.rank_group is None:
                raise ValueError(f"gate.{key}.{metric} is of lists: set train.rank_group")
            if metric in get_args(UserMetric) and train.evaluation.user is None:
                raise ValueError(f"gate.{key}.{metric} is of users: set train.evaluation.user")
            if entries[metric].bound != "value" and train.evaluation.user is None:
                raise ValueError(
                    f"gate.{key}.{metric}: an interval draws users: set train.evaluation.user, a carried column, or "
                    f"take the difference itself, bound: value"
                )
    slices = train.evaluation.slices
    for metric, limit in gate.slices.items():
        if not slices:
            raise ValueError(f"gate.slices.{metric}: there are no slices: set train.evaluation.slices")
        for name in limit.of:
            if name not in slices:
                raise ValueError(f"gate.slices.{metric}.of: no slice '{name}'{nearest(name, slices)}")
