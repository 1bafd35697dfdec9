"""The stages of a day, in order: the one list of them.

A stage is an entry here and a class in its package that follows `headrace.stage.Stage`; commands, jobs, status, the
report and Airflow's DAGs read this. The DAGs do so in another environment, by this file's path: it imports nothing
but the standard library. A pipeline may have stages of other packages besides: `headrace.stage.stage_entries`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class StageEntry:
    """Description of a stage for commands, jobs and DAGs: name, help, implementation, lease, resources."""

    name: str
    #: For `--help`: one sentence or two.
    help: str
    #: "module:callable": called without arguments, gives the `headrace.stage.Stage`. Empty: a stage of another package.
    implementation: str
    #: The kind of the DAG that runs it; None: it is no part of a day, its own command runs it.
    dag: Literal["retrain", "score"] | None
    #: The section of the spec without which a pipeline has no such stage; None: every pipeline has it.
    section: str | None = None
    #: Whether it opens a Spark session. One that does not starts as plain Python, without a JVM.
    spark: bool = True
    #: The key of the spec that says how many of its tasks run at once; None: it takes the slots that there are.
    slots: str | None = None
    #: A lease of its own, for a stage that reads what earlier ones have finished and writes places that no other does:
    #: those of different leases may run at the same time. None: it runs alone.
    lease: str | None = None
    #: Hours after which Airflow ends it.
    hours: float = 2
    #: The counts of its manifest's rows that say most about it, in this order.
    counts: tuple[str, ...] = ()
    #: Where it writes, with {pipeline}, {ds}, the run's {key} and {scores}, the warehouse's table: paths below the
    #: workspace.
    writes: tuple[str, ...] = ()
    #: What it imports for seconds: modules, or "module:function" to be called. An application that serves stages before
    #: it imports them beside those.
    imports: tuple[str, ...] = ()

    def applies(self, spec: object) -> bool:
        """Return whether a pipeline has the stage. `spec`: an object with the sections as attributes."""
        return self.section is None or getattr(spec, self.section) is not None


_ENTRIES = (
    StageEntry(
        "ingest",
        "Load the day's landing files into the lake's Delta table; bad rows go to quarantine with a reason.",
        "headrace.lake.landing.stage:Ingest",
        dag="retrain",
        counts=("kept", "quarantined"),
        writes=("lake/{pipeline}/events", "lake/{pipeline}/quarantine"),
    ),
    StageEntry(
        "outcomes",
        "Join the lists of earlier days with the events that followed and have landed; measure them by day.",
        "headrace.quality.outcomes.stage:MeasureOutcomes",
        dag="retrain",
        section="outcomes",
        counts=("days", "shown", "alerts"),
        writes=("lake/{pipeline}/outcomes", "lake/{pipeline}/outcome_metrics"),
        imports=("headrace.quality.outcomes.stage",),
    ),
    StageEntry(
        "experiments",
        "Compare the arms of experiments by their outcomes; stop losing ones where the spec says so.",
        "headrace.quality.experiments.stage:JudgeExperiments",
        dag="retrain",
        section="experiments",
        spark=False,
        hours=0.5,
        counts=("running", "stopped"),
    ),
    StageEntry(
        "features",
        "Fit the features on the training days and write the day's dataset.",
        "headrace.jobs.stages:features_stage",
        dag="retrain",
        counts=("train", "valid", "test", "rank"),
        writes=("datasets/{pipeline}/{ds}/{key}", "lake/{pipeline}/vocabulary", "lake/{pipeline}/statistics"),
        imports=("headrace.features.build.run", "headrace.quality.drift.count_day"),
    ),
    StageEntry(
        "drift",
        "Compare the newest rows with the training range, column by column; over a limit, warn or stop the day.",
        "headrace.quality.drift.stage:JudgeDrift",
        dag="retrain",
        section="drift",
        spark=False,
        hours=0.5,
        counts=("columns", "over_limit"),
    ),
    StageEntry(
        "train",
        "Train the model with sharded embeddings on Horovod's ranks, evaluate it, register it.",
        "headrace.train.stage:Train",
        dag="retrain",
        slots="train.ranks",
        lease="train",
        hours=6,
        counts=("train", "valid"),
        writes=("models/{pipeline}/{ds}/{key}",),
        imports=(
            "headrace.train.stage",
            "headrace.dataset.candidates",
            "headrace.train.evaluation.request",
            "headrace.train.launch.horovod_spark",
            "headrace.models.registry.versions:preload",
        ),
    ),
    StageEntry(
        "challenger",
        "Where one is due, train the model from nothing beside the day's that goes on, and register it as challenger.",
        "headrace.train.challenger:TrainChallenger",
        dag="retrain",
        section="challenger",
        slots="train.ranks",
        hours=6,
        counts=("train", "valid"),
        writes=("models/{pipeline}/{ds}/{key}",),
        imports=("headrace.train.challenger", "headrace.train.launch.horovod_spark"),
    ),
    StageEntry(
        "baseline",
        "Train XGBoost on the same dataset and split.",
        "headrace.train.baseline.stage:TrainBaseline",
        dag="retrain",
        section="baseline",
        slots="baseline.workers",
        lease="baseline",
        counts=("train", "valid"),
        writes=("models/{pipeline}/{ds}/{key}",),
        imports=("headrace.train.baseline.stage", "headrace.train.baseline.run", "xgboost.spark"),
    ),
    StageEntry(
        "second_stage",
        "Train XGBoost behind the neural model: over the features and its predictions of rows that it has not learned.",
        "headrace.train.baseline.stage:TrainSecondStage",
        dag="retrain",
        section="second_stage",
        slots="second_stage.workers",
        counts=("valid", "test"),
        writes=("models/{pipeline}/{ds}/{key}",),
        imports=("headrace.train.baseline.stage", "headrace.train.baseline.run", "xgboost.spark"),
    ),
    StageEntry(
        "evaluate",
        "Have the day's model and the champion predict the same rows of the day, each by its own workflow.",
        "headrace.quality.gate.evaluation_stages:Evaluate",
        dag="retrain",
        section="gate",
        counts=("rows",),
        imports=("headrace.quality.gate.evaluation_stages", "headrace.quality.gate.evaluate"),
    ),
    StageEntry(
        "gate",
        "Judge the day's model by the rules of the spec; the verdict and every rule's figure are kept.",
        "headrace.quality.gate.stage:JudgeModel",
        dag="retrain",
        section="gate",
        spark=False,
        hours=0.5,
        counts=("rules", "broken"),
    ),
    StageEntry(
        "promote",
        "Make the day's model the champion, unless its verdict is against it or the champion is of a later day.",
        "headrace.quality.gate.stage:Promote",
        dag="retrain",
        spark=False,
        hours=0.5,
        counts=("promoted",),
    ),
    StageEntry(
        "score",
        "Score users x candidate items with the registered model and keep the best for each user.",
        "headrace.score.stage:ScoreCandidates",
        dag="score",
        section="score",
        hours=4,
        counts=("scores", "users"),
        writes=("lake/{pipeline}/scores",),
        imports=("headrace.score.run",),
    ),
    StageEntry(
        "publish",
        "Write the day's scores to staging, audit them, publish them to the warehouse.",
        "headrace.publish.stage:Publish",
        dag="score",
        section="publish",
        counts=("published", "left_out"),
        writes=("lake/{pipeline}/published", "{scores} in the warehouse"),
        imports=("headrace.publish.stage",),
    ),
    StageEntry(
        "report",
        "Write one HTML page about the day.",
        "headrace.quality.report.stage:Report",
        dag="score",
        spark=False,
        hours=0.5,
        writes=("reports/{pipeline}/{ds}.html",),
        imports=("headrace.quality.report.stage", "headrace.quality.report.report"),
    ),
    StageEntry(
        "vectors",
        "Write the vectors that the registered model has for users and items, of a model in retrieval form.",
        "headrace.score.vectors:ExportVectors",
        dag=None,
        section="score",
        counts=("users", "items"),
        writes=("lake/{pipeline}/user_vectors", "lake/{pipeline}/item_vectors"),
        imports=("headrace.score.vectors",),
    ),
    StageEntry(
        "compare",
        "Train the models of the section compare over the day's dataset, and test them against each other.",
        "headrace.train.comparison:Compare",
        dag=None,
        section="compare",
        slots="compare_slots",
        hours=12,
        counts=("models",),
        writes=("models/{pipeline}/{ds}",),
    ),
    StageEntry(
        "compare_versions",
        "Have registered models predict the same rows of the day, and test them against each other.",
        "headrace.quality.gate.evaluation_stages:CompareVersions",
        dag=None,
        section="compare",
        counts=("rows", "models"),
    ),
    StageEntry(
        "estimate_policies",
        "Estimate what the models of experiments' arms would have earned on the log, by its propensities.",
        "headrace.quality.gate.evaluation_stages:EstimatePolicies",
        dag=None,
        section="experiments",
        counts=("rows", "models", "actions"),
    ),
)

#: Name -> entry, in the day's order.
STAGES = {entry.name: entry for entry in _ENTRIES}
#: The names of those that a day has.
ORDER = tuple(name for name, entry in STAGES.items() if entry.dag is not None)


def in_order(names: Iterable[str]) -> list[str]:
    """Return the stages of a day among names, where no spec is at hand: those of `ORDER`, then packages' by name."""
    names = set(names)
    return [*(name for name in ORDER if name in names), *sorted(names - STAGES.keys())]


#: The leases that stages have of their own.
LEASES = tuple(sorted({entry.lease for entry in _ENTRIES if entry.lease is not None}))
