"""`headrace experiment ...`: what is known of an experiment, its arms beforehand, and the end of an arm."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, redirect_stdout
from datetime import date, timedelta
from typing import Any

from headrace.commands.run import run
from headrace.commands.screen import out, plain, print_json, table
from headrace.config import Experiment, Spec, load_spec, parse_ds
from headrace.errors import EXIT_DONE, UserError, nearest
from headrace.manifest import Manifest
from headrace.quality.report import facts
from headrace.score.experiments.assignment import all_stopped, by_hand, stop_arm
from headrace.score.experiments.comparison import first_day, served_outcomes
from headrace.score.experiments.stage import SAMPLE_RATIO_LIMIT, known_of
from headrace.workspace import Workspace, pipeline_file

_STYLES = {"better": "green", "worse": "red"}
#: The stage that measures models as policies; no part of a day.
_ESTIMATE = "estimate_policies"
#: Of what it measures (headrace.train.evaluation.policy), as columns.
_VALUES = ("logged_value", "ips", "snips", "dr", "effective_sample_size")


def status(
    ws: Workspace, name: str, pipeline: str | None, ds: str | None, overrides: Sequence[str], as_json: bool
) -> None:
    """Show what is known of an experiment.

    Args:
        ws: the workspace.
        name: of the experiment.
        pipeline: a shipped pipeline's name or a YAML file; None: the shipped one that has the experiment.
        ds: the day whose run of `outcomes` is the last that counts; None: the newest.
        overrides: `key=value` for the spec.
        as_json: print JSON.

    Raises:
        UserError: there is no such experiment; or see headrace.score.experiments.comparison.
    """
    _, spec, experiment = _found(name, pipeline, overrides)
    ws = ws.of(spec)
    day = parse_ds(ds) if ds is not None else _newest(ws, spec, "outcomes")
    told: dict[str, Any] | None = None
    if day is not None:
        served = served_outcomes(ws, spec, day, first_day(experiment))
        stops = all_stopped(ws, spec.pipeline, name, experiment.arms)
        told = known_of(ws, spec, name, experiment, day, served, stops)
    if told is None or not told["days"]:
        began = "" if experiment.start is None else f"; its first lists are those of {experiment.start}"
        said = f"no outcome of experiment '{name}' of '{spec.pipeline}' is known yet{began}"
        if as_json:
            print_json({"pipeline": spec.pipeline, **(told or {"name": name, "state": "planned"})})
        else:
            out.print(
                f"{said}. Beforehand: headrace experiment estimate {name} {spec.argument} --ds DATE", markup=False
            )
        return
    if as_json:
        print_json({"pipeline": spec.pipeline, **told})
        return
    _show(spec, told)


def stop(
    ws: Workspace,
    name: str,
    pipeline: str | None,
    arm: str,
    reason: str | None,
    ds: str | None,
    overrides: Sequence[str],
) -> None:
    """Give an arm's users the control's model from a day on.

    Args:
        ws, name, pipeline, overrides: as of `status`.
        arm: not the control.
        reason: kept with who asked for it and when.
        ds: the first day whose lists are made without it; None: the day after the newest that was scored.

    Raises:
        UserError: no reason, no such arm, it is the control, or it was stopped before.
    """
    _, spec, experiment = _found(name, pipeline, overrides)
    ws = ws.of(spec)
    if arm not in experiment.arms:
        raise UserError(f"experiment '{name}' has no arm '{arm}'{nearest(arm, experiment.arms)}")
    if arm == experiment.control_arm:
        raise UserError(f"'{arm}' is the control of experiment '{name}': the others' users would get its model")
    if reason is None or not reason.strip():
        raise UserError("say why: --reason TEXT; it is kept with the arm")
    day = parse_ds(ds) if ds is not None else _next_scored(ws, spec, experiment)
    asked = by_hand(name, arm, day, reason.strip())
    done = stop_arm(ws, spec.pipeline, asked)
    if done != asked:
        raise UserError(
            f"arm '{arm}' of experiment '{name}' was stopped from {done.ds} on, by {done.by} at "
            f"{done.at:%Y-%m-%d %H:%M} UTC: {done.reason}"
        )
    out.print(
        f"arm {arm} of experiment {name}: from the lists of {day} on its users get the model of "
        f"{experiment.control_arm}",
        markup=False,
        soft_wrap=True,
    )
    out.print(f"kept in {ws.stopped_arm(spec.pipeline, name, arm)}", markup=False, soft_wrap=True)


def estimate(
    ws: Workspace, name: str, pipeline: str | None, ds: str | None, overrides: Sequence[str], as_json: bool
) -> int:
    """Show what the arms' models would have earned on the log, by the propensities of what chose its rows.

    Args:
        ws, name, pipeline, overrides, as_json: as of `status`.
        ds: the day whose rows are predicted; None: the newest whose features are there.

    Returns:
        the exit code.

    Raises:
        UserError: no day has features, or the log has no propensities.
    """
    path, spec, experiment = _found(name, pipeline, overrides)
    ws = ws.of(spec)
    if spec.train.evaluation.off_policy is None:
        raise UserError(
            "no model can be measured as a policy: the log needs the propensity of each row's action; name its column "
            "in train.evaluation.off_policy (docs/training.md)"
        )
    day = parse_ds(ds) if ds is not None else _newest(ws, spec, "features")
    if day is None:
        raise UserError(f"no day of '{spec.pipeline}' has features, so there are no logged rows to estimate with")
    # Of the other experiments nothing is asked. Arms stay in their order: the first may be the control.
    alone = [*overrides, f"experiments={json.dumps({name: experiment.model_dump(mode='json', by_alias=True)})}"]
    # Standard output is the document's.
    with redirect_stdout(sys.stderr) if as_json else nullcontext():
        code = run(path, ws, day, alone, _ESTIMATE, _ESTIMATE, show_results=False)
    if code != EXIT_DONE:
        return code
    manifest = Manifest.load(ws.manifest(spec.pipeline, day, _ESTIMATE))
    assert manifest is not None, "the stage is done"
    told = {"pipeline": spec.pipeline, "ds": day, "name": name, "rows": manifest.rows, **manifest.facts}
    if as_json:
        print_json(told)
    else:
        _show_values(told)
    return code


def _show_values(told: Mapping[str, Any]) -> None:
    policy, rows = told["policy"], told["rows"]
    how = f"softmax, temperature {policy['temperature']:g}" if policy["policy"] == "softmax" else policy["policy"]
    out.print(
        f"{told['name']} of {told['pipeline']}: {rows['rows']:,} logged rows of {told['ds']}, split {told['split']}; "
        f"{rows['actions']:,} actions; policies: {how}",
        markup=False,
        soft_wrap=True,
    )
    rows_table = table("arm", "model", *(f">{v}" for v in _VALUES), ">dr - control")
    for of in told["arms"]:
        cells = [_with_interval(of["values"].get(v), of["intervals"].get(v)) for v in _VALUES]
        minus = of["minus_control"].get("dr")
        ends = None if minus is None else [minus["low"], minus["high"]]
        version = of["version"] if of["version"] is not None else of["stage"]
        rows_table.add_row(
            of["arm"], str(version), *cells, "" if minus is None else _with_interval(minus["value"], ends)
        )
    out.print(rows_table)


def _with_interval(value: float | None, interval: Any) -> str:
    low, high = facts.sequence(interval) or (None, None)
    if low is None or high is None:
        return facts.decimals(value)
    return f"{facts.decimals(value)} ({facts.decimals(low)} to {facts.decimals(high)})"


def _show(spec: Spec, told: Mapping[str, Any]) -> None:
    unit = "rate" if told["metric"] == "rate" else "per user"
    days, ripe = told["days"], told["ripe_days"]
    ripe_days = f"{ripe[0]} to {ripe[-1]}" if ripe else "none"
    out.print(
        f"experiment {told['name']} of {spec.pipeline}: {told['state']}; {told['label']}, {unit}; "
        f"lists of {days[0]} to {days[-1]}, ripe: {ripe_days}; as of {told['ds']}",
        markup=False,
        soft_wrap=True,
    )
    ratio = told["sample_ratio"]
    said = "as sent" if ratio["ok"] else f"NOT as sent (p below {SAMPLE_RATIO_LIMIT:g}): believe no difference"
    counted = ", ".join(f"{arm} {n:,}" for arm, n in ratio["users"].items())
    out.print(f"sample ratio: {counted}; p {ratio['p']:.3g}: {said}", markup=False, soft_wrap=True)
    if told["moved_users"]:
        out.print(f"{told['moved_users']:,} users were in several arms: shares or salt were changed", markup=False)
    arms = table("arm", "model", ">share", ">users", ">shown", f">{told['label']}", f">{unit}", "stopped")
    for arm, of in told["arms"].items():
        stopped = of["stopped"]
        end = "" if stopped is None else f"from {stopped['ds']} on, by {stopped['by']}: {stopped['reason']}"
        name = f"{arm} (control)" if arm == told["control"] else arm
        model = of["model"] or "score.model"
        counts = (f"{of['users']:,}", f"{of['rows']:,}", f"{of['positives']:,}", facts.decimals(of["value"]))
        arms.add_row(name, model, facts.percent(of["share"]), *counts, end)
    out.print(arms)
    both = table("arm - control", ">difference", ">interval", ">without CUPED", ">variance", ">sequential", ">p", "is")
    for arm, of in told["differences"].items():
        if of is None:
            both.add_row(arm, "–", "", "", "", "", "", "nothing known")
            continue
        bounds, unadjusted = of["sequential"], of["plain"]
        both.add_row(
            arm,
            _signed(of["estimate"]),
            _range(of),
            f"{_signed(unadjusted['estimate'])} ({_range(unadjusted)})",
            facts.percent(of["variance_ratio"]),
            _range(bounds),
            f"{bounds['p']:.2g}",
            plain(of["conclusion"], style=_STYLES.get(of["conclusion"], "")),
        )
    out.print(both)
    by_day = table(
        "served", "", *(f">{arm}" for arm in told["arms"]), *(f">{a} - control" for a in told["differences"])
    )
    for day in told["by_day"]:
        values = [facts.decimals(of["value"]) for of in day["arms"].values()]
        differences = [
            "–" if of is None else f"{_signed(of['estimate'])} ({_range(of)})" for of in day["differences"].values()
        ]
        by_day.add_row(day["served_ds"], "ripe" if day["ripe"] else "provisional", *values, *differences)
    out.print(by_day)


def _signed(value: float) -> str:
    return f"{value:+.4f}"


def _range(of: Mapping[str, Any]) -> str:
    if of["low"] is None or of["high"] is None:
        return "–"
    return f"{_signed(of['low'])} to {_signed(of['high'])}"


def _found(name: str, pipeline: str | None, overrides: Sequence[str]) -> tuple[str, Spec, Experiment]:
    """Return the pipeline's name, its spec and its experiment."""
    if pipeline is None:
        shipped = [path.stem for path in sorted(pipeline_file("x").parent.glob("*.yaml"))]
        having = [p for p in shipped if name in (load_spec(p).experiments or {})]
        if len(having) != 1:
            raise UserError(f"say which pipeline has the experiment '{name}': a shipped one's name, or a .yaml file")
        (pipeline,) = having
    spec = load_spec(pipeline, overrides)
    known = spec.experiments or {}
    if name not in known:
        has = ", ".join(known) or "none"
        raise UserError(
            f"pipeline '{spec.pipeline}' has no experiment '{name}' (experiments: {has}){nearest(name, known)}"
        )
    return pipeline, spec, known[name]


def _newest(ws: Workspace, spec: Spec, stage: str) -> str | None:
    """Return the newest day for which a stage has finished."""
    return max((d for d in ws.days(spec.pipeline) if ws.manifest(spec.pipeline, d, stage).is_file()), default=None)


def _next_scored(ws: Workspace, spec: Spec, experiment: Experiment) -> str:
    newest = _newest(ws, spec, "score")
    if newest is not None:
        return (date.fromisoformat(newest) + timedelta(days=1)).isoformat()
    if experiment.start is None:
        raise UserError(f"no day of '{spec.pipeline}' has been scored: say from which day on, --ds DATE")
    return experiment.start
