"""The pipeline's spec: one immutable object, built from YAML or Python, checked where it is built.

    spec = load_spec("conf/pipelines/clicks.yaml", overrides=["train.epochs=2"])

Every field says its unit. Unknown keys and wrong types are refused with the file, the key's path and the nearest
valid name. Nothing below the command line reads the environment: what a stage obeys is in here.
"""

from headrace.config.baseline import Baseline, SecondStage, Trees
from headrace.config.candidates import (
    BlockedFilter,
    Candidates,
    CandidateSource,
    CandidateTable,
    Covisitation,
    NewItems,
    PairEvents,
    Popular,
    Recent,
    SeenFilter,
    VectorSource,
    WhereFilter,
)
from headrace.config.evaluation import Bootstrap, Evaluation, FullRanking, Slice
from headrace.config.experiments import Experiment, ExperimentArm, OutcomeAlert, OutcomeLabel, Outcomes
from headrace.config.features import Chain, Features, OpSpec, Split
from headrace.config.gate import Gate
from headrace.config.generate import Generate, Site
from headrace.config.housekeeping import Housekeeping
from headrace.config.load import build_spec, load_overlay, load_sharding, load_spec
from headrace.config.model import Loss, Model
from headrace.config.monitor import Drift, DriftColumn, Observe, OpenLineage
from headrace.config.publish import Online, Publish
from headrace.config.retrain import Challenger, Replay, Retrain
from headrace.config.score import Entity, Score
from headrace.config.section import Section, parse_ds
from headrace.config.source import (
    AnySource,
    Complete,
    ControlFile,
    LandingSource,
    Source,
    TableSource,
    Watermark,
    parse_duration,
)
from headrace.config.spark import LOOPBACK, Spark, spark_profile
from headrace.config.spec import Spec, id_columns
from headrace.config.table import Expectations, Ids, NamedSource, Table
from headrace.config.train import (
    DynamicTable,
    EmbeddingOptimizer,
    EmbeddingOptimizerKind,
    KnownAfter,
    Negatives,
    Optimizer,
    Schedule,
    Sharding,
    ShardingKind,
    TableOptimizer,
    TableSharding,
    Task,
    Train,
)
from headrace.config.variants import Compare, ModelVariant, Parameter, Search
from headrace.config.warehouse import Warehouse

__all__ = [
    "LOOPBACK",
    "AnySource",
    "Baseline",
    "BlockedFilter",
    "Bootstrap",
    "CandidateSource",
    "CandidateTable",
    "Candidates",
    "Chain",
    "Challenger",
    "Compare",
    "Complete",
    "ControlFile",
    "Covisitation",
    "Drift",
    "DriftColumn",
    "DynamicTable",
    "EmbeddingOptimizer",
    "EmbeddingOptimizerKind",
    "Entity",
    "Evaluation",
    "Expectations",
    "Experiment",
    "ExperimentArm",
    "Features",
    "FullRanking",
    "Gate",
    "Generate",
    "Housekeeping",
    "Ids",
    "KnownAfter",
    "LandingSource",
    "Loss",
    "Model",
    "ModelVariant",
    "NamedSource",
    "Negatives",
    "NewItems",
    "Observe",
    "Online",
    "OpSpec",
    "OpenLineage",
    "Optimizer",
    "OutcomeAlert",
    "OutcomeLabel",
    "Outcomes",
    "PairEvents",
    "Parameter",
    "Popular",
    "Publish",
    "Recent",
    "Replay",
    "Retrain",
    "Schedule",
    "Score",
    "Search",
    "SecondStage",
    "Section",
    "SeenFilter",
    "Sharding",
    "ShardingKind",
    "Site",
    "Slice",
    "Source",
    "Spark",
    "Spec",
    "Split",
    "Table",
    "TableOptimizer",
    "TableSharding",
    "TableSource",
    "Task",
    "Train",
    "Trees",
    "VectorSource",
    "Warehouse",
    "Watermark",
    "WhereFilter",
    "build_spec",
    "id_columns",
    "load_overlay",
    "load_sharding",
    "load_spec",
    "parse_ds",
    "parse_duration",
    "spark_profile",
]
