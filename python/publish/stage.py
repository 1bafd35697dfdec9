"""The stage `publish`: write, audit, publish the day's scores, to a warehouse and to a Delta table."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from headrace.config import Publish as PublishSpec
from headrace.config import Score, Spec
from headrace.errors import RefusedError, UserError
from headrace.lake.delta.log import DeltaLog, damaged_file
from headrace.publish.audit import Limits, day_checks, own_checks, reference_checks
from headrace.publish.online import OnlineVersion, export, open_store
from headrace.publish.opening import open_target
from headrace.publish.target import Target, beyond_retention, table_name, without_unfit_keys
from headrace.stage import Context, Result, Stage
from headrace.stage.manifest import Input, Manifest, Output

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


log = logging.getLogger("headrace.publish")

_SAMPLE_ROWS = 10


class Publish(Stage):
    """Write, audit, publish: the day's scores to the warehouse."""

    name = "publish"
    version = 1
    needs: tuple[str, ...] = ("score",)

    def spec_part(self, spec: Spec) -> Mapping[str, Any]:
        """Return the rows' destination and checks, without login details or an embedded server's port."""
        publish, score = _sections(spec)
        target = publish.warehouse.model_dump(include={"kind", "database", "schema_name"})
        if publish.warehouse.kind == "postgres":
            target |= {"host": publish.warehouse.host, "port": publish.warehouse.port}
        elif publish.warehouse.kind != "embedded":
            target |= publish.warehouse.model_dump(include={"host", "port", "path", "url", "catalog"})
        online = publish.online
        return {
            "table": table_name(spec),
            "warehouse": target,
            "min_rows": publish.min_rows,
            "max_row_change": publish.max_row_change,
            **({} if publish.audit is None else {"audit": publish.audit.model_dump(mode="json")}),
            **({} if online is None else {"online": online.model_dump(include={"kind", "url", "path"})}),
            "user": score.user.key,
            "item": score.item.key,
            "top_k": score.top_k,
        }

    def inputs(self, ctx: Context) -> tuple[Input, ...]:
        """Nothing besides the scores' manifest, which pins the scores' version."""
        return ()

    def verify(self, ctx: Context, manifest: Manifest) -> str | None:
        """Return why the warehouse no longer holds what the manifest says, or None.

        Raises:
            UserError: the warehouse cannot be asked.
        """
        log = DeltaLog(ctx.ws.table(ctx.spec.pipeline, "published"))
        if log.version is None:
            return "the Delta table of published scores is gone"
        version = int(manifest.output("delta").version)
        files = log.files(version) if log.has(version) else None
        if (
            files is not None
            and (damage := damaged_file(f for f in files if f.partition.get("ds") == ctx.ds)) is not None
        ):
            return damage
        retain_days = _sections(ctx.spec)[0].retain_days
        with open_target(ctx.spec, ctx.ws) as target:
            if retain_days is not None and ctx.ds in beyond_retention([*target.days(), ctx.ds], retain_days):
                return None  # dropped, or about to be
            return target.missing(ctx.ds, manifest.key) or _not_online(ctx, target, manifest.key)

    def run(self, ctx: Context) -> Result:
        """Publish the day; the tables are left as they were unless every check holds.

        Raises:
            RefusedError: the audit failed; names each failed check.
            UserError: the warehouse cannot be reached or written, or a check cannot be made.
            LeaseLost: a later run of the pipeline has been at work there since this one began.
        """
        from headrace.lake.spark.session import session  # late: a day that is published needs no Spark

        with (
            open_target(ctx.spec, ctx.ws, ctx.lock) as target,
            session(ctx.spec.spark, ctx.ws, "headrace publish") as spark,
        ):
            return _publish(ctx, target, spark)


def _publish(ctx: Context, target: Target, spark: SparkSession) -> Result:
    publish, score = _sections(ctx.spec)
    scores = ctx.upstream["score"].output("delta")
    df = _read(ctx, spark, scores)
    target.create(df.dtypes)
    limits_of_keys = {key: target.key_limits(key) for key in (score.user.key, score.item.key)}
    df, left_out = without_unfit_keys(df, limits_of_keys, score.user.key)
    left_out.warn(target.label)
    source = f"{scores.name}@{scores.version}"
    # A run that was killed between the swap and the manifest left the warehouse done.
    if target.missing(ctx.ds, ctx.key) is not None:
        limits = Limits(
            user=score.user.key,
            item=score.item.key,
            required=("ds", score.user.key, score.item.key, "rank", "score", "model_version"),
            expected_rows=(ctx.upstream["score"].rows["scores"] if scores.rows is None else scores.rows)
            - left_out.rows,
            min_rows=publish.min_rows,
            top_k=score.top_k,
            max_row_change=publish.max_row_change,
            by_score=score.rerank is None,
        )
        with target.stage(df, ctx.ds, ctx.key) as staged:
            scored_rows, audit = ctx.upstream["score"].rows, publish.audit
            checks = day_checks(staged, limits, audit, scored_rows.get("candidates"), scored_rows.get("users"))
            if audit is not None:
                checks += [*reference_checks(spark, df, audit.references), *own_checks(df, staged, audit.rules)]
            failed = [check for check in checks if not check.ok]
            if failed:
                target.keep(staged)
                raise RefusedError(
                    f"the scores of {ctx.spec.pipeline} for {ctx.ds} failed {len(failed)} of {len(checks)} checks and "
                    f"were not published; {target.label} is as it was. The rows are in {staged.label}, to look at "
                    f"(`headrace warehouse drop-kept {ctx.spec.argument}` drops them):\n"
                    + "\n".join(f"  {check}" for check in failed)
                )
            target.swap(staged, source, checks)
            log.info(
                "published %s rows to %s for %s (%d checks held)", f"{staged.rows:,}", target.label, ctx.ds, len(checks)
            )
    target.grant({str(privilege): roles for privilege, roles in publish.grants.items()})
    # The day itself stays, however old it is, until a newer one is published.
    target.drop_days([d for d in beyond_retention(target.days(), publish.retain_days) if d != ctx.ds])
    done = target.published(ctx.ds)
    assert done is not None, "written just now, under the pipeline's lock"
    rows = done.rows
    version = _write_delta(ctx, df)
    if publish.online is not None and ctx.ds == max(target.days()):
        with open_store(ctx.spec, ctx.ws, ctx.lock) as store:
            unfit = export(store, df, score.user.key, score.item.key, OnlineVersion(ctx.ds, ctx.key))
            unfit.warn(store.label)
            left_out += unfit
            log.info("the items of %s are in %s", ctx.ds, store.label)
    sample = target.sample(ctx.ds, _SAMPLE_ROWS)
    return Result(
        outputs=(
            Output(kind=target.kind, name=target.label, version=ctx.key, rows=rows),
            Output(kind="delta", name=f"lake/{ctx.spec.pipeline}/published", version=str(version), rows=rows),
        ),
        rows={"published": rows, **({"left_out": left_out.rows} if left_out.rows else {})},
        facts={
            "warehouse": target.address,
            "table": target.label,
            "source": source,
            "audit": done.audit,
            **({"left_out": list(left_out.keys)} if left_out.rows else {}),
            "sample": [{k: v if isinstance(v, (int, float)) else str(v) for k, v in row.items()} for row in sample],
        },
    )


def _not_online(ctx: Context, target: Target, key: str) -> str | None:
    """Return why the online store lacks the run's scores though its day is the newest, or None."""
    if _sections(ctx.spec)[0].online is None or ctx.ds != max(target.days()):
        return None
    with open_store(ctx.spec, ctx.ws) as store:
        version = store.current()
        return (
            None if version == OnlineVersion(ctx.ds, key) else f"{store.label} has other scores than those of {ctx.ds}"
        )


def _read(ctx: Context, spark: SparkSession, scores: Output) -> DataFrame:
    """Return the day's scores at exactly the version that the manifest of `score` names."""
    from pyspark.errors import AnalysisException
    from pyspark.sql import functions as F

    from headrace.lake.delta.with_spark import read_version

    path = ctx.ws.locate(scores.name)
    try:
        df = read_version(spark, path, int(scores.version), lambda partition: partition["ds"] == ctx.ds)
    except AnalysisException as e:
        raise UserError(
            f"version {scores.version} of {path} cannot be read ({str(e).splitlines()[0]}); make it again: "
            f"headrace run {ctx.spec.argument} --ds {ctx.ds} --from score"
        ) from None
    return df.where(F.col("ds") == ctx.ds)


def _write_delta(ctx: Context, df: DataFrame) -> int:
    """Write the same rows into the Delta table, in one commit that replaces the day. Return its version."""
    from pyspark.sql import functions as F

    from headrace.lake.delta.with_spark import save_delta

    log = DeltaLog(ctx.ws.table(ctx.spec.pipeline, "published"))
    last = next(log.commits(), None)
    if last is not None and last.user_metadata == ctx.key:  # killed between this commit and the manifest
        files = log.files(last.version) or ()
        if damaged_file(f for f in files if f.partition.get("ds") == ctx.ds) is None:
            return last.version
    rows = df.withColumn("published_key", F.lit(ctx.key))
    writer = (
        rows.write.format("delta")
        .mode("overwrite")
        .option("replaceWhere", f"ds = '{ctx.ds}'")
        .option("mergeSchema", "true")
        .option("userMetadata", ctx.key)
        .partitionBy("ds")
    )
    return save_delta(writer, log.folder, ctx.fence, rows.schema)


def _sections(spec: Spec) -> tuple[PublishSpec, Score]:
    assert spec.publish is not None, "headrace.config.stages: no stage without the section"
    assert spec.score is not None, "config refuses publish without score"
    return spec.publish, spec.score
