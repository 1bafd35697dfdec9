"""`headrace experiment ...`: figures of an experiment, estimates of its arms beforehand, and the end of an arm."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, redirect_stdout
from datetime import date, timedelta
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.root import (
    VAR,
    Group,
    Home,
    Json,
    MaybePipeline,
    Overlays,
    Panel,
    Sets,
    app,
    examples,
    overrides,
    workspace,
)
from headrace.cli.run import run_stages
from headrace.cli.screen import out, plain, print_json, table
from headrace.config.installation import pipeline_file
from headrace.errors import EXIT_DONE, UserError, nearest
from headrace.quality.report import facts

if TYPE_CHECKING:
    from headrace.config import Experiment, Spec
    from headrace.config.workspace import Workspace


experiment_app = typer.Typer(
    cls=Group, no_args_is_help=True, help="Experiments: what the arms have brought, and the end of an arm."
)
app.add_typer(experiment_app, name="experiment", rich_help_panel=Panel.MODELS)

Name = Annotated[str, typer.Argument(metavar="NAME", help="A key of the section `experiments`.")]
AsOf = Annotated[str | None, typer.Option("--ds", help="Figures as of this day; else of the newest.", metavar="DATE")]


@experiment_app.command(
    epilog=examples(
        "headrace experiment status ranker clicks",
        "headrace experiment status ranker clicks --ds 2026-01-08 --json",
        "headrace experiment status ranker pipelines/shop.yaml",
    )
)
def status(
    name: Name,
    pipeline: MaybePipeline = None,
    ds: AsOf = None,
    overlays: Overlays = None,
    sets: Sets = None,
    as_json: Json = False,
    home: Home = VAR,
) -> None:
    """Show the arms: users, the metric, differences from the control by day and in total, and their significance.

    In total over the days whose label is ripe: with an interval of one look (with and without CUPED), and one that
    holds for daily looks. The sample ratio says whether the arms can be compared at all.
    """
    show_experiment(workspace(home), name, pipeline, ds, overrides(overlays, sets), as_json)


@experiment_app.command(
    epilog=examples(
        "headrace experiment stop ranker clicks --arm weak --reason 'complaints of customers'",
        "headrace experiment stop ranker clicks --arm weak --reason 'a broken model' --ds 2026-01-08",
    )
)
def stop(
    name: Name,
    arm: Annotated[str, typer.Option("--arm", help="The arm; not the control.", metavar="ARM")],
    pipeline: MaybePipeline = None,
    reason: Annotated[
        str | None, typer.Option("--reason", help="Why; kept with who stopped it, and when.", metavar="TEXT")
    ] = None,
    ds: Annotated[
        str | None,
        typer.Option(
            "--ds",
            help="The first day whose lists are made without it; else the one after the newest that was scored.",
            metavar="DATE",
        ),
    ] = None,
    overlays: Overlays = None,
    sets: Sets = None,
    home: Home = VAR,
) -> None:
    """Stop an arm for good: from then on its users get the control's model. Other arms do not change."""
    stop_by_hand(workspace(home), name, pipeline, arm, reason, ds, overrides(overlays, sets))


@experiment_app.command(
    epilog=examples(
        "headrace experiment estimate ranker bandit.yaml", "headrace experiment estimate ranker bandit.yaml --json"
    )
)
def estimate(
    name: Name,
    pipeline: MaybePipeline = None,
    ds: AsOf = None,
    overlays: Overlays = None,
    sets: Sets = None,
    as_json: Json = False,
    home: Home = VAR,
) -> None:
    """Estimate, before the start, the reward of each arm's model on the log, by its propensities.

    The models predict the logged rows of the day once for each action (`train.evaluation.off_policy`): IPS, SNIPS and
    doubly robust with intervals, and the differences from the control's model. Nothing is trained.
    """
    raise typer.Exit(estimate_arms(workspace(home), name, pipeline, ds, overrides(overlays, sets), as_json))


_STYLES = {"better": "green", "worse": "red"}
#: The stage that measures models as policies; no part of a day.
_ESTIMATE = "estimate_policies"
#: Of what it measures (headrace.train.evaluation.policy), as columns.
_VALUES = ("logged_value", "ips", "snips", "dr", "effective_sample_size")


def show_experiment(
    ws: Workspace, name: str, pipeline: str | None, ds: str | None, overrides: Sequence[str], as_json: bool
) -> None:
    """Show the figures of an experiment.

    Args:
        ws: the workspace.
        name: of the experiment.
        pipeline: a shipped pipeline's name or a YAML file; None: the shipped one that has the experiment.
        ds: the day whose run of `outcomes` is the last that counts; None: the newest.
        overrides: `key=value` for the spec.
        as_json: print JSON.

    Raises:
        UserError: there is no such experiment; or see headrace.quality.experiments.comparison.
    """
    from headrace.config import parse_ds
    from headrace.quality.experiments.comparison import first_day, served_outcomes
    from headrace.quality.experiments.stage import known_of
    from headrace.score.assignment import all_stopped

    _, spec, experiment = _experiment_of(name, pipeline, overrides)
    ws = ws.of(spec)
    day = parse_ds(ds) if ds is not None else _newest(ws, spec, "outcomes")
    figures: dict[str, Any] | None = None
    if day is not None:
        served = served_outcomes(ws, spec, day, first_day(experiment))
        stops = all_stopped(ws, spec.pipeline, name, experiment.arms)
        figures = known_of(ws, spec, name, experiment, day, served, stops)
    if figures is None or not figures["days"]:
        start_note = "" if experiment.start is None else f"; its first lists are those of {experiment.start}"
        message = f"no outcome of experiment '{name}' of '{spec.pipeline}' is known yet{start_note}"
        if as_json:
            print_json({"pipeline": spec.pipeline, **(figures or {"name": name, "state": "planned"})})
        else:
            out.print(
                f"{message}. Beforehand: headrace experiment estimate {name} {spec.argument} --ds DATE", markup=False
            )
        return
    if as_json:
        print_json({"pipeline": spec.pipeline, **figures})
        return
    _show(spec, figures)


def stop_by_hand(
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
    from headrace.config import parse_ds
    from headrace.score.assignment import by_hand, stop_arm

    _, spec, experiment = _experiment_of(name, pipeline, overrides)
    ws = ws.of(spec)
    if arm not in experiment.arms:
        raise UserError(f"experiment '{name}' has no arm '{arm}'{nearest(arm, experiment.arms)}")
    if arm == experiment.control_arm:
        raise UserError(f"'{arm}' is the control of experiment '{name}': the others' users would get its model")
    if reason is None or not reason.strip():
        raise UserError("say why: --reason TEXT; it is kept with the arm")
    day = parse_ds(ds) if ds is not None else _next_scored(ws, spec, experiment)
    request = by_hand(name, arm, day, reason.strip())
    done = stop_arm(ws, spec.pipeline, request)
    if done != request:
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


def estimate_arms(
    ws: Workspace, name: str, pipeline: str | None, ds: str | None, overrides: Sequence[str], as_json: bool
) -> int:
    """Show the estimated rewards of the arms' models on the log, by the propensities of the logging policy.

    Args:
        ws, name, pipeline, overrides, as_json: as of `status`.
        ds: the day whose rows are predicted; None: the newest whose features are there.

    Returns:
        the exit code.

    Raises:
        UserError: no day has features, or the log has no propensities.
    """
    from headrace.config import parse_ds
    from headrace.stage.manifest import Manifest

    path, spec, experiment = _experiment_of(name, pipeline, overrides)
    ws = ws.of(spec)
    if spec.train.evaluation.off_policy is None:
        raise UserError(
            "no model can be measured as a policy: the log needs the propensity of each row's action; name its column "
            "in train.evaluation.off_policy (docs/evaluation.md)"
        )
    day = parse_ds(ds) if ds is not None else _newest(ws, spec, "features")
    if day is None:
        raise UserError(f"no day of '{spec.pipeline}' has features, so there are no logged rows to estimate with")
    # Of the other experiments nothing is asked. Arms stay in their order: the first may be the control.
    alone = [*overrides, f"experiments={json.dumps({name: experiment.model_dump(mode='json', by_alias=True)})}"]
    # Standard output is the document's.
    with redirect_stdout(sys.stderr) if as_json else nullcontext():
        code = run_stages(path, ws, day, alone, _ESTIMATE, _ESTIMATE, show_results=False)
    if code != EXIT_DONE:
        return code
    manifest = Manifest.load(ws.manifest(spec.pipeline, day, _ESTIMATE))
    assert manifest is not None, "the stage is done"
    figures = {"pipeline": spec.pipeline, "ds": day, "name": name, "rows": manifest.rows, **manifest.facts}
    if as_json:
        print_json(figures)
    else:
        _show_values(figures)
    return code


def _show_values(figures: Mapping[str, Any]) -> None:
    policy, rows = figures["policy"], figures["rows"]
    how = f"softmax, temperature {policy['temperature']:g}" if policy["policy"] == "softmax" else policy["policy"]
    out.print(
        f"{figures['name']} of {figures['pipeline']}: {rows['rows']:,} logged rows of {figures['ds']}, "
        f"split {figures['split']}; {rows['actions']:,} actions; policies: {how}",
        markup=False,
        soft_wrap=True,
    )
    rows_table = table("arm", "model", *(f">{v}" for v in _VALUES), ">dr - control")
    for record in figures["arms"]:
        cells = [_with_interval(record["values"].get(v), record["intervals"].get(v)) for v in _VALUES]
        minus = record["minus_control"].get("dr")
        ends = None if minus is None else [minus["low"], minus["high"]]
        version = record["version"] if record["version"] is not None else record["stage"]
        rows_table.add_row(
            record["arm"], str(version), *cells, "" if minus is None else _with_interval(minus["value"], ends)
        )
    out.print(rows_table)


def _with_interval(value: float | None, interval: Any) -> str:
    low, high = facts.sequence(interval) or (None, None)
    if low is None or high is None:
        return facts.decimals(value)
    return f"{facts.decimals(value)} ({facts.decimals(low)} to {facts.decimals(high)})"


def _show(spec: Spec, figures: Mapping[str, Any]) -> None:
    from headrace.quality.experiments.stage import SAMPLE_RATIO_LIMIT

    unit = "rate" if figures["metric"] == "rate" else "per user"
    days, ripe = figures["days"], figures["ripe_days"]
    ripe_days = f"{ripe[0]} to {ripe[-1]}" if ripe else "none"
    out.print(
        f"experiment {figures['name']} of {spec.pipeline}: {figures['state']}; {figures['label']}, {unit}; "
        f"lists of {days[0]} to {days[-1]}, ripe: {ripe_days}; as of {figures['ds']}",
        markup=False,
        soft_wrap=True,
    )
    ratio = figures["sample_ratio"]
    verdict = "as sent" if ratio["ok"] else f"NOT as sent (p below {SAMPLE_RATIO_LIMIT:g}): believe no difference"
    counted = ", ".join(f"{arm} {n:,}" for arm, n in ratio["users"].items())
    out.print(f"sample ratio: {counted}; p {ratio['p']:.3g}: {verdict}", markup=False, soft_wrap=True)
    if figures["moved_users"]:
        out.print(f"{figures['moved_users']:,} users were in several arms: shares or salt were changed", markup=False)
    arms = table("arm", "model", ">share", ">users", ">shown", f">{figures['label']}", f">{unit}", "stopped")
    for arm, record in figures["arms"].items():
        stopped = record["stopped"]
        end = "" if stopped is None else f"from {stopped['ds']} on, by {stopped['by']}: {stopped['reason']}"
        name = f"{arm} (control)" if arm == figures["control"] else arm
        model = record["model"] or "score.model"
        counts = (
            f"{record['users']:,}",
            f"{record['rows']:,}",
            f"{record['positives']:,}",
            facts.decimals(record["value"]),
        )
        arms.add_row(name, model, facts.percent(record["share"]), *counts, end)
    out.print(arms)
    both = table("arm - control", ">difference", ">interval", ">without CUPED", ">variance", ">sequential", ">p", "is")
    for arm, record in figures["differences"].items():
        if record is None:
            both.add_row(arm, "–", "", "", "", "", "", "nothing known")
            continue
        bounds, unadjusted = record["sequential"], record["plain"]
        both.add_row(
            arm,
            _signed(record["estimate"]),
            _range(record),
            f"{_signed(unadjusted['estimate'])} ({_range(unadjusted)})",
            facts.percent(record["variance_ratio"]),
            _range(bounds),
            f"{bounds['p']:.2g}",
            plain(record["conclusion"], style=_STYLES.get(record["conclusion"], "")),
        )
    out.print(both)
    by_day = table(
        "served", "", *(f">{arm}" for arm in figures["arms"]), *(f">{a} - control" for a in figures["differences"])
    )
    for day in figures["by_day"]:
        values = [facts.decimals(record["value"]) for record in day["arms"].values()]
        differences = [
            "–" if record is None else f"{_signed(record['estimate'])} ({_range(record)})"
            for record in day["differences"].values()
        ]
        by_day.add_row(day["served_ds"], "ripe" if day["ripe"] else "provisional", *values, *differences)
    out.print(by_day)


def _signed(value: float) -> str:
    return f"{value:+.4f}"


def _range(difference: Mapping[str, Any]) -> str:
    if difference["low"] is None or difference["high"] is None:
        return "–"
    return f"{_signed(difference['low'])} to {_signed(difference['high'])}"


def _experiment_of(name: str, pipeline: str | None, overrides: Sequence[str]) -> tuple[str, Spec, Experiment]:
    """Return the pipeline's name, its spec and its experiment."""
    from headrace.config import load_spec

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
