"""The stage `acme_row_counts`: the rows of the day's dataset, as a line of CSV for each split."""

from __future__ import annotations

from hashlib import sha256

from pydantic import BaseModel, ConfigDict, Field

from headrace.stage import Context, Manifest, Output, PackageStage, Result
from headrace.storage import Location


class RowCountsArgs(BaseModel):
    """Settings: `stages.acme_row_counts.args` of a pipeline."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    #: Between two columns.
    delimiter: str = Field(default=",", min_length=1, max_length=1)


class RowCounts(PackageStage):
    """Write the rows of the day's dataset, by split, to a CSV file."""

    version = 1
    needs = ("features",)
    writes = ("exports/{pipeline}/{ds}.csv",)
    Args = RowCountsArgs

    def verify(self, ctx: Context, manifest: Manifest) -> str | None:
        file = _file(ctx)
        if not file.is_file():
            return "the file of counts is gone"
        is_same = _digest(file.read_text()) == manifest.output("file").version
        return None if is_same else "the file of counts was changed"

    def run(self, ctx: Context) -> Result:
        rows = ctx.upstream["features"].rows
        text = "".join(f"{split}{self.args.delimiter}{count}\n" for split, count in rows.items())
        file = _file(ctx)
        ctx.check_lease()
        file.put_text(text)
        output = Output(kind="file", name=ctx.ws.name_of(file), version=_digest(text), rows=len(rows))
        return Result((output,), rows={"splits": len(rows)})


def _file(ctx: Context) -> Location:
    return ctx.ws.store / "exports" / ctx.spec.pipeline / f"{ctx.ds}.csv"


def _digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()[:16]
