"""Checks of pipelines' specs that need no data, made before the first stage begins. Imports neither Spark nor torch.

As a program, `check_specs.py PIPELINE.yaml...` prints JSON lines for the DAG parser: Airflow's own environment has no
headrace. It also describes the stages of pipelines that have stages of other packages: only this environment has their
classes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from headrace.config import Spec, load_spec
from headrace.config.formats import FILE_FORMATS, TABLE_FORMATS
from headrace.config.model import MODELS
from headrace.config.model_args import MODEL_ARGS
from headrace.config.operations import TABLE_DAYS, spark_profile
from headrace.config.schema import DatasetSchema
from headrace.config.stages import STAGES
from headrace.config.warehouse import WAREHOUSES
from headrace.errors import UserError, nearest
from headrace.features.build.plan import checked_workflow
from headrace.features.ops import OPERATORS
from headrace.features.table_ops import TABLE_OPERATORS
from headrace.logs import redact_sentence
from headrace.plugins import check_not_taken, check_reference, offered
from headrace.score.columns import check_score
from headrace.stage.protocol import PACKAGE_STAGES, stage_entries
from headrace.train.carried_columns import DayDecay
from headrace.train.requirements import check_requirements, has_vectors, refuse_drawn_negatives

#: Values of every vocabulary in the schema that is known without data.
_MANY_VALUES = 1 << 20


def check_spec(spec: Spec) -> None:
    """Check all that is known of a pipeline without its data: every name in the spec, and what keys say of each other.

    Raises:
        UserError: an unknown operator, parameter, column, feature, metric or class, an expression that Spark must
            refuse, two features of one name, a feature made of the label, a column of a pair that comes from nowhere or
            from two places, a stage of a package that is not valid, ...: with the key's place in the spec.
    """
    check_packages()
    spark_profile(spec.spark.profile)
    _check_kept_tables(spec)
    workflow = checked_workflow(spec)
    schema = workflow.schema_of(dict.fromkeys(workflow.rules, _MANY_VALUES))
    for place, pipeline in _trainings(spec):
        try:
            _check_training(pipeline, schema)
        except UserError as e:
            raise UserError(f"{place}: {e}") if place else e from None
    _check_trees(spec, schema)
    if spec.drift is not None and spec.drift.columns:
        features = [f for f in schema.features if f.sources]
        spec.drift.check_names(list(dict.fromkeys((*(f.name for f in features), *workflow.input_columns))))
    if spec.gate is not None:
        from headrace.quality.gate.rules import check_names as check_gate

        check_gate(spec, spec.gate, schema)
    for name, expression in (spec.outcomes.slices if spec.outcomes is not None else {}).items():
        from headrace.features.table_ops.sql import fault_without_spark

        if (fault := fault_without_spark(expression, [c.name for c in spec.table.columns])) is not None:
            raise UserError(f"outcomes.slices.{name}: {fault}")
    check_score(spec)
    _check_vectors(spec)
    if spec.score is not None and spec.publish is not None and spec.publish.audit is not None:
        from headrace.publish.audit import check_names as check_audit

        arms = ["arms"] if spec.experiments else []
        check_audit(spec.publish.audit, [*spec.score.row_columns, *arms])


def check_packages() -> None:
    """Check that no installed package offers a name of headrace's own.

    Raises:
        UserError: one does, and names it.
    """
    formats = (*FILE_FORMATS.builtin, *TABLE_FORMATS.builtin)  # a pipeline names both kinds by one key
    for seam, names in (
        (WAREHOUSES, WAREHOUSES.builtin),
        (FILE_FORMATS, formats),
        (TABLE_FORMATS, formats),
        (OPERATORS, OPERATORS.builtin),
        (TABLE_OPERATORS, TABLE_OPERATORS.builtin),
        (PACKAGE_STAGES, STAGES),
    ):
        check_not_taken(seam.group, seam.noun, names)
    check_not_taken(MODELS, "model", ("dlrm", *MODEL_ARGS))


def _check_kept_tables(spec: Spec) -> None:
    """Check that `housekeeping.tables` names tables that a stage of headrace's or of a package writes."""
    folder = "lake/{pipeline}/"
    paths = [path for entry in (*STAGES.values(), *stage_entries(spec).values()) for path in entry.writes]
    known = {path.removeprefix(folder) for path in paths if path.startswith(folder)} | TABLE_DAYS.keys()
    known |= {name for source in spec.sources for name in (source, f"{source}_quarantine")}
    for name in spec.housekeeping.tables:
        if name not in known:
            raise UserError(
                f"housekeeping.tables: no stage writes a table '{name}'{nearest(name, known)} (there are: "
                f"{', '.join(sorted(known))}; a package's stage declares its own in `writes`)"
            )


def _trainings(spec: Spec) -> Iterator[tuple[str, Spec]]:
    """Yield (place in the spec, pipeline) for each model that the pipeline may train; its own has no place."""
    yield "", spec
    if spec.retrain is not None and spec.retrain.warm:
        yield "retrain.warm", spec.model_copy(update={"train": spec.train_of_warm_start()})
    if spec.challenger is not None and spec.challenger.train:
        yield "challenger", spec.of_challenger()
    compared = {} if spec.compare is None else spec.compare.models
    searched = {} if spec.train.search is None else spec.train.search.models
    for section, variants in (("compare.models", compared), ("train.search.models", searched)):
        for name, variant in variants.items():
            if variant.model or variant.train:
                yield f"{section}.{name}", spec.with_variant(variant)


def _check_training(spec: Spec, schema: DatasetSchema) -> None:
    """Check the class of the model, and that the dataset has what it and its training ask for."""
    reference = offered(MODELS).get(spec.model.kind, spec.model.kind)
    if ":" in reference:
        check_reference(reference, "model.class", "model")
    ds = spec.ds or "2000-01-01"  # any day: names do not depend on it
    new_rows = "mean" if spec.retrain is None else spec.retrain.new_rows
    check_requirements(spec.model, spec.train, schema, ds, DayDecay.from_spec(spec, ds), new_rows)


def _check_trees(spec: Spec, schema: DatasetSchema) -> None:
    """Check that there is something for trees to learn."""
    for name, trees in (("baseline", spec.baseline), ("second_stage", spec.second_stage)):
        if trees is None:
            continue
        refuse_drawn_negatives(spec, name)
        label = None if trees.column is None else schema.carried_columns.get(trees.column)
        if label is not None and label.dtype == "string":
            raise UserError(f"{name}.label: the column '{trees.column}' is text; labels are numbers")


def _check_vectors(spec: Spec) -> None:
    """Check that the model has vectors where lists are made by them."""
    score = spec.score
    if score is None or score.of_registry or score.model == "baseline" or has_vectors(spec.model):
        return
    sources = {} if score.candidates is None else score.candidates.sources
    keys = [f"score.candidates.sources.{name}" for name, source in sources.items() if source.kind == "vectors"]
    if score.rerank is not None and score.rerank.diversity is not None and score.rerank.diversity.by == "vectors":
        keys.append("score.rerank.diversity.by")
    if keys:
        raise UserError(
            f"{keys[0]} is by vectors of users and items, and the model '{spec.model.kind}' has none: take a "
            f"model.class in retrieval form (docs/retrieval.md), or leave it out"
        )


def answer_of(path: str) -> dict[str, Any]:
    """Return what the DAG parser has to know of a pipeline's file.

    Returns:
        `fault`: why the file is refused before any stage runs, in one line; None where it is not. `stages`: the
        `StageEntry`s of its day as mappings, where some are of other packages; else empty.
    """
    try:
        spec = load_spec(path)
        check_spec(spec)
        stages = stage_entries(spec).values() if spec.stages else ()
    except UserError as e:
        return {"fault": redact_sentence("; ".join(str(e).splitlines())), "stages": []}
    return {"fault": None, "stages": [asdict(entry) for entry in stages]}


def main(argv: Sequence[str] | None = None) -> None:
    """Print a line for each file as soon as it is checked: an object of its path and the answer."""
    for path in sys.argv[1:] if argv is None else argv:
        print(json.dumps({path: answer_of(path)}), flush=True)


if __name__ == "__main__":
    main()
