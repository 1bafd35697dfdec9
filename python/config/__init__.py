"""The pipeline's spec: one immutable object, built from YAML or Python, checked where it is built.

    spec = load_spec("conf/pipelines/clicks.yaml", overrides=["train.epochs=2"])

Every field says its unit. Unknown keys and wrong types are refused with the file, the key's path and the nearest
valid name. Nothing below the command line reads the environment: what a stage obeys is in here.

A name's module is imported at first use, so that `headrace.embeddings` imports the settings of embeddings alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace import lazy_names

if TYPE_CHECKING:
    from headrace.config.baseline import Baseline as Baseline
    from headrace.config.baseline import SecondStage as SecondStage
    from headrace.config.baseline import Trees as Trees
    from headrace.config.candidates import BlockedFilter as BlockedFilter
    from headrace.config.candidates import Candidates as Candidates
    from headrace.config.candidates import CandidateSource as CandidateSource
    from headrace.config.candidates import CandidateTable as CandidateTable
    from headrace.config.candidates import Covisitation as Covisitation
    from headrace.config.candidates import NewItems as NewItems
    from headrace.config.candidates import PairEvents as PairEvents
    from headrace.config.candidates import Popular as Popular
    from headrace.config.candidates import Recent as Recent
    from headrace.config.candidates import SeenFilter as SeenFilter
    from headrace.config.candidates import VectorSource as VectorSource
    from headrace.config.candidates import WhereFilter as WhereFilter
    from headrace.config.embeddings import DynamicTable as DynamicTable
    from headrace.config.embeddings import EmbeddingOptimizer as EmbeddingOptimizer
    from headrace.config.embeddings import EmbeddingOptimizerKind as EmbeddingOptimizerKind
    from headrace.config.embeddings import Optimizer as Optimizer
    from headrace.config.embeddings import Schedule as Schedule
    from headrace.config.embeddings import Sharding as Sharding
    from headrace.config.embeddings import ShardingKind as ShardingKind
    from headrace.config.embeddings import TableOptimizer as TableOptimizer
    from headrace.config.embeddings import TableSharding as TableSharding
    from headrace.config.evaluation import Bootstrap as Bootstrap
    from headrace.config.evaluation import Evaluation as Evaluation
    from headrace.config.evaluation import FullRanking as FullRanking
    from headrace.config.evaluation import Slice as Slice
    from headrace.config.experiments import Experiment as Experiment
    from headrace.config.experiments import ExperimentArm as ExperimentArm
    from headrace.config.experiments import OutcomeAlert as OutcomeAlert
    from headrace.config.experiments import OutcomeLabel as OutcomeLabel
    from headrace.config.experiments import Outcomes as Outcomes
    from headrace.config.features import Chain as Chain
    from headrace.config.features import Features as Features
    from headrace.config.features import OpSpec as OpSpec
    from headrace.config.features import Split as Split
    from headrace.config.gate import Gate as Gate
    from headrace.config.load import build_spec as build_spec
    from headrace.config.load import load_overlay as load_overlay
    from headrace.config.load import load_sharding as load_sharding
    from headrace.config.load import load_spec as load_spec
    from headrace.config.model import Loss as Loss
    from headrace.config.model import Model as Model
    from headrace.config.operations import LOOPBACK as LOOPBACK
    from headrace.config.operations import Drift as Drift
    from headrace.config.operations import DriftColumn as DriftColumn
    from headrace.config.operations import Generate as Generate
    from headrace.config.operations import Housekeeping as Housekeeping
    from headrace.config.operations import Observe as Observe
    from headrace.config.operations import OpenLineage as OpenLineage
    from headrace.config.operations import Site as Site
    from headrace.config.operations import Spark as Spark
    from headrace.config.operations import spark_profile as spark_profile
    from headrace.config.score import Entity as Entity
    from headrace.config.score import Score as Score
    from headrace.config.section import Section as Section
    from headrace.config.section import parse_ds as parse_ds
    from headrace.config.source import AnySource as AnySource
    from headrace.config.source import Complete as Complete
    from headrace.config.source import ControlFile as ControlFile
    from headrace.config.source import LandingSource as LandingSource
    from headrace.config.source import Source as Source
    from headrace.config.source import TableSource as TableSource
    from headrace.config.source import Watermark as Watermark
    from headrace.config.source import parse_duration as parse_duration
    from headrace.config.spec import Spec as Spec
    from headrace.config.spec import id_columns as id_columns
    from headrace.config.table import Expectations as Expectations
    from headrace.config.table import Ids as Ids
    from headrace.config.table import NamedSource as NamedSource
    from headrace.config.table import Table as Table
    from headrace.config.train import Challenger as Challenger
    from headrace.config.train import KnownAfter as KnownAfter
    from headrace.config.train import Negatives as Negatives
    from headrace.config.train import Replay as Replay
    from headrace.config.train import Retrain as Retrain
    from headrace.config.train import Task as Task
    from headrace.config.train import Train as Train
    from headrace.config.variants import Compare as Compare
    from headrace.config.variants import ModelVariant as ModelVariant
    from headrace.config.variants import Parameter as Parameter
    from headrace.config.variants import Search as Search
    from headrace.config.warehouse import Online as Online
    from headrace.config.warehouse import Publish as Publish
    from headrace.config.warehouse import Warehouse as Warehouse

__getattr__ = lazy_names(
    __name__,
    {
        ".baseline": ("Baseline", "SecondStage", "Trees"),
        ".candidates": (
            "BlockedFilter",
            "CandidateSource",
            "CandidateTable",
            "Candidates",
            "Covisitation",
            "NewItems",
            "PairEvents",
            "Popular",
            "Recent",
            "SeenFilter",
            "VectorSource",
            "WhereFilter",
        ),
        ".evaluation": ("Bootstrap", "Evaluation", "FullRanking", "Slice"),
        ".experiments": ("Experiment", "ExperimentArm", "OutcomeAlert", "OutcomeLabel", "Outcomes"),
        ".features": ("Chain", "Features", "OpSpec", "Split"),
        ".gate": ("Gate",),
        ".load": ("build_spec", "load_overlay", "load_sharding", "load_spec"),
        ".operations": (
            "Drift",
            "DriftColumn",
            "Generate",
            "Housekeeping",
            "LOOPBACK",
            "Observe",
            "OpenLineage",
            "Site",
            "Spark",
            "spark_profile",
        ),
        ".embeddings": (
            "DynamicTable",
            "EmbeddingOptimizer",
            "EmbeddingOptimizerKind",
            "Optimizer",
            "Schedule",
            "Sharding",
            "ShardingKind",
            "TableOptimizer",
            "TableSharding",
        ),
        ".model": ("Loss", "Model"),
        ".score": ("Entity", "Score"),
        ".section": ("Section", "parse_ds"),
        ".source": (
            "AnySource",
            "Complete",
            "ControlFile",
            "LandingSource",
            "Source",
            "TableSource",
            "Watermark",
            "parse_duration",
        ),
        ".spec": ("Spec", "id_columns"),
        ".table": ("Expectations", "Ids", "NamedSource", "Table"),
        ".train": ("Challenger", "KnownAfter", "Negatives", "Replay", "Retrain", "Task", "Train"),
        ".variants": ("Compare", "ModelVariant", "Parameter", "Search"),
        ".warehouse": ("Online", "Publish", "Warehouse"),
    },
)
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
