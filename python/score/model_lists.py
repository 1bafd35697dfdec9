"""The models of a run, one for each arm of an experiment that has its own, and the lists that each makes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from pyspark import Accumulator
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from headrace.config import Score
from headrace.config.experiments import PARTS
from headrace.features.functions.arrays import one_batch
from headrace.features.table_ops.external import ExternalReader
from headrace.lake.spark.exchange import bounded_batches
from headrace.lake.spark.gpus import gpu_profile
from headrace.score.candidates.candidates import UserCandidates, candidates_of_users
from headrace.score.candidates.shared_lists import tables_of_score
from headrace.score.candidates.source import SourceContext, stored
from headrace.score.columns import context_scalars
from headrace.score.entities import Active
from headrace.score.experiments.assignment import ARM, PART, Live, edges, parts_of
from headrace.score.incremental import UsersToScore, users_to_score
from headrace.score.item_features import ItemFeatures
from headrace.score.items import ItemTable
from headrace.score.joined_tables import HeldRows, joined_tables
from headrace.score.loaded_model import loaded_workflow
from headrace.score.pair_features import PairFeatures, check_pair_features
from headrace.score.ranking import SEEN, TaskInputs
from headrace.score.rerank.reranker import ModelItemVectors, RuleReranker, UnmetByTask
from headrace.score.scored_rows import score_columns, scored_rows
from headrace.score.scoring_model import ScoringModel
from headrace.stage import Context
from headrace.storage import Location
from headrace.storage.host_scratch import HostPlace

#: The column of the scores where there are experiments: `experiment=arm`, several with commas between.
OF_EXPERIMENTS = {"arms": "string"}


@dataclass(frozen=True)
class ModelOfRun:
    """A model that scores some of a run's users."""

    #: The run as if this were the model of all: `score.model` asks for it, and what it keeps in scratch is its own.
    ctx: Context
    chosen: ScoringModel
    #: What asks for it, as `score.model`; None: `score.model` itself.
    asked: tuple[str | None, ...]


def models_of_run(
    ctx: Context, experiments: Sequence[Live], choose: Callable[[Context], ScoringModel]
) -> list[ModelOfRun]:
    """Return the model of `score.model`, and then those of arms, each once.

    Args:
        ctx: the run.
        experiments: of its day.
        choose: the model that `score.model` of a run asks for.

    Raises:
        UserError: as of `choose`.
    """
    found = [ModelOfRun(ctx, choose(ctx), (None,))]
    for asked in dict.fromkeys(of.model_of(arm) for of in experiments for arm in of.experiment.arms):
        if asked is None:
            continue
        mine = replace(ctx, spec=ctx.spec.scored_by(asked), key=f"{ctx.key}-{len(found)}")
        chosen = choose(mine)
        same = next((i for i, m in enumerate(found) if m.chosen.input == chosen.input), None)
        if same is None:
            found.append(ModelOfRun(mine, chosen, (asked,)))
        else:
            found[same] = replace(found[same], asked=(*found[same].asked, asked))
    return found


@dataclass(frozen=True)
class Assigned:
    """Columns of a user's assignment: `arms` (null: in no arm) and the place of the user's model (int)."""

    arms: Column
    model: Column

    @staticmethod
    def of(key: Column, is_integer: bool, experiments: Sequence[Live], models: Mapping[str | None, int]) -> Assigned:
        """Return the assignment as headrace.score.experiments.assignment computes it from Arrow's columns.

        Of experiments whose arms have models, a user takes part in the first that takes him; an arm that was stopped
        is no longer named.

        Args:
            key: not null.
            is_integer: whether keys are whole numbers; else they are texts.
            experiments: of the day.
            models: the place of each model that is asked for.
        """
        key = key.cast("bigint" if is_integer else "string")
        taken, model = F.lit(False), F.lit(models[None])
        texts = []
        for of in experiments:
            takes_part = _place(key, f"{of.salt}/{PART}") < parts_of(of.experiment.percent)
            arm = _arm(key, of)
            if of.experiment.has_models:
                takes_part = takes_part & ~taken
                taken = taken | takes_part
                for name in of.experiment.arms:
                    model = F.when(takes_part & (arm == name), models[of.model_of(name)]).otherwise(model)
            named = takes_part & ~arm.isin(*of.stopped) if of.stopped else takes_part
            texts.append(F.when(named, F.concat(F.lit(f"{of.name}="), arm)))
        text = F.concat_ws(",", *texts)
        return Assigned(F.when(text != "", text), model)


def _arm(key: Column, of: Live) -> Column:
    """Return the user's arm, whether or not the user takes part."""
    place, shares = _place(key, f"{of.salt}/{ARM}"), of.experiment.shares
    *names, last = shares
    found = F.lit(last)
    for name, edge in reversed(list(zip(names, edges(shares).tolist(), strict=False))):
        found = F.when(place < edge, name).otherwise(found)
    return found


def _place(key: Column, salt: str) -> Column:
    return F.pmod(F.xxhash64(F.lit(salt), key), F.lit(PARTS))


log = logging.getLogger("headrace.score")

#: Users, and items, whose pairs' features are compared.
_CHECKED = 8


@dataclass(frozen=True)
class RunInputs:
    """Inputs that all models of a run share."""

    spark: SparkSession
    active: Active
    items: ItemTable
    #: For what tasks hand to each other, by the keys of the run and of its further models.
    folder: Location
    #: Where tasks map models.
    maps: HostPlace
    #: The workers' memory; rules that lists of those who are scored now could not keep.
    peak: Accumulator[float]
    unmet: UnmetByTask


@dataclass(frozen=True)
class ModelLists:
    """The lists of one model's users."""

    model: ModelOfRun
    #: The rows of the table, computed when they are read.
    frame: DataFrame
    #: Users with candidates.
    users: int
    part: UsersToScore
    #: That were worked for them already; the rest takes whoever reads the rows.
    seconds: float
    #: What tasks were brought of its tables; None: all are mapped.
    held: HeldRows | None = None
    #: For the manifest.
    candidates: dict[str, Any] = field(default_factory=dict)

    @property
    def facts(self) -> dict[str, Any]:
        """The model, as the manifest tells it when the rows have been read."""
        chosen, (first, *_) = self.model.chosen, self.model.asked
        score = self.model.ctx.spec.score
        assert score is not None
        return {
            "stage": chosen.stage,
            "kind": kind(chosen.stage),
            "name": chosen.output.name,
            "version": chosen.output.version,
            "registered": chosen.facts.get("registered"),
            "auc": chosen.facts["metrics"].get("auc"),
            "asked": first or score.model,
            **({} if score.output is None else {"output": score.output}),
            **({} if self.held is None else {"joined": self.held.facts()}),
        }


@contextmanager
def lists_of_model(model: ModelOfRun, run: RunInputs, users: DataFrame, n_users: int) -> Iterator[ModelLists]:
    """Give a model's lists for some users, to be computed within the block.

    Args:
        model: the model.
        run: what it shares with the others of the run.
        users: its users; how many is `n_users`.
        n_users: at least one.
    """
    ctx, chosen, spark, items = model.ctx, model.chosen, run.spark, run.items
    spec, score = ctx.spec, ctx.spec.score
    assert score is not None
    folder, mine = ctx.ws.locate(chosen.output.name), run.folder / ctx.key
    features = PairFeatures(
        (score.user.key, *score.user.columns),
        (score.item.key, *score.item.columns),
        context_scalars(spec, score),
        loaded_workflow(folder, ctx.ws.mapped(spec.pipeline)),
    )
    of_items = ItemFeatures.write(items, folder, features, mine / "item_features", spark, run.maps)
    _check_pair_features(features, users, items, of_items)
    log.info(
        "score: %s users x %s items = %s pairs with the %s model",
        f"{n_users:,}",
        f"{items.rows:,}",
        f"{n_users * items.rows:,}",
        kind(chosen.stage),
    )
    threads = int(spark.sparkContext.getConf().get("spark.task.cpus") or 1)
    gpu = chosen.stage != "baseline" and gpu_profile(spark) is not None
    joined = joined_tables(score.embeddings, folder, ctx.ws.mapped(spec.pipeline), gpu)
    held = HeldRows.of(spark.sparkContext, joined) if joined else None
    task = TaskInputs(
        model=folder,
        threads=threads,
        output=score.output,
        top_k=score.top_k if score.rerank is None else score.ranked,
        rank_depth=score.ranked,
        rerank=_reranker(ctx, folder, threads, of_items, gpu, joined, run.maps),
        user_key=score.user.key,
        items=items,
        item_features=of_items,
        user_columns=features.user,
        item_names=features.item,
        context=dict(features.context),
        maps=run.maps,
        joined=joined,
        gpu=gpu,
    )
    with _candidates(model, run, users) as found:
        pairs, sources = n_users * items.rows, None
        if found is not None:
            users, n_users = found.frame, found.facts["users"]
            pairs, sources = found.facts["candidates"], found.names
        tick = time.perf_counter()
        with users_to_score(ctx, spark, task, users, (n_users, pairs), score_columns(score)) as part:
            measures = run.peak, run.unmet
            with scored_rows(ctx, spark, task, part, chosen.output.version, measures, sources, held) as scored:
                # Rows of items that filters leave out must never be in the table: counted before the commit.
                written = scored if found is None else stored(spark, scored, mine / "scores")
                of_candidates = _check_filters(ctx, found, written)
                yield ModelLists(model, written, n_users, part, time.perf_counter() - tick, held, of_candidates)


def kind(stage: str) -> str:
    """Return the name that people use for the models of a stage."""
    return {"train": "neural"}.get(stage, stage)


def _reranker(
    ctx: Context,
    folder: Location,
    threads: int,
    of_items: ItemFeatures,
    gpu: bool,
    joined: frozenset[str],
    maps: HostPlace,
) -> RuleReranker | None:
    score = ctx.spec.score
    if score is None or score.rerank is None:
        return None
    sources = () if score.candidates is None else tuple(score.candidates.sources)
    vectors = ModelItemVectors(folder, threads, score.output, maps, of_items, gpu, joined)
    return RuleReranker(score.rerank, score.top_k, ctx.ds, sources, vectors)


@contextmanager
def _candidates(model: ModelOfRun, run: RunInputs, users: DataFrame) -> Iterator[UserCandidates | None]:
    """Give the candidates of each user; None where all items are ranked."""
    ctx, spark = model.ctx, run.spark
    score: Score | None = ctx.spec.score
    assert score is not None
    if score.candidates is None:
        yield None
        return
    reader = ExternalReader.pinned_by(ctx.ws, tables_of_score(score), ctx.inputs)
    items, folder = run.items.frame(spark), run.folder / ctx.key
    context = SourceContext(ctx, spark, run.active, users, items, reader, model.chosen, folder, run.maps)
    # Users come with lists of their items.
    with bounded_batches(spark), ExitStack() as made:
        found = made.enter_context(candidates_of_users(context))
        reader.check_unchanged()
        yield found


def _check_filters(ctx: Context, candidates: UserCandidates | None, rows: DataFrame) -> dict[str, Any]:
    """Return the facts of candidates, after a count of the rows to be written against all filters."""
    if candidates is None:
        return {}
    violations = candidates.violations(rows)
    if violations:
        raise RuntimeError(f"{violations} of the scores of {ctx.ds} are of items that score.filters leave out")
    return {"candidates": {**candidates.facts, "violations": violations}}


def _check_pair_features(features: PairFeatures, users: DataFrame, items: ItemTable, of_items: ItemFeatures) -> None:
    """Check the shortcut on a few pairs of this very run."""
    few = one_batch(users.drop(SEEN).limit(_CHECKED).toArrow())
    first = one_batch(items.first(_CHECKED).select(list(dict.fromkeys(features.item))))
    check_pair_features(features, few, first, of_items.first(_CHECKED))
