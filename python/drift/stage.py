"""The stage `drift`: the newest rows beside the training range, column by column, against the limits of the spec.

The statistics are the features stage's (a Delta table); nothing is counted here, so another limit costs a second.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from headrace.config import Drift, Spec
from headrace.errors import UserError, nearest
from headrace.lake.delta.log import DeltaLog
from headrace.manifest import Input, Manifest, Output
from headrace.psi import ks, psi
from headrace.stage import Context, Result, Stage
from headrace.storage import StoreAway

log = logging.getLogger("headrace.monitor")

#: The training range, and what is held against it.
BEFORE, NOW = "train", "valid"


class JudgeDrift(Stage):
    """Compare the split `valid` (the newest days) with `train`; warn, or stop the day before anything is trained."""

    name = "drift"
    version = 1
    needs: tuple[str, ...] = ("features",)

    def spec_part(self, spec: Spec) -> Mapping[str, Any]:
        """The limits. What is counted belongs to the features stage."""
        return _section(spec).model_dump(mode="json", exclude={"quantiles", "top_values"})

    def inputs(self, ctx: Context) -> tuple[Input, ...]:
        """The statistics at the version that the features stage wrote."""
        made = _statistics(ctx)
        return (Input(kind="delta", name=made.name, version=made.version),)

    def verify(self, ctx: Context, manifest: Manifest) -> str | None:
        """It leaves nothing but its manifest."""
        return None

    def run(self, ctx: Context) -> Result:
        """Judge the day.

        Raises:
            UserError: a column that is to stop the day is over a limit; a limit names a column that is not there; the
                statistics are gone.
        """
        drift = _section(ctx.spec)
        found = judge(read_statistics(ctx), drift)
        over = [(c, b) for c in found for b in c.breaches]
        for column, breach in over:
            log.warning("drift: %s", breach.text(column))
        stops = [(c, b) for c, b in over if b.action == "stop"]
        if stops:
            raise UserError(_stopped(ctx, stops))
        worst = max((c for c in found if c.psi is not None), key=lambda c: c.psi or 0.0, default=None)
        shown = f"; largest PSI {worst.psi:.3f} ({worst.label})" if worst is not None else ""
        log.info("drift: %d columns, %d over a limit%s", len(found), sum(bool(c.breaches) for c in found), shown)
        return Result(
            rows={"columns": len(found), "over_limit": sum(bool(c.breaches) for c in found)},
            facts={"columns": [c.fact() for c in found]},
        )


@dataclass(frozen=True)
class Breach:
    """A figure above its limit."""

    #: psi, missing or oov.
    what: str
    value: float
    limit: float
    action: str
    #: The limit's key in the spec.
    key: str

    def text(self, column: ColumnDrift) -> str:
        """For people: column, figure, limit."""
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
    #: Of numbers.
    ks: float | None
    #: The limit of the PSI; None: not judged (no limit, or too few values).
    max_psi: float | None
    breaches: tuple[Breach, ...] = ()

    @property
    def label(self) -> str:
        return f"{self.side} {self.column}"

    def fact(self) -> dict[str, Any]:
        """As JSON."""
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
    names = sorted({column for _, column in by})
    for name in drift.columns:
        if name not in names:
            raise UserError(
                f"drift.columns: '{name}' is neither a feature nor a column that one is made of"
                f"{nearest(name, names)} "
                f"(there are: {', '.join(names)})"
            )
    found = [_compare(splits[BEFORE], splits[NOW], drift) for splits in by.values() if {BEFORE, NOW} <= set(splits)]
    return sorted(found, key=lambda c: (c.psi is None, -(c.psi or 0.0), c.side, c.column))


def _compare(before: Mapping[str, Any], now: Mapping[str, Any], drift: Drift) -> ColumnDrift:
    counts = [[b["count"] for b in side["histogram"]] for side in (before, now)]
    limits = drift.limits(before["column"])
    enough = min(before["values"], now["values"]) >= drift.min_values
    judged = enough and before["kind"] != "time" and limits.action != "ignore"
    oov = None
    if before["oov"] is not None and now["oov"] is not None:
        oov = (_share(before["oov"], before["values"]), _share(now["oov"], now["values"]))
    column = ColumnDrift(
        side=before["side"],
        column=before["column"],
        kind=before["kind"],
        values=(before["values"], now["values"]),
        missing=(_share(before["missing"], before["rows"]), _share(now["missing"], now["rows"])),
        oov=oov,
        mean=(before["mean"], now["mean"]),
        psi=psi(*counts),
        ks=ks(*counts) if before["kind"] == "number" else None,
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
    for what, (value, limit, field) in figures.items():
        if value is not None and limit is not None and value > limit:
            own = getattr(drift.columns.get(column.column), field, None) is not None
            key = f"drift.columns.{column.column}.{field}" if own else f"drift.{field}"
            yield Breach(what, value, limit, str(limits.action), key)


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def _stopped(ctx: Context, stops: Sequence[tuple[ColumnDrift, Breach]]) -> str:
    drift, made = _section(ctx.spec), _statistics(ctx)
    trained, newest = (ctx.upstream["features"].facts.get(f"{s}_range") for s in (BEFORE, NOW))
    days = f" ({' to '.join(dict.fromkeys(newest))} beside {' to '.join(trained)})" if newest and trained else ""
    (first, breach), more = stops[0], "\n".join(f"  {b.text(c)}" for c, b in stops)
    own = drift.columns.get(first.column)
    action = f"columns.{first.column}.action" if own is not None and own.action == "stop" else "action"
    return (
        f"drift of '{ctx.spec.pipeline}' stops {ctx.ds}{days}: nothing was trained, scored or published. "
        f"Over the limit:\n{more}\n"
        f"The figures are in {made.name} (ds = '{ctx.ds}'). Mend the data and run the day again; or, if the change is "
        f"real, raise the limit ({breach.key}) or let it pass with a warning: --set drift.{action}=warn"
    )


def _section(spec: Spec) -> Drift:
    assert spec.drift is not None, "headrace.stages: no stage without the section"
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
    """The day's records of the statistics table, at the version that the features stage wrote. Needs no Spark.

    Raises:
        UserError: that version is gone.
    """
    made = _statistics(ctx)
    again = f"make it again: headrace run {ctx.spec.argument} --ds {ctx.ds} --from features --to drift"
    files = DeltaLog(ctx.ws.locate(made.name)).plain_files(int(made.version))
    mine = [f.path for f in files or () if f.partition.get("ds") == ctx.ds]
    if not mine:
        raise UserError(f"{made.name} has no version {made.version} with {ctx.ds} any more; {again}")
    try:
        return [row for path in mine for row in pq.ParquetFile(path).read().to_pylist()]
    except StoreAway:  # nothing is known of the files
        raise
    except (OSError, pa.ArrowException) as e:
        raise UserError(f"{made.name} cannot be read ({' '.join(str(e).split())[:200]}); {again}") from None
