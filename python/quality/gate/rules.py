"""Rules of a gate: each figure compared with its limit, for the day's model and its challenger."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, get_args

from headrace.config import Gate, Spec
from headrace.config.evaluation import HIGHER_IS_BETTER, CatalogueMetric, ClickMetric, RankingMetric, UserMetric
from headrace.config.gate import MetricExpression, UndefinedMetric
from headrace.config.schema import DatasetSchema, Kind
from headrace.errors import UserError, nearest

#: The verdicts.
PASSED, REFUSED = "passed", "refused"

#: The key of the spec with the margin by which the challenger must be better.
CHALLENGER_KEY = "challenger.behind"


@dataclass(frozen=True)
class GateRule:
    """Rule and its result."""

    #: The key of the spec.
    key: str
    #: The figure, and its slice where it is not of all rows.
    figure: str
    value: float | None
    limit: float | None
    #: Distance of the figure from its limit, on the good side; negative: the rule is broken.
    margin: float | None
    #: None: it could not be judged, and does not count.
    passed: bool | None
    #: Text for messages.
    text: str
    low: float | None = None
    high: float | None = None

    def fact(self) -> dict[str, Any]:
        """Return the rule as JSON values."""
        return asdict(self)


def judge(gate: Gate, evaluated: Mapping[str, Any], drift: Mapping[str, Any] | None) -> list[GateRule]:
    """Return every rule of the section, in its order.

    Args:
        gate: the section.
        evaluated: facts of the stage `evaluate`.
        drift: facts and rows of the stage `drift`; None: the pipeline has none.

    Raises:
        UserError: a rule names a metric that was not measured.
    """
    return [
        *_metrics(gate, evaluated),
        *_champion(gate, evaluated),
        *_slices(gate, evaluated),
        *_calibration(gate, evaluated),
        *_coverage(gate, evaluated),
        *_drift(gate, evaluated, drift),
        *_size(gate, evaluated),
        *_latency(gate, evaluated),
        *_expressions(gate, evaluated),
    ]


def verdict_of(rules: list[GateRule]) -> str:
    """Refused where a rule is broken."""
    return REFUSED if any(rule.passed is False for rule in rules) else PASSED


def metrics_of(model: Mapping[str, Any] | None) -> dict[str, float | None]:
    """Return all numbers that rules may name of a model; of its own evaluation, what was not measured again."""
    if model is None:
        return {}
    numbers = {**model.get("own_metrics", {}), **model.get("metrics", {})}
    return numbers | {name: model.get(name) for name in ("bytes", "batch_ms", "rows_per_second")}


def _at_least(key: str, figure: str, value: float | None, limit: float) -> GateRule:
    return _against(key, figure, value, limit, None if value is None else value - limit, "at least")


def _at_most(key: str, figure: str, value: float | None, limit: float) -> GateRule:
    return _against(key, figure, value, limit, None if value is None else limit - value, "at most")


def _against(key: str, figure: str, value: float | None, limit: float, margin: float | None, side: str) -> GateRule:
    requirement = f"{side} {_n(limit)} is asked for"
    if value is None or margin is None:
        return GateRule(key, figure, None, limit, None, False, f"{figure} is undefined, and {requirement}")
    by = "" if margin >= 0 else f": by {_n(-margin)} on the wrong side"
    return GateRule(key, figure, value, limit, margin, margin >= 0, f"{figure} is {_n(value)}, {requirement}{by}")


def _n(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1e6 else f"{value:.6g}"


def _named(key: str, name: str, known: Mapping[str, Any]) -> None:
    if name not in known:
        raise UserError(
            f"{key}: '{name}' was not measured{nearest(name, known)}; there are: {', '.join(known)}. Ask for "
            f"more in train.evaluation"
        )


#: Figures of a saved model that rules may name besides metrics.
_OF_MODELS = ("bytes", "batch_ms", "rows_per_second")


def check_names(spec: Spec, gate: Gate, schema: DatasetSchema) -> None:
    """Check that rules name metrics that a day's evaluations may have, and vocabularies that a model has.

    Args:
        spec: the pipeline.
        gate: the section.
        schema: of its datasets.

    Raises:
        UserError: a name that no evaluation has.
    """
    compared, measured = measurable(spec, gate)
    known = dict.fromkeys((*compared, *measured, *_OF_MODELS))
    for name in gate.metrics:
        _named(f"gate.metrics.{name}", name, known)
    for rule_name, rule in gate.expressions().items():
        for name in (*rule.names, *rule.champion_names):
            _named(f"gate.rules.{rule_name}", name, known)
    for key, metrics in (("champion", gate.champion), ("slices", gate.slices)):
        for name in metrics:
            _named(f"gate.{key}.{name}", name, dict.fromkeys(compared))
    vocabularies = [f.name for f in schema.of(Kind.CATEGORICAL) if f.vocabulary is not None]
    for name in gate.coverage.min_known:
        if name not in vocabularies:
            raise UserError(
                f"gate.coverage.min_known: '{name}' is no feature with a vocabulary{nearest(name, vocabularies)} "
                f"(there are: {', '.join(vocabularies) or 'none'})"
            )


def measurable(spec: Spec, gate: Gate) -> tuple[list[str], list[str]]:
    """Return the metrics that a day's evaluations may have.

    Returns:
        those of the judged model beside the champion on the same rows; those of its own evaluation.
    """
    # Late: these modules bring the arithmetic of metrics, of which only names are needed.
    from headrace.train.evaluation.click import BASIC, ERROR_METRICS, OF_PROBABILITIES
    from headrace.train.evaluation.evaluate import OF_LISTS
    from headrace.train.evaluation.policy import POLICY_METRICS
    from headrace.train.evaluation.ranking import full_name

    train, evaluation, full = spec.train, spec.train.evaluation, spec.train.evaluation.full_ranking
    of_rows = [*BASIC, *get_args(ClickMetric), *([] if evaluation.user is None else get_args(UserMetric))]
    of_lists = [*OF_LISTS, *get_args(RankingMetric), *([] if evaluation.item is None else get_args(CatalogueMetric))]
    compared = {
        "probability": of_rows,
        "number": [*ERROR_METRICS],
        "order": [metric for metric in of_rows if metric not in OF_PROBABILITIES],
    }[predicts(spec, gate)]
    compared = [*compared, *([] if train.rank_group is None else of_lists)]
    if gate.model != "neural":
        # Trees that rank are measured by the lists of `group`, too.
        return compared, [*of_rows, *of_lists, *ERROR_METRICS]
    of_policies = [] if evaluation.off_policy is None else POLICY_METRICS
    of_full = [] if full is None else [*full.metrics(), *(full_name(m, k) for k in full.k for m in evaluation.metrics)]
    of_tasks = [f"{metric}.{task}" for task in train.tasks for metric in (*of_rows, *ERROR_METRICS)]
    return compared, [*compared, *of_policies, *of_full, *of_tasks]


def predicts(spec: Spec, gate: Gate) -> str:
    """Return what the judged model predicts: probability, number or order."""
    trees = {"baseline": spec.baseline, "second_stage": spec.second_stage}.get(gate.model)
    if trees is not None:
        return {"classification": "probability", "regression": "number"}.get(trees.objective, "order")
    if spec.model.loss is not None:
        return "number" if spec.model.loss.predicts == "number" else "probability"
    return "number" if spec.features.label_type == "number" else "probability"


def _metrics(gate: Gate, evaluated: Mapping[str, Any]) -> Iterator[GateRule]:
    known = metrics_of(evaluated["model"])
    for name, limit in gate.metrics.items():
        _named(f"gate.metrics.{name}", name, known)
        if limit.min is not None:
            yield _at_least(f"gate.metrics.{name}.min", name, known[name], limit.min)
        if limit.max is not None:
            yield _at_most(f"gate.metrics.{name}.max", name, known[name], limit.max)


def _not_judged(key: str, figure: str, limit: float | None, reason: str) -> GateRule:
    return GateRule(key, figure, None, limit, None, None, f"{figure}: not judged, {reason}")


def _no_champion(evaluated: Mapping[str, Any]) -> str:
    """Return why there is no comparison with a champion; empty where there is one."""
    champion = evaluated["champion"]
    if champion is None:
        return "there is no champion yet"
    if evaluated["note"]:
        return f"the champion cannot predict the day's rows: {evaluated['note']}"
    return "" if champion.get("finite", 1) else "the champion gives no number for any of the day's rows"


def _champion(gate: Gate, evaluated: Mapping[str, Any]) -> Iterator[GateRule]:
    for name, limit in gate.champion.items():
        key, figure = f"gate.champion.{name}", f"{name} beside the champion's"
        if reason := _no_champion(evaluated):
            yield _not_judged(key, figure, -limit.by, reason)
            continue
        metrics, difference = evaluated["model"]["metrics"], evaluated["differences"].get(name)
        _named(key, name, {**metrics, **evaluated["differences"]})
        if difference is None and metrics.get(name) is not None:
            yield _not_judged(key, figure, -limit.by, "the champion's is undefined on the day's rows")
        else:
            yield _no_worse(key, figure, name, difference, limit.by, limit.bound)


def _slices(gate: Gate, evaluated: Mapping[str, Any]) -> Iterator[GateRule]:
    for name, limit in gate.slices.items():
        key = f"gate.slices.{name}"
        if reason := _no_champion(evaluated):
            yield _not_judged(key, f"{name} of slices beside the champion's", -limit.by, reason)
            continue
        if not evaluated["slices"] and evaluated["model"]["metrics"].get(name, 0.0) is None:
            yield _no_worse(key, f"{name} of slices beside the champion's", name, None, limit.by, limit.bound)
        for part in evaluated["slices"]:
            if name not in part["differences"] or (limit.of and part["slice"] not in limit.of):
                continue
            figure = f"{name} of {part['slice']} = {part['value']} beside the champion's"
            if part["rows"] < limit.min_rows:
                yield _not_judged(
                    key, figure, -limit.by, f"it has {part['rows']:,} rows, fewer than {limit.min_rows:,}"
                )
            elif part["differences"][name] is None:
                yield _not_judged(key, figure, -limit.by, "it is undefined there")
            else:
                yield _no_worse(key, figure, name, part["differences"][name], limit.by, limit.bound)


def _no_worse(
    key: str, figure: str, metric: str, difference: Mapping[str, float | None] | None, by: float, bound: str
) -> GateRule:
    """Return a difference, above 0 where the model is better: at least -by."""
    if difference is None:
        return GateRule(key, figure, None, -by, None, False, f"{figure}: the model's is undefined on the day's rows")
    low, high, value = difference["low"], difference["high"], difference["value"]
    assert value is not None
    if not HIGHER_IS_BETTER[metric]:
        low, high, value = (None if x is None else -x for x in (high, low, value))
    assert value is not None
    held = {"low": low, "value": value, "high": high}[bound]
    between = "" if low is None or high is None else f" [{low:+.4g}, {high:+.4g}]"
    if held is None:
        return GateRule(key, figure, value, -by, None, False, f"{figure}: {value:+.4g}, and no interval: too few users")
    margin = held + by
    bound_text = {"low": "the interval's lower end", "value": "the difference", "high": "the interval's upper end"}[
        bound
    ]
    short = "" if margin >= 0 else f": {bound_text} is by {_n(-margin)} below"
    text = f"{figure}: better by {value:+.4g}{between}, at least {-by:+.4g} is asked for{short}"
    return GateRule(key, figure, value, -by, margin, margin >= 0, text, low, high)


def _calibration(gate: Gate, evaluated: Mapping[str, Any]) -> Iterator[GateRule]:
    known, limits = metrics_of(evaluated["model"]), gate.calibration
    if limits.ratio is not None:
        key, figure = "gate.calibration.ratio", "predicted over observed"
        yield _at_least(key, figure, known.get("calibration"), limits.ratio[0])
        yield _at_most(key, figure, known.get("calibration"), limits.ratio[1])
    if limits.max_error is not None:
        figure = "expected calibration error"
        yield _at_most("gate.calibration.max_error", figure, known.get("calibration_error"), limits.max_error)


def _coverage(gate: Gate, evaluated: Mapping[str, Any]) -> Iterator[GateRule]:
    limits, model, rows = gate.coverage, evaluated["model"], evaluated["rows"]
    if limits.min_rows is not None:
        yield _at_least("gate.coverage.min_rows", "rows", rows, limits.min_rows)
    share = model["finite"] / rows if rows else None
    yield _at_least("gate.coverage.min_finite", "share of rows with a finite prediction", share, limits.min_finite)
    for name, limit in limits.min_known.items():
        key = f"gate.coverage.min_known.{name}"
        _named(key, name, model["known"])
        values, known = model["known"][name]
        figure = f"share of {name} that the vocabulary has"
        yield _at_least(key, figure, known / values if values else None, limit)


def _drift(gate: Gate, evaluated: Mapping[str, Any], drift: Mapping[str, Any] | None) -> Iterator[GateRule]:
    limits = gate.drift
    if limits.max_psi is not None and drift is not None:
        worst = max(
            (c for c in drift["columns"] if c["psi"] is not None and c["max_psi"] is not None),
            key=lambda c: c["psi"],
            default=None,
        )
        key = "gate.drift.max_psi"
        if worst is None:
            yield _not_judged(key, "PSI of columns", limits.max_psi, "none has enough values")
        else:
            yield _at_most(key, f"PSI of {worst['side']} {worst['column']}, the largest", worst["psi"], limits.max_psi)
    if limits.max_columns is not None and drift is not None:
        yield _at_most("gate.drift.max_columns", "columns over a limit", drift["over_limit"], limits.max_columns)
    if limits.max_score_psi is not None:
        key, figure = "gate.drift.max_score_psi", "PSI of the predictions against the champion's"
        if reason := _no_champion(evaluated):
            yield _not_judged(key, figure, limits.max_score_psi, reason)
        else:
            yield _at_most(key, figure, evaluated["score_psi"], limits.max_score_psi)


def _size(gate: Gate, evaluated: Mapping[str, Any]) -> Iterator[GateRule]:
    limits, size = gate.size, evaluated["model"]["bytes"]
    if limits.max_bytes is not None:
        yield _at_most("gate.size.max_bytes", "bytes of the saved model", size, limits.max_bytes)
    if limits.max_growth is not None:
        key, figure = "gate.size.max_growth", "bytes over the champion's"
        if reason := _no_champion(evaluated):
            yield _not_judged(key, figure, limits.max_growth, reason)
        else:
            yield _at_most(key, figure, size / evaluated["champion"]["bytes"], limits.max_growth)


def _latency(gate: Gate, evaluated: Mapping[str, Any]) -> Iterator[GateRule]:
    limits, model = gate.latency, evaluated["model"]
    if limits.min_rows_per_second is not None:
        key = "gate.latency.min_rows_per_second"
        yield _at_least(key, "rows a second on one core", model["rows_per_second"], limits.min_rows_per_second)
    if limits.max_batch_ms is not None:
        figure = f"milliseconds for {limits.batch_rows:,} rows on one core"
        yield _at_most("gate.latency.max_batch_ms", figure, model["batch_ms"], limits.max_batch_ms)


def _expressions(gate: Gate, evaluated: Mapping[str, Any]) -> Iterator[GateRule]:
    metrics, champion_metrics = metrics_of(evaluated["model"]), metrics_of(evaluated["champion"])
    for name, rule in gate.expressions().items():
        yield _expression(f"gate.rules.{name}", rule, metrics, champion_metrics, _no_champion(evaluated))


def _expression(
    key: str,
    rule: MetricExpression,
    metrics: Mapping[str, float | None],
    champion_metrics: Mapping[str, float | None],
    no_champion: str,
) -> GateRule:
    for metric in rule.names:
        _named(key, metric, metrics)
    if rule.champion_names and no_champion:
        return _not_judged(key, rule.text, None, no_champion)
    for metric in rule.champion_names:
        _named(key, metric, champion_metrics)
        if champion_metrics[metric] is None and metrics.get(metric) is not None:
            return _not_judged(key, rule.text, None, f"champion.{metric} is undefined on the day's rows")
    values = {n: metrics[n] for n in rule.names} | {f"champion.{n}": champion_metrics[n] for n in rule.champion_names}
    values_text = ", ".join(f"{n} is {'undefined' if v is None else _n(v)}" for n, v in values.items())
    try:
        passed = rule.holds(metrics, champion_metrics)
    except UndefinedMetric as e:
        return GateRule(key, rule.text, None, None, None, False, f"{rule.text}: {e.args[0]} is undefined")
    except ZeroDivisionError:
        return GateRule(key, rule.text, None, None, None, False, f"{rule.text}: it divides by 0 ({values_text})")
    holds = "holds" if passed else "does not hold"
    return GateRule(key, rule.text, None, None, None, passed, f"{rule.text} {holds}: {values_text}")


def judge_challenger(gate: Gate, evaluated: Mapping[str, Any], drift: Mapping[str, Any] | None) -> list[GateRule]:
    """Return every rule of the section, of the challenger instead of the day's model, against the same champion.

    Args:
        gate: the section.
        evaluated: facts of the stage `evaluate`, with a challenger that was measured.
        drift: see `judge`.

    Raises:
        UserError: as `judge`.
    """
    challenger = evaluated["challenger"]
    beside_champion = challenger["beside_champion"] or {}
    return judge(gate, {**evaluated, "model": challenger, **beside_champion}, drift)


def better_rule(evaluated: Mapping[str, Any], verdict: str, monitor: str, required_gain: float) -> GateRule | None:
    """Return whether a challenger is better than the version that would be champion without it.

    Args:
        evaluated: facts of the stage `evaluate`, with a challenger that was measured.
        verdict: on the day's model, which is that version where it has passed; else the champion is, where it can
            predict the rows.
        monitor: the metric.
        required_gain: by more than this, in units of the metric.

    Returns:
        the rule; None where there is no such version.
    """
    if verdict == PASSED:
        reference, differences = evaluated["model"], evaluated["challenger"]["beside_model"]
    elif evaluated["champion"] is not None and evaluated["challenger"]["beside_champion"] is not None:
        reference, differences = evaluated["champion"], evaluated["challenger"]["beside_champion"]["differences"]
    else:
        return None
    figure = f"{monitor} beside that of version {reference['version']}"
    difference = differences.get(monitor)
    if difference is None:
        return GateRule(
            CHALLENGER_KEY, figure, None, required_gain, None, False, f"{figure}: it was not measured on these rows"
        )
    value, low, high = (difference[name] for name in ("value", "low", "high"))
    if not HIGHER_IS_BETTER.get(monitor, True):
        value, low, high = -value, None if high is None else -high, None if low is None else -low
    between = "" if low is None or high is None else f" [{low:+.4g}, {high:+.4g}]"
    text = f"{figure}: better by {value:+.4g}{between}, more than {required_gain:.4g} is asked for"
    return GateRule(
        CHALLENGER_KEY, figure, value, required_gain, value - required_gain, value > required_gain, text, low, high
    )


def verdict_on_challenger(
    gate: Gate,
    evaluated: Mapping[str, Any],
    drift: Mapping[str, Any] | None,
    verdict: str,
    monitor: str,
    required_gain: float,
) -> dict[str, Any]:
    """Return the gate's facts of a measured challenger: verdict, rules, `becomes_champion`.

    Args:
        gate: the section.
        evaluated: facts of the stage `evaluate`, with it.
        drift: see `judge`.
        verdict: on the day's model.
        monitor: see `better_rule`.
        required_gain: see `better_rule`.

    Raises:
        UserError: as `judge`.
    """
    rules = judge_challenger(gate, evaluated, drift)
    challenger_verdict = verdict_of(rules)
    better = better_rule(evaluated, verdict, monitor, required_gain) if gate.challenger == "promote" else None
    becomes = (
        gate.challenger == "promote" and challenger_verdict == PASSED and (better is None or better.passed is True)
    )
    return {
        "verdict": challenger_verdict,
        "becomes_champion": becomes,
        "rules": [rule.fact() for rule in (*rules, *([] if better is None else [better]))],
    }
