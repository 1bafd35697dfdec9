"""The pipeline's spec: one immutable object, built from YAML or Python, checked where it is built.

    spec = load_spec("conf/pipelines/clicks.yaml", overrides=["train.epochs=2"])

Every field says its unit. Unknown keys and wrong types are refused with the file, the key's path and the nearest
valid name. Nothing below the command line reads the environment: what a stage obeys is in here.
"""

from headrace.config.baseline import Baseline, Trees
from headrace.config.candidate_source import CandidateSource, PairEvents
from headrace.config.candidates import Candidates, CandidateTable, Covisitation, NewItems, Popular, Recent
from headrace.config.compare import Compare, ModelVariant
from headrace.config.complete import Complete, ControlFile, Watermark, parse_duration
from headrace.config.drift import Drift, DriftColumn
from headrace.config.evaluation import Bootstrap, Evaluation, FullRanking, Slice
from headrace.config.experiments import Experiment, ExperimentArm
from headrace.config.features import Chain, Features, OpSpec, Split
from headrace.config.filters import BlockedFilter, SeenFilter, WhereFilter
from headrace.config.gate import Gate
from headrace.config.generate import Generate, Site
from headrace.config.housekeeping import Housekeeping
from headrace.config.id_columns import id_columns
from headrace.config.load import build_spec, load_overlay, load_sharding, load_spec
from headrace.config.loss import Loss
from headrace.config.model import Model
from headrace.config.named_source import NamedSource
from headrace.config.observe import Observe, OpenLineage
from headrace.config.online import Online
from headrace.config.outcomes import OutcomeAlert, OutcomeLabel, Outcomes
from headrace.config.publish import Publish
from headrace.config.retrain import Challenger, Replay, Retrain
from headrace.config.score import Entity, Score
from headrace.config.search import Parameter, Search
from headrace.config.second_stage import SecondStage
from headrace.config.section import Section, parse_ds
from headrace.config.source import AnySource, LandingSource, Source, TableSource
from headrace.config.spark import LOOPBACK, Spark, spark_profile
from headrace.config.spec import Spec
from headrace.config.table import Expectations, Ids, Table
from headrace.config.tasks import KnownAfter, Task
from headrace.config.train import (
    DynamicTable,
    EmbeddingOptimizer,
    EmbeddingOptimizerKind,
    Negatives,
    Optimizer,
    Schedule,
    Sharding,
    ShardingKind,
    TableOptimizer,
    TableSharding,
    Train,
)
from headrace.config.vector_source import VectorSource
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
