"""Stage `drift`: the newest rows compared with the training range, column by column, against the spec's limits.

The statistics are the features stage's (a Delta table); nothing is counted here, so another limit costs a second.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from headrace.compute.psi import ks, psi
from headrace.config import Drift, Spec
from headrace.errors import UserError
from headrace.lake.delta.log import DeltaLog
from headrace.stage import Context, Result, Stage
from headrace.stage.manifest import Input, Manifest, Output
from headrace.storage import StoreAway

log = logging.getLogger("headrace.monitor")

#: The splits of the training range and of the newest days.
TRAINING, NEWEST = "train", "valid"


class JudgeDrift(Stage):
    """Stage that compares the split `valid` (the newest days) with `train`; warns, or stops the day before training."""

    name = "drift"
    version = 1
    needs: tuple[str, ...] = ("features",)

    def spec_part(self, spec: Spec) -> Mapping[str, Any]:
        """Return the limits. The keys of what is counted belong to the features stage."""
        return _section(spec).model_dump(mode="json", exclude={"quantiles", "top_values"})

    def inputs(self, ctx: Context) -> tuple[Input, ...]:
        """Return the statistics at the version that the features stage wrote."""
        statistics = _statistics(ctx)
        return (Input(kind="delta", name=statistics.name, version=statistics.version),)

    def verify(self, ctx: Context, manifest: Manifest) -> str | None:
        """Return None: the stage has no output besides its manifest."""
        return None

    def run(self, ctx: Context) -> Result:
        """Judge the day.

        Raises:
            UserError: a column that is to stop the day is over a limit; a limit names a column that is not there; the
                statistics are gone.
        """
        drift = _section(ctx.spec)
        columns = judge(read_statistics(ctx), drift)
        over = [(c, b) for c in columns for b in c.breaches]
        for column, breach in over:
            log.warning("drift: %s", breach.text(column))
        stops = [(c, b) for c, b in over if b.action == "stop"]
        if stops:
            raise UserError(_stopped(ctx, stops))
        worst = max((c for c in columns if c.psi is not None), key=lambda c: c.psi or 0.0, default=None)
        largest = f"; largest PSI {worst.psi:.3f} ({worst.label})" if worst is not None else ""
        log.info("drift: %d columns, %d over a limit%s", len(columns), sum(bool(c.breaches) for c in columns), largest)
        return Result(
            rows={"columns": len(columns), "over_limit": sum(bool(c.breaches) for c in columns)},
            facts={"columns": [c.fact() for c in columns]},
        )


@dataclass(frozen=True)
class Breach:
    """Figure above its limit."""

    #: psi, missing or oov.
    what: str
    value: float
    limit: float
    action: str
    #: The limit's key in the spec.
    key: str

    def text(self, column: ColumnDrift) -> str:
        """Describe the breach: column, figure, limit."""
        texts = {
            "psi": f"PSI is {self.value:.3f}, the limit {self.limit:g}",
            "missing": f"rows without a value went from {_percent(column.missing[0])} to "
            f"{_percent(column.missing[1])}, by more than {_percent(self.limit)}",
            "oov": f"{_percent(self.value)} of the values are not in the vocabulary, the limit is "
            f"{_percent(self.limit)}",
        }
        return f"{column.label}: {texts[self.what]} ({self.key})"


@dataclass(frozen=True)
class ColumnDrift:
    """One column on both sides; pairs are (training range, newest)."""

    side: str
    column: str
    kind: str
    values: tuple[int, int]
    #: Shares of the rows.
    missing: tuple[float, float]
    #: Shares of the values; None where there is no vocabulary.
    oov: tuple[float, float] | None
    mean: tuple[float | None, float | None]
    psi: float | None
    #: Distance by Kolmogorov and Smirnov; None: no numbers.
    ks: float | None
    #: The limit of the PSI; None: not judged (no limit, or too few values).
    max_psi: float | None
    breaches: tuple[Breach, ...] = ()

    @property
    def label(self) -> str:
        return f"{self.side} {self.column}"

    def fact(self) -> dict[str, Any]:
        """Return the column as JSON values."""
        return {**asdict(self), "breaches": [asdict(b) for b in self.breaches]}


def judge(rows: Sequence[Mapping[str, Any]], drift: Drift) -> list[ColumnDrift]:
    """Compare the splits of each column; the largest PSI first, those without one last, then by side and name.

    Args:
        rows: records of the statistics table, of one day.
        drift: the limits.

    Raises:
        UserError: a limit is for a column that is not there.
    """
    by: dict[tuple[str, str], dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        by.setdefault((row["side"], row["column"]), {})[row["split"]] = row
    drift.check_names(sorted({column for _, column in by}))
    columns = [
        _compare(splits[TRAINING], splits[NEWEST], drift) for splits in by.values() if {TRAINING, NEWEST} <= set(splits)
    ]
    return sorted(columns, key=lambda c: (c.psi is None, -(c.psi or 0.0), c.side, c.column))


def _compare(training: Mapping[str, Any], newest: Mapping[str, Any], drift: Drift) -> ColumnDrift:
    counts = [[b["count"] for b in side["histogram"]] for side in (training, newest)]
    limits = drift.limits(training["column"])
    enough = min(training["values"], newest["values"]) >= drift.min_values
    judged = enough and training["kind"] != "time" and limits.action != "ignore"
    oov = None
    if training["oov"] is not None and newest["oov"] is not None:
        oov = (_share(training["oov"], training["values"]), _share(newest["oov"], newest["values"]))
    column = ColumnDrift(
        side=training["side"],
        column=training["column"],
        kind=training["kind"],
        values=(training["values"], newest["values"]),
        missing=(_share(training["missing"], training["rows"]), _share(newest["missing"], newest["rows"])),
        oov=oov,
        mean=(training["mean"], newest["mean"]),
        psi=psi(*counts),
        ks=ks(*counts) if training["kind"] == "number" else None,
        max_psi=limits.max_psi if judged else None,
    )
    if limits.action == "ignore":
        return column
    return replace(column, breaches=tuple(_breaches(column, drift)))


def _breaches(column: ColumnDrift, drift: Drift) -> Iterator[Breach]:
    limits = drift.limits(column.column)
    figures = {
        "psi": (column.psi, column.max_psi, "max_psi"),
        "missing": (abs(column.missing[1] - column.missing[0]), limits.max_missing_change, "max_missing_change"),
        "oov": (column.oov[1] if column.oov else None, limits.max_oov_rate, "max_oov_rate"),
    }
    for figure, (value, limit, field) in figures.items():
        if value is not None and limit is not None and value > limit:
            is_column_limit = getattr(drift.columns.get(column.column), field, None) is not None
            key = f"drift.columns.{column.column}.{field}" if is_column_limit else f"drift.{field}"
            yield Breach(figure, value, limit, str(limits.action), key)


def _share(part: int, total: int) -> float:
    return part / total if total else 0.0


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def _stopped(ctx: Context, stops: Sequence[tuple[ColumnDrift, Breach]]) -> str:
    drift, statistics = _section(ctx.spec), _statistics(ctx)
    trained, newest = (ctx.upstream["features"].facts.get(f"{s}_range") for s in (TRAINING, NEWEST))
    days = f" ({' to '.join(dict.fromkeys(newest))} beside {' to '.join(trained)})" if newest and trained else ""
    (first, breach), more = stops[0], "\n".join(f"  {b.text(c)}" for c, b in stops)
    column_section = drift.columns.get(first.column)
    action = (
        f"columns.{first.column}.action" if column_section is not None and column_section.action == "stop" else "action"
    )
    return (
        f"drift of '{ctx.spec.pipeline}' stops {ctx.ds}{days}: nothing was trained, scored or published. "
        f"Over the limit:\n{more}\n"
        f"The figures are in {statistics.name} (ds = '{ctx.ds}'). Mend the data and run the day again; or, if the "
        f"change is real, raise the limit ({breach.key}) or let it pass with a warning: --set drift.{action}=warn"
    )


def _section(spec: Spec) -> Drift:
    assert spec.drift is not None, "headrace.config.stages: no stage without the section"
    return spec.drift


def _statistics(ctx: Context) -> Output:
    name = ctx.ws.name_of(ctx.ws.table(ctx.spec.pipeline, "statistics"))
    for output in ctx.upstream["features"].outputs:
        if output.name == name:
            return output
    raise UserError(
        f"the features of {ctx.ds} were made without statistics; make them again: "
        f"headrace run {ctx.spec.argument} --ds {ctx.ds} --from features --to drift"
    )


def read_statistics(ctx: Context) -> list[dict[str, Any]]:
    """Return the day's records of the statistics table, at the version that the features stage wrote. Needs no Spark.

    Raises:
        UserError: that version is gone.
    """
    statistics = _statistics(ctx)
    again = f"make it again: headrace run {ctx.spec.argument} --ds {ctx.ds} --from features --to drift"
    files = DeltaLog(ctx.ws.locate(statistics.name)).plain_files(int(statistics.version))
    paths = [f.path for f in files or () if f.partition.get("ds") == ctx.ds]
    if not paths:
        raise UserError(f"{statistics.name} has no version {statistics.version} with {ctx.ds} any more; {again}")
    try:
        return [row for path in paths for row in pq.ParquetFile(path).read().to_pylist()]
    except StoreAway:  # the files may be intact
        raise
    except (OSError, pa.ArrowException) as e:
        raise UserError(f"{statistics.name} cannot be read ({' '.join(str(e).split())[:200]}); {again}") from None
