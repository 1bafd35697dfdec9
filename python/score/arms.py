"""Which model each user's list is by: the one of `score.model`, or that of the user's arm in an experiment."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from pyspark.sql import Column
from pyspark.sql import functions as F

from headrace.config.experiments import PARTS
from headrace.experiments.assignment import ARM, PART, Live, edges, parts_of
from headrace.score.scoring_model import ScoringModel
from headrace.stage import Context

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
    """The model of `score.model`, and then those of arms, each once.

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
    """Of a user's key: the column `arms` (null: in no arm) and the place of the user's model (int)."""

    arms: Column
    model: Column

    @staticmethod
    def of(key: Column, is_integer: bool, experiments: Sequence[Live], models: Mapping[str | None, int]) -> Assigned:
        """As headrace.experiments.assignment has them of Arrow's columns.

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
    """The user's arm, whether he takes part or not."""
    place, shares = _place(key, f"{of.salt}/{ARM}"), of.experiment.shares
    *names, last = shares
    found = F.lit(last)
    for name, edge in reversed(list(zip(names, edges(shares).tolist(), strict=False))):
        found = F.when(place < edge, name).otherwise(found)
    return found


def _place(key: Column, salt: str) -> Column:
    return F.pmod(F.xxhash64(F.lit(salt), key), F.lit(PARTS))
